"""Steps over more shards than may be mapped are those over shards that are all mapped; the plan
reads none of them.
"""

import shutil
from itertools import islice

import pytest
from remote_cases import BLOCK, NEED, SETTINGS, Reversed, weighted_halves

from contracts import assert_same_step
from makers.datasets import random_documents, tokenizer_info
from makers.many_shards import many_shards
from makers.object_store import s3_store
from makers.processes import run_code
from makers.trees import tree_dataset
from penstock import InputRequirements, Loader, Mixture, Source, open_dataset, write_dataset
from penstock.core.errors import CorruptionError
from penstock.data.shards.tables import mappings
from penstock.data.shards.tables.mappings import MappedShards

MOST = 40


@pytest.fixture
def fewer(monkeypatch):
    """Datasets that are opened from then on may have 40 shards mapped."""

    def begin():
        monkeypatch.setattr(mappings, "mapping_limit", lambda: MOST * mappings._SOME_SHARE)
        monkeypatch.setattr(mappings, "_ALL_SHARE", 10**9)

    return begin


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dataset of 150 shards, with loss weights."""
    folder = tmp_path_factory.mktemp("data") / "bucket" / "chats"
    folder.parent.mkdir()
    chats = random_documents(1500, 5, 700, seed=2)
    spans = weighted_halves(chats)
    write_dataset(folder, chats, spans=spans, tokenizer=tokenizer_info(), documents_per_shard=10)
    return folder


SOURCES = {
    "full": {},
    "block": BLOCK,
    "none": {"shuffle": "none", "slice": (0.1, 0.6)},
    "drop": {"too_long": "drop"},
    "python": {"objective": Reversed(), "too_long": "drop"},
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("threads", [0, 2])
def test_steps_are_those_of_mapped_shards(folder, fewer, kind, threads):
    def loader():
        source = Source(folder, max_epochs=1, **SOURCES[kind])
        return Loader(source, threads=threads, requirements=NEED, **SETTINGS)

    expected = loader()
    fewer()
    found = loader()
    assert isinstance(found.datasets[0].table.mappings, MappedShards)
    steps = zip(expected, found, strict=True)
    for mine, theirs in steps:
        assert_same_step(mine, theirs)
    assert found.traffic == {}
    assert mappings.pool.held == 0
    assert len(mappings.pool.idle) <= MOST
    for one, other in zip(expected.explain(3), found.explain(3), strict=True):
        assert str(one) == str(other)


def test_a_resume_and_a_loader_that_is_left(folder, fewer):
    fewer()
    source = Source(folder, max_epochs=2)
    steps = list(islice(Loader(source, threads=2, requirements=NEED, **SETTINGS), 12))
    other = Loader(source, threads=2, requirements=NEED, **SETTINGS)
    other.load_state_dict(steps[5].resume_state)
    for mine, theirs in zip(steps[6:], other, strict=False):
        assert_same_step(mine, theirs)
    other.load_state_dict(steps[0].resume_state)
    assert mappings.pool.held == 0


def test_mixtures_of_mapped_and_other_shards_and_a_store(folder, fewer, tmp_path, monkeypatch):
    pytest.importorskip("s3fs")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    plain = open_dataset(folder)
    tree_dataset(tmp_path / "trees", vocabulary=900)
    with s3_store(folder.parents[1], monkeypatch):
        before = Loader(
            Mixture([Source(plain, share=0.5), Source(folder, name="b", share=0.5)]), **SETTINGS
        )
        fewer()
        remote = Source("s3://bucket/chats", name="b", share=0.5)
        after = Loader(
            Mixture([Source(plain, share=0.5), remote]),
            threads=2,
            cache_bytes=50_000_000,
            **SETTINGS,
        )
        both = Loader(
            Mixture([Source(folder, share=0.5), remote]), cache_bytes=50_000_000, **SETTINGS
        )
        for steps in zip(*(islice(loader, 20) for loader in (before, after, both)), strict=True):
            assert_same_step(steps[0], steps[1])
            assert_same_step(steps[0], steps[2])
        assert list(both.traffic) == ["b"]
        shutil.copytree(folder, tmp_path / "copy")
        parts = [plain, tmp_path / "copy"], ["s3://bucket/chats", folder]
        joined = [Loader(Source(one, name="j"), **SETTINGS) for one in parts]
        for mine, theirs in zip(*(islice(loader, 10) for loader in joined), strict=True):
            assert_same_step(mine, theirs)


def test_trees_and_columns(fewer, tmp_path):
    tree_dataset(tmp_path / "trees", vocabulary=900)
    need = InputRequirements(
        trees=True, asked_by="a test", loss_weights=True, positions=True, cu_seqlens=True
    )

    def loader():
        return Loader(
            Source(tmp_path / "trees", max_epochs=2),
            sequence_length=128,
            rows_per_step=2,
            requirements=need,
        )

    expected = loader()
    fewer()
    for mine, theirs in zip(expected, loader(), strict=True):
        assert mine.units == theirs.units
        assert_same_step(mine, theirs)


def test_damage_is_found_and_named(folder, fewer, tmp_path):
    write_dataset(
        tmp_path / "d",
        random_documents(300, 20, 90),
        tokenizer=tokenizer_info(),
        documents_per_shard=5,
    )
    shard = tmp_path / "d" / "00030.arrow"
    data = bytearray(shard.read_bytes())
    data[int(open_dataset(tmp_path / "d").table.batches["tokens"][30])] ^= 1
    shard.write_bytes(data)
    fewer()
    with pytest.raises(CorruptionError, match=r"document 15[0-4]: .*penstock verify"):
        list(Loader(Source(tmp_path / "d", shuffle="none", max_epochs=1), **SETTINGS))


@pytest.mark.slow
def test_a_plan_over_100_000_shards(tmp_path):
    """Opens under the usual limits, and plans without a look at a shard."""
    many_shards(tmp_path / "many", 100_000, [[1, 2, 3, 4] * 30] * 2)
    code = """
        import resource, sys, penstock as ps
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        loader = ps.Loader(ps.Source(sys.argv[1], shuffle="full"), sequence_length=1024, rows_per_step=64)
        # Of this program: what getrusage says begins with the most that its parent had.
        opens = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
        print(len(loader.datasets[0].manifest.shards), len(open("/proc/self/maps").readlines()) < 2000, opens < 3 << 18)
        step = next(iter(loader))
        print(len(step), step.index)
    """  # noqa: E501
    found = run_code(code, tmp_path / "many", check=True)
    assert found.stdout == "100000 True True\n64 0\n"
