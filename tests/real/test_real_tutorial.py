"""The tutorials on a real model run as they stand, and print what they say; with `--write`, they
get new numbers.
"""

import os
import time
from pathlib import Path

import pytest
from real_report import Report

from makers.pages import continues, models, rewrite_page, run_page

pytestmark = pytest.mark.real

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
PAGES = sorted(
    (page for page in TUTORIALS.glob("*.md") if models(page)),
    key=lambda page: (continues(page) is not None, page),
)


@pytest.fixture(scope="module")
def folders() -> dict[Path, Path]:
    """The folders that pages were run in, for those that go on there."""
    return {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_does_what_it_says(
    page: Path,
    folders: dict[Path, Path],
    smollm2: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    report: Report,
) -> None:
    first = continues(page)
    if first is None or first not in folders:
        folder = tmp_path / "page"
        folder.mkdir()
        for name in models(page):
            (folder / name).symlink_to(smollm2.parent / name)
        if first is not None:
            run_page(first, folder)
    else:
        folder = folders[first]
    begin = time.monotonic()
    (rewrite_page if request.config.getoption("--write") else run_page)(page, folder)
    minutes = (time.monotonic() - begin) / 60
    folders[page] = folder
    threads = os.environ.get("OMP_NUM_THREADS")
    report.add(
        f"the tutorial [{page.stem}](tutorials/{page.name}), {threads} threads",
        f"{minutes:.1f} minutes",
        "",
    )
