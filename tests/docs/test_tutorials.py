"""Each tutorial, and the how-to pages that are programs, too, run as they stand, from an empty
folder, and print what they say.
"""

import importlib.util
import re
import time
from pathlib import Path

import pytest

from makers.pages import models, needs, read_blocks, run_page

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page for page in (DOCS / "tutorials").glob("*.md") if page.name != "index.md")
PAGES.append(DOCS / "how-to" / "messy-chats.md")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if not models(page)], ids=lambda page: page.stem
)
def test_a_tutorial_does_what_it_says(page: Path, tmp_path: Path) -> None:
    missing = [name for name in needs(page) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{page.name} needs {', '.join(missing)}, which is not installed")
    folder = tmp_path / "page"
    folder.mkdir()
    start = time.monotonic()
    run_page(page, folder)
    print(f"{page.stem}: {time.monotonic() - start:.1f} s")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_has_code_that_is_run_and_one_title(page: Path) -> None:
    assert any(block.runs for block in read_blocks(page)), "no block of this page is run"
    fences = re.findall(r"^ *```.*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert [fence for fence in fences[::2] if fence.strip() == "```"] == [], (
        "a block without a language"
    )
    outside = re.sub(
        r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    assert len(re.findall(r"^# ", outside, re.MULTILINE)) == 1
