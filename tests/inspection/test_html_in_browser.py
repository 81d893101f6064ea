"""The page in a headless Chromium: what is seen, by pointer and by keyboard, in light and dark,
wide and narrow.
"""

import json
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from test_html_page import ATTACK, ROLES, make_document, make_row

from makers.browser import Browser
from patience import wait_for
from penstock.use.inspection.page import write_html
from penstock.use.inspection.page_model import Note, PageData
from penstock.use.inspection.rows import Stretch


@pytest.fixture
def see(browser, tmp_path):
    """Write a page, open it in light and wide, and check at the end that nothing was thrown,
    refused or fetched.
    """
    browser.events.clear()
    browser.look()

    def opened(**parts) -> Browser:
        write_html(tmp_path / "page.html", PageData(**{"title": "chats", **parts}))
        browser.open(tmp_path / "page.html")
        return browser

    yield opened
    assert browser.complaints() == []
    assert {url for url in browser.requests() if not url.startswith("file://")} == set()
    assert len(browser.requests()) == 1


def several():
    notes = [Note("truncated", "after message 2")]
    return [
        make_document(0),
        make_document(1, notes=notes, ok=False),
        make_document(2, loss_weights=np.zeros(18)),
        make_document(3, loss_weights=np.ones(18), text=" needle"),
        make_document(
            4,
            roles=np.zeros(18, np.int64),
            notes=[*notes, Note("forged", "<|end|> is text")],
            ok=True,
        ),
    ]


def listed(browser) -> list[int]:
    return browser.run(
        "[...document.querySelectorAll('#list li')].map(item => Number(item.dataset.i))"
    )


def chosen(browser) -> int:
    return browser.run("Number(document.querySelector('#list [aria-selected=true]').dataset.i)")


def tokens(browser, selector="") -> list[int]:
    found = json.dumps(f"#main .t{selector}")
    return browser.run(
        f"[...document.querySelectorAll({found})].map(token => Number(token.dataset.i))"
    )


def card(browser) -> dict[str, str]:
    """What the card tells; empty where it is hidden."""
    return browser.run(
        "document.getElementById('card').hidden ? {} : "
        "Object.fromEntries([...document.querySelectorAll('#card dt')].map(name => "
        "[name.textContent, name.nextSibling.textContent]))"
    )


def test_500_conversations_open_in_under_two_seconds(browser, tmp_path):
    generator = np.random.default_rng(5)
    words = [f" word{number}" for number in range(20_000)]
    roles, weights = np.repeat([0, 1, 2] * 8 + [-1], 40), np.repeat([0, 0, 1.0] * 8 + [0], 40)
    documents = []
    for number in range(500):
        ids = np.minimum(generator.zipf(1.3, 1000), 20_000) - 1
        notes = [Note("truncated", "after message 2")] * (number % 9 == 0)
        pieces = [words[i] for i in ids]
        documents.append(
            make_document(
                number,
                pieces=pieces,
                ids=ids,
                roles=roles,
                loss_weights=weights,
                is_control=None,
                notes=notes,
            )
        )
    write_html(tmp_path / "page.html", PageData(title="500", documents=documents))
    browser.look()
    taken = min(browser.open(tmp_path / "page.html") for _ in range(2))
    assert len(listed(browser)) == 500
    assert len(tokens(browser)) == 1000
    assert taken < 2000
    begin = browser.run("performance.now()")
    browser.run("choice.query = 'word19999'; fillList()")
    assert browser.run("performance.now()") - begin < 1000


def test_document_shows_every_token_and_marks_what_is_trained(see):
    document = make_document(weight=0.5, text=" tab\tand\nline")
    browser = see(documents=[document])
    shown = browser.run(
        "[...document.querySelectorAll('#main .t')].map(token => token.textContent)"
    )
    assert shown == document.pieces
    assert tokens(browser, ".trained") == np.flatnonzero(document.loss_weights).tolist()
    assert tokens(browser, ".control") == np.flatnonzero(document.is_control).tolist()
    assert tokens(browser, "[data-weight='×0.5']") == [9]
    heads = browser.run(
        "[...document.querySelectorAll('.block .role')].map(head => head.textContent)"
    )
    assert heads == ["user", "assistant", "user"]
    line = "getComputedStyle(document.querySelector('.t.trained:not(.control)')).textDecorationLine"
    assert browser.run(line) == "underline"


def test_content_stays_content(see):
    browser = see(
        title=ATTACK,
        settings={ATTACK: ATTACK},
        documents=[
            make_document(text=ATTACK, title=ATTACK, origin=ATTACK, notes=[Note(ATTACK, ATTACK)])
        ],
        other=PageData(title=ATTACK, documents=[make_document(text=ATTACK)]),
    )
    for key in "123":
        browser.key(key)
        assert browser.run("document.querySelectorAll('img, body script:not([type])').length") == 1
    browser.key("1")
    assert browser.text("#title") == ATTACK
    assert ATTACK in browser.text(".flow")


def test_card_tells_a_token_under_the_pointer_and_at_the_focus(see):
    browser = see(documents=[make_document(weight=0.5)])
    browser.point(".t[data-i='9']")
    told = card(browser)
    assert told["position"] == "9 of 18"
    assert told["role"] == "assistant"
    assert told["loss"] == "trained, weight 0.5"
    assert told["target"] == "␣and id 5, weight 0.5"
    browser.point("#title")
    assert card(browser) == {}
    browser.run("document.querySelector('#list li').focus()")
    browser.key("Enter", "ArrowRight", "ArrowRight")
    assert card(browser)["position"] == "2 of 18"
    assert card(browser)["target"] == "none"
    assert "position 2 of 18" in browser.run("document.getElementById('spoken').textContent")
    browser.key("End")
    assert card(browser)["id"] == "2, control token"
    browser.key("ArrowUp")
    assert 12 <= browser.run("Number(document.activeElement.dataset.i)") < 17
    browser.key("Escape")
    assert browser.run("document.activeElement.id") == "item-0"


def test_card_says_why_a_token_is_not_trained(see):
    why = ["the prompt <supplies> it"] * 9 + [""] * 3 + ["", *["another"] * 5]
    browser = see(documents=[make_document(reasons=why)])
    found = []
    for place in (2, 9, 12, 13):
        browser.point(f".t[data-i='{place}']")
        found.append(card(browser)["loss"])
    assert found == [
        "only read: the prompt <supplies> it",
        "trained, weight 1",
        "only read",
        "only read: another",
    ]


def test_tab_key_reaches_the_text(see):
    browser = see(documents=[make_document()])
    browser.run("document.querySelector('.steppers button:last-child').focus()")
    browser.key("Tab")
    assert browser.run("document.activeElement.dataset.i") == "0"


def test_keys_move_among_documents_and_stretches(see):
    browser = see(documents=several())
    browser.key("j", "j", "ArrowRight")
    assert (chosen(browser), browser.run("location.hash")) == (3, "#documents-4")
    browser.key("k", "ArrowLeft", "ArrowLeft", "k")
    assert chosen(browser) == 0
    browser.key("n")
    assert browser.run("document.activeElement.dataset.i") == "9"
    browser.key("?")
    assert browser.run("document.getElementById('manual').open")
    browser.key("Escape")
    assert not browser.run("document.getElementById('manual').open")
    browser.key("/", *"needle")
    browser.run("clearTimeout(0)")
    assert browser.run("document.activeElement.value") == "needle"


def test_filters_search_and_order(see):
    browser = see(documents=several())
    chips = browser.run("[...document.querySelectorAll('.chip')].map(chip => chip.textContent)")
    assert chips == [
        "any note2",
        "not proven1",
        "nothing trained1",
        "everything trained1",
        "truncated2",
        "forged1",
    ]
    press = (
        "[...document.querySelectorAll('.chip')].find(chip => "
        "chip.textContent.startsWith({})).click()"
    )
    browser.run(press.format("'not proven'"))
    assert listed(browser) == [1]
    browser.run(press.format("'forged'"))
    assert (listed(browser), browser.text("#count")) == ([1, 4], "2 of 5")
    assert chosen(browser) == 1
    browser.key("j")
    assert chosen(browser) == 4
    browser.run(press.format("'not proven'") + ";" + press.format("'forged'"))
    choose = "(select => {{ select.value = '{}'; select.dispatchEvent(new Event('change')); }})({})"
    browser.run(
        choose.format("2", "document.querySelector('[aria-label=\"Only with this role\"]')")
    )
    assert listed(browser) == [0, 1, 2, 3]
    browser.run(choose.format("1", "document.querySelector('[aria-label=Order]')"))
    assert listed(browser) == [2, 0, 1, 3]
    browser.run("choice.query = 'needle and'; fillList(); redraw()")
    assert listed(browser) == [3]
    assert tokens(browser, ".hit") == [3, 4, 9, 10, 15, 16]
    browser.run("choice.query = 'user'; fillList(); redraw()")
    assert tokens(browser, ".hit") == [1, 13]


def test_many_notes_are_folded(see):
    browser = see(
        documents=[make_document(notes=[Note("dropped", f"text {number}") for number in range(7)])]
    )
    assert browser.text(".head summary") == "3 more notes"
    assert "text 6" not in browser.text(".head")
    browser.point(".head summary", click=True)
    assert "text 6" in browser.text(".head")


def test_search_that_finds_nothing_says_so(see):
    browser = see(documents=several())
    browser.run("choice.query = 'nowhere'; fillList(); redraw()")
    assert "Nothing matches" in browser.text("#main")


def test_row_shows_strip_attention_and_targets(see):
    browser = see(rows=[make_row()], control_ids=frozenset({2}))
    widths = browser.run(
        "[...document.querySelectorAll('.strip .region')].map(region => "
        "parseFloat(region.style.width))"
    )
    assert widths == pytest.approx([100 * n / 12 for n in (5, 4, 3)], abs=0.01)
    assert browser.run("document.querySelectorAll('.strip .hatched').length") == 1
    triangles = browser.run(
        "[...document.querySelectorAll('.triangle')].map(part => part.getAttribute('d'))"
    )
    assert triangles == ["M0 0V5H5Z", "M5 5V9H9Z"]
    assert "25 pairs, 32 %" in browser.text(".attention")
    assert tokens(browser, ".trained") == [2, 3, 4, 7, 8]
    browser.point(".t[data-i='4']")
    told = card(browser)
    assert (told["slot"], told["document"]) == ("4, position 4", "A web")
    assert (told["target +1"], told["target +2"]) == ("spelled777 id 777, weight 1", "none")
    assert "slot 4 sees slots 0–4" in browser.text(".attention")
    browser.point(".strip .region:nth-child(2)", click=True)
    assert browser.run("document.activeElement.dataset.i") == "5"


def test_rows_whose_documents_see_each_other_are_one_triangle(see):
    row = make_row()
    row.positions[:9] = np.arange(9)
    browser = see(rows=[row])
    assert browser.run("document.querySelectorAll('.triangle').length") == 1
    assert "those of other documents too" in browser.text(".attention")


def make_rewritten_row():
    """Document A with a mode, one hole and its span, seen in both directions up to slot 3; B as it
    was.
    """
    row = make_row()
    told = [
        (0, 1, "inputs", "mode", -1),
        (1, 2, "inputs", "sentinel", 0),
        (2, 3, "inputs", "input", -1),
    ]
    told += [(3, 4, "targets", "sentinel", 0), (4, 5, "targets", "target", 0)]
    stretches = [
        Stretch(begin=b, end=e, part=part, role=role, span=span) for b, e, part, role, span in told
    ]
    first = replace(
        row.documents[0],
        task="R",
        prefix=3,
        stretches=tuple(stretches),
        restored=(("taken", 0), (" kept", -1)),
    )
    return replace(row, documents=(first, row.documents[1]))


def test_a_span_lights_up_where_it_is_and_where_it_was(see):
    browser = see(rows=[make_rewritten_row()])
    lit = "[...document.querySelectorAll('.lit')].map(each => each.dataset.i ?? each.textContent)"
    browser.point(".t[data-i='1']")
    assert browser.run(lit) == ["1", "3", "4", "taken"]
    assert card(browser)["role"] == "sentinel of span 0"
    browser.point(".t[data-i='2']")
    assert browser.run(lit) == []
    assert card(browser)["role"] == "input"
    browser.point(".span")
    assert browser.run(lit) == ["1", "3", "4", "taken"]
    browser.point("h2")
    assert browser.run(lit) == []
    browser.run("focusToken(document.querySelector('.t[data-i=\"4\"]'))")
    assert browser.run(lit) == ["1", "3", "4", "taken"]


def test_inputs_and_targets_stand_apart_with_their_task(see):
    browser = see(rows=[make_rewritten_row()])
    assert browser.run(
        "[...document.querySelectorAll('.label b')].map(each => each.textContent)"
    ) == [
        "inputs",
        "targets",
        "as it was",
    ]
    assert browser.text(".pane .label") == "inputs 3 slots, see each other"
    assert browser.run("[...document.querySelectorAll('.pane.seen')].length") == 1
    assert (browser.text(".task"), "tasks: R 1" in browser.text(".facts")) == ("R", True)
    # The numbers of sentinels are seen; their own text is in the card, and where one copies.
    assert (
        browser.run("getComputedStyle(document.querySelector('.sentinel'), '::before').content")
        == '"0"'
    )
    assert browser.run("document.querySelector('.sentinel').textContent") == "t1"


def test_prefixes_are_squares_in_the_picture_of_attention(see):
    browser = see(rows=[make_rewritten_row()])
    shapes = browser.run(
        "[...document.querySelectorAll('.triangle')].map(part => part.getAttribute('d'))"
    )
    assert shapes == ["M0 0V5H5L3 3V0Z", "M5 5V9H9Z"]
    assert "28 pairs" in browser.text(".attention")
    browser.point(".t[data-i='1']")
    assert "slot 1 sees slots 0–2 and is seen from 0–4" in browser.text(".attention")
    browser.point(".t[data-i='4']")
    assert "slot 4 sees slots 0–4 and is seen from 4–4" in browser.text(".attention")


def test_figures_show_settings_shares_and_histograms(see):
    browser = see(
        documents=several(), settings={"train_on_eos": "turn"}, summary={"conversations": 5}
    )
    browser.key("3")
    text = browser.text(".figures")
    for part in (
        "train_on_eos",
        "conversations",
        "tokens by role",
        "trained tokens by role",
        "tokens of a document",
    ):
        assert part in text
    full = browser.run(
        "[...document.querySelectorAll('.full')].filter(bar => "
        "Number(bar.getAttribute('height'))).length"
    )
    assert full == 1 + 3


def test_two_settings_side_by_side(see):
    ours = [make_document(), make_document(1), make_document(2)]
    weights = np.where(np.arange(18) == 11, 0, ours[1].loss_weights)
    theirs = [make_document(), make_document(1, loss_weights=weights), make_document(2, turns=4)]
    browser = see(
        label="a",
        documents=ours,
        settings={"train_on_eos": "turn", "template": "x"},
        other=PageData(
            title="u",
            label="b",
            documents=theirs,
            settings={"train_on_eos": "none", "template": "x"},
        ),
    )
    # It opens on the first that differs.
    assert tokens(browser, ".changed") == [11, 11]
    browser.key("k")
    assert tokens(browser, ".changed") == []
    browser.key("j")
    assert "1 weight differs" in browser.text(".head")
    assert (
        " ".join(browser.text(".pair.titles").split())
        == "a train_on_eos = turn b train_on_eos = none"
    )
    browser.key("n")
    assert card(browser)["b"] == "only read"
    browser.key("j")
    assert tokens(browser, ".changed") == list(range(18, 24))
    browser.key("c")
    assert len(tokens(browser)) == 18
    browser.key("c")
    assert len(tokens(browser)) == 24


def test_difference_is_a_longest_common_subsequence(see):
    """Against the table of dynamic programming."""
    browser = see(documents=[make_document()])
    draw = random.Random(3)
    for _ in range(60):
        a, b = ([draw.randrange(4) for _ in range(draw.randrange(14))] for _ in range(2))
        pairs = sorted(browser.run(f"matched({json.dumps(a)}, {json.dumps(b)})"))
        assert all(a[i] == b[j] for i, j in pairs)
        assert all(i < k and j < m for (i, j), (k, m) in pairwise(pairs))
        table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
        for i in range(len(a)):
            for j in range(len(b)):
                table[i + 1][j + 1] = (
                    table[i][j] + 1 if a[i] == b[j] else max(table[i][j + 1], table[i + 1][j])
                )
        assert len(pairs) == table[-1][-1]


CONTRAST = """
(() => {
  const brush = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = colour => { brush.clearRect(0, 0, 1, 1); brush.fillStyle = colour; brush.fillRect(0, 0, 1, 1);
    return [...brush.getImageData(0, 0, 1, 1).data]; };
  const ground = node => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(rgba(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, [r, g, b, a]) =>
      [r, g, b].map((v, k) => v * a / 255 + below[k] * (1 - a / 255)), [255, 255, 255]);
  };
  const light = rgb => rgb.slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
  const ratio = node => {
    const [a, b] = [light(rgba(getComputedStyle(node).color)), light(ground(node))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  return SELECTORS.map(selector => [selector, Math.min(...[...document.querySelectorAll(selector)].map(ratio))]);
})()
"""  # noqa: E501


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable(see, scheme):
    """WCAG 2.2, 1.4.3: a contrast of 4.5 for text."""
    document = make_document(role_names=ROLES, notes=[Note("forged", "x")], ok=False, text=" find")
    browser = see(
        documents=[document], other=PageData(title="u", documents=[make_document(weight=0.5)])
    )
    browser.run("choice.query = 'find'; redraw()")
    browser.look(scheme=scheme)
    assert tokens(browser, ".hit")
    assert tokens(browser, ".changed")
    seen = [
        ".t",
        ".t.trained",
        ".t.control",
        ".role",
        ".note",
        ".bad",
        "h1",
        "h2",
        ".quiet",
        ".chip",
        "#list li",
        "nav button",
    ]
    found = dict(browser.run(CONTRAST.replace("SELECTORS", json.dumps(seen))))
    assert {
        selector: ratio for selector, ratio in found.items() if ratio is None or ratio < 4.5
    } == {}


def test_theme_can_be_chosen(see):
    browser = see(documents=several())
    ground = "getComputedStyle(document.body).backgroundColor"
    light = browser.run(ground)
    browser.key("d")
    assert (browser.run(ground), browser.text("#theme")) == (light, "☀ Light")
    browser.key("d")
    assert browser.run(ground) != light
    browser.key("d")
    assert browser.text("#theme") == "◐ System"
    browser.look(scheme="dark")
    assert browser.run(ground) != light


@pytest.mark.parametrize("key", ["1", "2", "3"])
def test_narrow_window_scrolls_only_downwards(see, key):
    wide = make_document(text="x" * 200)
    browser = see(documents=[wide], rows=[make_row()], other=PageData(title="u", documents=[wide]))
    browser.look(width=360)
    browser.key(key)
    assert browser.run("document.documentElement.scrollWidth") <= 360


def test_address_opens_a_document(see, browser, tmp_path):
    browser = see(documents=several(), rows=[make_row()])
    browser.run("location.hash = '#documents-3'; fromAddress()")
    assert chosen(browser) == 2
    browser.run("location.hash = '#rows-1'; fromAddress()")
    assert "step 0 · row 3" in browser.text("h2")


def test_a_page_of_nothing_and_a_document_of_nothing_are_told(see):
    browser = see(
        documents=[
            make_document(
                pieces=[],
                ids=np.zeros(0, int),
                loss_weights=np.zeros(0),
                roles=None,
                is_control=None,
            )
        ]
    )
    assert "no tokens" in browser.text("#main")


def test_the_list_shows_first_words_and_then_which_document_it_is(see):
    pieces = ["<|im_start|>", "user", "\n", "How  high", " is\nit?", "<|im_end|>"]
    told = make_document(
        7,
        pieces=pieces,
        ids=np.arange(6),
        loss_weights=np.zeros(6),
        roles=np.zeros(6, np.int64),
        role_names=("user",),
        is_control=np.array([True, False, False, False, False, True]),
    )
    browser = see(documents=[told])
    assert browser.text("#list .name span:last-child") == "How high is it?"
    assert browser.text("#list .which") == browser.text("h2")


def test_a_phone_gives_the_document_the_room_and_opens_the_list_when_asked(see):
    browser = see(documents=several(), rows=[make_row()])
    browser.look(width=390, height=760)
    top = "document.querySelector('.head').getBoundingClientRect().top"
    wait_for(lambda: browser.run("innerWidth") == 390 and browser.run(top) < 70)
    assert browser.run("side.offsetHeight") == 0
    browser.point("#open-list", click=True)
    assert browser.run("side.offsetHeight") > 300
    assert (
        browser.run("document.getElementById('open-list').getAttribute('aria-expanded')") == "true"
    )
    assert browser.run("main.offsetHeight") == 0
    # Items get their real heights a frame after they are seen, so a pointer might meet another one.
    browser.run("document.querySelector('#list li:nth-child(3)').click()")
    assert (chosen(browser), browser.run("side.offsetHeight")) == (2, 0)
    assert browser.run(top) < 70
    browser.point("#open-list", click=True)
    browser.key("Escape")
    assert browser.run("side.offsetHeight") == 0
    browser.look(width=1300)
    wait_for(lambda: browser.run("side.offsetHeight") > 300)
    assert browser.run("document.getElementById('open-list').offsetHeight") == 0
