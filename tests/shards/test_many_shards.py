"""More shards than a process may map: they are mapped while they are read, and the least recently
used ones leave.
"""

import ctypes
import errno
import gc
import pickle
import resource
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from shard_data import TOKENIZER, make_dataset, make_documents

from makers.many_shards import many_shards
from makers.object_store import s3_store
from makers.processes import run_code
from makers.trees import tree_dataset
from penstock import open_dataset, write_dataset
from penstock.core.errors import ConfigError, CorruptionError
from penstock.data.shards import verify
from penstock.data.shards.origins import read_origins
from penstock.data.shards.tables import mappings
from penstock.data.shards.tables.mappings import MappedShards

MOST = 8


@pytest.fixture
def few(monkeypatch):
    """A system with few mappings: eight shards may be mapped on demand."""
    monkeypatch.setattr(mappings, "mapping_limit", lambda: MOST * mappings._SOME_SHARE)
    monkeypatch.setattr(mappings, "_ALL_SHARE", 10**9)


@pytest.fixture
def many(tmp_path):
    """Folder of a dataset of 60 shards, and its documents."""
    documents = make_documents(600, seed=4, longest=90)
    write_dataset(tmp_path / "many", documents, tokenizer=TOKENIZER, documents_per_shard=10)
    return tmp_path / "many", documents


def mapped_now(folder):
    with open("/proc/self/maps") as lines:
        return sum(f" {folder}/" in line and ".arrow" in line for line in lines)


def test_documents_are_right_and_few_shards_are_mapped(few, many):
    folder, documents = many
    dataset = open_dataset(folder)
    assert isinstance(dataset.table.mappings, MappedShards)
    assert mapped_now(folder) == 0
    for number in np.random.default_rng(0).permutation(600).tolist():
        np.testing.assert_array_equal(dataset[number].tokens, documents[number])
        assert mapped_now(folder) <= MOST
    whole = dataset.table.read(0, 600)
    np.testing.assert_array_equal(whole.values, np.concatenate(documents))
    dataset.table.check_lengths(np.arange(600))
    files, lines = read_origins(dataset)
    assert len(files) == len(lines) == 600
    assert verify(folder).sound
    assert mapped_now(folder) <= MOST
    assert pickle.loads(pickle.dumps(dataset))[7] == dataset[7]


def test_what_is_held_stays_and_what_was_used_last_leaves_last(few, many):
    folder, _ = many
    table = open_dataset(folder).table
    shards = table.mappings
    with shards.held(np.array([3])):
        before = shards[3].copy()
        for number in range(20, 60):
            with shards.held(np.array([number])):
                pass
        np.testing.assert_array_equal(shards[3], before)
        assert sorted(shards._files) == [3, *range(53, 60)]
    with shards.held(np.array([53])):
        pass
    with shards.held(np.arange(10, 15)):
        assert {53, 3} <= set(shards._files)
        assert 54 not in shards._files


def test_more_than_there_is_room_for_may_be_held_at_once(few, many):
    folder, documents = many
    table = open_dataset(folder).table
    with table.held(np.arange(600), (0,)):
        assert mapped_now(folder) == 60
        np.testing.assert_array_equal(table.read(0, 600).values, np.concatenate(documents))
    assert mapped_now(folder) <= MOST


def test_who_may_wait_waits_for_room(few, many):
    shards = open_dataset(many[0]).table.mappings
    shards.want(np.arange(MOST))
    came = threading.Event()

    def want():
        shards.want(np.array([50]), lambda: True)
        came.set()

    thread = threading.Thread(target=want)
    thread.start()
    assert not came.wait(0.3)
    shards.release(np.arange(4))
    thread.join()
    assert came.is_set()
    shards.release(np.array([50]))
    shards.want(np.array([51, 52, 53, 54, 55]), lambda: False)
    shards.release(np.array([51, 52, 53, 54, 55]))
    shards.release(np.arange(4, MOST))


def test_threads_that_read_at_random(few, many):
    folder, documents = many
    dataset, right = open_dataset(folder), []

    def read(seed):
        numbers = np.random.default_rng(seed).integers(0, 600, 300).tolist()
        right.append(
            all(np.array_equal(dataset.table.read(n, n + 1).values, documents[n]) for n in numbers)
        )

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert right == [True] * 4
    assert mappings.pool.held == 0


def test_datasets_share_the_room_and_leave_it(few, tmp_path, many):
    folder, _ = many
    write_dataset(
        tmp_path / "other",
        make_documents(300, longest=90),
        tokenizer=TOKENIZER,
        documents_per_shard=5,
    )
    joined, alone = open_dataset([folder, tmp_path / "other"]), open_dataset(tmp_path / "other")
    for number in range(0, 900, 7):
        part, local = joined.part_of(number)
        assert joined[number] == part[local]
        np.testing.assert_array_equal(
            joined.table.read(number, number + 1).values, part[local].tokens
        )
        assert alone[number % 300].tokens is not None
    assert mapped_now(tmp_path / "other") + mapped_now(folder) <= MOST
    del joined, alone, part
    gc.collect()
    assert mapped_now(tmp_path / "other") + mapped_now(folder) == 0
    assert open_dataset(folder)[3].tokens is not None
    assert len(mappings.pool.datasets) == 1
    assert len(mappings.pool.idle) == 1


def test_trees_columns_and_weights(few, tmp_path, monkeypatch):
    paths = tmp_path / "trees"
    tree_dataset(paths)
    few_shards = open_dataset(paths)
    assert isinstance(few_shards.table.mappings, MappedShards)
    spans = make_dataset(tmp_path / "spans", 80, documents_per_shard=3)
    monkeypatch.setattr(mappings, "mapping_limit", lambda: 10**6)
    monkeypatch.setattr(mappings, "_ALL_SHARE", 2)
    assert [few_shards[n] for n in range(40)] == [open_dataset(paths)[n] for n in range(40)]
    assert [spans[n] for n in range(80)] == [open_dataset(tmp_path / "spans")[n] for n in range(80)]


def test_datasets_of_hugging_face_say_why_not(few, many):
    pytest.importorskip("datasets")
    with pytest.raises(ConfigError, match=r"60.*max_map_count"):
        open_dataset(many[0]).to_datasets()


@pytest.mark.parametrize("change", ["replaced", "overwritten", "removed", "cut"])
def test_a_shard_that_changed_since_the_opening(few, many, change):
    folder, documents = many
    dataset, shard = open_dataset(folder), folder / "00030.arrow"
    content = shard.read_bytes()
    if change in ("replaced", "removed"):
        shard.unlink()
    if change != "removed":
        shard.write_bytes(content[: -1 if change == "cut" else None])
    np.testing.assert_array_equal(dataset[299].tokens, documents[299])
    message = (
        "No such file"
        if change == "removed"
        else r"was changed or replaced since .* too many shards \(60\)"
    )
    for _ in range(2):
        with pytest.raises(CorruptionError, match=rf"00030.arrow: .*{message}"):
            dataset[300]
    np.testing.assert_array_equal(dataset[310].tokens, documents[310])


def test_where_the_system_refuses_unused_ones_leave_and_then_it_says_which_limit(
    few, many, monkeypatch
):
    folder, documents = many
    dataset = open_dataset(folder)
    assert dataset[0].tokens is not None
    real, allowed = mappings._map, 2

    def map_some(address, size, handle):
        if handle is not None and len(dataset.table.mappings._files) >= allowed:
            ctypes.set_errno(errno.ENOMEM)
            return None
        return real(address, size, handle)

    monkeypatch.setattr(mappings, "_map", map_some)
    for number in range(0, 600, 10):
        np.testing.assert_array_equal(dataset[number].tokens, documents[number])
    message = (
        r"one of 60 shards: Cannot allocate memory; .*\(vm.max_map_count\).*sysctl -w "
        r"vm.max_map_count=\d+"
    )
    with pytest.raises(ConfigError, match=message), dataset.table.held(np.arange(0, 30), (0,)):
        pass
    np.testing.assert_array_equal(dataset[55].tokens, documents[55])
    assert mappings.pool.held == 0


def test_mappings_of_others_leave_little_room(tmp_path):
    """With the real limit: nearly all mappings of the process are taken when the dataset is
    opened.
    """
    many_shards(tmp_path / "many", 3000, [[1, 2, 3], [4, 5]])
    code = """
        import ctypes, sys, penstock as ps
        from penstock.core.system import mapping_limit
        m = ctypes.CDLL(None).mmap
        m.restype, m.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        assert ps.open_dataset(sys.argv[1])[5].tokens.tolist() == [4, 5]  # all kernels are loaded
        for i in range(mapping_limit() - len(open("/proc/self/maps").readlines()) - 1000):
            m(None, 4096, i % 2, 0x22, -1, 0)
        dataset = ps.open_dataset(sys.argv[1])
        print([dataset[i].tokens.tolist() for i in range(0, 6000, 1501)])
    """  # noqa: E501
    if mappings.mapping_limit() > 200_000:
        pytest.skip("the limit of mappings was raised here")
    found = run_code(code, tmp_path / "many", check=True)
    assert found.stdout == "[[1, 2, 3], [4, 5], [1, 2, 3], [4, 5]]\n"


@contextmanager
def no_more_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("opened", [False, True])
def test_too_many_open_files_are_no_damage(few, many, opened):
    dataset = open_dataset(many[0])
    what = ".*one of 60 shards.*" if opened else ".*"
    with (
        no_more_files(),
        pytest.raises(ConfigError, match=rf"{what}the.*limit.*3.*\(ulimit"),
    ):
        dataset[100] if opened else open_dataset(many[0])
    assert dataset[100].tokens is not None


def test_a_store(few, many, tmp_path, monkeypatch):
    pytest.importorskip("s3fs")
    folder, documents = many
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "store" / "bucket").mkdir(parents=True)
    folder.rename(tmp_path / "store" / "bucket" / "many")
    with s3_store(tmp_path / "store", monkeypatch):
        for _ in range(2):
            dataset = open_dataset("s3://bucket/many")
            assert isinstance(dataset.table.mappings, MappedShards)
            for number in range(0, 600, 11):
                np.testing.assert_array_equal(dataset[number].tokens, documents[number])
            np.testing.assert_array_equal(
                dataset.table.read(0, 600).values, np.concatenate(documents)
            )
            assert mapped_now(dataset.path) <= MOST
            assert mappings.pool.held == 0
