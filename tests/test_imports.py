"""Imports of the package: no circles, whatever the kind of import; imports in functions are few."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import penstock

PACKAGE = Path(penstock.__file__).parent
IN_FUNCTIONS = 150
"""Imports in functions are for optional packages, and for what most users of a module do not
need.
"""


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_name(path): path for path in PACKAGE.rglob("*.py")}


def _imports(node: ast.AST, *, inside: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """All imports, with those for type checkers; and whether each is in a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, inside
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports(child, inside=inside or function)


def _modules(statement: ast.stmt) -> Iterator[str]:
    """The modules of penstock that an import names."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names if alias.name in FILES)
    elif isinstance(statement, ast.ImportFrom) and statement.module:
        names = [f"{statement.module}.{alias.name}" for alias in statement.names]
        yield from (
            name if name in FILES else statement.module
            for name in names
            if statement.module in FILES
        )


def _graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module → the modules that it imports, in functions and for type checkers too."""
    return {
        name: {other for statement, _ in _imports(ast.parse(text)) for other in _modules(statement)}
        - {name}
        for name, text in sources.items()
    }


def test_no_module_imports_itself_through_others():
    graph = _graph({name: path.read_text(encoding="utf-8") for name, path in FILES.items()})
    assert len(graph) > 300
    TopologicalSorter(graph).prepare()


def test_a_circle_is_found_in_functions_and_for_type_checkers():
    circle = {
        "penstock.core.urls": "def use():\n    from penstock.core import errors\n",
        "penstock.core.errors": "if TYPE_CHECKING:\n    from penstock.core.urls import shown_url\n",
    }
    with pytest.raises(CycleError, match="cycle") as found:
        TopologicalSorter(_graph(circle)).prepare()
    assert {*found.value.args[1]} == {*circle}


def test_imports_in_functions_are_few():
    found = [
        f"{name}:{statement.lineno}"
        for name, path in FILES.items()
        for statement, inside in _imports(ast.parse(path.read_text(encoding="utf-8")))
        if inside
    ]
    assert len(found) < IN_FUNCTIONS
