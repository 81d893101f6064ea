"""The tests that a change in one room can break: `python tests/room_tests.py loader` prints their
files.

A room's change reaches the rooms that import it, directly or through others. A file of tests is
listed if it, its folder's `conftest.py` or the makers that it imports use such a room, or if it
lies in the folder of one. Tests of the whole project (directly in `tests/`) and of the tutorials
are always listed.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS, PACKAGE = ROOT / "tests", ROOT / "src" / "penstock"
WHOLE = (TESTS, TESTS / "docs")
"""Folders whose tests are about the whole project."""
GROUPS = ("data", "plan", "learn", "use")
"""Folders that hold rooms."""


def files_of(room: str) -> list[Path]:
    """The files of tests that a change in a room can break.

    Raises:
        ValueError: There is no such room.
    """
    if room not in rooms():
        raise ValueError(f"no room {room!r}; known: {', '.join(sorted(rooms()))}")
    reached = reaching(room)
    return [
        path
        for path in sorted(TESTS.rglob("test_*.py"))
        if path.parent in WHOLE
        or path.relative_to(TESTS).parts[0] in reached
        or used_by(path) & reached
    ]


def reaching(room: str) -> set[str]:
    """The room and all rooms that import it, directly or through others."""
    found, waiting = set(), [room]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += [other for other, imported in rooms().items() if one in imported]
    return found


@cache
def rooms() -> dict[str, set[str]]:
    """Room → the rooms that it imports, anywhere in its files."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        if (room := room_of(name.removesuffix(".__init__"))) is not None:
            found.setdefault(room, set()).update(imported_rooms(path))
    return found


def room_of(module: str) -> str | None:
    """The room of a module, by its long or its short address; None: it is in none."""
    parts = module.split(".")[1:]
    while parts:
        if parts[0] in GROUPS:
            return parts[1] if len(parts) > 1 else None
        if (PACKAGE / parts[0]).is_dir():
            return parts[0]
        address = _public().get(parts[0])
        if address is None:
            return None
        parts = address.split(".")
    return None


@cache
def _public() -> dict[str, str]:
    """Name at the top → what it is, relative to the package."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    blocks = [node.body for node in tree.body if isinstance(node, ast.With)]  # `with lazy(…):`
    return {
        one.asname or one.name: f"{node.module}.{one.name}".removeprefix("penstock.")
        for body in blocks
        for node in body
        if isinstance(node, ast.ImportFrom)
        for one in node.names
    }


def imported_rooms(path: Path) -> set[str]:
    """The rooms that a file uses: by imports, and as `ps.Loader` or `penstock.Loader`."""
    return {room for module in _named(path) if (room := room_of(module)) is not None}


def _named(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.startswith("penstock."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "penstock":
            yield from (f"{node.module}.{one.name}" for one in node.names)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("ps", "penstock")
        ):
            yield f"penstock.{node.attr}"


@cache
def used_by(path: Path) -> set[str]:
    """The rooms that a file of tests uses, itself, in its `conftest.py`, or by the files of `tests`
    that it imports.
    """
    seen: set[Path] = set()
    waiting = [path, path.parent / "conftest.py"]
    while waiting:
        one = waiting.pop()
        if one in seen or not one.is_file():
            continue
        seen.add(one)
        for node in ast.walk(ast.parse(one.read_text(encoding="utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            for name in filter(None, names):
                place = Path(*name.split(".")).with_suffix(".py")
                waiting += [TESTS / place, one.parent / place]
    return set().union(*map(imported_rooms, seen))


if __name__ == "__main__":
    try:
        print(*(path.relative_to(ROOT) for path in files_of(sys.argv[1])))
    except (IndexError, ValueError) as error:
        sys.exit(f"give one room: {error}")
