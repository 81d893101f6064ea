"""Files of the repository as pages of the site: the examples, the changelog, and whatever else a
page links to.

Pages link to such files by their path, as readers of the repository need it; the site gets the same
link to its page.
"""

import ast
import os
import re
from pathlib import Path

from markdown_links import LINK, links

ROOT = Path(__file__).parents[2]
EXAMPLES = "how-to/examples"
DOCUMENTS = {"CHANGELOG.md": "project/changelog.md", "CONTRIBUTING.md": "project/contributing.md"}
"""File of the repository → its place in the site."""
HOME = "index.md"
_LANGUAGES = {
    ".py": "python",
    ".sh": "bash",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".toml": "toml",
    ".jinja": "jinja",
}


def repository_pages() -> dict[str, str]:
    """Place below `docs` → Markdown."""
    examples = sorted(
        path for path in (ROOT / "examples").rglob("*") if path.is_file() and _is_text(path)
    )
    names = [path.relative_to(ROOT).as_posix() for path in examples]
    linked = {name for name in _linked() if name not in DOCUMENTS and name != "README.md"}
    pages = {place(name): _code_page(name) for name in {*names, *linked}}
    pages[f"{EXAMPLES}/index.md"] = _examples_page(names)
    for name, where in DOCUMENTS.items():
        pages[where] = moved_links((ROOT / name).read_text(encoding="utf-8"), name, where)
    return pages


def place(name: str) -> str:
    """Where a file of the repository is in the site."""
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    if name == "README.md":
        return HOME
    if name == "examples":
        return f"{EXAMPLES}/index.md"
    if name.startswith("examples/"):
        return f"{EXAMPLES}/{name.removeprefix('examples/')}.md"
    return DOCUMENTS.get(name, f"files/{name}.md")


def moved_links(text: str, name: str, where: str) -> str:
    """The text of the file `name` with links for its page at `where`; links inside `docs` are kept
    from there.
    """

    def moved(found: re.Match[str]) -> str:
        path, sign, rest = found[3].partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return found[0]
        target = os.path.normpath(os.path.join(os.path.dirname(name), path))
        if (name.startswith("docs/") and target.startswith("docs/")) or not _has_page(target):
            return found[0]
        relative = os.path.relpath(place(target), os.path.dirname(where) or ".")
        return f"{found[1]}[{found[2]}]({relative}{sign}{rest})"

    return LINK.sub(moved, text)


def _has_page(name: str) -> bool:
    return name == "examples" or (ROOT / name).is_file()


def _linked() -> set[str]:
    """The files outside `docs` that pages link to."""
    found = set()
    for page in [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in DOCUMENTS)]:
        for _, target in links(page.read_text(encoding="utf-8")):
            name = os.path.relpath(page.parent / target.partition("#")[0], ROOT)
            if not name.startswith(("docs", "..")) and (ROOT / name).is_file():
                found.add(Path(name).as_posix())
    return found


def _code_page(name: str) -> str:
    path = ROOT / name
    text = path.read_text(encoding="utf-8")
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    language = _LANGUAGES.get(path.suffix, "docker" if path.name == "Dockerfile" else "text")
    return (
        f"# "
        f"{path.relative_to(ROOT / path.relative_to(ROOT).parts[0])}\n\n{_purpose(path, text)}\n\n"
        f'{fence}{language} title="{name}"\n{text.rstrip()}\n{fence}\n'
    )


def _purpose(path: Path, text: str) -> str:
    """What a file says about itself: the first paragraph of its docstring, or of the comment that
    it begins with.
    """
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    comment = []
    for line in text.splitlines():
        if line.startswith("#!"):
            continue
        if not line.startswith("#") or line.startswith(("# syntax", "#SBATCH")):
            break
        comment.append(line.lstrip("# "))
    return "\n".join(comment).split("\n\n")[0]


def _examples_page(names: list[str]) -> str:
    rows = []
    for name in names:
        path = ROOT / name
        purpose = " ".join(_purpose(path, path.read_text(encoding="utf-8")).split()).replace(
            "|", "&#124;"
        )
        shown = name.removeprefix("examples/")
        rows.append(f"| [`{shown}`]({shown}.md) | {purpose} |")
    text = (
        "Whole programs and configurations, from the folder `examples` of the repository. They "
        "run as they stand."
    )
    return (
        "\n".join([f"# Examples\n\n{text}\n", "| file | what it does |", "|---|---|", *rows]) + "\n"
    )


def _is_text(path: Path) -> bool:
    return path.suffix in _LANGUAGES or path.name == "Dockerfile"
