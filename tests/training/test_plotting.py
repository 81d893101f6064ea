"""Curves of runs: what is drawn, and pages that are whole and safe."""

import json
import math
import re
import sys
from importlib.resources import files
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from makers.texts import write_json_lines
from penstock.core.errors import ConfigError, FormatError, MissingExtraError, OutputError
from penstock.learn.training.curve_page import payload
from penstock.learn.training.curve_picture import plot_runs
from penstock.learn.training.curves import (
    EVEN,
    POINTS,
    Curve,
    Panel,
    View,
    bin_edges,
    half_life,
    notes_of,
    read_panels,
    shown_parts,
    smoothed,
)
from penstock.use.cli import plot


def make_run(folder, steps: int, **more):
    records = [
        {
            "step": s,
            "tokens": 50 * s,
            "loss": 9.0 / s,
            "learning_rate": 0.1,
            "tokens_per_second": None,
        }
        | more
        for s in range(1, steps + 1)
    ]
    return write_json_lines(folder / "metrics.jsonl", records).parent


def test_panels_are_the_figures_that_runs_have(tmp_path):
    make_run(tmp_path / "a", 5)
    make_run(tmp_path / "b", 3, **{"held out/loss": 2.0, "samples/text": "hello"})
    panels = read_panels([tmp_path / "a", tmp_path / "b"], over="tokens")
    assert [panel.title for panel in panels] == [
        "Loss, nats per target",
        "Learning rate",
        "held out/loss",
    ]
    assert [(curve.run, curve.number, curve.x) for curve in panels[0].curves] == [
        ("a", 0, (50, 100, 150, 200, 250)),
        ("b", 1, (50, 100, 150)),
    ]
    assert [curve.number for curve in panels[2].curves] == [1]


def test_many_steps_become_bins_that_lose_no_extreme(tmp_path):
    make_run(tmp_path / "a", 1001)
    curve = read_panels([tmp_path / "a"])[0].curves[0]
    assert EVEN <= len(curve.x) <= POINTS
    assert (curve.x[0], curve.x[-1]) == (1, 1001)
    assert (max(curve.high), min(curve.low)) == (9.0, 9 / 1001)
    assert sum(curve.count) == 1001
    total = sum(mean * count for mean, count in zip(curve.mean, curve.count, strict=True))
    assert total == pytest.approx(sum(9 / s for s in range(1, 1002)))


@given(st.one_of(st.integers(0, 3 * POINTS), st.integers(0, 10**7)))
def test_bins_cover_all_points_once(count):
    edges = bin_edges(count)
    assert (edges[0], edges[-1]) == (0, count)
    assert edges == sorted(set(edges))
    assert len(edges) - 1 <= POINTS
    # A linear axis of 400 places shows each bin, and so does the left of a logarithmic one.
    assert max((b - a for a, b in pairwise(edges)), default=0) <= max(1, -(-count // EVEN))


def test_a_page_needs_nothing_else_and_holds_names_as_text(tmp_path):
    run = make_run(tmp_path / "<script>alert(1)<", 5)
    out = plot_runs([run], tmp_path / "curves.html").read_text()
    assert "<script>alert" not in out
    assert "&lt;script&gt;alert" in out
    assert "\\u003cscript>alert" in out
    assert not re.search(r"(src|href)=|url\(|@import", out)
    assert [panel["title"] for panel in data_of(out)["panels"]] == [
        "Loss, nats per target",
        "Learning rate",
    ]
    assert data_of(out)["panels"][0]["curves"] == [
        {"run": 0, "x": [1, 2, 3, 4, 5], "mean": [9, 4.5, 3, 2.25, 1.8]}
    ]
    assert "MIT" in (files("penstock.learn.training") / "assets" / "uPlot.LICENSE").read_text()


def data_of(page):
    return json.loads(page.partition('id="data">')[2].partition("</script>")[0])


def make_curve(x, mean, count=None, **more):
    values = {
        "run": "a",
        "number": 0,
        "x": tuple(x),
        "mean": tuple(mean),
        "low": tuple(mean),
        "high": tuple(mean),
    }
    return Curve(**values, count=tuple(count or [1] * len(values["x"])), **more)


def panel_of(*curves):
    return Panel(title="loss", over="step", curves=curves)


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.floats(-1e3, 1e3), st.integers(1, 9)),
        min_size=1,
        max_size=30,
    ),
    st.floats(0.5, 100),
    st.booleans(),
)
def test_smoothing_is_the_weighted_mean_of_all_values_so_far(points, half, is_log):
    x, at = [], 0
    for gap, _, _ in points:
        x.append(at := at + gap)
    y, count = [point[1] for point in points], [point[2] for point in points]
    places = [math.log10(value) for value in x] if is_log else x
    for i, found in enumerate(smoothed(make_curve(x, y, count), half, is_log=is_log)):
        weights = [count[j] * 2 ** (-(places[i] - places[j]) / half) for j in range(i + 1)]
        expected = sum(w * v for w, v in zip(weights, y, strict=False)) / sum(weights)
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_smoothing_at_equal_distances_is_adams_corrected_average():
    values, decay, average = [3.0, 1.0, 4.0, 1.0, 5.0], 2 ** (-1 / 3), 0.0
    found = smoothed(make_curve(range(1, 6), values), 3)
    for step, value in enumerate(values, 1):
        average = decay * average + (1 - decay) * value
        assert found[step - 1] == pytest.approx(average / (1 - decay**step))


def test_few_points_and_schedules_are_not_smoothed(tmp_path):
    run = make_run(tmp_path / "a", 8)
    loss, rate = read_panels([run])
    assert smoothed(loss.curves[0], half_life(loss, View())) == pytest.approx(
        loss.curves[0].mean, rel=1e-3
    )
    assert half_life(rate, View(smoothing=0.5)) == 0
    with pytest.raises(ConfigError, match=r"smoothing is 1\.5; expected a share"):
        View(smoothing=1.5)


def test_values_that_are_no_numbers_interrupt_the_line_and_are_counted(tmp_path):
    run = make_run(tmp_path / "a", 9)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    for step, text in ((1, "NaN"), (4, "null"), (5, "Infinity"), (9, "null")):
        lines[step - 1] = f'{{"step": {step}, "tokens": {step}, "loss": {text}}}'
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    panel = read_panels([run])[0]
    curve = panel.curves[0]
    assert curve.x == (2, 3, 6, 7, 8)
    assert (curve.breaks, curve.lost, curve.lost_count) == ((2,), (1, 4, 5, 9), 4)
    assert shown_parts(curve, False, False) == [[0, 1], [2, 3, 4]]
    assert notes_of(panel, View()) == ["4 values were no numbers (×)"]
    written = payload([panel], View())["panels"][0]
    assert (written["curves"][0]["breaks"], written["curves"][0]["lost"]) == ((2,), [1, 4, 5, 9])
    assert written["note"] == "4 values were no numbers (×)"


def test_a_restart_replaces_the_steps_that_it_repeats(tmp_path):
    run = make_run(tmp_path / "a", 6)
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"step": s, "tokens": 50 * s, "loss": 100.0 + s}) + "\n" for s in (4, 5)
        )
        file.write(json.dumps({"step": 5, "held/loss": 7.0}) + "\n")
    panels = read_panels([run])
    assert panels[0].curves[0].x == (1, 2, 3, 4, 5)
    assert panels[0].curves[0].mean[2:] == (3.0, 104.0, 105.0)
    assert panels[-1].curves[0].x == (5,)


def test_zeros_have_no_place_on_a_logarithmic_axis_and_that_is_told():
    curve = make_curve([0, 1, 2, 3], [5.0, 0.0, 2.0, 8.0])
    view = View(log_x=True, log_y=True, smoothing=0)
    assert shown_parts(curve, True, True) == [[2, 3]]
    assert notes_of(panel_of(curve), view) == [
        "1 of 4 points are not above 0, and not on the horizontal axis",
        "1 of 4 points are not above 0, and not on the vertical axis",
    ]
    nothing = panel_of(make_curve([1, 2], [0.0, -1.0]))
    assert notes_of(nothing, view) == ["no number is above 0, so the vertical axis stays linear"]


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    for parent in ("x", "y"):
        (tmp_path / parent).mkdir()
        make_run(tmp_path / parent / "run", 2)
    panels = read_panels([tmp_path / "x" / "run", tmp_path / "y" / "run"])
    assert [curve.run for curve in panels[0].curves] == [
        str(tmp_path / "x" / "run"),
        str(tmp_path / "y" / "run"),
    ]


def test_mistakes_are_told(tmp_path, monkeypatch):
    run = make_run(tmp_path / "a", 2)
    with pytest.raises(ConfigError, match=r"must end in \.html or \.png"):
        plot_runs([run], tmp_path / "curves.jpg")
    with pytest.raises(FormatError, match="give the folder of a run"):
        plot_runs([tmp_path], tmp_path / "curves.html")
    with pytest.raises(ConfigError, match="found no runs"):
        plot_runs([])
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


def test_a_picture_takes_names_as_text(tmp_path):
    """Two $ begin and end a formula of matplotlib, which may be none."""
    pytest.importorskip("matplotlib")
    run = tmp_path / "a$_$"
    run.mkdir()
    records = [{"step": n, "loss": 1.0, "loss.source.a$^$": 2.0} for n in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    out = plot_runs([run], tmp_path / "curves.png")
    assert out.read_bytes().startswith(b"\x89PNG")


def test_the_verb_draws_beside_the_run(tmp_path, capsys):
    plot.run(runs=[str(make_run(tmp_path / "a", 5))])
    assert capsys.readouterr().out == f"{tmp_path / 'a' / 'curves.html'}\n"
    given = {"output": tmp_path / "mine.html", "over": "tokens"}
    plot.run(runs=[str(tmp_path / "a" / "metrics.jsonl")], **given)
    assert data_of((tmp_path / "mine.html").read_text())["over"] == "tokens"


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


@given(
    st.lists(st.tuples(*[st.sampled_from(ABSURD)] * 4), min_size=1, max_size=6),
    st.sampled_from(["step", "tokens"]),
    st.builds(
        View, smoothing=st.sampled_from([0, 0.01, 0.2]), log_x=st.booleans(), log_y=st.booleans()
    ),
)
def test_absurd_numbers_are_left_out(tmp_path_factory, rows, over, view):
    run = tmp_path_factory.mktemp("absurd") / "run"
    run.mkdir()
    names = ("step", "tokens", "loss", "held/loss")
    lines = [
        json.dumps({"step": number, **dict(zip(names[1:], row[1:], strict=True))})
        for number, row in enumerate(rows)
    ]
    lines += [
        json.dumps({"step": row[0], "tokens": row[1], "loss": row[2]})
        for row in rows
        if type(row[0]) is int
    ]
    (run / "metrics.jsonl").write_text(
        "\n".join([*lines, json.dumps({"step": 1, "tokens": 2, "loss": 3.0})]) + "\n"
    )
    drawn = plot_runs([run], run / "curves.html", over=over, view=view).read_text()
    written = data_of(drawn)
    numbers = [
        n
        for panel in written["panels"]
        for curve in panel["curves"]
        for n in (*curve["x"], *curve["mean"])
    ]
    assert numbers
    assert all(-1e31 < number < 1e31 for number in numbers)
    assert not re.search("NaN|Infinity", json.dumps(written["panels"]))


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
    with pytest.raises(FormatError, match=r"metrics.jsonl:1.*record.*metrics"):
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
