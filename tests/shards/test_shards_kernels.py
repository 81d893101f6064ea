"""Kernels of the shards against slow, obvious twins."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.compiled import address_of, kernel
from penstock.data.shards.format import _batch_kernels as b
from penstock.data.shards.format import _check_kernels as check
from penstock.data.shards.format import _kernels as k
from penstock.data.stores import files
from penstock.data.stores._kernels import MULTIPLIERS, bytes_checksum
from penstock.data.stores.files import checksum, map_file

MASK = 2**64 - 1
GOLDEN_MULTIPLIERS = [2700845547, 3680066521, 341518763, 4179810097]
GOLDEN_16 = "0x29aa89035a758b5c"
GOLDEN_32 = "0x95620d737de8ac74"


@kernel
def token_checksum(address, token_bytes, chunk, count):
    return k.token_checksum(address, token_bytes, chunk, count)


@kernel
def spans_checksum(begins, ends, weights, count):
    return k.spans_checksum(begins, ends, weights, count)


@kernel
def null_spans_checksum():
    return k.null_spans_checksum()


def slow_mix(key: int, value: int) -> int:
    z = (key + (value + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def slow_sum(data: bytes) -> int:
    data += b"\0" * (-len(data) % 4)
    words = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
    return sum(word * int(m) for word, m in zip(words, MULTIPLIERS, strict=False)) & MASK


def slow_checksum(chunk: np.ndarray, number: int) -> int:
    return slow_mix(slow_sum(chunk.tobytes()), number << 16 | chunk.nbytes)


def slow_spans(spans: list[tuple[int, int, float]]) -> int:
    key = 0x5350414E53
    for first in range(0, len(spans), 64):
        block = np.array(spans[first : first + 64], [("b", "<u4"), ("e", "<u4"), ("w", "<f4")])
        key = slow_mix(key, slow_sum(block.tobytes()))
    return slow_mix(key, len(spans))


def span_columns(spans: list[tuple[int, int, float]]) -> tuple[np.ndarray, ...]:
    columns = list(zip(*spans, strict=True)) or [(), (), ()]
    return tuple(
        np.array(part, kind) for part, kind in zip(columns, ("<u4", "<u4", "<f4"), strict=True)
    )


def address(array: np.ndarray) -> np.uint64:
    return np.uint64(address_of(array))


def document_checksums(tokens: np.ndarray) -> list[int]:
    return [slow_checksum(tokens[at : at + 256], at // 256) for at in range(0, len(tokens), 256)]


def test_multipliers_are_odd_distinct_and_never_change():
    assert len(set(MULTIPLIERS.tolist())) == 256
    assert (MULTIPLIERS % 2 == 1).all()
    assert MULTIPLIERS[:4].tolist() == GOLDEN_MULTIPLIERS


@pytest.mark.parametrize(("dtype", "golden"), [(np.uint16, "GOLDEN_16"), (np.uint32, "GOLDEN_32")])
def test_checksum_is_golden(dtype, golden):
    tokens = np.arange(200, dtype=dtype) * 7
    assert hex(int(token_checksum(address(tokens), tokens.itemsize, 0, 200))) == globals()[golden]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 65535), max_size=256),
    st.integers(0, 2**40),
    st.sampled_from([np.uint16, np.uint32]),
)
def test_checksum_equals_twin(values, chunk, dtype):
    tokens = np.array(values, dtype)
    # The kernel adds the chunk's place to the document's address.
    begin = np.uint64((address_of(tokens) - chunk * 256 * tokens.itemsize) & MASK)
    assert token_checksum(begin, tokens.itemsize, chunk, len(tokens)) == slow_checksum(
        tokens, chunk
    )


@settings(deadline=None)
@given(st.data())
def test_change_inside_one_word_is_always_found(data):
    tokens = np.array(
        data.draw(st.lists(st.integers(0, 65535), min_size=1, max_size=256)), np.uint16
    )
    before = token_checksum(address(tokens), 2, 0, len(tokens))
    word = data.draw(st.integers(0, (len(tokens) - 1) // 2))
    bytes_of_word = tokens.view(np.uint8)[4 * word : 4 * word + 4]
    change = data.draw(
        st.binary(min_size=len(bytes_of_word), max_size=len(bytes_of_word)).filter(any)
    )
    bytes_of_word ^= np.frombuffer(change, np.uint8)
    assert token_checksum(address(tokens), 2, 0, len(tokens)) != before


def test_length_and_place_count():
    zeros = np.zeros(1024, np.uint16)
    found = {
        int(token_checksum(address(zeros), 2, chunk, count))
        for chunk in range(3)
        for count in range(257)
    }
    assert len(found) == 3 * 257
    assert 0 not in found


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.floats(width=32)),
        max_size=150,
    )
)
def test_spans_checksum_equals_twin(spans):
    columns = span_columns(spans)
    found = spans_checksum(*(address(part) for part in columns), np.uint64(len(spans)))
    assert found == slow_spans(spans)
    assert found != null_spans_checksum()


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=8),
    st.sampled_from([np.uint16, np.uint32]),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_batch_of_checksums_equals_twin(lengths, dtype, has_spans, seed):
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, 65536, length).astype(dtype) for length in lengths]
    offsets = np.cumsum([0, *lengths])
    counts = np.empty(len(lengths), np.int64)
    b.checksum_counts(offsets, has_spans, counts)
    assert counts.tolist() == [-(-length // 256) + has_spans for length in lengths]
    starts = np.concatenate([[0], np.cumsum(counts)])
    words = np.empty(starts[-1], np.uint64)
    valid = rng.random(len(lengths)) < 0.5 if has_spans else np.empty(0, bool)
    spans = [[(0, 1, 1.0), (2, 5, 0.5)] if good else [] for good in valid]
    columns = span_columns([span for row in spans for span in row])
    span_offsets = np.cumsum([0, *map(len, spans)])
    tokens = np.concatenate(documents)
    addresses = np.array([address(part) for part in columns], np.uint64)
    b.checksum_batch(
        address(tokens), tokens.itemsize, offsets, starts, (valid, span_offsets, addresses), words
    )
    for i, document in enumerate(documents):
        due = document_checksums(document)
        if has_spans:
            due.append(slow_spans(spans[i]) if valid[i] else int(null_spans_checksum()))
        assert words[starts[i] : starts[i + 1]].tolist() == due


@st.composite
def sound_spans(draw):
    """(tokens, sound spans) of a document."""
    edges = sorted(draw(st.sets(st.integers(0, 60), max_size=12)))
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    weights = draw(
        st.lists(st.sampled_from([0.0, 1.0, 0.5, -2.0]), min_size=len(pairs), max_size=len(pairs))
    )
    spans = [(begin, end, weight) for (begin, end), weight in zip(pairs, weights, strict=True)]
    return draw(st.integers(edges[-1] if edges else 0, 70)), spans


def slow_weights(num_tokens: int, spans: list[tuple[int, int, float]] | None) -> np.ndarray:
    weights = np.ones(num_tokens) if spans is None else np.zeros(num_tokens)
    for begin, end, weight in spans or []:
        weights[begin:end] = weight
    return weights


@settings(deadline=None)
@given(st.lists(st.tuples(sound_spans(), st.booleans()), min_size=1, max_size=6))
def test_summary_equals_twin(drawn):
    documents = [(num_tokens, spans if valid else None) for (num_tokens, spans), valid in drawn]
    offsets = np.cumsum([0, *(num_tokens for num_tokens, _ in documents)])
    valid = np.array([spans is not None for _, spans in documents])
    columns = span_columns([span for _, spans in documents for span in spans or []])
    span_offsets = np.cumsum([0, *(len(spans or []) for _, spans in documents)])
    lengths, sums = np.empty((len(documents), 2), np.uint32), np.empty(len(documents))
    wrong, fractional = b.summarise_batch(offsets, valid, span_offsets, *columns, lengths, sums)
    assert wrong == -1
    assert fractional == any(
        weight not in (0, 1) for _, spans in documents for *_, weight in spans or []
    )
    for i, (num_tokens, spans) in enumerate(documents):
        weights = slow_weights(num_tokens, spans)[1:]
        assert lengths[i].tolist() == [num_tokens, np.count_nonzero(weights)]
        assert sums[i] == pytest.approx(weights.sum())


@pytest.mark.parametrize(
    "spans",
    [
        [(2, 2, 1.0)],
        [(3, 2, 1.0)],
        [(0, 11, 1.0)],
        [(4, 6, 1.0), (5, 8, 1.0)],
        [(4, 6, 1.0), (0, 2, 1.0)],
        [(0, 1, float("nan"))],
        [(0, 1, float("inf"))],
    ],
)
def test_unsound_spans_are_named(spans):
    offsets, span_offsets = np.array([0, 10, 20]), np.array([0, 0, len(spans)])
    lengths, sums = np.empty((2, 2), np.uint32), np.empty(2)
    found = b.summarise_batch(
        offsets, np.array([True, True]), span_offsets, *span_columns(spans), lengths, sums
    )
    assert found[0] == 1


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=6).filter(any),
    st.sampled_from([1, 7, 1024]),
)
def test_location_equals_twin(sizes, per_batch):
    starts = np.cumsum([0, *sizes])
    batches = [-(-size // per_batch) for size in sizes]
    first_batch = np.cumsum([0, *batches])
    places = [
        (shard, first_batch[shard] + local // per_batch, local % per_batch)
        for shard, size in enumerate(sizes)
        for local in range(size)
    ]
    for document in {
        0,
        len(places) - 1,
        len(places) // 2,
        *(s for s in starts[:-1] if s < len(places)),
    }:
        assert k.find_document(document, starts, first_batch, per_batch) == places[document]


@settings(deadline=None)
@given(st.binary(max_size=5000))
def test_bytes_checksum_equals_twin(data):
    key = len(data)
    for at in range(0, len(data), 1024):
        key = slow_mix(key, slow_sum(data[at : at + 1024]))
    assert bytes_checksum(address(np.frombuffer(data, np.uint8)), np.uint64(len(data))) == key
    assert checksum(np.frombuffer(data, np.uint8)) == key


def resident(data):
    """Bytes of a mapped file that count as memory of this process."""
    begin = f"{address(data):x}-"
    with open("/proc/self/smaps") as lines:
        while not next(lines).startswith(begin):
            pass
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


def test_a_mapped_file_does_not_stay_in_memory(tmp_path, monkeypatch):
    data = np.random.default_rng(0).integers(256, size=(9 << 20) + 13, dtype=np.uint8)
    data.tofile(tmp_path / "file")
    mapped = map_file(tmp_path / "file")
    monkeypatch.setattr(files, "STRETCH_BYTES", 1 << 14)
    assert checksum(mapped) == bytes_checksum(address(data), np.uint64(len(data)))
    assert resident(mapped) == 0
    most = 0
    for begin in files.reading(mapped, range(0, len(mapped), 1 << 15)):
        assert mapped[begin] == data[begin]
        most = max(most, resident(mapped))
    assert 0 < most < 4 << 20
    assert np.array_equal(mapped, data)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.sampled_from([np.uint16, np.uint32]))
def test_ends_of_documents_equal_twin(values, dtype):
    tokens = np.array(values, dtype)
    due = [i + 1 for i, token in enumerate(values) if token == 0]
    due += [len(values)] if values and values[-1] != 0 else []
    ends = np.empty(len(due), np.int64)
    assert check.find_ends(tokens, dtype(0), np.empty(0, np.int64)) == len(due)
    assert check.find_ends(tokens, dtype(0), ends) == len(due)
    assert ends.tolist() == due
