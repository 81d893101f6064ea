"""The public names of penstock, read from the source without importing it: each with door and first
sentence.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, final

SOURCE = Path(__file__).parents[2] / "src"
TOP = "penstock"

Kind = Literal["class", "function", "value", "module"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PublicName:
    """One entry of the `__all__` of a door."""

    door: str
    """The package that lists it, such as `penstock.chat`."""
    name: str
    """Its name there."""
    home: str
    """The module that defines it; of a module, the module itself."""
    kind: Kind
    """What it is."""
    summary: str
    """The first sentence of its docstring; "" without one."""

    @property
    def path(self) -> str:
        """Its public address, such as `penstock.chat.encode`."""
        return f"{self.door}.{self.name}"

    @property
    def shown(self) -> str:
        """Its address as users write it, such as `ps.chat.encode`; full where `ps` has no such
        room.
        """
        return f"{_address(self.door)}.{self.name}"


@cache
def doors() -> list[str]:
    """The packages that list public names, the top first."""
    inits = sorted((SOURCE / TOP).rglob("__init__.py"), key=lambda path: path.parts)
    names = [".".join(path.parent.relative_to(SOURCE).parts) for path in inits]
    return [name for name in names if _listed(_tree(name))]


def public_names(door: str) -> Iterator[PublicName]:
    """The names that a door lists, in its order."""
    tree = _tree(door)
    homes = _imports(tree)
    for name in _listed(tree):
        yield _public(door, name, homes.get(name, (door, name)))


@cache
def _address(door: str) -> str:
    """How users reach a door: as a name of another one, from `ps` down, else by its full name."""
    if door == TOP:
        return "ps"
    for other in (TOP, door.rpartition(".")[0]):
        names = public_names(other) if other in doors() else ()
        if found := next((one for one in names if one.home == door), None):
            return f"{_address(other)}.{found.name}"
    return door


def first_sentence(text: str | None) -> str:
    """The first sentence of a docstring, on one line."""
    line = " ".join((text or "").split("\n\n")[0].split())
    found = re.search(r"(?<!et al)(?<!e\.g)(?<!i\.e)\.(?= |$)", line)
    return line if found is None else line[: found.end()]


def module_docstring(module: str) -> str:
    """The docstring of a module."""
    return ast.get_docstring(_tree(module)) or ""


def _public(door: str, name: str, home: tuple[str, str]) -> PublicName:
    module, original = home
    if _path(f"{module}.{original}").exists():
        path = f"{module}.{original}"
        return PublicName(
            door=door,
            name=name,
            home=path,
            kind="module",
            summary=first_sentence(module_docstring(path)),
        )
    body = _tree(module).body
    for number, node in enumerate(body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == original:
            kind: Kind = "class" if isinstance(node, ast.ClassDef) else "function"
            return PublicName(
                door=door,
                name=name,
                home=module,
                kind=kind,
                summary=first_sentence(ast.get_docstring(node)),
            )
        if original in _assigned(node):
            return PublicName(
                door=door, name=name, home=module, kind="value", summary=_text_after(body, number)
            )
    if original in (again := _imports(_tree(module))):
        return _public(door, name, again[original])
    raise LookupError(f"{door}.{name}: not found in {module}")


def _text_after(body: list[ast.stmt], number: int) -> str:
    """The first sentence of the string behind an assignment."""
    following = body[number + 1] if number + 1 < len(body) else None
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        return first_sentence(str(following.value.value))
    return ""


def _assigned(node: ast.stmt) -> list[str]:
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _imports(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Name → (module, name there) of all that a module imports from penstock, for type checkers
    too.
    """
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == TOP
        for alias in node.names
        if node.module
    }


def _listed(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if "__all__" in _assigned(node):
            names: list[str] = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            return names
    return []


def _path(module: str) -> Path:
    folder = SOURCE.joinpath(*module.split("."))
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_path(module).read_text(encoding="utf-8"))
