"""First words: what a conversation is known by in a list, without the headers of any template."""

import numpy as np
import pytest

from makers.views import printed
from penstock.use.inspection.page_model import WORDS, PageDocument, first_words
from penstock.use.inspection.terminal_tokens import documents_list


def make(parts, names=("system", "user", "assistant"), **more):
    """A document from (role or −1, piece, whether it is a control token)."""
    roles = np.array([role for role, _, _ in parts])
    return PageDocument(
        title="conversation 3",
        pieces=[piece for _, piece, _ in parts],
        ids=np.arange(len(parts)),
        loss_weights=np.arange(len(parts)) % 2,
        roles=roles,
        role_names=names,
        is_control=np.array([control for _, _, control in parts], bool),
        **more,
    )


CHATML = [
    (0, "<|im_start|>", 1),
    (0, "system", 0),
    (0, "\n", 0),
    (0, "Be brief.", 0),
    (0, "<|im_end|>", 1),
    (0, "\n", 0),
    (1, "<|im_start|>", 1),
    (1, "user", 0),
    (1, "\n", 0),
    (1, "User", 0),
    (1, " names\n\nare", 0),
    (1, " short.", 0),
    (1, "<|im_end|>", 1),
    (1, "\n", 0),
    (2, "<|im_start|>", 1),
    (2, "assistant", 0),
    (2, "\nYes", 0),
]
LLAMA = [
    (-1, "<|begin_of_text|>", 1),
    (1, "<|start_header_id|>", 1),
    (1, "user", 0),
    (1, "<|end_header_id|>", 1),
    (1, "\n\n", 0),
    (1, "What is", 0),
    (1, " rain?", 0),
    (1, "<|eot_id|>", 1),
]
VICUNA = [
    (1, "USER", 0),
    (1, ": ", 0),
    (1, "What is", 0),
    (1, " rain?", 0),
    (2, " ASSISTANT: Water.", 0),
]
OUTSIDE = [
    (-1, "[INST]", 1),
    (1, " What is", 0),
    (1, " rain?", 0),
    (-1, " [/INST]", 1),
    (2, "Water.", 0),
]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (CHATML, "User names are short."),
        (LLAMA, "What is rain?"),
        (VICUNA, "What is rain?"),
        (OUTSIDE, "What is rain?"),
        (CHATML[:6], "Be brief."),
        ([(-1, "only", 0), (-1, " text", 0)], "only text"),
        ([], ""),
    ],
)
def test_the_first_message_that_no_system_wrote(parts, expected):
    assert first_words(make(parts)) == expected


def test_two_messages_of_one_role_are_two():
    document = make([(1, "one", 0), (1, " two", 0)], turns=np.array([0, 1]))
    assert first_words(document) == "one"


def test_a_text_without_roles_begins_where_it_begins():
    document = make([(0, "<s>", 1), (0, "user: is a word", 0), (0, " here", 0)])
    plain = PageDocument(
        title="t",
        pieces=document.pieces,
        ids=document.ids,
        loss_weights=document.loss_weights,
        is_control=document.is_control,
    )
    assert first_words(plain) == "user: is a word here"


def test_long_ones_are_cut():
    words = first_words(make([(1, "word " * 10, 0)] * 100))
    assert len(words) == WORDS
    assert words.endswith("…")


def test_the_terminal_lists_a_line_for_each():
    shown = printed(documents_list([make(CHATML, ok=True), make(LLAMA, ok=False)]))
    lines = [line.split() for line in shown.splitlines()]
    assert lines[1] == ["✓", "conversation", "3", "17", "47%", "User", "names", "are", "short."]
    assert lines[2][:2] == ["✗", "conversation"]
