"""Curves of runs: what is drawn, and pages that are whole and safe."""

import json
import re
import sys
import xml.etree.ElementTree as Xml

import pytest
from hypothesis import given
from hypothesis import strategies as st

from makers.texts import write_json_lines
from penstock.cli import plot
from penstock.core.errors import ConfigError, FormatError, MissingExtraError, OutputError
from penstock.training.curves import POINTS, nice_ticks, plot_runs, read_panels, short


def make_run(folder, steps: int, **more):
    records = [
        {"step": s, "tokens": 50 * s, "loss": 9.0 / s, "learning_rate": 0.1, "tokens_per_second": None} | more
        for s in range(1, steps + 1)
    ]
    return write_json_lines(folder / "metrics.jsonl", records).parent


def test_panels_are_the_figures_that_runs_have(tmp_path):
    make_run(tmp_path / "a", 5)
    make_run(tmp_path / "b", 3, **{"held out/loss": 2.0, "samples/text": "hello"})
    panels = read_panels([tmp_path / "a", tmp_path / "b"], over="tokens")
    assert [panel.title for panel in panels] == ["Loss, nats per target", "Learning rate", "held out/loss"]
    assert [(curve.run, curve.number, curve.x) for curve in panels[0].curves] == [
        ("a", 0, (50, 100, 150, 200, 250)),
        ("b", 1, (50, 100, 150)),
    ]
    assert [curve.number for curve in panels[2].curves] == [1]


def test_many_steps_become_bins_that_lose_no_extreme(tmp_path):
    make_run(tmp_path / "a", 1001)
    curve = read_panels([tmp_path / "a"])[0].curves[0]
    assert len(curve.x) <= POINTS
    assert curve.x[-1] == 1001
    assert curve.high[0] == 9.0
    assert curve.low[0] == 3.0
    assert curve.mean[0] == pytest.approx((9 + 4.5 + 3) / 3)


def test_a_page_needs_nothing_else_and_holds_names_as_text(tmp_path):
    run = make_run(tmp_path / "<script>alert(1)<", 5)
    out = plot_runs([run], tmp_path / "curves.html").read_text()
    assert "<script>" not in out
    assert "&lt;script&gt;" in out
    assert not re.search(r"(src|href)=|url\(|@import", out)
    drawings = re.findall(r"<svg.*?</svg>", out)
    assert len(drawings) == 2
    assert len(Xml.fromstring(drawings[0]).findall("circle")) == 5


def test_one_step_can_be_drawn(tmp_path):
    plot_runs([make_run(tmp_path / "a", 1)], tmp_path / "curves.html")


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    for parent in ("x", "y"):
        (tmp_path / parent).mkdir()
        make_run(tmp_path / parent / "run", 2)
    panels = read_panels([tmp_path / "x" / "run", tmp_path / "y" / "run"])
    assert [curve.run for curve in panels[0].curves] == [str(tmp_path / "x" / "run"), str(tmp_path / "y" / "run")]


def test_mistakes_are_told(tmp_path, monkeypatch):
    run = make_run(tmp_path / "a", 2)
    with pytest.raises(ConfigError, match=r"must end in \.html or \.png"):
        plot_runs([run], tmp_path / "curves.jpg")
    with pytest.raises(FormatError, match="give the folder of a run"):
        plot_runs([tmp_path], tmp_path / "curves.html")
    with pytest.raises(OutputError, match="cannot be written"):
        plot_runs([run], tmp_path / "nothing" / "curves.html")
    with pytest.raises(ConfigError, match="no figures yet"):
        plot_runs([make_run(tmp_path / "empty", 0)], tmp_path / "curves.html")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"penstock\[plot\]"):
        plot_runs([run], tmp_path / "curves.png")


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    out = plot_runs([make_run(tmp_path / "a", 5)], tmp_path / "curves.png")
    assert out.read_bytes().startswith(b"\x89PNG")


@given(low=st.floats(-1e6, 1e6), width=st.floats(1e-6, 1e6))
def test_ticks_are_few_and_inside(low, width):
    ticks = nice_ticks(low, low + width, 5)
    assert 1 <= len(ticks) <= 7
    slack = 1e-6 * max(width, abs(low) * 1e-6, 1e-9)
    assert all(low - slack <= tick <= low + width + slack for tick in ticks)


def test_short_numbers():
    assert [short(x) for x in (12500, 0.0003, 2e-7, 3.14159, 2e9)] == ["12.5k", "0.0003", "2e-07", "3.142", "2G"]


def test_the_verb_draws_beside_the_run(tmp_path, capsys):
    plot.run([str(make_run(tmp_path / "a", 5))])
    assert capsys.readouterr().out == f"{tmp_path / 'a' / 'curves.html'}\n"
    plot.run([str(tmp_path / "a" / "metrics.jsonl")], tmp_path / "mine.html", "tokens")
    assert ">tokens</text>" in (tmp_path / "mine.html").read_text()


ABSURD = (
    10**400,
    -(10**400),
    1e308,
    -1e308,
    1.7e308,
    5e-324,
    0,
    -0.0,
    1e29,
    1e-300,
    1e17,
    1e17 + 16,
    True,
    None,
    "x",
    [],
)
LITERALS = ("NaN", "Infinity", "-Infinity", "1e999", "[" * 500)


@given(st.lists(st.tuples(*[st.sampled_from(ABSURD)] * 4), min_size=1, max_size=6), st.sampled_from(["step", "tokens"]))
def test_absurd_numbers_are_left_out(tmp_path_factory, rows, over):
    run = tmp_path_factory.mktemp("absurd") / "run"
    run.mkdir()
    names = ("step", "tokens", "loss", "held/loss")
    lines = [
        json.dumps({"step": number, **dict(zip(names[1:], row[1:], strict=True))}) for number, row in enumerate(rows)
    ]
    lines += [json.dumps({"step": row[0], "tokens": row[1], "loss": row[2]}) for row in rows if type(row[0]) is int]
    (run / "metrics.jsonl").write_text("\n".join([*lines, json.dumps({"step": 1, "tokens": 2, "loss": 3.0})]) + "\n")
    drawn = plot_runs([run], run / "curves.html", over=over).read_text()
    points = [n for text in re.findall(r'points="([^"]*)"', drawn) for n in re.split("[ ,]", text)]
    assert points
    assert all(-1e4 < float(number) < 1e4 for number in points)
    assert not re.search(r"\b(nan|inf)\b", drawn)


@pytest.mark.parametrize("literal", LITERALS)
def test_what_json_reads_and_no_figure_is(tmp_path, literal):
    run = make_run(tmp_path / "a", 3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 4, "tokens": 4, "loss": {literal}}}\n')
    assert read_panels([run])[0].curves[0].x == (1, 2, 3)


def test_bytes_that_are_no_text_are_named_by_their_line(tmp_path):
    run = make_run(tmp_path / "a", 3)
    text = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(b"\xff\xfe\n" + text)
    with pytest.raises(FormatError, match=r"metrics.jsonl:1: is not a record of metrics"):
        plot_runs([run], tmp_path / "curves.html")


def test_parts_of_the_loss_are_drawn_before_evaluations(tmp_path):
    parts = {"held/loss": 1.0, "loss.source.a/b": 1.0, "loss.task.R": 1.0, "loss.distance.2": 1.0}
    panels = read_panels([make_run(tmp_path / "a", 3, **parts)])
    assert [panel.title for panel in panels][2:] == [
        "Loss of source a/b",
        "Loss of task R",
        "Loss of target distance 2",
        "held/loss",
    ]
