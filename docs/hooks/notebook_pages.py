"""Notebooks as pages of the site: their cells with the outputs that are kept in them."""

import json
import re
from pathlib import PurePosixPath
from typing import Any

from repository_pages import ROOT

FOLDER = "tutorials/notebooks"
_FILES = {".yaml": "yaml", ".py": "python", ".jinja": "jinja"}


def notebook_pages() -> dict[str, str]:
    """Place below `docs` → Markdown, and the order of the folder."""
    tutorials = (ROOT / "docs" / "tutorials" / ".nav.yml").read_text(encoding="utf-8")
    paths = sorted(
        (ROOT / "docs" / "notebooks").glob("*.ipynb"),
        key=lambda path: tutorials.find(f'"{path.stem}.md"'),
    )
    books = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    pages = {f"{FOLDER}/{name}.md": _page(name, book["cells"]) for name, book in books.items()}
    rows = [
        f"| [{_title(book['cells'])}]({name}.md) | [{name}.ipynb](../../notebooks/{name}.ipynb) |"
        for name, book in books.items()
    ]
    text = (
        "Tutorials as notebooks, with the tables and marked texts that objects show there. Open "
        "one here, or download it and run it in Jupyter, VS Code or Colab: each makes its own "
        "small data."
    )
    pages[f"{FOLDER}/index.md"] = "\n".join(
        [f"# Notebooks\n\n{text}\n", "| on this site | to download |", "|---|---|", *rows, ""]
    )
    order = "".join(f"  - {name}.md\n" for name in ["index", *books])
    pages[f"{FOLDER}/.nav.yml"] = f"title: Notebooks\nnav:\n{order}"
    return pages


def page_links(markdown: str, where: str) -> str:
    """Links to the file of a notebook, from a page of tutorials, lead to its page."""
    if PurePosixPath(where).parent.as_posix() != "tutorials":
        return markdown
    return re.sub(r"\]\(\.\./notebooks/([\w-]+)\.ipynb\)", r"](notebooks/\1.md)", markdown)


def _title(cells: list[dict[str, Any]]) -> str:
    return _text(cells[0]["source"]).splitlines()[0].removeprefix("# ")


def _page(name: str, cells: list[dict[str, Any]]) -> str:
    # The tutorial is in the search already.
    head, _, rest = _text(cells[0]["source"]).partition("\n")
    links = (
        f"[Download {name}.ipynb](../../notebooks/{name}.ipynb){{ .md-button download }} "
        f"[The same as a tutorial](../{name}.md){{ .md-button }}"
    )
    parts = [f"---\nsearch: {{exclude: true}}\n---\n\n{head}\n\n{links}", _moved(rest)]
    for cell in cells[1:]:
        source = _text(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(_moved(source))
        else:
            parts += [_code(source), *map(_output, cell["outputs"])]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _text(value: "str | list[str]") -> str:
    """Text of the format, which may be one string or its lines."""
    return value if isinstance(value, str) else "".join(value)


def _moved(source: str) -> str:
    """Links from the notebooks' folder, as they are from the pages' folder."""
    return re.sub(r"\]\(\.\./(?!tutorials/)", "](../../", source).replace(
        "](../tutorials/", "](../"
    )


def _code(source: str) -> str:
    magic, _, rest = source.partition("\n")
    word, _, name = magic.partition(" ")
    if word == "%%bash":
        return _fence("bash", rest)
    if word == "%%writefile":
        language = _FILES.get(PurePosixPath(name).suffix, "text")
        return _fence(f'{language} title="{name}"', rest)
    return _fence("python", source)


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if html := _text(data.get("text/html", "")):
        # On one line, so that Markdown leaves it as it is.
        return f'<div class="output">{html.replace(chr(10), "&#10;")}</div>'
    return _fence("text", _text(output.get("text", "")) or _text(data.get("text/plain", "")))


def _fence(head: str, text: str) -> str:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}{head}\n{text.rstrip()}\n{fence}"
