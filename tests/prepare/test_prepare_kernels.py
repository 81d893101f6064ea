"""Kernels of prepare against slow, obvious twins."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.ragged import Ragged
from penstock.data.prepare import _kernels as k
from penstock.data.prepare.documents import Framing, frame

ROWS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), max_size=6)


@settings(deadline=None)
@given(ROWS, st.integers(-1, 3), st.integers(-1, 3), st.data())
def test_frame(rows, bos, eos, data):
    chosen = [n for n in range(len(rows)) if data.draw(st.booleans())]
    got = frame(
        Ragged.from_rows(rows, np.uint32), np.array(chosen, np.int64), Framing(bos, eos, "", ""), 10
    )
    due = []
    for n in chosen:
        row = list(rows[n])
        row = row if bos < 0 or row[0] == bos else [bos, *row]
        due.append(row if eos < 0 or rows[n][-1] == eos else [*row, eos])
    assert [row.tolist() for row in got] == due
    assert got.values.dtype == np.uint16


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=8))
def test_hash_depends_on_the_text_alone(texts):
    def hashes(items):
        rows = Ragged.from_rows([np.frombuffer(item, np.uint8) for item in items], np.uint8)
        out = np.empty(len(items), np.uint64)
        k.hash_texts(rows.values, rows.offsets, np.uint64(7), out)
        return out.tolist()

    assert hashes(texts) == [hashes([text])[0] for text in texts]
    assert len(set(hashes(texts))) == len(set(texts))


def test_hash_is_golden_and_even():
    texts = [f"document {number}".encode() for number in range(20_000)]
    rows = Ragged.from_rows([np.frombuffer(text, np.uint8) for text in texts], np.uint8)
    out = np.empty(len(texts), np.uint64)
    k.hash_texts(rows.values, rows.offsets, np.uint64(7), out)
    assert abs(np.mean(out < np.uint64(2**64 // 10)) - 0.1) < 0.01


@st.composite
def weighted(draw):
    """A text, cuts of its bytes into tokens, rising character ranges with weights."""
    text = draw(st.text(st.sampled_from("aé水🙂 "), min_size=1, max_size=12))
    size = len(text.encode())
    ends = sorted([*draw(st.lists(st.integers(0, size), max_size=8)), size])
    edges = sorted(draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    weights = [draw(st.sampled_from([0.0, 0.5, 1.0])) for _ in pairs]
    present = draw(st.booleans())
    return text, ends, pairs if present else [], weights if present else [], present


def slow_weights(text, ends, pairs, weights, first, extra):
    """The weight of every token, byte by byte."""
    of_byte = []
    for at, character in enumerate(text):
        weight = next((w for (b, e), w in zip(pairs, weights, strict=True) if b <= at < e), 0.0)
        of_byte += [weight] * len(character.encode())
    result, before = [0.0] * first, 0
    for end in ends:
        byte = end - 1 if end > before else end
        result.append(of_byte[byte] if byte < len(of_byte) else 0.0)
        before = end
    return result + [of_byte[-1]] * extra


@settings(deadline=None, max_examples=300)
@given(st.lists(weighted(), max_size=4), st.integers(0, 1), st.integers(0, 1))
def test_spans(documents, first, extra):
    texts = Ragged.from_rows([np.frombuffer(d[0].encode(), np.uint8) for d in documents], np.uint8)
    ends = Ragged.from_rows([d[1] for d in documents], np.int64)
    offsets = np.concatenate([[0], np.cumsum([len(d[2]) for d in documents])]).astype(np.int64)
    begin = np.array([b for d in documents for b, _ in d[2]], np.int64)
    end = np.array([e for d in documents for _, e in d[2]], np.int64)
    weight = np.array([w for d in documents for w in d[3]], np.float32)
    byte_begin, byte_end = np.empty_like(begin), np.empty_like(end)
    k.characters_to_bytes(texts.values, texts.offsets, offsets, begin, end, byte_begin, byte_end)
    count = len(begin) + len(documents)
    out = (np.empty(count, np.uint32), np.empty(count, np.uint32), np.empty(count, np.float32))
    out_offsets = np.empty(len(documents) + 1, np.int64)
    k.mark_spans(
        texts.lengths,
        ends.values,
        ends.offsets,
        (offsets, byte_begin, byte_end, weight),
        np.array([d[4] for d in documents], np.bool_),
        np.full(len(documents), first, np.int64),
        np.full(len(documents), extra, np.int64),
        out,
        out_offsets,
    )
    for n, (text, token_ends, pairs, weights, present) in enumerate(documents):
        spans = [
            tuple(column[s] for column in out) for s in range(out_offsets[n], out_offsets[n + 1])
        ]
        if not present:
            assert not spans
            continue
        got = [0.0] * (first + len(token_ends) + extra)
        for b, e, w in spans:
            assert b < e
            got[b:e] = [float(w)] * (e - b)
        assert got == slow_weights(text, token_ends, pairs, weights, first, extra)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
