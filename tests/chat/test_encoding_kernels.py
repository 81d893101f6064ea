"""The compiled search for control text against a slow twin over characters."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.chat.tokens._kernels import find_items
from penstock.chat.tokens.control_text import ControlText
from penstock.tokenizers.vocabulary import AddedEntry

SPACES = " \t\n\x0b\x0c\r\x85\xa0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000"
ALPHABET = "ab<é水🤦" + SPACES + "\x1c\u200b\u180e\u2010\ufeff"
FLAGS = st.fixed_dictionaries(
    {
        "text": st.text("ab<é水", min_size=1, max_size=4),
        "is_control": st.booleans(),
        "lstrip": st.booleans(),
        "rstrip": st.booleans(),
    }
)
ENTRIES = st.lists(FLAGS, max_size=6, unique_by=lambda flags: flags["text"])
TEXTS = st.lists(
    st.lists(st.tuples(st.sampled_from(ALPHABET + "ab<" * 8), st.booleans()), max_size=20),
    max_size=4,
)


def find_slowly(
    text: str, literal: list[bool], entries: list[AddedEntry]
) -> tuple[list[Any], list[Any]]:
    """Items (begin, end, entry) in characters, and forged ones (character, entry)."""
    items, forged = [], []
    place = free = forged_end = 0
    while place < len(text):
        here = [
            number for number, entry in enumerate(entries) if text.startswith(entry.text, place)
        ]
        here.sort(key=lambda number: -len(entries[number].text))
        valid = [
            n
            for n in here
            if not entries[n].is_control or all(literal[place : place + len(entries[n].text)])
        ]
        if here[:1] != valid[:1] and place >= forged_end:
            forged.append((place, here[0]))
            forged_end = place + len(entries[here[0]].text)
        if not valid:
            place += 1
            continue
        entry = entries[valid[0]]
        begin, end = place, place + len(entry.text)
        place = end
        if not entry.is_control:
            continue
        while entry.lstrip and begin > free and text[begin - 1] in SPACES:
            begin -= 1
        while entry.rstrip and end < len(text) and text[end] in SPACES:
            end += 1
        items += [(free, begin, -1), (begin, end, valid[0])]
        place = free = end
    items.append((free, len(text), -1))
    return [item for item in items if item[0] < item[1]], forged


def find_compiled(
    rows: list[list[tuple[str, bool]]], known: ControlText
) -> tuple[list[Any], list[Any]]:
    encoded = ["".join(character for character, _ in row).encode() for row in rows]
    data = np.frombuffer(b"".join(encoded), np.uint8)
    offsets = np.cumsum([0, *map(len, encoded)])
    literal = np.array([flag for row in rows for _, flag in row], np.bool_)
    items, forged = (
        np.empty((2 * len(data) + 1, 3), np.int64),
        np.empty((len(data) + 1, 3), np.int64),
    )
    text_items, counts = np.empty(len(rows) + 1, np.int64), np.zeros(2, np.int64)
    find_items(
        data,
        offsets,
        literal,
        known.steps,
        known.accepts,
        known.is_control,
        known.lstrip,
        known.rstrip,
        items,
        text_items,
        forged,
        counts,
    )
    by_text = []
    for text, raw in enumerate(encoded):
        part = (
            items[text_items[text] : text_items[text + 1]] - [offsets[text], offsets[text], 0]
        ).tolist()
        by_text.append(
            [
                (len(raw[:begin].decode()), len(raw[:end].decode()), entry)
                for begin, end, entry in part
            ]
        )
    return by_text, [tuple(row) for row in forged[: counts[1]].tolist()]


@settings(deadline=None, max_examples=500)
@given(rows=TEXTS, flags=ENTRIES)
def test_control_text_is_found_as_by_a_slow_search(
    rows: list[list[tuple[str, bool]]], flags: list[dict[str, Any]]
) -> None:
    entries = [AddedEntry(token_id=number, **entry) for number, entry in enumerate(flags)]
    by_text, forged = find_compiled(rows, ControlText(entries, 6))
    due_forged = []
    for number, row in enumerate(rows):
        text, literal = "".join(character for character, _ in row), [flag for _, flag in row]
        items, found = find_slowly(text, literal, entries)
        assert by_text[number] == items
        due_forged += [(number, *occurrence) for occurrence in found]
    assert forged == due_forged
