"""The bars of docs/benchmarks.md: drawn from the files of results, which say what the page says."""

import importlib.util
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as Xml
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bars = load("bars")
ALL = bars.read_bars(RESULTS)
GROUPS = list(dict.fromkeys(bar.group for bar in ALL))


@pytest.mark.parametrize("group", GROUPS)
def test_pictures_are_those_of_the_files(group):
    """`python benchmarks/bars.py` draws them again."""
    drawn = bars.draw(group, [bar for bar in ALL if bar.group == group])
    assert (PICTURES / bars.name_of(group)).read_text(encoding="utf-8") == drawn


@pytest.mark.parametrize("group", GROUPS)
def test_bars_are_as_long_as_their_ratios(group):
    """Against a scale that is read off the picture's own ticks."""
    page = Xml.parse(PICTURES / bars.name_of(group)).getroot()
    ticks = [
        (float(each.get("x1")), math.log(float(each.get("data-tick"))))
        for each in page.iter(f"{SVG}line")
        if each.get("data-tick")
    ]
    (first, low), (last, high) = ticks[0], ticks[-1]

    def ratio(x):
        return math.exp(low + (x - first) / (last - first) * (high - low))

    told = sorted((bar.low, bar.high) for bar in ALL if bar.group == group)
    drawn = []
    for each in page.iter(f"{SVG}g"):
        expected = (float(each.get("data-low")), float(each.get("data-high")))
        pieces = [
            (float(r.get("x")), float(r.get("x")) + float(r.get("width")))
            for r in each.iter(f"{SVG}rect")
        ]
        ends = [*(ratio(x) for piece in pieces for x in piece), 1.0]
        assert (min(ends), max(ends)) == pytest.approx(
            (min(1, expected[0]), max(1, expected[1])), rel=2e-3
        )
        assert ratio(float(each.find(f"{SVG}line[@class='one']").get("x1"))) == pytest.approx(
            1, rel=2e-3
        )
        words = "".join(each.itertext())
        assert f"{expected[0]:.3g}" in words
        assert f"{expected[1]:.3g} ×" in words
        drawn.append(expected)
    assert sorted(drawn) == told


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_no_figure_is_invented(path):
    """What was not measured by `--json` is quoted from the page, with its numbers in the
    quotation.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    assert {"command", "machine", "entered", "source", "bars"} <= set(found)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", found["entered"])
    assert (ROOT / found["command"].split()[1]).is_file()
    if found["source"] == "measured":
        return
    page = next((ROOT / "docs").rglob("benchmarks.md")).read_text(encoding="utf-8")
    for bar in found["bars"]:
        assert bar["quote"] in page
        numbers = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", bar["quote"])}
        if "ratio" in bar:
            assert set(map(float, bar["ratio"])) <= numbers
        else:
            assert float(max(bar["seconds"])) in numbers


def test_bars_that_cannot_be_drawn_are_refused(tmp_path):
    entry = {"group": "Data", "what": "work", "peer": "them"}
    for more, problem in (
        ({}, "needs ratio or seconds"),
        ({"ratio": [1, 2], "seconds": [1, 2]}, "needs ratio or seconds"),
        ({"ratio": [0, 2]}, "expected 0 < least"),
        ({"ratio": [3, 2]}, "expected 0 < least"),
    ):
        (tmp_path / "a.json").write_text(json.dumps({"bars": [entry | more]}))
        with pytest.raises(ValueError, match=problem):
            bars.read_bars(tmp_path)


def test_a_slower_one_points_to_the_left():
    page = Xml.fromstring(
        bars.draw("Data", [bars.Bar(group="Data", what="a <b>", peer="p", low=0.5, high=0.8)])
    )
    (one,) = {
        float(line.get("x1")) for line in page.iter(f"{SVG}line") if line.get("class") == "one"
    }
    assert all(float(r.get("x")) < one for r in page.find(f"{SVG}g").iter(f"{SVG}rect"))
    assert "less" in page.find(f".//{SVG}g/{SVG}rect").get("class")


BENCHMARK = """
import sys
sys.path.insert(0, {folder!r})
from common import against, arguments, table
flags = arguments(None).parse_args()
against("Data", "work", "them 1.0", ours=2.0, theirs=5.0)
table("title", [("what", "figure", "note")])
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemError('no')"])
def test_a_benchmark_writes_what_bars_are_drawn_from(tmp_path, end):
    (tmp_path / "bench_packing.py").write_text(
        BENCHMARK.format(folder=str(ROOT / "benchmarks"), end=end)
    )
    command = [
        sys.executable,
        str(tmp_path / "bench_packing.py"),
        "--json",
        str(tmp_path / "a.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if end:
        assert "SystemError" in done.stderr
        assert not (tmp_path / "a.json").exists()
        return
    (bar,) = bars.read_bars(tmp_path)
    assert (bar.low, bar.high, bar.peer) == (2.5, 2.5, "them 1.0")
    told = json.loads((tmp_path / "a.json").read_text())
    assert told["command"] == "python benchmarks/bench_packing.py --json a.json"
    assert told["tables"] == [{"title": "title", "rows": [["what", "figure", "note"]]}]
