"""The page of curves in a headless Chromium: its script draws what Python draws, and answers."""

import json
import math
import random

import pytest

from makers.texts import write_json_lines
from patience import wait_for
from penstock.learn.training.curve_page import notes_of, page, svg
from penstock.learn.training.curves import View, read_panels

VIEWS = [View(smoothing=s, log_x=x, log_y=y) for s in (0, 0.01) for x in (False, True) for y in (False, True)]


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
        make_run(tmp_path / name, steps, seed) for seed, (name, steps) in enumerate([("a", 900), ("b <script>", 60)])
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


LINES = """
(() => {
  const { picture } = drawPanel(page.panels[%d], { smoothing: %s, logX: %s, logY: %s, hidden: new Set() }, 560);
  const lines = [...picture.querySelectorAll("polygon, polyline")];
  return lines.map(line => [line.getAttribute("class"), line.getAttribute("points")]);
})()
"""


def test_the_script_draws_what_python_draws(see, panels):
    browser = see()
    for view in VIEWS:
        for number, panel in enumerate(panels):
            code = LINES % (number, view.smoothing, json.dumps(view.log_x), json.dumps(view.log_y))
            drawn = [[kind, [float(n) for n in points.replace(",", " ").split()]] for kind, points in browser.run(code)]
            expected = _lines(svg(panel, view))
            assert [kind for kind, _ in drawn] == [kind for kind, _ in expected]
            for (_, mine), (_, theirs) in zip(drawn, expected, strict=True):
                assert mine == pytest.approx(theirs, abs=0.11)


def _lines(text):
    import xml.etree.ElementTree as Xml

    found = [each for each in Xml.fromstring(text).iter() if each.tag in ("polygon", "polyline")]
    return [(each.get("class"), [float(n) for n in each.get("points").replace(",", " ").split()]) for each in found]


def now(browser, panel=0):
    return browser.run(
        f"[...document.querySelectorAll('figure')[{panel}].querySelectorAll('.now span')].map(each => each.textContent)"
    )


def test_the_crosshair_tells_all_curves_at_one_step(see, panels):
    browser = see(View(smoothing=0))
    before = now(browser)
    browser.run("document.querySelector('svg').focus()")
    browser.key(*["ArrowRight"] * 20)
    a, b = panels[0].curves
    assert now(browser) == [f"{float(f'{curve.mean[19]:.4g}'):g}" for curve in (a, b)]
    # The same step in all panels, at the same place; and the spoken line.
    places = browser.run("[...document.querySelectorAll('.cross')].map(line => Number(line.getAttribute('x1')))")
    assert max(places) - min(places) < 1
    assert browser.run("document.querySelectorAll('.cross').length") == len(panels)
    assert browser.run("document.querySelector('.tip text').textContent") == "step 20"
    assert browser.run("document.getElementById('spoken').textContent").startswith("step 20: a ")
    browser.key("End")
    assert now(browser)[1] == "–"
    browser.key("Escape")
    assert now(browser) == before
    browser.point("svg")
    assert browser.run("document.querySelectorAll('.cross').length") >= 1


def test_notes_are_those_of_python(see, panels):
    browser = see()
    for view in VIEWS:
        asked = f"{{ smoothing: 0, logX: {json.dumps(view.log_x)}, logY: {json.dumps(view.log_y)}, hidden: new Set() }}"
        for number, panel in enumerate(panels):
            told = "(p, a) => notesOf(p.curves, a, drawPanel(p, a, 560).axes)"
            assert browser.run(f"({told})(page.panels[{number}], {asked})") == "; ".join(notes_of(panel, view))


def test_runs_are_switched_by_their_names(see):
    browser = see()
    lines = "document.querySelectorAll('figure')[0].querySelectorAll('.line').length"
    shown = browser.run(lines)
    browser.point("#legend li:nth-child(1) button", click=True)
    assert 0 < browser.run(lines) < shown
    assert len(now(browser)) == 1
    browser.point("#legend li:nth-child(2) button", click=True)
    assert "hidden" in browser.text(".told")
    browser.run("document.querySelector('#legend button').dispatchEvent(new MouseEvent('dblclick'))")
    assert browser.run("[...document.querySelectorAll('#legend button')].map(b => b.getAttribute('aria-pressed'))") == [
        "true",
        "false",
    ]
    assert browser.run("document.querySelectorAll('#legend button')[1].textContent") == "b <script>"


def test_smoothing_and_axes_are_chosen_in_the_page(see):
    browser = see()
    points = "document.querySelector('.line').getAttribute('points')"
    before = browser.run(points)
    browser.run("smoothing.value = 0; smoothing.dispatchEvent(new Event('input'))")
    assert browser.text("#half") == "off"
    assert browser.run("document.querySelectorAll('.raw').length") == 0
    assert browser.run(points) != before
    browser.point("#log-y", click=True)
    assert "not above 0, and not on the vertical axis" in browser.run(
        "[...document.querySelectorAll('.told')].map(e => e.textContent).join()"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_only_downwards(see, scheme):
    browser = see()
    browser.look(width=360, scheme=scheme)
    assert browser.run("document.documentElement.scrollWidth") <= 360
    assert browser.run("document.querySelector('svg').getBoundingClientRect().width") > 280


def test_without_its_script_it_is_a_picture(browser, tmp_path, panels):
    (tmp_path / "curves.html").write_text(page(panels, View()), encoding="utf-8")
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.call("Page.navigate", url=(tmp_path / "curves.html").as_uri())
        wait_for(lambda: json.dumps(browser.call("DOM.getDocument", depth=-1)).count('"polyline"') >= 4)
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
