"""The kernels of alignment against slow and obvious twins."""

import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from makers.tokenizers import bpe_without_merges
from penstock.tokenizers import Aligner, Tokenizer
from penstock.tokenizers.alignment import CONTROL, DIFFERENT, EQUIVALENT, EXACT
from penstock.tokenizers.alignment_forms import canonicalise, normalise
from penstock.tokenizers.alignment_sides import Side, TokenTable, walk, walk_same

BOS, EOS, OTHER, FIRST = 0, 1, 2, 3


def byte_level(entries: list[bytes], *, normalizer: Any = None) -> Tokenizer:
    """A byte-level vocabulary: <s>, </s>, <x>, then `entries`."""
    from penstock.tokenizers.spelling import _BYTE_OF_CHARACTER

    character = {byte: chr(code) for code, byte in _BYTE_OF_CHARACTER.items()}
    vocab = {
        "".join(character[byte] for byte in entry): FIRST + place
        for place, entry in enumerate(entries)
    }
    controls = {name: place for place, name in enumerate(("<s>", "</s>", "<x>"))}
    return bpe_without_merges("made", vocab, controls, normalizer=normalizer)


SINGLE = [bytes([byte]) for byte in range(256)]
STUDENT = byte_level([*SINGLE, b"ab", b"ba", b"aab", b"  ", b"bb b", "é".encode(), b"aaaa", b" a"])
TEACHER = byte_level(
    [*SINGLE, b"aa", b"ab", b"abab", b" b", b"b a", b"a  ", "e\u0301".encode()[:2]]
)
ALIGNER = Aligner(STUDENT, TEACHER)


def slow_chunks(left: list[int], right: list[int]) -> list[tuple[int, int, int, int, int]]:
    """The definition: cut both wherever equally many equal bytes and no control token lie since the
    last cut.
    """
    chunks, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] < FIRST or right[j] < FIRST:
            run_i, run_j = i, j
            while run_i < len(left) and left[run_i] < FIRST:
                run_i += 1
            while run_j < len(right) and right[run_j] < FIRST:
                run_j += 1
            for x in range(i, run_i):
                y = next((y for y in range(j, run_j) if right[y] == left[x] != OTHER), None)
                if y is not None:
                    chunks.append((x, x + 1, y, y + 1, CONTROL))
                    j = y + 1
            i, j = run_i, run_j
            continue
        found = None
        for size in range(2, len(left) + len(right) - i - j + 1):
            for p in range(max(1, size - len(right) + j), min(size, len(left) - i + 1)):
                inside = left[i : i + p], right[j : j + size - p]
                if min(map(min, inside)) < FIRST:
                    continue
                if spelled(STUDENT, inside[0]) == spelled(TEACHER, inside[1]):
                    found = found or (p, size - p)
        if found is None:
            return chunks
        chunks.append((i, i + found[0], j, j + found[1], EXACT))
        i, j = i + found[0], j + found[1]
    return chunks


def spelled(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(tokenizer.byte_table[token_id] for token_id in ids)


def cut(source: st.DataObject, tokenizer: Tokenizer, text: bytes) -> list[int]:
    """`text` as ids, each any of those that fit."""
    table = {
        tokenizer.byte_table[token_id]: token_id for token_id in range(FIRST, tokenizer.vocab_size)
    }
    ids, at = [], 0
    while at < len(text):
        sizes = [
            size for size in range(1, 5) if text[at : at + size] in table and at + size <= len(text)
        ]
        size = source.draw(st.sampled_from(sizes))
        ids.append(table[text[at : at + size]])
        at += size
    return ids


def listed(chunks: Any) -> list[tuple[int, ...]]:
    return [
        (*left, *right, kind)
        for left, right, kind in zip(
            chunks.student_bounds.tolist(),
            chunks.teacher_bounds.tolist(),
            chunks.kinds.tolist(),
            strict=True,
        )
    ]


texts = st.text("ab é", max_size=12).map(str.encode)


@settings(deadline=None, max_examples=300)
@given(data=st.data(), stretches=st.lists(texts, min_size=1, max_size=3))
def test_equal_text_is_cut_as_finely_as_can_be(data: st.DataObject, stretches: list[bytes]) -> None:
    left: list[int] = []
    right: list[int] = []
    for text in stretches:
        left += data.draw(st.lists(st.sampled_from([BOS, EOS, OTHER]), max_size=3)) + cut(
            data, STUDENT, text
        )
        right += data.draw(st.lists(st.sampled_from([BOS, EOS, OTHER]), max_size=3)) + cut(
            data, TEACHER, text
        )
    due = slow_chunks(left, right)
    plain = walk_same(*table_and_ids(left, right))
    general = walk(*sides(left, right), resume=True)
    assert plain is None or listed(plain) == due
    assert general is not None
    fits = all(inside_equal(left, right, chunk) for chunk in listed(general))
    assert fits
    if not any(kind == DIFFERENT for *_, kind in listed(general)):
        assert listed(general) == due
        assert plain is not None
    assert listed(ALIGNER.align(left, right)) == listed(general)


def table_and_ids(left: list[int], right: list[int]) -> tuple[Any, ...]:
    tables = TokenTable(STUDENT, {}, exact=True), TokenTable(TEACHER, {}, exact=True)
    return tables[0], np.array(left, np.int64), tables[1], np.array(right, np.int64)


def sides(left: list[int], right: list[int]) -> tuple[Side, Side]:
    student, left_ids, teacher, right_ids = table_and_ids(left, right)
    return student.spell(left_ids), teacher.spell(right_ids)


def inside_equal(left: list[int], right: list[int], chunk: tuple[int, ...]) -> bool:
    """Whether a chunk is what its kind says."""
    a, b, c, d, kind = chunk
    if kind == EXACT:
        no_control = min(left[a:b] + right[c:d]) >= FIRST
        return no_control and spelled(STUDENT, left[a:b]) == spelled(TEACHER, right[c:d])
    return kind != CONTROL or left[a:b] == right[c:d]


ids = st.lists(
    st.integers(0, STUDENT.vocab_size - 1) | st.integers(FIRST + 94, FIRST + 101), max_size=60
)


@settings(deadline=None, max_examples=300)
@given(
    left=ids,
    right=st.lists(
        st.integers(0, TEACHER.vocab_size - 1) | st.integers(FIRST + 94, FIRST + 101), max_size=60
    ),
)
@example(left=[], right=[])
@example(left=[BOS], right=[])
@example(left=[OTHER, FIRST + 97], right=[FIRST + 97, OTHER])
def test_any_ids_give_ordered_disjoint_true_chunks(left: list[int], right: list[int]) -> None:
    found = ALIGNER.align(left, right)
    check_order(found)
    for chunk in listed(found):
        a, b, c, d, kind = chunk
        if kind == EQUIVALENT:
            both = spelled(STUDENT, left[a:b]), spelled(TEACHER, right[c:d])
            assert both[0] != both[1]
            assert len({unicodedata.normalize("NFC", side.decode()) for side in both}) == 1
        else:
            assert inside_equal(left, right, chunk)


def check_order(found: Any) -> None:
    for bounds, size in (
        (found.student_bounds, found.num_student_tokens),
        (found.teacher_bounds, found.num_teacher_tokens),
    ):
        flat = bounds.ravel().tolist()
        assert flat == sorted(flat)
        assert (bounds[:, 0] < bounds[:, 1]).all()
        assert not flat or (flat[0] >= 0 and flat[-1] <= size)


@settings(deadline=None, max_examples=200)
@given(text=st.text("ae\u0301\u0327é가ᄀ\u1161\u11a8 \u00a0ﬁ", max_size=14), data=st.data())
def test_normalised_ends_are_those_of_independent_parts(text: str, data: st.DataObject) -> None:
    side = TokenTable(STUDENT, {}, exact=True).spell(
        np.array(cut(data, STUDENT, text.encode()), np.int64)
    )
    for form in ("NFC", "NFKC"):
        normal = normalise(side, form)
        assert normal.data.tobytes().decode() == unicodedata.normalize(form, text)
        for given_end, end, is_open in zip(side.ends, normal.ends, normal.open, strict=True):
            if not is_open:
                continue
            parts = [side.data[:given_end].tobytes(), side.data[given_end:].tobytes()]
            try:
                parts = [unicodedata.normalize(form, part.decode()).encode() for part in parts]
            except UnicodeDecodeError:
                continue  # inside a character that stays as it is
            assert b"".join(parts) == normal.data.tobytes()
            assert len(parts[0]) == end


def test_a_cut_before_a_letter_stays_where_only_the_next_one_changes() -> None:
    side = TokenTable(STUDENT, {}, exact=True).spell(
        np.frombuffer("bae\u0301b".encode(), np.uint8).astype(np.int64) + FIRST
    )
    normal = normalise(side, "NFC")
    assert normal.open.tolist() == [True, True, False, False, True, True]
    assert normal.ends.tolist() == [1, 2, 2, 2, 4, 5]


@settings(deadline=None)
@given(text=st.text("aÉ \u00a0ﬁß▁\u0301水", max_size=12))
def test_canonical_bytes(text: str) -> None:
    side = TokenTable(STUDENT, {}, exact=True).spell(
        np.frombuffer(text.encode(), np.uint8).astype(np.int64) + FIRST
    )
    plain = unicodedata.normalize("NFKD", text.casefold())
    due = "".join(
        c for c in plain if not c.isspace() and c != "▁" and unicodedata.category(c)[0] != "M"
    )
    assert canonicalise(side).data.tobytes().decode() == due


@pytest.mark.parametrize("ids", [[-1], [STUDENT.vocab_size], [FIRST, 10**12]])
def test_unknown_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"id {ids[-1]} .*{STUDENT.vocab_size}"):
        ALIGNER.align(ids, [FIRST])
