"""The site's look: columns of code, dark pictures, notebooks as pages; and in a browser: what
scrolls says so, and pictures are enlarged by keyboard.
"""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from makers.browser import Browser
from notebooks import NOTEBOOKS, notebook_path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "hooks"))

from notebook_pages import FOLDER, notebook_pages, page_links  # noqa: E402

COLUMNS = 100
"""Of code that fit into the column of text in a window of 1,400 pixels."""
MAY_WRAP = ("text", "jinja")
"""What programs print, and templates, in which a line break is content: these wrap there."""
FENCE = re.compile(r"^ *(`{3,})(\S*)")

PAGE = """<!doctype html>
<style>pre > code {{ display: block; overflow: auto; }}</style>
<body data-md-color-scheme="default"><main class="md-content md-typeset">
<div class="highlight"><pre><code id="long">{line}</code></pre></div>
<div class="highlight"><pre><code id="short">short</code></pre></div>
<figure class="picture"><svg class="drawing" viewBox="0 0 1000 200" width="1000" role="img"
aria-label="A drawing"><rect width="1000" height="200"/></svg></figure>
<p><img id="picture" alt="A picture" width="300" height="80" src="data:image/svg+xml,%3Csvg
xmlns='http://www.w3.org/2000/svg'/%3E"></p>
</main></body>
<link rel="stylesheet" href="{assets}/site.css"><script src="{assets}/site.js"></script>
<script>addEventListener("load", () => requestAnimationFrame(() => requestAnimationFrame(() => {{
document.documentElement.dataset.ready = "1" }})))</script>
"""


def wide_lines(text: str) -> list[tuple[int, str]]:
    """(number, line) of code that has more columns than fit."""
    found, fence, language = [], "", ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = FENCE.match(line)
        if mark and not fence and "`" not in line.strip().lstrip("`"):
            fence, language = mark[1], mark[2]
        elif fence and line.strip() == fence:
            fence = ""
        elif fence and language not in MAY_WRAP and len(line) > COLUMNS:
            found.append((number, line))
    return found


@pytest.mark.parametrize(
    "page",
    [*sorted(DOCS.rglob("*.md")), ROOT / "CONTRIBUTING.md"],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_code_fits_into_the_column(page: Path) -> None:
    wide = wide_lines(page.read_text(encoding="utf-8"))
    assert wide == [], f"at most {COLUMNS} columns: break the line, put comments above it"


def test_wide_lines_are_found() -> None:
    long = "x" * (COLUMNS + 1)
    text = f"{long}\n```python\n{long}\n```\n```text\n{long}\n```\n````\n```\n{long}\n````\n"
    assert wide_lines(text) == [(3, long), (10, long)]


@pytest.mark.parametrize(
    "picture",
    sorted(
        path for path in (DOCS / "pictures").glob("*.png") if not path.name.endswith(".dark.png")
    ),
    ids=lambda path: path.stem,
)
def test_a_picture_has_a_dark_version(picture: Path) -> None:
    dark = picture.with_suffix(".dark.png")
    assert dark.is_file(), "make it: `make pictures`, or tests/notebooks.py for a tutorial's"
    with Image.open(picture) as light, Image.open(dark) as other:
        assert light.size == other.size
        shades = [each.convert("L").resize((1, 1)).getpixel((0, 0)) for each in (light, other)]
    assert shades[0] > 200
    assert shades[1] < 60


def test_no_dark_picture_is_left_over() -> None:
    names = {path.name for path in (DOCS / "pictures").glob("*.png")}
    dark = {name for name in names if name.endswith(".dark.png")}
    assert dark
    assert {name.replace(".dark.png", ".png") for name in dark} <= names


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_a_page(name: str) -> None:
    page = notebook_pages()[f"{FOLDER}/{name}.md"]
    cells = json.loads(notebook_path(name).read_text(encoding="utf-8"))["cells"]
    at = 0
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        source = cell["source"]
        if source.startswith("%%"):
            source = source.partition("\n")[2]
        at = page.index(source, at)
        for output in cell["outputs"]:
            html = output.get("data", {}).get("text/html")
            expected = html.replace("\n", "&#10;") if html else output["text"].rstrip()
            at = page.index(expected, at)
    assert "%%" not in page
    assert f"(../../notebooks/{name}.ipynb)" in page
    assert f"({name}.md)" in notebook_pages()[f"{FOLDER}/index.md"]
    # Drawings and links of the notebooks' folder lead there from a folder below the tutorials.
    for target in re.findall(r"\]\((\.\.[^)#]+)", page):
        assert Path(os.path.normpath(DOCS / FOLDER / target)).is_file(), target


def test_a_tutorial_leads_to_the_page_of_its_notebook() -> None:
    text = "[a](../notebooks/chats.ipynb), [b](../how-to/load.md)"
    expected = "[a](notebooks/chats.md), [b](../how-to/load.md)"
    assert page_links(text, "tutorials/chats.md") == expected
    assert page_links(text, "how-to/chats.md") == text


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Browser:
    browser.events.clear()
    browser.look(width=390, height=700)
    file = tmp_path / "page.html"
    file.write_text(PAGE.format(line="x" * 200, assets=(DOCS / "assets").as_uri()))
    browser.open(file)
    return browser


def _until(browser: Browser, code: str) -> None:
    end = time.monotonic() + 20
    while not browser.run(code):
        assert time.monotonic() < end, f"{code}: {browser.complaints()}"
        time.sleep(0.02)


def test_what_scrolls_says_so_and_takes_the_focus(page: Browser) -> None:
    _until(page, "document.querySelector('#long').className === 'scrolls after'")
    found = "(each => [each.className, each.tabIndex])(document.querySelector('{}'))"
    assert page.run(found.format("#long")) == ["scrolls after", 0]
    assert page.run(found.format("#short")) == ["", -1]
    assert page.run(found.format(".picture")) == ["picture scrolls after", 0]
    page.run("document.querySelector('#long').scrollLeft = 30")
    _until(page, "document.querySelector('#long').className === 'scrolls after before'")
    page.run("document.querySelector('#long').scrollLeft = 9999")
    _until(page, "document.querySelector('#long').className === 'scrolls before'")
    page.look(width=3000, height=700)
    _until(page, "document.querySelector('.picture').className === 'picture'")
    assert page.complaints() == []


def test_pictures_are_enlarged_by_keyboard_and_pointer(page: Browser) -> None:
    names = "[...document.querySelectorAll('.enlarge')].map(each => each.ariaLabel)"
    assert page.run(names) == ["Enlarge the picture: A drawing", "Enlarge the picture: A picture"]
    page.run("document.querySelector('.enlarge').focus()")
    page.key("Enter")
    _until(page, "document.querySelector('dialog')?.open")
    assert page.text("dialog p") == "A drawing"
    assert page.run("document.querySelector('dialog').contains(document.activeElement)")
    shown = "document.querySelector('dialog {}').getBoundingClientRect().width"
    assert page.run(shown.format("svg")) > 2 * 390
    _until(page, "document.querySelector('dialog section').tabIndex === 0")
    page.key("Escape")
    _until(page, "!document.querySelector('dialog').open")
    assert page.run("document.activeElement.ariaLabel") == "Enlarge the picture: A drawing"
    page.point("#picture", click=True)
    _until(page, "document.querySelector('dialog').open")
    assert page.run("document.querySelectorAll('dialog img, dialog svg').length") == 1
    page.point("dialog button", click=True)
    _until(page, "!document.querySelector('dialog').open")
    assert page.run("document.activeElement.ariaLabel") == "Enlarge the picture: A picture"
    assert page.complaints() == []
