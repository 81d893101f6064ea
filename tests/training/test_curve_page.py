"""The page of curves in a headless Chromium: it draws what Python computes, and answers."""

import json
import math
import random

import pytest

from makers.texts import write_json_lines
from penstock.learn.training.curve_page import page
from penstock.learn.training.curves import (
    View,
    half_life,
    is_log_x,
    is_log_y,
    read_panels,
    smoothed,
)

VIEWS = [
    View(smoothing=s, log_x=x, log_y=y)
    for s in (0, 0.01)
    for x in (False, True)
    for y in (False, True)
]


def make_run(folder, steps, seed):
    draw = random.Random(seed)
    records = [
        {
            "step": s,
            "tokens": 100 * s,
            "loss": None if s == 30 else 2 + 8 / math.sqrt(s) + draw.gauss(0, 0.2),
            "gradient_norm": max(0.0, draw.gauss(1, 1)),
            "learning_rate": 0.001 * (1 - s / steps),
        }
        for s in range(1, steps + 1)
    ]
    records[steps // 2]["held out/loss"] = 3.0
    return write_json_lines(folder / "metrics.jsonl", records).parent


@pytest.fixture
def panels(tmp_path):
    runs = [
        make_run(tmp_path / name, steps, seed)
        for seed, (name, steps) in enumerate([("a", 900), ("b <script>", 60)])
    ]
    return read_panels(runs)


@pytest.fixture
def see(browser, tmp_path, panels):
    """Opens the page; its policy must refuse nothing, and it must ask for nothing but itself."""
    browser.events.clear()
    browser.look()

    def opened(view=None):
        (tmp_path / "curves.html").write_text(page(panels, view or View()), encoding="utf-8")
        browser.open(tmp_path / "curves.html")
        return browser

    yield opened
    assert browser.complaints() == []
    assert len({url for url in browser.requests() if not url.startswith("data:")}) == 1


def test_the_page_draws_the_numbers_and_smooths_as_python_does(see, panels):
    browser = see()
    for view in VIEWS:
        browser.run(
            f"Object.assign(view, {{ smoothing: {view.smoothing}, logX: "
            f"{json.dumps(view.log_x)} }})"
        )
        browser.run(f"view.logY = {json.dumps(view.log_y)}; redraw()")
        for number, panel in enumerate(panels):
            drawn = browser.run(f"charts[{number}].data.map(column => [...column])")
            assert drawn[0] == sorted(drawn[0])
            half, is_log = half_life(panel, view), is_log_x(panel, view)
            for curve, line in zip(panel.curves, drawn[4::4], strict=True):
                expected = dict(zip(curve.x, smoothed(curve, half, is_log=is_log), strict=True))
                found = {x: y for x, y in zip(drawn[0], line, strict=True) if y is not None}
                kept = {x: y for x, y in expected.items() if y > 0 or not is_log_y(panel, view)}
                assert found == pytest.approx(kept, rel=1e-6)


def now(browser, panel=0):
    values = (
        "[...document.querySelectorAll('figure')[%d].querySelectorAll('.u-series:not(.aside) "
        ".u-value')]"
    )
    return browser.run(values % panel + ".map(each => each.textContent)")[1:]


def test_the_crosshair_shows_all_curves_at_one_step(see, panels):
    browser = see(View(smoothing=0))
    browser.run("document.querySelector('.uplot').focus()")
    browser.key(*["ArrowRight"] * 20)
    a, b = panels[0].curves
    assert [float(text) for text in now(browser)] == pytest.approx(
        [a.mean[19], b.mean[19]], rel=1e-3
    )
    # The same step in all panels; and the spoken line.
    assert (
        browser.run(
            "new Set(charts.slice(0, 3).map(chart => "
            "Math.round(chart.posToVal(chart.cursor.left, 'x')))).size"
        )
        == 1
    )
    assert browser.text("#spoken").startswith("step")
    browser.key("End")
    assert now(browser)[1] == "–"
    browser.key("Escape")
    assert browser.run("document.getElementById('spoken').textContent") == ""


def test_what_is_not_drawn_is_noted(see):
    browser = see()
    assert browser.text(".note") == "2 values were no numbers (×)"


def test_runs_are_switched_by_their_names(see):
    browser = see()
    lines = "document.querySelector('figure').querySelectorAll('.u-series:not(.aside)').length"
    shown = browser.run(lines)
    browser.point("#legend li:nth-child(1) button", click=True)
    assert 0 < browser.run(lines) < shown
    assert len(now(browser)) == 1
    browser.point("#legend li:nth-child(2) button", click=True)
    assert "hidden" in browser.text(".note")
    browser.run(
        "document.querySelector('#legend button').dispatchEvent(new MouseEvent('dblclick'))"
    )
    assert browser.run(
        "[...document.querySelectorAll('#legend button')].map(b => b.getAttribute('aria-pressed'))"
    ) == [
        "true",
        "false",
    ]
    assert browser.run("document.querySelectorAll('#legend button')[1].textContent") == "b <script>"


def test_smoothing_and_axes_are_chosen_in_the_page(see):
    browser = see()
    line = "[...charts[0].data[4]].slice(0, 9)"
    before = browser.run(line)
    browser.run("smoothing.value = 0; smoothing.dispatchEvent(new Event('input'))")
    assert browser.text("#half") == "off"
    assert browser.run(line) != before
    browser.point("#log-y", click=True)
    assert browser.run("charts[0].scales.y.distr") == 3
    assert browser.run("charts[0].scales.x.distr") == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_only_downwards(see, scheme):
    browser = see()
    browser.look(width=360, scheme=scheme)
    assert browser.run("document.documentElement.scrollWidth") <= 360
    assert browser.run("document.querySelector('.uplot').getBoundingClientRect().width") > 280
