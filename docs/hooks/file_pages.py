"""The map of files: every module of the package with the first line of its docstring, by folder."""

import ast
from itertools import groupby
from pathlib import Path

from markdown_text import cell
from repository_pages import ROOT

PAGE = "reference/files.md"
PACKAGE = ROOT / "src" / "penstock"


def file_pages() -> dict[str, str]:
    """Place below `docs` → Markdown."""
    files = sorted(PACKAGE.rglob("*.py"), key=lambda path: (path.parent.parts, path.name))
    lines = [
        "# Files",
        (
            "\nEvery module, with the first line of its docstring. [The "
            "rooms](../architecture.md#the-rooms)."
        ),
    ]
    for folder, inside in groupby(files, key=lambda path: path.parent):
        lines += [
            f"\n## {folder.relative_to(PACKAGE.parent).as_posix()}\n",
            "| file | what it does |",
            "|---|---|",
        ]
        lines += [f"| `{path.name}` | {cell(first_line(path))} |" for path in inside]
    return {PAGE: "\n".join(lines) + "\n"}


def first_line(path: Path) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]
