"""The demo's text: functions of the standard library of this Python, and their documentation
strings.

The same on every machine that has the same Python: modules are taken in an order that depends on
their names alone.
"""

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

CODE_BYTES = 6_000_000
"""Of the standard library's sources, at most."""
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def standard_library() -> Iterator[Path]:
    """Modules of the standard library without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        path
        for path in root.rglob("*.py")
        if not LEFT_OUT.intersection(path.relative_to(root).parts)
    ]
    paths.sort(key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest())
    total = 0
    for path in paths:
        total += path.stat().st_size
        if total > CODE_BYTES:
            return
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if path.stat().st_size:
            yield path


def definitions(source: str) -> Iterator[tuple[str, str]]:
    """("code", text) of every function of a module, and ("docs", text) of documentation strings."""
    lines = source.splitlines(keepends=True)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and len(text := ast.get_docstring(node) or "") > 80:
            yield "docs", text
        if (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and (node.end_lineno or 0) - node.lineno >= 3
        ):
            yield "code", textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
