"""Trajectories on a page in a headless Chromium: kinds, shades, the card and the tree, in light and
dark, wide and narrow.
"""

import pytest

import penstock as ps
from makers.trajectories import thinking_tokenizer, thinking_trajectory
from penstock.use.inspection import view_document
from penstock.use.inspection.page import write_html
from penstock.use.inspection.page_model import PageData, from_dataset

CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parts = colour => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = colour => {
    const [r, g, b] = parts(colour).slice(0, 3).map(x => x / 255)
      .map(x => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = node => {
    for (; node; node = node.parentElement) {
      const found = getComputedStyle(node).backgroundColor;
      if (parts(found)[3] === 255) return found;
    }
    return "white";
  };
  const all = document.querySelectorAll(".flow .t, .kinds .look, .said, .why, .letter");
  return Math.min(...[...all].map(each => {
    const both = [light(getComputedStyle(each).color), light(ground(each))];
    return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
  }));
})()"""
"""The least contrast of any text with what is behind it, by WCAG 2."""


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trajectories-in-browser")
    tokenizer = thinking_tokenizer(folder / "tokenizer")
    done = [
        thinking_trajectory(tokenizer, masked=masked, log=log).finish(
            reward=masked, advantage=0.5 - masked, group="a", step_rewards=(1, 2, 3), version=4
        )
        for masked, log in ((0, -0.5), (1, -0.25))
    ]
    data = ps.write_trajectories(folder / "data", done, tokenizer=tokenizer)
    return view_document(data, 0, data.loaded_tokenizer, lines=True)


@pytest.fixture
def page(browser, view, tmp_path):
    browser.events.clear()
    browser.look()
    write_html(tmp_path / "page.html", PageData(title="t", documents=[from_dataset(view)]))
    browser.open(tmp_path / "page.html")
    yield browser
    assert browser.complaints() == []


def card(browser):
    return browser.run(
        "Object.fromEntries([...document.querySelectorAll('#card dt')].map(name => "
        "[name.textContent, name.nextSibling.textContent]))"
    )


def place(view, kind):
    return view.trajectory.kinds.index(kind)


def test_tokens_have_their_kind_and_shade(page, view):
    kinds = page.run("[...document.querySelectorAll('.flow .t')].map(each => each.dataset.kind)")
    assert kinds == list(view.trajectory.kinds)
    shades = page.run(
        "[...document.querySelectorAll('.flow .t')].map(each => each.dataset.shade ?? '')"
    )
    logs, trained = view.trajectory.log_probabilities, [kind == "sampled" for kind in kinds]
    wanted = [
        str(sum(-log >= bound for bound in (0.1, 0.5, 1, 2))) if is_trained else ""
        for log, is_trained in zip(logs, trained, strict=True)
    ]
    assert shades == wanted
    grounds = page.run(
        "['1', '2', '4'].map(shade => getComputedStyle(document.querySelector("
        "`.flow .t.trained[data-shade='${shade}']`)).backgroundColor)"
    )
    assert len(set(grounds)) == 3


def test_the_card_tells_what_was_sampled(page, view):
    at = place(view, "sampled")
    page.point(f".t[data-i='{at}']")
    told = card(page)
    assert told["id"].startswith(str(view.tokens[at]))
    assert told["kind"] == "sampled: by the model, trained here"
    assert told["log-probability"] == "−3.000 nats, 5 %"
    assert told["loss"] == "trained, weight 1"
    assert (told["advantage"], told["policy version"]) == ("0.5", "4")
    page.point("#title")
    page.run(f"focusToken(document.querySelector(\".t[data-i='{place(view, 'masked')}']\"))")
    told = card(page)
    assert (told["kind"], told["loss"]) == ("masked: by the model, not trained", "only read")
    assert "advantage" not in told
    assert "log-probability −0.250 nats" in page.run("byId('spoken').textContent")
    page.point(f".t[data-i='{place(view, 'rewritten')}']")
    assert card(page)["kind"] == "rewritten: a reply, but not as it was sampled"


def test_the_legend_explains_and_is_no_text(page):
    legend = page.text(".kinds")
    for words in ("2 trajectories, 4 paths, 6 replies", "sampled", "masked", "rewritten", "nats"):
        assert words in legend
    page.point(".kinds .look")
    assert page.run("byId('card').hidden")
    page.key("n")
    assert page.run("document.activeElement.dataset.kind") == "sampled"


def test_branches_stand_under_those_that_they_fork_from(page, view):
    lefts = page.run(
        "[...document.querySelectorAll('.branch')].map(each => each.getBoundingClientRect().left)"
    )
    depths = [branch.depth for branch in view.trajectory.branches]
    assert [lefts.index(left) for left in lefts] == [depths.index(depth) for depth in depths]
    assert sorted(set(lefts)) == [lefts[depths.index(depth)] for depth in sorted(set(depths))]
    heads = page.run("[...document.querySelectorAll('.said b')].map(each => each.textContent)")
    assert "repeats reply 1, trained in path 0" in heads
    forks = page.run("[...document.querySelectorAll('.fork')].map(each => each.dataset.to)")
    assert sorted(forks) == ["↳B", "↳C", "↳D"]
    hues = page.run("[...document.querySelectorAll('.tree rect')].map(each => each.dataset.hue)")
    assert set(hues) == {"none", "0", "1", "4", "5"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_nothing_hangs_over_and_all_can_be_read(page, width, scheme):
    page.look(width=width, height=900, scheme=scheme)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.run("byId('main').scrollWidth <= byId('main').clientWidth")
    assert page.run(CONTRAST) >= 4.5
