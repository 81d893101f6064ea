"""Sources in a store: rows, states and explanations are those of a local copy, and only what is
needed comes.
"""

import hashlib
import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
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

from contracts import ARRAYS, assert_same_step
from makers.datasets import random_documents, tokenizer_info, unit_record
from makers.processes import child_environment
from makers.trees import tree_dataset
from patience import PATIENCE_SECONDS, wait_for
from penstock import InputRequirements, Loader, Mixture, Source, open_dataset, write_dataset
from penstock.core.errors import ConfigError, StoreError
from penstock.use.config import load_run, make_loader

DOCUMENTS = 12_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a store, with datasets in a bucket."""
    root = tmp_path_factory.mktemp("store")
    documents = random_documents(DOCUMENTS, 20, 180, seed=1)
    write_dataset(
        root / "bucket" / "plain", documents, tokenizer=tokenizer_info(), documents_per_shard=5000
    )
    chats = random_documents(3000, 5, 700, seed=2)
    spans = weighted_halves(chats)
    write_dataset(
        root / "bucket" / "chats",
        chats,
        spans=spans,
        tokenizer=tokenizer_info(),
        documents_per_shard=1100,
    )
    return root


@pytest.fixture
def store(folder, tmp_path, monkeypatch):
    with patient_store(folder, tmp_path, monkeypatch) as found:
        yield found


SOURCES = {
    "full": ("plain", {}),
    "block": ("plain", BLOCK),
    "none": ("plain", {"shuffle": "none", "slice": (0.1, 0.6)}),
    "split": ("chats", BLOCK),
    "truncate": ("chats", {"too_long": "truncate", **BLOCK}),
    "keep_end": ("chats", {"too_long": "keep_end", "max_document_tokens": 100, **BLOCK}),
    "drop": ("chats", {"too_long": "drop"}),
    "python": ("chats", {"objective": Reversed(), "too_long": "drop", **BLOCK}),
    "denoise": ("chats", {"objective": DENOISE, "too_long": "drop", "shuffle": "none"}),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("threads", [0, 2])
def test_steps_are_those_of_a_local_copy(store, kind, threads):
    name, options = SOURCES[kind]
    local, remote = pair(store, name, max_epochs=1, **options)
    here, there = (
        Loader(one, threads=threads, requirements=NEED, **SETTINGS) for one in (local, remote)
    )
    for mine, theirs in zip(here, there, strict=True):
        assert_same_step(mine, theirs)
    traffic = there.traffic[name]
    assert traffic.used_bytes > 0
    assert traffic.fetched_bytes < 1.5 * sum(
        shard.bytes for shard in there.datasets[0].manifest.shards
    )
    for one, other in zip(here.explain(3), there.explain(3), strict=True):
        assert other.shard.startswith(f"s3://bucket/{name}/0000")
        assert str(one) == str(other)
        assert (one.document, one.begin, one.num_tokens, one.text) == (
            other.document,
            other.begin,
            other.num_tokens,
            other.text,
        )


def test_mixtures_of_local_and_remote_sources(store, tmp_path):
    tree_dataset(tmp_path / "trees", vocabulary=900)
    sources = [pair(store, "plain", share=0.5), pair(store, "chats", share=0.3, too_long="drop")]
    mixtures = [Mixture([one[number] for one in sources]) for number in (0, 1)]
    half = Mixture([sources[0][0], sources[1][1]])
    loaders = [Loader(one, **SETTINGS) for one in (*mixtures, half)]
    for steps in zip(*(islice(loader, 30) for loader in loaders), strict=True):
        assert_same_step(steps[0], steps[1])
        assert_same_step(steps[0], steps[2])
    assert list(loaders[1].traffic) == ["plain", "chats"]
    assert list(loaders[2].traffic) == ["chats"]
    assert loaders[0].traffic == {}


def test_trees_and_columns_are_packed_from_a_store(store):
    tree_dataset(store.folder / "bucket" / "trees", vocabulary=900)
    need = InputRequirements(
        trees=True, asked_by="a test", loss_weights=True, positions=True, cu_seqlens=True
    )
    loaders = [
        Loader(one, sequence_length=128, rows_per_step=2, requirements=need, data_parallel=(1, 2))
        for one in pair(store, "trees", max_epochs=2, share=1.0)
    ]
    for mine, theirs in zip(*loaders, strict=True):
        assert mine.units == theirs.units
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_array_equal(one.columns["order"], other.columns["order"])


def test_a_resume_at_each_step_from_a_cold_cache(store, tmp_path):
    local, remote = pair(store, "chats", max_epochs=1, **BLOCK)
    settings = {**SETTINGS, "rows_per_step": 128}
    steps = list(Loader(local, **settings))
    assert len(steps) > 20
    for number, step in enumerate(steps):
        loader = Loader(remote, cache=tmp_path / f"cold-{number}", **settings)
        loader.load_state_dict(json.loads(json.dumps(step.resume_state)))
        following = next(iter(loader), None)
        if number + 1 < len(steps):
            assert_same_step(following, steps[number + 1])
        else:
            assert following is None


def test_the_first_step_needs_one_more_round_trip_and_few_runs(store):
    _, remote = pair(store, "plain", shuffle="block")
    loader = Loader(remote, **{**SETTINGS, "window_rows": 8})
    plan = loader._planner.next()
    ((holder, units),) = loader._fetching.wanted(plan, *loader._filling.own_rows(plan))
    assert len(units) == 1
    assert not any(holder.units.unit(unit).has_more for unit in units.tolist())
    store.forget()
    with holder.held(units):
        # Tokens and checksums of one run, in each of the two batches that it touches at most, at
        # the same time.
        assert store.count(".arrow") <= 4


def test_a_rank_fetches_its_own_rows_only(store):
    """Spans that the denominator needs come for all ranks, tokens for one."""
    local, remote = pair(store, "chats", max_epochs=1, shuffle="none")
    here, there = (Loader(one, data_parallel=(1, 2), **SETTINGS) for one in (local, remote))
    for mine, theirs in islice(zip(here, there, strict=True), 12):
        assert_same_step(mine, theirs)
    from penstock.data.shards.tables.holder import SPANS, TOKENS

    wanted = []
    for rank in (0, 1):
        loader = Loader(remote, data_parallel=(rank, 2), **SETTINGS)
        plan = loader._planner.next()
        ((holder, units),) = loader._fetching.wanted(plan, *loader._filling.own_rows(plan))
        kinds = [holder.units.kind(unit) for unit in units.tolist()]
        wanted.append({kind: kinds.count(kind) for kind in kinds})
    assert set(wanted[0]) == {TOKENS, SPANS}
    plain = Loader(Source("s3://bucket/plain", shuffle="full"), data_parallel=(1, 8), **SETTINGS)
    plan = plain._planner.next()
    ((holder, units),) = plain._fetching.wanted(plan, *plain._filling.own_rows(plan))
    begin, end = plan.row_starts[[1, 2]].tolist()
    assert set(units.tolist()) == set((plan.pieces["document"][begin:end] // 256).tolist())


def test_skipped_documents_are_not_fetched(store):
    """Documents that the plan leaves out are judged by the lengths, which were checked when they
    came.
    """
    _, remote = pair(store, "chats", too_long="drop", shuffle="full")
    loader = Loader(remote, **SETTINGS)
    store.forget()
    plan = loader._planner
    for _ in range(10):
        assert plan.next() is not None
    assert store.log == []


def test_a_budget_without_room_is_refused_with_its_numbers(store):
    for options, reason in (
        (
            BLOCK,
            (
                r"for 7 runs of 256 documents: two windows of 2 runs that are shuffled, and the "
                r"documents of 32 rows"
            ),
        ),
        ({}, "with shuffle 'full' all of it; shuffle 'block' needs less"),
        ({"shuffle": "none"}, "a window of 32 rows"),
    ):
        _, remote = pair(store, "plain", **options)
        with pytest.raises(
            ConfigError,
            match=rf"9,000, but [\d,]+ bytes.*{reason}",
        ):
            Loader(remote, cache_bytes=9000, **SETTINGS)
    with pytest.raises(ConfigError, match="cache_bytes must be at least 1, got 0"):
        Loader(remote, cache_bytes=0, **SETTINGS)
    with pytest.raises(ConfigError, match=r"shuffle_runs.*'block'.*'full'"):
        Source("s3://bucket/plain", shuffle_runs=3)


def test_a_line_says_what_was_fetched_for_what_was_used(store, caplog):
    _, remote = pair(store, "plain", max_epochs=1, **BLOCK)
    with caplog.at_level(logging.INFO, "penstock.loader"):
        for _ in Loader(remote, **SETTINGS):
            pass
    (said,) = [record.message for record in caplog.records if "fetched" in record.message]
    assert said.startswith("source 'plain' (s3://bucket/plain): fetched 2.")
    # This line has no limits, so what lies between tokens and checksums may come with them.
    assert re.search(r"MB used \(1\.[01]", said)


def test_run_files_and_pickled_loaders(store, tmp_path):
    (tmp_path / "run.yaml").write_text(
        "data:\n"
        "  sources:\n"
        "    - {path: 's3://bucket/plain', shuffle: block, shuffle_runs: 2}\n"
        "  loader: {sequence_length: 256, rows_per_step: 8, seed: 3, window_rows: 32}\n"
        f"  cache: {tmp_path / 'mine'}\n"
        "  cache_bytes: 1500000\n"
    )
    loader = make_loader(load_run(tmp_path / "run.yaml").data)
    assert loader.datasets[0].path.is_relative_to(tmp_path / "mine")
    assert loader.datasets[0].table.holder.budget == 1_500_000
    local = Loader(pair(store, "plain", **BLOCK)[0], **SETTINGS)
    steps = list(islice(local, 6))
    for mine, theirs in zip(steps[:3], islice(loader, 3), strict=True):
        assert_same_step(mine, theirs)
    for mine, theirs in zip(steps[3:], islice(pickle.loads(pickle.dumps(loader)), 3), strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)


def test_a_failure_comes_where_its_step_would_have_come(store):
    local, remote = pair(store, "plain", shuffle="none")
    loader, expected = (
        Loader(remote, threads=2, **SETTINGS),
        list(islice(Loader(local, **SETTINGS), 80)),
    )
    fault = store.fail("500", 10**6, "00001.arrow")
    given = []
    with pytest.raises(StoreError, match=r"s3://bucket/plain/00001.arrow.*read, 5"):
        given.extend(loader)
    assert len(given) > 0
    fault.times = 0
    for mine, theirs in zip([*given, *islice(loader, 3)], expected, strict=False):
        assert_same_step(mine, theirs)


@pytest.mark.parametrize("threads", [0, 2])
def test_once_all_is_here_steps_are_made_as_from_a_local_disk(store, threads, monkeypatch):
    """In the middle of an iteration, and from the beginning of the next; with what is behind the
    slice not here.
    """
    monkeypatch.setattr("penstock.plan.loader.steps_ahead._ALL_SECONDS", 0.0)
    monkeypatch.setattr("penstock.plan.loader.steps_ahead._ALL_SHARE", 0)
    # A fast machine would ask for all steps before the first is taken.
    monkeypatch.setattr("penstock.plan.loader.steps_ahead.AHEAD_STEPS", 16)
    local, remote = pair(store, "chats", max_epochs=4, slice=(0.0, 0.7), too_long="drop", **BLOCK)
    here, there = (Loader(one, threads=threads, **SETTINGS) for one in (local, remote))
    asked = []
    wanted = there._fetching.wanted
    monkeypatch.setattr(
        there._fetching, "wanted", lambda *given: asked.append(given) or wanted(*given)
    )
    expected = list(here)
    for mine, theirs in zip(expected, there, strict=True):
        assert_same_step(mine, theirs)
    assert 0 < len(asked) < len(expected)
    used = there.traffic["chats"].used_bytes
    assert not there._fetching._all
    other = Loader(remote, **SETTINGS).datasets[0].table.holder
    record = unit_record(other)
    again = Loader(remote, threads=threads, **SETTINGS)
    monkeypatch.setattr(again._fetching, "wanted", None)
    for number, (mine, theirs) in enumerate(zip(expected, again, strict=True)):
        assert_same_step(mine, theirs)
        if number == 3:
            other.budget = 1
            other.want(
                other.find(np.arange(2990, 3000), (0,))
            )  # makes room, as far as others let it
            assert not record.own(0)
    assert again.traffic["chats"].used_bytes == used
    assert again.traffic["chats"].fetched_bytes == 0
    assert record.own(0)


def test_more_units_are_wanted_than_there_are_threads(store, monkeypatch):
    """Their ranges come one after another, and an answer that fails comes again."""
    monkeypatch.setattr("penstock.data.shards.remote.residency.THREADS", 1)
    local, remote = pair(store, "chats", max_epochs=1, shuffle="full")
    loader, coming = Loader(remote, **SETTINGS), []
    holder = loader.datasets[0].table.holder
    fetch = holder._fetcher.fetch
    monkeypatch.setattr(
        holder._fetcher,
        "fetch",
        lambda unit, at_once: coming.append(holder._coming) or fetch(unit, at_once=at_once),
    )
    store.latency = 0.01
    store.fail("500", 3, "00001.arrow")
    store.fail("cut", 3, "00000.arrow")
    for mine, theirs in zip(Loader(local, **SETTINGS), loader, strict=True):
        assert_same_step(mine, theirs)
    assert max(coming) > 1
    assert holder._coming == 0


def test_a_loader_that_is_left_and_moved_lets_all_go(store):
    local, remote = pair(store, "plain", max_epochs=1, **BLOCK)
    expected = list(Loader(local, **SETTINGS))
    for _ in Loader(remote, **SETTINGS):
        pass
    loader = Loader(remote, **SETTINGS)
    record = unit_record(loader.datasets[0].table.holder)
    for _ in range(2):
        assert_same_step(next(iter(loader.seek(7))), expected[7])
        assert not record.own(3)
    loader.seek(0)
    assert record.own(3)
    record.free(3)
    for mine, theirs in zip(expected, loader, strict=True):
        assert_same_step(mine, theirs)


RANK = textwrap.dedent(
    """
    import hashlib, json, sys, time
    import penstock as ps
    url, cache, rank, size, budget, skip, out = sys.argv[1:]
    loader = ps.Loader(
        ps.Source(url, name="plain", shuffle="block", shuffle_runs=2, max_epochs=1), sequence_length=256,
        rows_per_step=8, seed=3, window_rows=32, data_parallel=(int(rank), int(size)), threads=1,
        cache=cache, cache_bytes=int(budget),
    )
    loader.seek(int(skip))
    peak = 0
    with open(out, "a") as file:
        for step in loader:
            rows = hashlib.blake2b(digest_size=8)
            for row in step:
                for name in {names}:
                    rows.update(bytes(getattr(row, name)))
            print(step.index, rows.hexdigest(), file=file, flush=True)
            while size == "2" and open(out[:-1] + "10"[int(rank)], "a+").seek(0, 2) < file.tell() - 100:
                time.sleep(0.001)  # ranks of a run wait for each other
            peak = max(peak, loader.datasets[0].table.holder.size)
    print(json.dumps({"peak": peak, "fetched": loader.traffic["plain"].fetched_bytes}))
    """  # noqa: E501
).replace("{names}", repr(ARRAYS))


def rank_process(store, cache, rank, size, budget, skip, out):
    words = ["s3://bucket/plain", cache, rank, size, budget, skip, out]
    return subprocess.Popen(
        [sys.executable, "-c", RANK, *map(str, words)],
        env=child_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )


def expected_lines(store, rank, size):
    local = Source(store.folder / "bucket" / "plain", name="plain", max_epochs=1, **BLOCK)
    lines = []
    for step in Loader(local, data_parallel=(rank, size), **SETTINGS):
        rows = hashlib.blake2b(digest_size=8)
        for row in step:
            for name in ARRAYS:
                rows.update(bytes(getattr(row, name)))
        lines.append(f"{step.index} {rows.hexdigest()}")
    return lines


@pytest.mark.slow
def test_two_ranks_share_a_cache_of_a_part_of_the_data(store, tmp_path):
    whole = sum(
        shard.bytes
        for shard in Loader(pair(store, "plain")[0], **SETTINGS).datasets[0].manifest.shards
    )
    budget = whole // 4  # small runs: four pages of each are shared with its neighbours
    outs = [tmp_path / f"rank-{rank}" for rank in (0, 1)]
    ranks = [
        rank_process(store, tmp_path / "shared", rank, 2, budget, 0, outs[rank]) for rank in (0, 1)
    ]
    found = [json.loads(rank.communicate(timeout=PATIENCE_SECONDS)[0]) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    for rank, out in enumerate(outs):
        assert out.read_text().splitlines() == expected_lines(store, rank, 2)
    # A rank that would wait for itself exceeds the budget, by the units of a step.
    assert max(one["peak"] for one in found) <= 1.1 * budget
    # Both need nearly every run, and most come once for both.
    assert sum(one["fetched"] for one in found) < 1.5 * whole


@pytest.mark.slow
def test_killed_in_the_middle_of_a_fetch_and_started_again(store, tmp_path):
    whole = sum(
        shard.bytes
        for shard in Loader(pair(store, "plain")[0], **SETTINGS).datasets[0].manifest.shards
    )
    out, done = tmp_path / "steps", 0
    store.latency = 0.01
    for kill_after in (3, 40, 90, None):
        process = rank_process(store, tmp_path / "cache", 0, 1, whole // 3, done, out)
        if kill_after is None:
            process.communicate(timeout=PATIENCE_SECONDS)
            assert process.returncode == 0
            break
        wait_for(
            lambda goal=kill_after: out.exists() and len(out.read_text().splitlines()) >= goal,
            process,
        )
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        lines = [line for line in out.read_text().splitlines(keepends=True) if line.endswith("\n")]
        out.write_text("".join(lines))
        done = len(lines)
    assert out.read_text().splitlines() == expected_lines(store, 0, 1)


def test_a_run_file_made_of_opened_datasets_has_urls(store):
    from penstock.use.runs.run_document import plain

    assert (
        plain(open_dataset("s3://bucket/plain"), ("data", "sources", 0, "path"), {})
        == "s3://bucket/plain"
    )
