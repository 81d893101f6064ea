"""Notebooks and pictures of tutorials: `python tests/notebooks.py [NAME …]` runs the pages and
writes them again.

Pages of which only words have changed need no run: `python tests/notebooks.py --words`.

A notebook has the cells of its page, with the output that they gave here: what they printed, and
the value of a last expression as HTML and as text. Nothing of Jupyter is needed. A test compares
the cells with those of the page.
"""

import base64
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from makers.browser import Browser, find_browser
from makers.pages import Block, Output, clean, compare, read_blocks, run_page

DOCS = Path(__file__).parents[1] / "docs"
NOTEBOOKS = ("first-dataset", "chats", "ul2", "objective")
"""The pages that are notebooks, too."""
PICTURES = {"first-dataset": "rows.html", "chats": "chats.html", "ul2": "rows.html"}
"""Page → the page for a browser that it writes, of which a picture is taken."""
LARGEST = 200_000
"""Bytes of a notebook."""
_TIME = re.compile(r"^[\d.]+ s$", re.MULTILINE)
SIZE = (1200, 760)
"""Pixels of a picture, before they are doubled for dense screens."""


def page_of(name: str) -> Path:
    """The page of a tutorial."""
    return DOCS / "tutorials" / f"{name}.md"


def notebook_path(name: str) -> Path:
    """The notebook of a tutorial."""
    return DOCS / "notebooks" / f"{name}.ipynb"


def cells_of(page: Path) -> Iterator[tuple[str, Block | None]]:
    """(source, block) of each cell in order; without a block it is Markdown."""
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    at = 0
    for block in read_blocks(page):
        if not (block.runs or (block.title is not None and block.not_run is None)):
            continue
        if text := _markdown("".join(lines[at : block.line - 2])):
            yield text, None
        yield _source(block), block
        at = block.line + block.code.count("\n")
        if block.expected is not None:
            # What the block prints is its output here.
            at = next(i for i in range(at, len(lines)) if lines[i].startswith("```text"))
            at = next(i for i in range(at + 1, len(lines)) if lines[i].startswith("```")) + 1
    if text := _markdown("".join(lines[at:])):
        yield text, None


def _markdown(text: str) -> str:
    """The text without comments to the runner, with links from the notebooks' folder."""
    text = re.sub(r"^ *<!--.*?-->\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\]\((?![a-z]+:|\.\./|#)", "](../tutorials/", text).strip()


def _source(block: Block) -> str:
    first = (
        f"%%writefile {block.title}\n"
        if block.title
        else "%%bash\n"
        if block.language == "bash"
        else ""
    )
    return (first + block.code).rstrip("\n")


def notebook(page: Path, outputs: dict[int, Output], folder: Path) -> dict[str, Any]:
    """A notebook in format 4.5.

    Args:
        page: The page.
        outputs: Line of a block → what it gave.
        folder: Where it ran; its path is left out of outputs.
    """
    cells: list[dict[str, Any]] = []
    count = 0
    for number, (source, block) in enumerate(cells_of(page)):
        cell: dict[str, Any] = {
            "cell_type": "markdown",
            "id": f"cell-{number}",
            "metadata": {},
            "source": source,
        }
        if block is not None:
            count += 1
            found = _outputs(outputs.get(block.line, Output()), count, (str(folder), str(page)))
            if block.title:
                found = [
                    {"output_type": "stream", "name": "stdout", "text": f"Writing {block.title}\n"}
                ]
            if block.fails:
                cell["metadata"] = {"tags": ["raises-exception"]}
            cell |= {"cell_type": "code", "execution_count": count, "outputs": found}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _outputs(output: Output, count: int, private: tuple[str, str]) -> list[dict[str, Any]]:
    def public(text: str) -> str:
        return text.replace(private[0], ".").replace(private[1], Path(private[1]).name)

    found: list[dict[str, Any]] = []
    if output.printed:
        found.append({"output_type": "stream", "name": "stdout", "text": public(output.printed)})
    if output.shown:
        data = {kind: public(text) for kind, text in output.shown.items()}
        found.append(
            {
                "output_type": "execute_result",
                "execution_count": count,
                "data": data,
                "metadata": {},
            }
        )
    return found


def text_of(cell: dict[str, Any]) -> str:
    """What a cell of a notebook shows, as text."""
    printed = "".join(output.get("text", "") for output in cell["outputs"])
    shown = [output["data"]["text/plain"] for output in cell["outputs"] if "data" in output]
    return Output(printed=clean(printed), shown={"text/plain": shown[0]} if shown else {}).text


def check_outputs(page: Path, cells: list[dict[str, Any]]) -> None:
    """Fail where a notebook's output is not what the page says, numbers included, but for times."""
    for (_, block), cell in zip(cells_of(page), cells, strict=True):
        if block is not None and block.runs:
            expected = block.expected and _TIME.sub("… s", block.expected)
            output = Output(printed=text_of(cell), error="as expected" if block.fails else None)
            compare(page, replace(block, expected=expected, exact=True), output)


def write(name: str, browser: Browser | None) -> None:
    """Run a page; write its notebook and its picture."""
    page = page_of(name)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "page"
        folder.mkdir()
        outputs = {block.line: output for block, output in run_page(page, folder)}
        if name in NOTEBOOKS:
            _save(notebook_path(name), notebook(page, outputs, folder))
        if name in PICTURES and browser is not None:
            take_picture(browser, folder / PICTURES[name], DOCS / "pictures" / f"{name}.png")


def write_words(name: str) -> None:
    """Write the words of a page into its notebook, and keep code and outputs.

    Raises:
        ValueError: The code has changed, too.
    """
    path, page = notebook_path(name), page_of(name)
    made, old = notebook(page, {}, Path()), json.loads(path.read_text(encoding="utf-8"))
    kept = [cell for cell in old["cells"] if cell["cell_type"] == "code"]
    fresh = [cell for cell in made["cells"] if cell["cell_type"] == "code"]
    if [cell["source"] for cell in kept] != [cell["source"] for cell in fresh]:
        raise ValueError(
            f"{page.name}: code has changed since its notebook was made; run "
            f"tests/notebooks.py {name}"
        )
    for cell, before in zip(fresh, kept, strict=True):
        cell["outputs"] = before["outputs"]
    _save(path, made)


def _save(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size:,} bytes")


def take_picture(browser: Browser, html: Path, target: Path) -> None:
    """A picture of the top of a page, in few colours so that it is small, and `NAME.dark.png` for
    readers who prefer dark.
    """
    import io

    from PIL import Image

    width, height = SIZE
    for scheme, path in (("light", target), ("dark", target.with_suffix(".dark.png"))):
        browser.look(width=width, height=height, scheme=scheme)
        browser.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1.5,
            mobile=False,
        )
        browser.call("Page.navigate", url=html.as_uri())
        browser.call(
            "Runtime.evaluate",
            expression="new Promise(done => setTimeout(done, 1500))",
            awaitPromise=True,
        )
        content = base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])
        picture = Image.open(io.BytesIO(content)).convert("RGB")
        picture.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
        print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size:,} bytes")


def main() -> None:
    """Write the notebooks and pictures named on the command line, or all."""
    names = [word for word in sys.argv[1:] if word != "--words"]
    if "--words" in sys.argv:
        for name in names or NOTEBOOKS:
            write_words(name)
        return
    binary = find_browser()
    if binary is None:
        print("no Chromium on the path: pictures stay as they are")
    with tempfile.TemporaryDirectory() as profile:
        browser = None if binary is None else Browser(binary, Path(profile))
        for name in names or sorted({*NOTEBOOKS, *PICTURES}):
            write(name, browser)
        if browser is not None:
            browser.close()


if __name__ == "__main__":
    main()
