"""The map of files in `docs/architecture.md`: `python tests/file_map.py` writes it again; a test compares it."""

import ast
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "penstock"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- map -->\n", "<!-- end of map -->"


def first_line(path: Path) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]


def file_map() -> str:
    """Markdown: a table for each room, its own line first."""
    files = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    lines = []
    for room, inside in groupby(sorted(files, key=lambda path: path.parts[:-1]), key=lambda path: path.parts[:-1]):
        name = "/".join(("penstock", *room))
        lines += [f"\n**`{name}/`**\n"]
        lines += [f"- `{path.name}`: {first_line(PACKAGE / path)}" for path in inside]
    return "\n".join(lines) + "\n\n"


def split_page() -> tuple[str, str, str]:
    """The page before the map, the map, and the page after it."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    found, _, tail = rest.partition(END)
    return head + BEGIN, found, END + tail


if __name__ == "__main__":
    head, _, tail = split_page()
    PAGE.write_text(head + file_map() + tail, encoding="utf-8")
