"""The loader's promises: exact resume, any number of ranks, clean threads, errors in their
place.
"""

import base64
import gc
import json
import os
import resource
import shutil
import threading
from itertools import islice

import numpy as np
import pytest

from contracts import assert_exact_resume, assert_ranks_share_steps, assert_same_step, tokens_of
from makers.datasets import tokenizer_info
from makers.processes import run_code
from patience import wait_for
from penstock import (
    DataParallel,
    InputRequirements,
    Loader,
    Mixture,
    ShareChange,
    Source,
    write_dataset,
)
from penstock.core.errors import (
    ConfigError,
    CorruptionError,
    DistributedError,
    FormatError,
    StateError,
)
from penstock.plan.packing import PACKINGS


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two datasets, one with loss weights."""
    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)

    def documents(count):
        return [
            generator.integers(0, 900, int(n))
            for n in np.clip(np.exp(generator.normal(3.5, 1, count)), 1, 500)
        ]

    web, chat = documents(150), documents(40)
    spans = [[(len(d) // 2, len(d), 0.5)] if len(d) > 1 else [] for d in chat]
    return write_dataset(folder / "web", web), write_dataset(folder / "chat", chat, spans=spans)


def mixture(data, max_epochs=None):
    return Mixture(
        [Source(data[0], 0.7, max_epochs=max_epochs), Source(data[1], 0.3, max_epochs=max_epochs)],
        [ShareChange(step=4, shares={"chat": 0.9})],
    )


def build(data, *, max_epochs=None, **settings):
    defaults = {
        "sequence_length": 128,
        "rows_per_step": 8,
        "seed": 3,
        "window_rows": 32,
        "threads": 0,
    }
    return Loader(mixture(data, max_epochs), **{**defaults, **settings})


@pytest.mark.parametrize("packing", PACKINGS)
def test_resume_is_exact_at_every_step(data, packing):
    """Over epochs, a blend, a change of shares, split documents and a finite end."""
    steps = assert_exact_resume(lambda: build(data, packing=packing, max_epochs=2), 60)
    assert len(steps) < 60


def test_resume_is_exact_with_threads_and_endless_sources(data):
    assert_exact_resume(lambda: build(data, threads=2, prefetch=3), 12)


def test_resuming_again_and_again(data):
    whole = list(islice(build(data), 9))
    state = build(data).state_dict()
    for expected in whole:
        loader = build(data, threads=1)
        loader.load_state_dict(state)
        (step,) = islice(loader, 1)
        assert_same_step(step, expected)
        state = json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_ranks_share_every_step(data, packing):
    assert_ranks_share_steps(
        lambda rank: build(data, packing=packing, data_parallel=rank, max_epochs=2),
        [1, 2, 4, 8],
        100,
    )


def test_the_number_of_ranks_may_change_at_a_restore(data):
    whole = list(islice(build(data), 10))
    for size in (2, 4):
        ranks = [build(data, data_parallel=(rank, size)) for rank in range(size)]
        for rank in ranks:
            rank.load_state_dict(whole[4].resume_state)
        for expected, parts in zip(
            whole[5:], zip(*(islice(rank, 5) for rank in ranks), strict=True), strict=True
        ):
            rows = [row for part in parts for row in part]
            for mine, theirs in zip(rows, expected, strict=True):
                np.testing.assert_array_equal(mine.targets, theirs.targets)


def test_threads_change_nothing(data):
    plain = list(islice(build(data), 15))
    for threads, prefetch in ((1, 1), (3, 4)):
        for mine, theirs in zip(
            islice(build(data, threads=threads, prefetch=prefetch), 15), plain, strict=True
        ):
            assert_same_step(mine, theirs)


def test_every_document_once_an_epoch_over_all_ranks(data):
    ranks = [build(data, data_parallel=(rank, 4), max_epochs=1) for rank in range(4)]
    steps = [list(rank) for rank in ranks]
    total = sum(int(d.table.lengths[:, 0].sum()) for d in data)
    assert sum(tokens_of(part) for part in steps) == total
    assert len({len(part) for part in steps}) == 1


def test_the_same_iterator_place_after_a_break(data):
    loader, plain = build(data, threads=2), list(islice(build(data), 6))
    first = list(islice(loader, 3))
    second = list(islice(loader, 3))
    for mine, theirs in zip(first + second, plain, strict=True):
        assert_same_step(mine, theirs)


@pytest.mark.parametrize("threads", [0, 2])
def test_seek(data, threads):
    plain = list(islice(build(data), 30))
    loader = build(data, threads=threads)
    for step in (20, 3, 0, 29, 12):
        (found,) = islice(loader.seek(step), 1)
        assert_same_step(found, plain[step])
    finite = build(data, max_epochs=1)
    with pytest.raises(ConfigError, match=r"cannot.*step.*500.*sources"):
        finite.seek(500)


def test_moving_a_loader_ends_its_old_iterator(data):
    loader = build(data, threads=1)
    iterator = iter(loader)
    next(iterator)
    loader.seek(5)
    with pytest.raises(StateError, match="moved or iterated again"):
        list(islice(iterator, 10))
    (step,) = islice(loader, 1)
    assert step.index == 5


@pytest.mark.parametrize("threads", [0, 2])
def test_only_the_newest_iterator_goes_on(data, threads):
    loader = build(data, threads=threads)
    old = iter(loader)
    next(old)
    new = iter(loader)
    assert next(new).index == 1
    with pytest.raises(StateError, match="moved or iterated again"):
        next(old)
    assert next(new).index == 2


def our_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("penstock-")]


def test_no_thread_outlives_its_iterator(data):
    for _ in range(3):
        list(islice(build(data, threads=3, prefetch=4), 2))
    gc.collect()
    wait_for(lambda: our_threads() == [])


def test_iterators_in_cycles_may_be_collected_in_any_thread(data):
    """The collector may close an abandoned iterator from inside one of our own threads; nothing may
    wait there.
    """

    def abandon():
        iterator = iter(build(data, threads=2, prefetch=4))
        next(iterator)
        cycle = [iterator]
        cycle.append(cycle)

    threshold = gc.get_threshold()
    gc.set_threshold(20, 2, 2)
    try:
        for _ in range(40):
            abandon()
    finally:
        gc.set_threshold(*threshold)


def test_an_iterator_held_at_exit_ends_quietly(data, tmp_path):
    script = (
        "import sys, penstock as ps\nloader = ps.Loader(sys.argv[1], sequence_length=128, "
        "rows_per_step=4, prefetch=8, threads=3)\nsteps = iter(loader); next(steps)\n"
    )
    found = run_code(script, data[0].path)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_an_iterator_does_not_survive_a_fork(data):
    iterator = iter(build(data, threads=1))
    next(iterator)
    child = os.fork()
    if child == 0:
        try:
            next(iterator)
        except StateError as error:
            os._exit(0 if "before the process forked" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_error_in_a_thread_reaches_the_caller(tmp_path):
    write_dataset(tmp_path / "d", [[7] * 50 for _ in range(200)])
    (shard,) = (tmp_path / "d").glob("*.arrow")
    content = bytearray(shard.read_bytes())
    place = content.index(bytes([7, 0] * 5000)) + 8000
    content[place] ^= 4
    shard.write_bytes(content)
    loader = Loader(
        Source(str(tmp_path / "d"), max_epochs=1), sequence_length=64, rows_per_step=4, threads=2
    )
    good = []
    with pytest.raises(CorruptionError, match="document 80"):
        good.extend(loader)
    assert loader.step == len(good)


def test_which_setting_of_a_source_differs_is_said(data):
    def state_of(**options):
        return Loader(Source(data[0], **options), sequence_length=64, rows_per_step=2)

    state = next(iter(state_of(name="c"))).resume_state
    for options, told in [
        (
            {"name": "other"},
            r"""source 0 \('other'\) has another name, .* \(the name, which was 'c': name="c" """,
        ),
        ({"name": "c", "share": 2.0}, r"source 0 \('c'\) .* \(share\)\."),
        ({"name": "c", "slice": (0, 0.5)}, r"\(slice\)\."),
        ({"name": "c", "shuffle": "none"}, r"\(order\)\."),
        (
            {"name": "d", "max_epochs": 3},
            r"""\(the name, which was 'c': name="c" gives it back and limit\)\.""",
        ),
    ]:
        with pytest.raises(StateError, match=told):
            state_of(**options).load_state_dict(state)
    older = {
        **state,
        "made_from": {name: value for name, value in state["made_from"].items() if name != "named"},
    }
    state_of(name="c").load_state_dict(older)
    with pytest.raises(StateError, match=r"share.*objective"):
        state_of(name="d").load_state_dict(older)
    for damaged in ("x", "", base64.b85encode(b"abc").decode(), 3):
        broken = {**state, "made_from": {**state["made_from"], "named": damaged}}
        state_of(name="c").load_state_dict(broken)


def test_states_of_earlier_versions_take_a_limit_of_epochs(data):
    """They have no names of sources, which decide nothing."""

    def loader(epochs):
        return Loader(
            Source(data[0], name="c", max_epochs=epochs), sequence_length=64, rows_per_step=2
        )

    state = next(iter(loader(None))).resume_state
    made_from = {name: value for name, value in state["made_from"].items() if name != "named"}
    for epochs in (None, 3):
        loader(epochs).load_state_dict({**state, "made_from": made_from})


def test_states_that_do_not_fit_are_refused(data, tmp_path):
    state = next(iter(build(data))).resume_state
    with pytest.raises(StateError, match="sequence_length was 128, is 256"):
        build(data, sequence_length=256).load_state_dict(state)
    with pytest.raises(StateError, match="seed was 3, is 4"):
        build(data, seed=4).load_state_dict(state)
    other = write_dataset(tmp_path / "chat", [[1, 2, 3]])
    with pytest.raises(StateError, match=r"source.*1.*\('chat'\).*documents"):
        build((data[0], other)).load_state_dict(state)
    mixed = Mixture([Source(data[0], 0.6), Source(data[1], 0.3)], mixture(data).changes)
    with pytest.raises(StateError, match=r"source.*0.*\('web'\).*share"):
        Loader(mixed, sequence_length=128, rows_per_step=8, seed=3, window_rows=32).load_state_dict(
            state
        )
    unchanging = Mixture(mixture(data).sources)
    with pytest.raises(StateError, match="the changes of shares differ"):
        Loader(
            unchanging, sequence_length=128, rows_per_step=8, seed=3, window_rows=32
        ).load_state_dict(state)
    for broken in (
        {},
        {**state, "place": "x"},
        {**state, "place": "0"},
        {**state, "format": 9},
        None,
        {**state, "made_from": None},
    ):
        with pytest.raises(StateError, match=r"not the state of a loader|version 9"):
            build(data).load_state_dict(broken)


def test_a_state_does_not_mind_how_numbers_are_written(data):
    def loader(share, epochs, length):
        source = Source(data[0], share, max_epochs=epochs)
        return Loader(
            source, sequence_length=length, rows_per_step=np.int64(8), seed=np.int64(3), threads=0
        )

    state = json.loads(json.dumps(next(iter(loader(1, 2, 128))).resume_state))
    loader(1.0, 2.0, np.int64(128)).load_state_dict(state)


def test_the_end_of_a_pass_is_a_place(data):
    loader = build(data, max_epochs=1)
    steps = len(list(loader))
    assert list(loader.seek(steps)) == []
    with pytest.raises(ConfigError, match="steps are numbered from 0, got -1"):
        loader.explain(-1)


def test_a_capacity_bounds_the_documents_of_rows_on_all_ranks_alike(tmp_path):
    """Two entries fewer than there are, for the end of the last document and that of the
    padding.
    """
    dataset = write_dataset(tmp_path / "d", [[1] * 5] * 20 + [[1]] * 200)
    source = Source(dataset, shuffle="none", max_epochs=1)
    need = InputRequirements(cu_seqlens=True, cu_seqlens_capacity=8)
    counts = []
    for rank in range(2):
        loader = Loader(
            source, sequence_length=20, rows_per_step=8, data_parallel=(rank, 2), requirements=need
        )
        rows = [row for step in loader for row in step]
        counts += [row.num_documents for row in rows]
        assert all(row.cu_seqlens.shape == (8,) for row in rows)
    assert (max(counts), sum(counts)) == (6, 220)
    small = InputRequirements(cu_seqlens=True, cu_seqlens_capacity=2)
    with pytest.raises(ConfigError, match=r"cu_seqlens_capacity.*2.*needs 3"):
        Loader(source, sequence_length=20, rows_per_step=8, requirements=small)


def test_a_state_is_small(data):
    for count, most in ((2, 1000), (100, 4000)):
        sources = [Source(data[0], 1 / (i + 1), f"source number {i}") for i in range(count)]
        loader = Loader(Mixture(sources), sequence_length=128, rows_per_step=64, seed=3, threads=0)
        for step in islice(loader, 120):
            assert len(json.dumps(step.resume_state)) <= most


def test_a_finite_pass_gives_all_ranks_as_many_rows(data):
    lengths = {len(list(build(data, data_parallel=(r, 8), max_epochs=1))[-1]) for r in range(8)}
    assert len(lengths) == 1
    empty = [
        row
        for r in range(8)
        for row in list(build(data, data_parallel=(r, 8), max_epochs=1))[-1]
        if not row.num_tokens
    ]
    for row in empty:
        assert (row.targets == -100).all()
        assert row.cu_seqlens.tolist() == [0, 128]


def test_a_rank_at_its_default_is_refused(data, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DistributedError, match=r"rank 1.*2.*data_parallel"):
        build(data)
    assert build(data, data_parallel=DataParallel.from_env()).data_parallel == DataParallel(1, 2)
    monkeypatch.delenv("RANK")
    with pytest.raises(DistributedError, match="set both"):
        DataParallel.from_env()


def test_sources_of_different_tokenizers_are_refused(tmp_path):
    def info(name):
        return tokenizer_info(name, vocab_size=50)

    ours = write_dataset(tmp_path / "ours", [[1, 2, 3]], tokenizer=info("ours"))
    theirs = write_dataset(tmp_path / "theirs", [[1, 2, 3]], tokenizer=info("gpt2"))
    nameless = write_dataset(tmp_path / "nameless", [[1, 2, 3]])
    with pytest.raises(ConfigError, match=r"'theirs'.*'gpt2'.*'ours'"):
        Loader([ours, theirs], sequence_length=8, rows_per_step=1)
    Loader([ours, nameless], sequence_length=8, rows_per_step=1)


def test_a_mixture_takes_what_a_loader_takes(data):
    assert [source.name for source in Mixture(Source(data[0])).sources] == ["web"]
    assert [source.name for source in Mixture([str(data[0].path), data[1]]).sources] == [
        "web",
        "chat",
    ]


def test_a_device_mesh_says_the_place(data):
    class Mesh:
        ndim, mesh_dim_names = 1, None

        def get_coordinate(self):
            return [3]

        def size(self):
            return 4

    assert build(data, data_parallel=Mesh()).data_parallel == DataParallel(3, 4)
    with pytest.raises(ConfigError, match="expected DataParallel"):
        build(data, data_parallel="3/4")


def test_a_world_that_does_not_divide_the_step_is_refused(data):
    with pytest.raises(ConfigError, match=r"8.*divide.*among.*3.*ranks"):
        build(data, data_parallel=(0, 3))
    with pytest.raises(ConfigError, match="rank must be 0 … 1, got 2 of 2"):
        build(data, data_parallel=(2, 2))


def test_explain_names_files_and_lines(data):
    loader = build(data)
    step = list(islice(loader, 4))[-1]
    for number, row in enumerate(step):
        pieces = loader.explain(3, number)
        assert sum(piece.num_tokens for piece in pieces) == row.num_tokens
        for piece, source in zip(pieces, row.source_ids, strict=True):
            dataset = data[source]
            stored = dataset[piece.document].tokens[
                piece.first_token : piece.first_token + piece.num_tokens
            ]
            np.testing.assert_array_equal(
                row.tokens[piece.begin : piece.begin + piece.num_tokens], stored
            )
            assert piece.origin.line == piece.document
            assert piece.source == dataset.name
    assert len(loader.explain(3)) == sum(len(row.source_ids) for row in step)
    assert loader.step == 4


def test_memory_does_not_grow(data):
    loader = build(data, threads=1)
    iterator = iter(loader)
    for _ in islice(iterator, 300):
        pass
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in islice(iterator, 1250):
        pass
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8_000


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_killed_while_iterating_nothing_is_lost(data, tmp_path):
    """A child is killed at some moment; what its last saved state gives is what comes after its
    last saved step.
    """
    plain = list(islice(build(data), 200))
    for moment in (3, 11, 40):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                for step in build(data):
                    os.write(writer, json.dumps(step.resume_state).encode() + b"\n")
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as lines:
            saved = [json.loads(next(lines)) for _ in range(moment)][-1]
            os.kill(child, 9)
            os.waitpid(child, 0)
        resumed = build(data)
        resumed.load_state_dict(saved)
        for mine, theirs in zip(islice(resumed, 3), plain[saved["step"] :], strict=False):
            assert_same_step(mine, theirs)


def test_threads_that_cannot_be_started_leave_nothing_behind(data, monkeypatch):
    """Those that ran would plan steps for nobody, and the next iterator would miss them."""

    def build():
        return Loader(
            Source(data[0], max_epochs=2, name="a"), sequence_length=64, rows_per_step=2, threads=3
        )

    due, started, start = list(build()), [], threading.Thread.start

    def refuse_the_third(thread):
        started.append(thread)
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    loader = build()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_the_third)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            next(iter(loader))
    assert not any(thread.is_alive() for thread in started)
    for found, expected in zip(loader, due, strict=True):
        assert_same_step(found, expected)


def test_opening_many_sources_pauses_the_collector(data, tmp_path):
    """It would look at all that was opened before again and again."""
    paths = [tmp_path / f"{i}" for i in range(40)]
    for path in paths:
        shutil.copytree(data[0].path, path)
    collections, before = [], gc.get_threshold()
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    gc.set_threshold(50)
    try:
        collections.clear()
        Loader(paths, sequence_length=64, rows_per_step=4)
        # One before it pauses and one after, each with its start and stop.
        assert len(collections) <= 8
        with pytest.raises(FormatError, match="nothing there"):
            Loader([*paths, tmp_path / "missing"], sequence_length=64, rows_per_step=4)
        assert gc.isenabled()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.pop()
