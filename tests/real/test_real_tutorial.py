"""The tutorial on a real model runs as it stands, and prints what it says; with `--write`, it gets
new numbers.
"""

import os
import time
from pathlib import Path

import pytest
from real_report import Report

from makers.pages import models, rewrite_page, run_page

pytestmark = pytest.mark.real

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
PAGES = [page for page in sorted(TUTORIALS.glob("*.md")) if models(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_does_what_it_says(
    page: Path, smollm2: Path, tmp_path: Path, request: pytest.FixtureRequest, report: Report
) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    for name in models(page):
        (folder / name).symlink_to(smollm2.parent / name)
    begin = time.monotonic()
    (rewrite_page if request.config.getoption("--write") else run_page)(page, folder)
    minutes = (time.monotonic() - begin) / 60
    threads = os.environ.get("OMP_NUM_THREADS")
    report.add(
        f"the tutorial [{page.stem}](tutorials/{page.name}), {threads} threads",
        f"{minutes:.1f} minutes",
        "",
    )
