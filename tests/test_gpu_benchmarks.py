"""The scripts of the first day on a GPU, at toy sizes on the CPU: none of their parts fails."""

import json
import re
from pathlib import Path

import pytest

from makers.forked import run_python

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_torch")]
GPU = Path(__file__).parents[1] / "benchmarks" / "gpu"
SCRIPTS = sorted(path.stem for path in GPU.glob("[0-9]*.py"))


def test_all_are_there():
    assert [name[:2] for name in SCRIPTS] == [f"{number:02}" for number in range(13)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_runs_at_toy_sizes(name, tmp_path):
    done = run_python(GPU / f"{name}.py", "--toy", "--output", tmp_path / "found", check=True)
    found = json.loads((tmp_path / "found" / f"{name}.json").read_text())
    assert (found["name"], found["toy"]) == (name, True)
    assert found["parts"]
    wrong = {
        part: figures
        for part, figures in found["parts"].items()
        if {"error", "skipped"} & figures.keys() or figures.get("status", 0)
    }
    assert not wrong
    # What is compared with and is not here is named; ours never is.
    missing = [figures["missing"] for figures in found["parts"].values() if "missing" in figures]
    assert all(re.search("not installed|no backward pass|no switch|needs", one) for one in missing)
    assert name in done.stdout


def test_a_part_that_fails_stops_nothing(tmp_path):
    script = tmp_path / "99_failing.py"
    script.write_text(
        "from common import Report\n"
        "report = Report(__file__, None)\n"
        "report.part('wrong', lambda: {'figure': 1 / 0})\n"
        "report.part('right', lambda: {'figure': 1.0})\n"
        "report.done()\n"
    )
    done = run_python(
        "-c",
        f"import sys, runpy; sys.path.insert(0, {str(GPU)!r}); "
        f"sys.argv = ['x', '--output', {str(tmp_path)!r}]; "
        f"runpy.run_path({str(script)!r}, run_name='__main__')",
        check=True,
    )
    found = json.loads((tmp_path / "99_failing.json").read_text())["parts"]
    assert found["wrong"]["error"].startswith("ZeroDivisionError")
    assert found["right"]["figure"] == 1.0
    assert "right" in done.stdout
