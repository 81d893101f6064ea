"""The page as a file: small, whole, closed to what data say, and true to the arrays; and the same
in the terminal.
"""

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makers.views import console_of
from penstock.chat.encoded_chat import EncodedChat
from penstock.chat.masks.certificate import Certificate, Problem
from penstock.core.errors import ConfigError, OutputError
from penstock.use.inspection.datasets import DocumentView
from penstock.use.inspection.page import page_html, payload, readable, runs, varints, write_html
from penstock.use.inspection.page_model import (
    Note,
    PageData,
    PageDocument,
    from_chat,
    from_dataset,
    histograms_of,
    pieces_of,
    shares_of,
)
from penstock.use.inspection.rows import RowDocument, RowView
from penstock.use.inspection.terminal_tokens import print_document

ROLES = ("system", "user", "assistant")
ATTACK = "</script><img src=x onerror=alert(1)><!--<script>{{data}}"


def make_document(number=0, *, text=" words", turns=3, weight=1.0, **more) -> PageDocument:
    """Turns of user and assistant, the assistant's trained with their terminators."""
    pieces, ids, weights, roles, control = [], [], [], [], []
    for turn in range(turns):
        role = 1 + turn % 2
        trained = weight if role == 2 else 0.0
        for piece, token, loss, special in [
            ("<|start|>", 1, 0.0, True),
            (ROLES[role], 10 + role, 0.0, False),
            ("\n", 3, 0.0, False),
            (text, 100 + number, trained, False),
            (" and", 5, trained, False),
            ("<|end|>", 2, trained, True),
        ]:
            pieces.append(piece)
            ids.append(token)
            weights.append(loss)
            roles.append(role)
            control.append(special)
    given = {
        "title": f"conversation {number}",
        "origin": f"chats.jsonl:{number + 1}",
        "pieces": pieces,
        "ids": np.array(ids),
        "loss_weights": np.array(weights, np.float32),
        "roles": np.array(roles),
        "role_names": ROLES,
        "is_control": np.array(control),
    }
    return PageDocument(**{**given, **more})


def make_row(lengths=(5, 4), slots=12) -> RowView:
    """Documents of tokens 0, 1, 2, …, each trained from its third token on."""
    used = sum(lengths)
    tokens, positions = np.arange(slots), np.zeros(slots, np.int64)
    targets, weights = np.full((2, slots), -100), np.zeros((2, slots), np.float32)
    documents, begin = [], 0
    for number, length in enumerate(lengths):
        end = begin + length
        positions[begin:end] = np.arange(length)
        for distance in (1, 2):
            slot = np.arange(begin + 1, end - distance)
            targets[distance - 1, slot] = slot + distance
            weights[distance - 1, slot] = 0.5
        documents.append(
            RowDocument(
                begin=begin,
                end=end,
                source="web",
                origin="w:1",
                document=number,
                first_token=0,
                epoch=0,
            )
        )
        begin = end
    # The last slot of the first document predicts a token that is nowhere in the row, as after a
    # split.
    targets[0, lengths[0] - 1], weights[0, lengths[0] - 1] = 777, 1.0
    return RowView(
        step=0,
        row=3,
        tokens=tokens,
        targets=targets,
        loss_weights=weights,
        positions=positions,
        num_tokens=used,
        documents=tuple(documents),
        texts=tuple(f"t{i}" if i < used else "" for i in range(slots)),
        spell=lambda token: f"spelled{token}",
    )


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text of each script."""

    def __init__(self, text):
        super().__init__()
        self.found, self.scripts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.found and self.found[-1][0] == "script":
            self.scripts.append(data)


def data_of(text: str) -> dict:
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1]
    )


def unvarints(text: str) -> list[int]:
    """The obvious reader."""
    found, value, shift = [], 0, 0
    for byte in base64.b64decode(text):
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            found.append(value)
            value = shift = 0
    return found


def expanded(pairs: list) -> list:
    return [
        value for count, value in zip(pairs[::2], pairs[1::2], strict=True) for _ in range(count)
    ]


def test_content_cannot_leave_the_data_element():
    page = PageData(
        title=ATTACK,
        settings={ATTACK: ATTACK},
        summary={ATTACK: 1},
        documents=[
            make_document(
                text=ATTACK,
                title=ATTACK,
                origin=ATTACK,
                notes=[Note(ATTACK, ATTACK)],
                checks=[ATTACK],
            )
        ],
        shares={ATTACK: {ATTACK: 1}},
    )
    text = page_html(page)
    elements = Elements(text)
    assert [tag for tag, _ in elements.found if tag in ("script", "img", "iframe", "object")] == [
        "script",
        "script",
    ]
    assert not any(name.startswith("on") for _, attributes in elements.found for name in attributes)
    found = data_of(text)
    assert found["title"] == found["sides"][0]["documents"][0]["title"] == ATTACK
    assert ATTACK in found["vocabulary"]["texts"]


def test_page_asks_for_nothing_and_runs_only_its_own_script():
    text = page_html(PageData(title="t", documents=[make_document()]))
    policy = next(a["content"] for t, a in Elements(text).found if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for _, attributes in Elements(text).found:
        assert not {"src", "srcset", "data", "action"} & set(attributes)
        assert attributes.get("href", "#").startswith("#")
    without_data = re.sub(r'id="data">.*?</script>', "", text, flags=re.S)
    assert set(re.findall(r"https?://[^\"'\s]+", without_data)) == {"http://www.w3.org/2000/svg"}


def test_script_never_reads_text_as_markup():
    script = Elements(page_html(PageData(title="t"))).scripts[-1]
    assert (
        re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script
        )
        == []
    )


def test_payload_tells_the_arrays_again():
    document = make_document(4, weight=0.25)
    found = payload(PageData(title="t", documents=[make_document(), document]))
    told, vocabulary = found["sides"][0]["documents"][1], found["vocabulary"]
    numbers = unvarints(told["tokens"])
    assert [vocabulary["ids"][number] for number in numbers] == document.ids.tolist()
    assert [vocabulary["texts"][number] for number in numbers] == document.pieces
    assert [number in vocabulary["control"] for number in numbers] == document.is_control.tolist()
    assert expanded(told["weights"]) == document.loss_weights.tolist()
    assert [found["roles"][role] for role in expanded(told["roles"])] == [
        ROLES[role] for role in document.roles
    ]
    assert (told["length"], told["trained"]) == (18, 3)


def test_reasons_are_told_once_and_by_number():
    why = ["the prompt supplies it"] * 9 + [""] * 3 + ["<another>"] * 6
    found = payload(PageData(title="t", documents=[make_document(), make_document(reasons=why)]))
    told = [document.get("reasons") for document in found["sides"][0]["documents"]]
    assert (told[0], found["reasons"]) == (None, ["", "the prompt supplies it", "<another>"])
    assert [found["reasons"][number] for number in expanded(told[1])] == why
    assert "reasons" not in payload(PageData(title="t", documents=[make_document()]))


def test_roles_of_documents_that_number_them_differently():
    roles = np.array([0, 1, -1] + [0] * 15)
    documents = [make_document(), make_document(roles=roles, role_names=("tool", "user"))]
    found = payload(PageData(title="t", documents=documents))
    assert found["roles"] == ["system", "user", "assistant", "tool"]
    assert expanded(found["sides"][0]["documents"][1]["roles"])[:4] == [3, 1, -1, 3]


def test_neighbouring_messages_of_one_role_stay_apart():
    turns = np.repeat([0, 1, 2], 6)
    document = replace(make_document(roles=np.repeat([2, 2, 1], 6)), turns=turns)
    assert payload(PageData(title="t", documents=[document]))["sides"][0]["documents"][0][
        "roles"
    ] == [6, 2, 6, 2, 6, 1]


def test_rows_are_told_with_their_targets():
    row = make_row()
    found = payload(PageData(title="t", rows=[row], control_ids=frozenset({2})))
    told, vocabulary = found["rows"][0], found["vocabulary"]
    assert [vocabulary["ids"][number] for number in unvarints(told["tokens"])] == list(range(9))
    assert [vocabulary["ids"][number] for number in vocabulary["control"]] == [2]
    assert [expanded(each) for each in told["weights"]] == row.loss_weights.tolist()
    assert [
        start + slot for slot, start in enumerate(expanded(told["positions"]))
    ] == row.positions[:9].tolist()
    assert told["targets"] == [[4, 777], []]
    assert "spelled777" in vocabulary["texts"]
    # Slot 5 follows a target, but of another document.
    assert expanded(told["learned"]) == [0, 0, 0.5, 0.5, 0.5, 0, 0, 0.5, 0.5]


def test_comparison_counts_what_differs():
    same, other, longer = make_document(), make_document(weight=0.5), make_document(turns=4)
    page = PageData(
        title="t",
        label="a",
        documents=[same, same, same],
        other=PageData(title="u", label="b", documents=[same, other, longer]),
    )
    found = payload(page)
    assert found["changed"] == [0, 3, -1]
    assert [side["title"] for side in found["sides"]] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"2 documents.*3.*comparison"):
        PageData(title="t", documents=[same, same], other=page.other)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**35 - 1)))
def test_varints_equal_the_obvious_reader(values):
    assert unvarints(varints(np.array(values, np.int64))) == values


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0, 0.5, -1.0])))
def test_runs_expand_to_the_values(values):
    assert expanded(runs(np.array(values))) == values


def test_what_does_not_print_is_spelled():
    assert readable("a\tb\n") == "a\tb\n"
    assert readable("\x1b[0m\u202e\ud800\xa0") == r"\x1b[0m\u202e\ud800\xa0"


def test_a_page_with_half_a_surrogate_pair_can_be_written(tmp_path):
    write_html(
        tmp_path / "page.html", PageData(title="t\ud800", documents=[make_document(text="\ud800")])
    )
    assert data_of((tmp_path / "page.html").read_text(encoding="utf-8"))["title"] == "t\ud800"


def test_arrays_of_other_lengths_are_refused():
    with pytest.raises(ConfigError, match=r"conversation 0: loss_weights.*2.*18"):
        make_document(loss_weights=np.zeros(2))
    with pytest.raises(ConfigError, match="roles go from 0 to 5, expected −1 to 2"):
        make_document(roles=np.array([5] + [0] * 17))


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(OutputError, match=r"nowhere/page\.html"):
        write_html(tmp_path / "nowhere" / "page.html", PageData(title="t"))


def test_500_conversations_of_1000_tokens_stay_below_5_mb():
    generator = np.random.default_rng(5)
    words = [f" word{number}" for number in range(20_000)]
    documents = []
    for number in range(500):
        ids = np.minimum(generator.zipf(1.3, 1000), 20_000) - 1
        weights = np.repeat(generator.integers(0, 2, 100), 10).astype(np.float32)
        documents.append(
            make_document(
                number,
                pieces=[words[i] for i in ids],
                ids=ids,
                loss_weights=weights,
                roles=np.repeat(generator.integers(-1, 3, 50), 20),
                is_control=None,
            )
        )
    assert len(page_html(PageData(title="t", documents=documents)).encode()) < 3e6


def test_figures_count_plainly():
    documents = [make_document(number, turns=turns) for number, turns in enumerate((1, 2, 2, 3))]
    histograms = histograms_of(documents)
    assert [sum(found.counts) for found in histograms.values()] == [4, 4]
    lengths = histograms["tokens of a document"]
    assert {lengths.edges[i]: count for i, count in enumerate(lengths.counts) if count} == {
        6: 1,
        12: 2,
        18: 1,
    }
    assert shares_of(documents) == {
        "tokens by role": {"user": 30.0, "assistant": 18.0},
        "trained tokens by role": {"assistant": 9.0},
    }
    assert histograms_of([]) == shares_of([]) == {}


def test_documents_of_a_dataset():
    view = DocumentView(
        number=3, origin="w:4", tokens=(2, 7), texts=("<s>", " a"), loss_weights=(1.0, 1.0)
    )
    document = from_dataset(view, frozenset({2}))
    assert (document.title, document.origin) == ("document 3", "w:4")
    assert document.loss_weights.tolist() == [0, 1]
    assert document.is_control.tolist() == [True, False]


def test_chats_with_their_certificate():
    certificate = Certificate(
        terminators=(),
        dropped=(),
        straddling=(2,),
        forged=(),
        checks=("generation tags agree",),
        problems=(Problem("missing_terminator", 1, "ends without <|end|>"),),
    )
    encoded = EncodedChat(
        text="<s>né",
        tokens=np.array([1, 5, 6, 7, 2], np.uint32),
        begins=np.array([0, 3, 4, 4, 5]),
        ends=np.array([3, 4, 5, 5, 5]),
        loss_weights=np.array([0, 0, 1, 1, 1], np.float32),
        messages=np.array([-1, 0, 1, 1, 1]),
        roles=("user", "assistant", "user"),
        is_control=np.array([True, False, False, False, True]),
        certificate=certificate,
    )
    document = from_chat(
        encoded, title="c", origin="chats.jsonl:1", special_tokens={"<s>": 1, "</s>": 2}
    )
    assert document.pieces == ["<s>", "n", "", "é", "</s>"]
    assert (document.role_names, document.roles.tolist()) == (
        ("user", "assistant"),
        [-1, 0, 1, 1, 1],
    )
    assert [note.kind for note in document.notes] == ["missing terminator"]
    assert document.checks == (
        "generation tags agree",
        "tokens at borders, by their last character: 2",
    )
    assert document.notes[0].message == "message 1: ends without <|end|>"
    assert document.ok is False


@given(st.text(min_size=1), st.data())
def test_pieces_say_every_character_once(text, data):
    """Tokens that share characters, as tokens of half a character do."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    begins = [0, *cuts]
    ends = [min(len(text), max(after, begin) + data.draw(st.integers(0, 2)))
            for begin, after in zip(begins, [*cuts, len(text)], strict=True)]  # fmt: skip
    assert "".join(pieces_of(text, begins, ends)) == text


def printed_document(document, **options) -> str:
    console = console_of(**options)
    print_document(document, console)
    return console.file.getvalue()


def test_terminal_without_colour_marks_what_is_read():
    text = printed_document(
        make_document(notes=[Note("truncated", "after message 2")], ok=False, weight=0.5)
    )
    assert "conversation 0  chats.jsonl:1  18 tokens, 16.7% trained  ✗ not proven" in text
    assert "! truncated: after message 2" in text
    assert "▌ user" in text
    assert "⟨0.5:  words and⟪<|end|>⟫⟩" in text
    assert "⟦⟪<|start|>⟫user⏎" in text
    assert "\x1b" not in text


def test_terminal_tells_control_tokens_from_text_that_looks_like_them():
    text = printed_document(make_document(text="<|end|>"))
    assert "⟦⟪<|start|>⟫user⏎" in text
    assert "<|end|> and⟪<|end|>⟫" in text


def test_terminal_gives_a_blank_after_a_turn_to_the_turn():
    roles = np.array([1, 1, -1, 1, 1, 1] + [2] * 6 + [-1] * 6)
    assert printed_document(make_document(roles=roles)).count("▌") == 3


def test_terminal_with_colour_underlines_what_is_trained():
    text = printed_document(make_document(weight=0.5), force_terminal=True, color_system="standard")
    assert "\x1b[1;4;36m words and\x1b[0m" in text
    assert "×0.5" in text
    assert "\x1b[2m words and\x1b[0m" in text


def test_terminal_leaves_out_what_is_too_long_and_says_so():
    console = console_of()
    print_document(make_document(), console, max_tokens=6)
    assert "…12 more tokens" in console.file.getvalue()
