"""The fill against its slow, obvious twin: rows written from documents in Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import trained_sum
from makers.datasets import random_documents
from penstock import InputRequirements, Loader, Mixture, Source, write_dataset
from penstock.core.errors import ConfigError, CorruptionError


def slow_row(pieces, documents, slots, distances, pad_id):
    """Tokens, targets, weights, positions, document ids and cu_seqlens of a row, from its pieces.

    A piece is (source, document, begin, tokens, total); `documents[source][document]` is (tokens,
    weights).
    """
    tokens, positions, ids, starts = [], [], [], []
    targets = [[] for _ in range(distances)]
    weights = [[] for _ in range(distances)]
    for number, (source, document, begin, count, total) in enumerate(pieces):
        text, loss_weights = documents[source][document]
        starts.append(len(tokens))
        for place in range(begin, begin + count):
            tokens.append(int(text[place]))
            positions.append(place - begin)
            ids.append(number)
            for d in range(1, distances + 1):
                known = place + d < total and loss_weights[place + d] != 0
                targets[d - 1].append(int(text[place + d]) if known else -100)
                weights[d - 1].append(float(loss_weights[place + d]) if known else 0.0)
    used = len(tokens)
    padding = slots - used
    borders = [*starts, used, slots] if padding else [*starts, used]
    return {
        "tokens": tokens + [pad_id] * padding,
        "positions": positions + list(range(padding)),
        "document_ids": ids + [len(pieces)] * padding,
        "targets": [row + [-100] * padding for row in targets],
        "loss_weights": [row + [0.0] * padding for row in weights],
        "cu_seqlens": borders,
        "max_seqlen": max(np.diff(borders)),
        "num_tokens": used,
    }


@st.composite
def corpora(draw):
    """Documents with spans: (token lists, spans or None of each)."""
    lengths = draw(st.lists(st.integers(0, 40) | st.integers(250, 530), min_size=1, max_size=12))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    documents = [
        generator.integers(0, draw(st.sampled_from([300, 70_000])), length) for length in lengths
    ]
    spans = None
    if draw(st.booleans()):
        spans = []
        for length in lengths:
            edges = np.sort(
                generator.choice(
                    length + 1, min(length + 1, 2 * generator.integers(0, 4)), replace=False
                )
            )
            pairs = edges[: len(edges) // 2 * 2].reshape(-1, 2).tolist()
            values = generator.choice(
                [0.0, 1.0, 0.5, 2.0] if draw(st.booleans()) else [0.0, 1.0], len(pairs)
            )
            listed = [(begin, end, float(v)) for (begin, end), v in zip(pairs, values, strict=True)]
            spans.append(None if generator.random() < 0.2 else listed)
    return documents, spans


def weights_of(documents, spans):
    out = []
    for i, document in enumerate(documents):
        weights = np.ones(len(document), np.float32)
        if spans is not None and spans[i] is not None:
            weights[:] = 0
            for begin, end, value in spans[i]:
                weights[begin:end] = value
        out.append((document, weights))
    return out


@settings(deadline=None, max_examples=60)
@given(
    st.lists(corpora(), min_size=1, max_size=2),
    st.sampled_from(["best_fit", "best_fit_decreasing", "next_fit", "concat", "none"]),
    st.integers(8, 600),
    st.integers(1, 4),
    st.sampled_from(["int32", "int64"]),
    st.sampled_from(["split", "drop", "truncate", "keep_end"]),
    st.none() | st.integers(3, 40),
    st.none() | st.integers(1, 5),
)
def test_rows_equal_their_twin(
    tmp_path_factory,
    sources,
    packing,
    slots,
    distances,
    dtype,
    too_long,
    longest,
    documents_per_row,
):
    folder = tmp_path_factory.mktemp("fill")
    parts, documents = [], []
    longest = None if longest is None else min(longest, slots)
    limit = longest or slots
    too_long = None if packing == "concat" and longest is None else too_long
    begin, end = {"truncate": (0, limit), "keep_end": (-limit, None)}.get(too_long, (0, None))
    for i, (corpus, spans) in enumerate(sources):
        weights = [w for _, w in weights_of(corpus, spans) if len(w) <= limit or too_long != "drop"]
        if not any(w[begin:end][1:].any() for w in weights):
            # Such a source is refused; test_untrained.py has it.
            continue
        dataset = write_dataset(folder / str(i), corpus, spans=spans)
        parts.append(Source(dataset, name=str(i), max_epochs=2, too_long=too_long))
        documents.append(weights_of(corpus, spans))
    if not parts:
        return
    need = InputRequirements(
        target_distances=distances,
        loss_weights=True,
        positions=True,
        document_ids=True,
        cu_seqlens=True,
        dtype=dtype,
    )
    settings = {
        "sequence_length": slots,
        "rows_per_step": 3,
        "packing": packing,
        "requirements": need,
        "window_rows": 4,
        "max_document_tokens": longest,
        "documents_per_row": documents_per_row,
    }
    loader, planning = (Loader(Mixture(parts), pad_id=9, threads=0, **settings) for _ in range(2))
    for step in loader:
        plan = planning._planner.next()
        for number, row in enumerate(step):
            pieces = [
                tuple(p[name] for name in ("source", "document", "begin", "tokens", "total"))
                for p in plan.pieces[plan.row_starts[number] : plan.row_starts[number + 1]]
            ]
            assert len(pieces) <= (documents_per_row or len(pieces))
            expected = slow_row(pieces, documents, slots, distances, 9)
            for name, value in expected.items():
                np.testing.assert_array_equal(getattr(row, name), value, err_msg=name)
            assert row.tokens.dtype == row.targets.dtype == row.positions.dtype == np.dtype(dtype)
            assert row.source_ids.tolist() == [piece[0] for piece in pieces]
        for distance in range(1, distances + 1):
            assert step.loss_denominators[distance - 1] == pytest.approx(
                trained_sum(step, distance), rel=1e-12
            )
        assert step.num_tokens == sum(row.num_tokens for row in step)


@pytest.fixture
def dataset(tmp_path):
    return write_dataset(tmp_path / "data", random_documents(60, 20, 700, below=500))


def rows(dataset, **settings):
    return Loader(Source(dataset, max_epochs=1), sequence_length=256, rows_per_step=4, **settings)


def test_arrays_are_never_written_again(dataset):
    held, copies = [], []
    for step in rows(dataset, threads=2, prefetch=3):
        for row in step:
            held.append(row)
            copies.append(row.targets.copy())
    assert all(np.array_equal(row.targets, copy) for row, copy in zip(held, copies, strict=True))


def test_buffers_are_used_again(dataset):
    loader = Loader(Source(dataset), sequence_length=256, rows_per_step=4, threads=0)
    seen = set()
    for step in loader:
        seen.add(step[0].tokens.__array_interface__["data"][0])
        if step.index == 200:
            break
    assert len(seen) < 10


def test_capacity_pads_cu_seqlens_or_refuses(dataset):
    need = InputRequirements(cu_seqlens=True, cu_seqlens_capacity=40)
    for step in rows(dataset, requirements=need):
        for row in step:
            borders = np.unique(row.cu_seqlens)
            assert len(row.cu_seqlens) == 40
            assert borders[0] == 0
            assert borders[-1] == 256
            assert (row.positions, row.loss_weights, row.document_ids) == (None, None, None)
    tight = InputRequirements(asked_by="layer 3", cu_seqlens=True, cu_seqlens_capacity=2)
    with pytest.raises(ConfigError, match=r"cu_seqlens_capacity.*2"):
        list(rows(dataset, requirements=tight))


def test_fractional_weights_are_not_lost(tmp_path):
    dataset = write_dataset(tmp_path / "w", [[1, 2, 3, 4]], spans=[[(0, 3, 0.5)]])
    with pytest.raises(ConfigError, match=r"attention.*weights.*'w'.*weights"):
        rows(dataset, requirements=InputRequirements(asked_by="attention"))
    (step,) = rows(dataset)
    assert step.loss_denominator == 1.0
    assert step[0].loss_weights[0, :4].tolist() == [0.5, 0.5, 0.0, 0.0]


def test_requirements_merge_and_name_who_disagrees():
    merged = InputRequirements(asked_by="attention", cu_seqlens=True).merge(
        InputRequirements(asked_by="head", target_distances=3, dtype="int64")
    )
    assert (merged.cu_seqlens, merged.target_distances, merged.dtype) == (True, 3, "int64")
    with pytest.raises(ConfigError, match=r"target_distances.*needs 3.*needs 2"):
        merged.merge(InputRequirements(asked_by="loss", target_distances=2))


@pytest.mark.parametrize("with_spans", [False, True])
def test_any_flipped_bit_is_found_before_it_is_trained(tmp_path, with_spans):
    generator = np.random.default_rng(4)
    documents = [generator.integers(0, 500, n) for n in (3, 40, 300, 17)]
    spans = [[(1, 3, 1.0)], None, [(5, 20, 0.5), (30, 299, 2.0)], []] if with_spans else None
    write_dataset(tmp_path / "d", documents, spans=spans)
    loader = rows(str(tmp_path / "d"), threads=0)
    good = [row.targets.copy() for step in loader for row in step]
    denominators = [step.loss_denominators for step in rows(str(tmp_path / "d"), threads=0)]
    (shard,) = (tmp_path / "d").glob("*.arrow")
    files = [shard, tmp_path / "d" / "lengths.u32", *(tmp_path / "d").glob("weight_sums.f64")]
    for path in files:
        original = path.read_bytes()
        for place in range(0, len(original), 7):
            damaged = bytearray(original)
            damaged[place] ^= 1 << int(generator.integers(8))
            path.write_bytes(damaged)
            try:
                steps = list(rows(str(tmp_path / "d"), threads=0))
                found = [row.targets for step in steps for row in step]
                # Not noticed: then it was a byte that is never read for training.
                assert len(found) == len(good)
                assert all(np.array_equal(a, b) for a, b in zip(found, good, strict=True))
                assert [step.loss_denominators for step in steps] == denominators
            except (CorruptionError, ConfigError):
                pass
        path.write_bytes(original)


def test_a_damaged_document_is_named(tmp_path):
    write_dataset(tmp_path / "d", [[5] * 100, [6] * 300])
    (shard,) = (tmp_path / "d").glob("*.arrow")
    data = bytearray(shard.read_bytes())
    place = data.index(bytes([6, 0] * 200))
    data[place + 20] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"dataset.*'d'.*document.*1.*checksum"):
        list(
            Loader(
                Source(str(tmp_path / "d"), max_epochs=1),
                sequence_length=512,
                rows_per_step=1,
                threads=2,
            )
        )


@pytest.mark.parametrize(("too_long", "bit"), [("split", 2), ("drop", 10), ("error", 10)])
@pytest.mark.parametrize("number", [3, 2000])
def test_a_document_is_not_skipped_for_a_length_that_is_damaged(tmp_path, too_long, bit, number):
    """Nobody reads it later, so the plan asks its shard."""
    count = max(number, 20)
    write_dataset(
        tmp_path / "d",
        [[i % 50 + 1] * 4 for i in range(count)] + [[], [1] * 9],
        documents_per_shard=700,
    )
    lengths = tmp_path / "d" / "lengths.u32"
    source = Source(
        str(tmp_path / "d"),
        max_epochs=2,
        too_long="drop" if too_long == "error" else too_long,
        name="a",
    )
    whole = list(Loader(source, sequence_length=16, rows_per_step=2, threads=0))
    assert sum(step.num_tokens for step in whole) == 2 * (4 * count + 9)
    data = bytearray(lengths.read_bytes())
    data[8 * (number - 1) + bit // 8] ^= 1 << bit % 8
    lengths.write_bytes(data)
    damaged = Source(str(tmp_path / "d"), max_epochs=2, too_long=too_long, name="a")
    with pytest.raises(CorruptionError, match=rf"document.*{number - 1}.*length.*shard"):
        list(Loader(damaged, sequence_length=16, rows_per_step=2, threads=0))


def test_an_infinite_sum_of_weights_is_found(tmp_path):
    write_dataset(tmp_path / "d", [[1, 2, 3, 4]] * 4, spans=[[(1, 3, 0.5)]] * 4)
    sums = tmp_path / "d" / "weight_sums.f64"
    data = bytearray(sums.read_bytes())
    data[7] ^= 0x40
    sums.write_bytes(data)
    with pytest.raises(CorruptionError, match="document 0: its loss weights differ"):
        list(rows(str(tmp_path / "d"), threads=0))
