"""One loader over every kind of dataset at once: shards with and without loss weights, Megatron,
bare tokens.

Every token of the corpora is another number, so a row alone says which document, and which part of
it, lies where.
"""

from itertools import islice

import numpy as np
import pytest

from contracts import assert_same_row
from penstock import InputRequirements, Loader, Mixture, ShareChange, Source, write_dataset
from penstock.data.shards import open_npy, write_megatron
from penstock.plan.packing import PACKINGS

SLOTS, ROWS, EPOCHS = 96, 4, 2


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Datasets, and of each the documents; two-byte tokens and four-byte ones, many batches, many
    shards.
    """
    folder = tmp_path_factory.mktemp("mixed")
    generator = np.random.default_rng(0)
    first = 1

    def documents(count):
        nonlocal first
        out = []
        for length in generator.choice([1, 2, 7, 30, SLOTS, SLOTS + 1, 300], count):
            out.append(np.arange(first, first + length))
            first += length
        return out

    short, long, weighted, foreign, bare = (documents(count) for count in (40, 1500, 60, 50, 70))
    spans = [[(0, len(d) // 2, 1.0)] if len(d) > 1 else None for d in weighted]
    write_megatron(write_dataset(folder / "source", foreign), folder / "foreign")
    # Bare tokens end each document with the token 0, which here stands for its last number.
    np.concatenate([np.append(d[:-1], 0) for d in bare]).astype("<u4").tofile(folder / "bare.npy")
    datasets = [
        write_dataset(folder / "short", short, documents_per_shard=7),
        write_dataset(folder / "long", long, documents_per_shard=1300),
        write_dataset(folder / "weighted", weighted, spans=spans, documents_per_shard=25),
        folder / "foreign",
        open_npy(folder / "bare.npy", "uint32", 0),
    ]
    return datasets, [short, long, weighted, foreign, bare]


def build(corpora, changes=(), drop_untrained=True, **options):
    sources = [
        Source(dataset, share, name=str(i), max_epochs=EPOCHS, drop_untrained=drop_untrained)
        for i, (dataset, share) in enumerate(
            zip(corpora[0], (0.1, 1.0, 0.3, 0.01, 0.2), strict=True)
        )
    ]
    settings = {
        "sequence_length": SLOTS,
        "rows_per_step": ROWS,
        "seed": 1,
        "window_rows": 16,
        "threads": 0,
    }
    need = InputRequirements(
        target_distances=2, loss_weights=True, positions=True, document_ids=True, cu_seqlens=True
    )
    return Loader(Mixture(sources, changes), **{**settings, "requirements": need, **options})


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_token_of_every_format_once_an_epoch(corpora, packing):
    bounds = [(documents[0][0], documents[-1][-1] + 1) for documents in corpora[1]]
    seen = np.zeros(bounds[-1][1] + 2, np.int64)
    for rank in range(2):
        loader = build(corpora, packing=packing, data_parallel=(rank, 2), drop_untrained=False)
        for row in (row for step in loader for row in step):
            borders = row.cu_seqlens.tolist()
            for source, begin, end in zip(row.source_ids, borders, borders[1:], strict=False):
                tokens, targets = row.tokens[begin:end].astype(np.int64), row.targets[:, begin:end]
                if source == 4:
                    # A lone 0 does not say whose it is; any other end of a document follows from
                    # the token before it.
                    lone = tokens[0] == 0
                    tokens[-1] += 0 if lone or tokens[-1] else tokens[-2] + 1
                    seen[0] += lone
                    tokens = tokens[int(lone) :]
                low, high = bounds[source]
                assert len(tokens) == 0 or low <= tokens[0] <= tokens[-1] < high
                assert (np.diff(tokens) == 1).all()
                seen[tokens] += 1
                for distance, found in enumerate(targets, 1):
                    trained = (found != -100) & (found != 0)
                    assert (found[trained] == row.tokens[begin:end][trained] + distance).all()
    low, high = bounds[4]
    assert (seen[1:low] == EPOCHS).all()
    last = np.array([document[-1] for document in corpora[1][4]])
    whole = np.delete(np.arange(low, high), last - low)
    assert (seen[whole] == EPOCHS).all()
    assert seen[last].sum() + seen[0] == EPOCHS * len(last)


@pytest.mark.parametrize("packing", PACKINGS)
def test_sources_that_pause_end_and_come_back_resume_exactly(corpora, packing):
    changes = [
        ShareChange(step=5, shares={"1": 0, "2": 0}),
        ShareChange(step=9, shares={"1": 1, "0": 5}),
        ShareChange(step=10, shares={"2": 2}),
        ShareChange(step=30, shares={"3": 1}),
    ]
    whole = list(build(corpora, changes, packing=packing))
    for done in range(0, len(whole), 1 + len(whole) // 25):
        rank, size = done % 2, 2
        resumed = build(corpora, changes, packing=packing, data_parallel=(rank, size))
        resumed.load_state_dict(whole[done].resume_state)
        expected = whole[done + 1 : done + 40]
        tail = list(islice(resumed, 39))
        assert [step.index for step in tail] == [step.index for step in expected]
        for mine, theirs in zip(tail, expected, strict=True):
            assert mine.loss_denominators == theirs.loss_denominators
            for left, right in zip(mine, theirs[rank * len(mine) :], strict=False):
                assert_same_row(left, right)
