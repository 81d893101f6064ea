"""Large datasets in a store: their lengths come in ranges, and plans, rows and states are those of
a local copy.
"""

import json
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from remote_cases import (
    BLOCK,
    DENOISE,
    NEED,
    SETTINGS,
    Reversed,
    pair,
    patient_store,
    weighted_halves,
)

from contracts import assert_same_step
from makers.datasets import random_documents, tokenizer_info
from penstock import Loader, Mixture, Source, open_dataset, write_dataset
from penstock.core.errors import ConfigError, CorruptionError, StoreError
from penstock.core.randomness import mix
from penstock.data.shards.convert import write_megatron
from penstock.data.shards.extend import write_side
from penstock.data.shards.tables.lengths import LazyNumbers
from penstock.plan.loader.lengths_ahead import LengthsAhead
from penstock.plan.sampling import Permutation
from penstock.use.inspection.datasets import summarise

DOCUMENTS, RANGE = 12_000, 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a store, with datasets that have checksums of ranges of 300 documents: no
    border fits another.
    """
    root = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.data.shards.writing.finish.LAZY_DOCUMENTS", 0)
        patch.setattr("penstock.data.shards.writing.finish.RANGE_DOCUMENTS", RANGE)
        documents = random_documents(DOCUMENTS, 0, 180, seed=1)
        write_dataset(
            root / "bucket" / "plain",
            documents,
            tokenizer=tokenizer_info(),
            documents_per_shard=5000,
        )
        chats = random_documents(3000, 0, 700, seed=2)
        spans = weighted_halves(chats)
        write_dataset(
            root / "bucket" / "chats",
            chats,
            spans=spans,
            tokenizer=tokenizer_info(),
            documents_per_shard=1100,
        )
        whole = [[(1, len(one), 1.0)] if len(one) > 1 else None for one in chats[:900]]
        write_dataset(root / "bucket" / "short", [[7]] * 900, tokenizer=tokenizer_info())
        write_dataset(
            root / "bucket" / "more", chats[:900], spans=whole, tokenizer=tokenizer_info()
        )
    return root


@pytest.fixture
def store(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.data.shards.remote.length_ranges.RANGE_DOCUMENTS", 200)
    with patient_store(folder, tmp_path, monkeypatch) as found:
        yield found


SOURCES = {
    "full": ("plain", {}),
    "block": ("plain", BLOCK),
    "large windows": ("plain", {"shuffle": "block"}),
    "none": ("plain", {"shuffle": "none", "slice": (0.13, 0.61)}),
    "epochs": ("chats", {"max_epochs": 2.5, "slice": (0.3, 0.7), **BLOCK}),
    "few": ("plain", {"max_epochs": 40, "slice": (0.5, 0.51), **BLOCK}),
    "truncate": ("chats", {"too_long": "truncate", **BLOCK}),
    "keep_end": ("chats", {"too_long": "keep_end", "max_document_tokens": 100, **BLOCK}),
    "drop": ("chats", {"too_long": "drop", **BLOCK}),
    "python": ("chats", {"objective": Reversed(), "too_long": "drop", **BLOCK}),
    "denoise": ("chats", {"objective": DENOISE, "too_long": "drop", "shuffle": "none"}),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_steps_are_those_of_a_local_copy(store, kind):
    name, options = SOURCES[kind]
    local, remote = pair(store, name, **{"max_epochs": 1, **options})
    here, there = (Loader(one, threads=2, requirements=NEED, **SETTINGS) for one in (local, remote))
    assert isinstance(there.datasets[0].table.lengths, LazyNumbers)
    for mine, theirs in zip(here, there, strict=True):
        assert_same_step(mine, theirs)
    assert here.dropped == there.dropped
    assert [str(one) for one in here.explain(3)] == [str(other) for other in there.explain(3)]
    assert here.count_steps() == there.count_steps()


@pytest.mark.parametrize("packing", ["best_fit_decreasing", "next_fit", "concat", "none"])
def test_all_packings(store, packing):
    local, remote = pair(store, "plain", max_epochs=1, **BLOCK)
    for mine, theirs in zip(
        *(Loader(one, packing=packing, **SETTINGS) for one in (local, remote)), strict=True
    ):
        assert_same_step(mine, theirs)


@pytest.mark.parametrize("places", [("plain", "chats"), ("chats", "plain")])
def test_mixtures_and_ranks(store, places):
    sources = [pair(store, name, max_epochs=1, too_long="drop", **BLOCK) for name in places]
    mixtures = [Mixture([one[number] for one in sources]) for number in (0, 1)]
    for rank in (0, 1):
        loaders = [Loader(one, data_parallel=(rank, 2), **SETTINGS) for one in mixtures]
        for mine, theirs in zip(*loaders, strict=True):
            assert_same_step(mine, theirs)


@pytest.mark.parametrize("kind", ["full", "block", "none"])
def test_joined_datasets_with_local_and_remote_parts(store, kind):
    """Of weights that are fractional in some parts only."""
    near, far = (store.folder / "bucket" / "more", "s3://bucket/chats")
    lists = [
        [near, store.folder / "bucket" / "chats"],
        [near, far],
        ["s3://bucket/more", far],
    ]
    options = {
        "name": "all",
        "max_epochs": 1,
        "shuffle": kind,
        "too_long": "drop",
        "slice": (0.05, 0.95),
    }
    loaders = [
        Loader(Source(one, **options), requirements=NEED, threads=1, **SETTINGS) for one in lists
    ]
    assert [isinstance(loader.datasets[0].table.lengths, LazyNumbers) for loader in loaders] == [
        False,
        True,
        True,
    ]
    for mine, theirs, others in zip(*loaders, strict=True):
        assert_same_step(mine, theirs)
        assert_same_step(mine, others)
    whole = loaders[0].datasets[0].table
    for table in (loader.datasets[0].table for loader in loaders[1:]):
        np.testing.assert_array_equal(table.lengths[:, 1], whole.lengths[:, 1])
        np.testing.assert_array_equal(table.weight_sums[880:920], whole.weight_sums[880:920])
        np.testing.assert_array_equal(table.weight_sums, whole.weight_sums)


def test_a_resume_at_each_step_from_a_cold_cache(store, tmp_path):
    local, remote = pair(store, "chats", max_epochs=1, **BLOCK)
    settings = {**SETTINGS, "rows_per_step": 512}
    steps = list(Loader(local, **settings))
    for number, step in enumerate(steps[:-1]):
        loader = Loader(remote, cache=tmp_path / f"cold-{number}", **settings)
        loader.load_state_dict(json.loads(json.dumps(step.resume_state)))
        assert_same_step(next(iter(loader)), steps[number + 1])


def test_seek_and_a_budget(store):
    local, remote = pair(store, "plain", **BLOCK)
    here, there = Loader(local, **SETTINGS), Loader(remote, cache_bytes=1_200_000, **SETTINGS)
    for step in (400, 20, 700):
        for mine, theirs in islice(zip(here.seek(step), there.seek(step), strict=True), 40):
            assert_same_step(mine, theirs)
    # A unit is given back although nobody has the lengths of its neighbours.
    assert there.datasets[0].table.holder.size <= 1_200_000


def test_filling_has_lengths_that_its_own_plan_did_not_read(store):
    """What a plan of another loader says is filled from a cold cache: kernels never see a length
    that is not here.
    """
    sources = pair(store, "plain", shuffle="block")
    here, there = (
        Loader(one, requirements=NEED, data_parallel=(1, 8), **SETTINGS) for one in sources
    )
    plans = [here._planner.next() for _ in range(60)]
    assert not there.datasets[0].table.lengths.ranges.here.all()
    for plan in plans[40:]:
        assert_same_step(here._filling.step(plan), there._filling.step(plan))
        # Also those of other ranks' documents, which the denominator needs.
        assert there.datasets[0].table.lengths.ranges.here[plan.pieces["document"] // RANGE].all()


def test_shares_by_tokens_read_the_lengths_of_the_slice(store):
    pairs = [
        pair(store, name, share="tokens", slice=(0.2, 0.6), **BLOCK) for name in ("plain", "chats")
    ]
    here, there = (Loader([one[number] for one in pairs], **SETTINGS) for number in (0, 1))
    assert [one.share for one in here.mixture.sources] == [
        one.share for one in there.mixture.sources
    ]
    assert there.datasets[0].table.lengths.ranges.here.mean() < 0.6


def test_a_first_step_brings_the_lengths_of_few_ranges(store, monkeypatch):
    monkeypatch.setattr("penstock.plan.loader.lengths_ahead._LEAST", 256)
    local, remote = pair(store, "plain", shuffle="block")
    loader = Loader(remote, **{**SETTINGS, "window_rows": 8})
    assert_same_step(
        next(iter(Loader(local, **{**SETTINGS, "window_rows": 8}))), next(iter(loader))
    )
    lengths = loader.datasets[0].table.lengths
    # Those of the windows that the steps made ahead are in, and of the windows after these; how
    # many steps are made ahead by now, the machine decides. There are 40 ranges.
    assert 1 <= lengths.ranges.here.sum() < 32
    assert store.count("lengths.u32") > 0
    assert not any("lengths" in path and span is None for _, path, span in store.log)


def test_a_source_that_cannot_be_trained_is_refused(store):
    _, remote = pair(store, "short", slice=(0.5, 1.0), **BLOCK)
    with pytest.raises(ConfigError, match=r"'short'.*nothing.*450.*documents"):
        Loader(remote, **SETTINGS)


def test_failures_come_where_their_step_would_have_come(store):
    local, remote = pair(store, "plain", shuffle="none", max_epochs=1)
    expected = list(Loader(local, **SETTINGS))
    file = store.folder / "bucket" / "plain" / "lengths.u32"
    kept = file.read_bytes()
    given = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.plan.loader.lengths_ahead._STRETCH", 400)
        patch.setattr("penstock.plan.loader.lengths_ahead._LEAST", 400)
        loader = Loader(remote, threads=2, **SETTINGS)
        fault = store.fail("500", 10**6, "lengths.u32")
        with pytest.raises(StoreError, match=r"s3://bucket/plain/lengths.u32.*read, 5"):
            given.extend(loader)
        fault.times = 0
        given.extend(islice(loader, 3))
        changed = bytearray(kept)
        changed[8 * 7000] ^= 1
        file.write_bytes(changed)
        with pytest.raises(CorruptionError, match=r"s3://bucket/plain/lengths.u32"):
            given.extend(loader)
    file.write_bytes(kept)
    assert 3 < len(given) < len(expected)
    for mine, theirs in zip(given, expected, strict=False):
        assert_same_step(mine, theirs)


class Recorded:
    """Ranges of one document each, which note when each was asked for."""

    size = 1

    def __init__(self, documents):
        self.here, self.asked_at = np.zeros(documents, np.uint8), np.full(documents, -1)
        self.now, self.late = 0, []

    def want(self, begins, ends):
        assert (ends == begins + 1).all()
        self.asked_at[begins[self.asked_at[begins] < 0]] = self.now

    def need(self, begins, ends):
        if (self.asked_at[begins] == self.now).any():
            self.late.append(self.now)
        assert (self.asked_at[begins] >= 0).all()
        self.here[begins] = 1


@pytest.mark.parametrize(("shuffle", "runs"), [("block", 4), ("block", 16), ("none", 512)])
@pytest.mark.parametrize("start", [0, 12_345])
def test_lengths_are_asked_for_before_the_plan_is_there(monkeypatch, shuffle, runs, start):
    """Nothing is waited for that was not asked for before, but what a run begins with."""
    monkeypatch.setattr("penstock.plan.loader.lengths_ahead._STRETCH", 2000)
    size, first, epochs = 30_000, 50, 2
    source = Source(
        "somewhere", shuffle=shuffle, **({"shuffle_runs": runs} if shuffle == "block" else {})
    )
    ranges = Recorded(first + size + 70)
    ahead = LengthsAhead(source, ranges, first, size, 77, epochs * size)
    for epoch in range(epochs):
        key = int(mix(np.uint64(77), np.uint64(epoch)))
        order = (
            first
            + Permutation(
                size=size, key=key, shuffle=shuffle, shuffle_runs=source.shuffle_runs
            ).images()
        )
        if epoch:
            # As if nothing had come but what was asked for in this epoch.
            ranges.here[:] = 0
        for index in range(0 if epoch else start, size, 90):
            ranges.now = epoch * size + index
            ahead.look(ranges.now)
            if not ranges.here[order[index : index + 90]].all():
                ahead.bring(ranges.now)
                assert ranges.here[order[index]]
        if epoch == 0:
            assert ranges.late == [start]
            assert (ranges.asked_at[order[start:]] >= 0).all()
    assert not ranges.here[:first].any()
    assert not ranges.here[first + size :].any()
    # Back again, as a plan that tries another packing does.
    ranges.here[:] = 0
    ahead.look(17)
    ahead.bring(17)
    assert ranges.here[
        first
        + Permutation(
            size=size,
            key=int(mix(np.uint64(77), np.uint64(0))),
            shuffle=shuffle,
            shuffle_runs=source.shuffle_runs,
        ).images(17, 18)[0]
    ]


def test_other_ways_to_read_a_dataset(store, tmp_path):
    local, remote = (open_dataset(one.path) for one in pair(store, "plain"))
    here = remote.table.lengths.ranges.here
    assert "documents" in remote._repr_html_()
    assert here.sum() == 0
    assert [remote[n] for n in (0, 299, 300, 1099, 11_999)] == [
        local[n] for n in (0, 299, 300, 1099, 11_999)
    ]
    assert 0 < here.sum() < len(here)
    np.testing.assert_array_equal(
        remote.table.read(4990, 5400).values, local.table.read(4990, 5400).values
    )
    assert here.sum() < len(here)
    assert replace(summarise(remote), path="") == replace(summarise(local), path="")
    assert here.all()
    columns = {"score": [np.ones(size, np.float32) for size in local.table.lengths[:, 0]]}
    for name, dataset in (
        ("local", local),
        ("remote", open_dataset("s3://bucket/plain", cache=tmp_path / "cold")),
    ):
        write_side(dataset, tmp_path / f"side-{name}", columns)
        write_megatron(dataset, tmp_path / name)
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"local{ending}").read_bytes() == (
            tmp_path / f"remote{ending}"
        ).read_bytes()
    assert open_dataset(tmp_path / "side-local") == open_dataset(tmp_path / "side-remote")
