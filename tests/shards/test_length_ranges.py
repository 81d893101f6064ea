"""Ranges of lengths: nothing is read that is not here, what comes is checked, and processes share
it.
"""

import errno
import gc
import os
import shutil
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.errors import TypingError
from shard_data import make_dataset

from makers.object_store import s3_store
from makers.processes import run_code
from penstock import Dataset, open_dataset
from penstock.core.compiled import address_of
from penstock.core.errors import CorruptionError, OutputError, StoreError
from penstock.data.shards import verify
from penstock.data.shards.copying import copy_dataset
from penstock.data.shards.format import _kernels as k
from penstock.data.shards.remote.length_ranges import JoinedRanges
from penstock.data.shards.tables.lengths import LazyNumbers, _named, for_kernel, ranges_of, runs_of

URL = "s3://bucket/web"
DOCUMENTS, RANGE = 2300, 100


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("penstock.data.stores.store.PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("penstock.data.shards.writing.finish.LAZY_DOCUMENTS", 500)
    monkeypatch.setattr("penstock.data.shards.writing.finish.RANGE_DOCUMENTS", RANGE)
    return tmp_path / "cache"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store with the dataset `web` in a bucket: 23 ranges, of lengths and of fractional weight
    sums.
    """
    pytest.importorskip("s3fs")
    (tmp_path / "store").mkdir()
    make_dataset(tmp_path / "store" / "bucket" / "web", DOCUMENTS, documents_per_shard=900)
    with s3_store(tmp_path / "store", monkeypatch) as found:
        yield found


def local_copy(store):
    return Dataset.open(store.folder / "bucket" / "web")


def file_of(store, name="lengths.u32"):
    return store.folder / "bucket" / "web" / name


def spoil(store, name, document):
    """Change a byte of a document's number in the store, with the same stamp as before."""
    path, status = file_of(store, name), file_of(store, name).stat()
    data = bytearray(path.read_bytes())
    data[8 * document] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_opening_fetches_no_lengths(store):
    dataset = open_dataset(URL)
    names = [path.rpartition("/")[2] for _, path, _ in store.log]
    assert sorted(names[:2]) == ["bucket", "manifest.json"]
    assert sorted(names[2:]) == ["batches.u64", "files.json", "range_checksums.u64"]
    for numbers in (dataset.table.lengths, dataset.table.weight_sums):
        assert isinstance(numbers, LazyNumbers)
        assert len(numbers) == DOCUMENTS
    assert repr(dataset.table.lengths) == "LazyNumbers((2300, 2), uint32, 0% here)"
    assert "documents" in dataset._repr_html_()
    store.forget()
    assert len(open_dataset(URL)) == DOCUMENTS
    assert len(store.log) == 2


def test_indices_fetch_what_they_name(store):
    local, remote = local_copy(store).table, open_dataset(URL).table
    store.forget()
    for key in (
        5,
        -1,
        (7, 1),
        slice(150, 350),
        (slice(150, 350), 0),
        slice(2290, None),
        (np.array([900, 5, 1811]), 0),
        np.array([[3, 4], [5, 1200]]),
        slice(1300, 1000, -150),
        slice(5, 5),
        [1, 2],
    ):
        np.testing.assert_array_equal(remote.lengths[key], local.lengths[key])
        if not isinstance(key, tuple):
            np.testing.assert_array_equal(remote.weight_sums[key], local.weight_sums[key])
    assert 0 < remote.lengths.ranges.here.sum() < 23
    spans = [span for _, path, span in store.log if path.endswith("lengths.u32")]
    assert len(spans) == len(set(spans))
    np.testing.assert_array_equal(np.asarray(remote.lengths), local.lengths)
    np.testing.assert_array_equal(remote.weight_sums[...], local.weight_sums)
    mask = np.arange(DOCUMENTS) % 700 == 3
    np.testing.assert_array_equal(open_dataset(URL).table.lengths[mask], local.lengths[mask])
    with pytest.raises(IndexError, match="index 2300 is out of bounds"):
        remote.lengths[DOCUMENTS]


def test_kernels_cannot_be_given_what_is_not_here(store):
    remote = open_dataset(URL).table
    with pytest.raises(AttributeError, match="ctypes"):
        address_of(remote.lengths)
    some = np.array([2200])
    with pytest.raises(TypingError, match="LazyNumbers"):
        k.wrong_length(*remote.kernel_view, remote.lengths, some)
    assert remote.lengths.ranges.here.sum() == 0
    expected = local_copy(store).table.lengths
    np.testing.assert_array_equal(for_kernel(remote.lengths, some)[2200], expected[2200])
    assert for_kernel(expected, some) is expected
    assert remote.lengths.ranges.here.tolist() == [0] * 22 + [1]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), max_size=8),
    st.integers(1, 20),
    st.integers(1, 5),
)
def test_ranges_and_runs_against_their_twins(pairs, size, most):
    begins = np.array([begin for begin, _ in pairs], np.int64)
    ends = begins + np.array([count for _, count in pairs], np.int64)
    expected = sorted(
        {document // size for begin, count in pairs for document in range(begin, begin + count)}
    )
    found = ranges_of(begins, ends, size)
    assert found.tolist() == expected
    groups = [group.tolist() for group in runs_of(found, most)]
    assert [number for group in groups for number in group] == expected
    for group in groups:
        assert 1 <= len(group) <= most
        assert group == list(range(group[0], group[0] + len(group)))
    assert len(groups) <= len(expected)


INDICES = st.one_of(
    st.integers(-12, 11),
    st.slices(12),
    st.lists(st.integers(-12, 11), min_size=1, max_size=5).map(np.array),
    st.lists(st.booleans(), min_size=12, max_size=12).map(np.array),
    st.just(Ellipsis),
)


@given(INDICES)
def test_the_documents_of_an_index_against_numpy(key):
    begins, ends = _named(key, 12)
    found = {
        document for begin, end in zip(begins, ends, strict=True) for document in range(begin, end)
    }
    assert found == set(np.arange(12)[key].ravel().tolist())


def test_large_datasets_only_have_checksums_of_ranges(tmp_path):
    small, large = make_dataset(tmp_path / "small", 500), make_dataset(tmp_path / "large", 501)
    assert "range_checksums.u64" not in small.manifest.checksums
    assert not (tmp_path / "small" / "range_checksums.u64").exists()
    assert "range_checksums.u64" in large.manifest.checksums
    assert isinstance(large.table.lengths, np.ndarray)
    assert verify(tmp_path / "large").sound
    copy_dataset(tmp_path / "large", tmp_path / "copy")
    assert open_dataset(tmp_path / "copy") == large
    assert (tmp_path / "copy" / "range_checksums.u64").is_file()


def reseal(folder, words):
    """Give a dataset other checksums of ranges, sealed."""
    from dataclasses import replace

    from penstock.data.shards.format.manifest import Manifest
    from penstock.data.stores.files import checksum

    words.tofile(folder / "range_checksums.u64")
    manifest = Manifest.load(folder)
    replace(
        manifest, checksums={**manifest.checksums, "range_checksums.u64": checksum(words)}
    ).save(folder)


@pytest.mark.parametrize("words", [[], [0], [100, 1, 2], [2**63, 5], [50, *range(46)]])
def test_checksums_of_other_ranges(store, words):
    reseal(store.folder / "bucket" / "web", np.array(words, np.uint64))
    with pytest.raises(CorruptionError, match=rf"range_checksums.u64: {len(words)}.*2,3"):
        open_dataset(URL)
    faults = verify(store.folder / "bucket" / "web").faults
    assert [fault.reason for fault in faults] == ["is not of lengths.u32 and weight_sums.f64"]


def test_checksums_that_were_damaged_here_come_again(store):
    path = open_dataset(URL).path / "range_checksums.u64"
    sound, words = np.fromfile(path, np.uint64), np.fromfile(path, np.uint64)
    words[5] ^= np.uint64(1)
    words.tofile(path)
    open_dataset(URL)
    np.testing.assert_array_equal(np.fromfile(path, np.uint64), sound)


@pytest.mark.parametrize("kind", ["500", "reset", "cut"])
def test_failures_that_pass_are_healed(store, kind):
    remote, faults = (
        open_dataset(URL),
        [store.fail(kind, 3, name) for name in ("lengths.u32", "weight_sums.f64")],
    )
    np.testing.assert_array_equal(remote.table.lengths[:], local_copy(store).table.lengths)
    assert [fault.times for fault in faults] == [0, 0]


def test_failures_that_stay_name_the_url_and_may_be_tried_again(store):
    remote, fault = open_dataset(URL), store.fail("500", 10**6, "lengths.u32")
    for _ in range(2):
        with pytest.raises(StoreError, match=r"s3://bucket/web/lengths.u32.*read, 5"):
            remote.table.lengths[7]
    assert remote.table.lengths.ranges.here.sum() == 0
    fault.times = 0
    np.testing.assert_array_equal(remote.table.lengths[:900], local_copy(store).table.lengths[:900])


@pytest.mark.parametrize("name", ["lengths.u32", "weight_sums.f64"])
def test_a_range_that_differs_from_its_checksum(store, name):
    expected = np.array(local_copy(store).table.lengths)
    spoil(store, name, 1234)
    remote = open_dataset(URL).table
    np.testing.assert_array_equal(remote.lengths[:1200], expected[:1200])
    with pytest.raises(CorruptionError, match=rf"s3://bucket/web/{name}.*1,200.*1,299"):
        remote.lengths[1250]
    # Not even the sparse file has it.
    folder = open_dataset(URL).path.parent.parent / "lengths"
    assert not np.fromfile(folder / "weight_sums.f64")[1200:1300].any()
    np.testing.assert_array_equal(remote.lengths[1300:], expected[1300:])
    spoil(store, name, 1234)
    np.testing.assert_array_equal(remote.lengths[:], expected)


def test_tables_that_were_replaced(store, cache):
    remote = open_dataset(URL).table
    assert len(remote.lengths[:200]) == 200
    shutil.copy(file_of(store), file_of(store).with_name("other"))
    os.replace(file_of(store).with_name("other"), file_of(store))
    with pytest.raises(CorruptionError, match=r"s3://bucket/web/lengths.u32"):
        remote.lengths[1000]
    with pytest.raises(CorruptionError, match=r"s3://bucket/web/lengths.u32"):
        open_dataset(URL)
    file_of(store).write_bytes(file_of(store).read_bytes()[:-8])
    shutil.rmtree(cache)
    with pytest.raises(CorruptionError, match=r"web/lengths.u32: 18392.*expected 18400"):
        open_dataset(URL)
    file_of(store).unlink()
    with pytest.raises(CorruptionError, match=r"s3://bucket/web/lengths.u32.*upload"):
        open_dataset(URL)


def test_a_full_disk_names_the_url_and_the_cure(store, monkeypatch):
    remote = open_dataset(URL)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("penstock.data.stores.unit_record.os.pwrite", full)
    with pytest.raises(OutputError, match=r"s3://bucket/web.*lengths"):
        remote.table.lengths[0]


def test_the_folder_of_the_cache_is_no_local_copy(store):
    """Its lengths are zeros where they were not fetched: as a folder, it would be a dataset of
    empty documents.
    """
    remote = open_dataset(URL)
    assert len(remote[0].tokens)
    with pytest.raises(CorruptionError, match=r"lengths.u32: the file is missing"):
        open_dataset(remote.path)


def test_a_cache_with_lengths_as_a_whole_is_used(store):
    """As earlier versions have made it."""
    remote = open_dataset(URL)
    for name in ("lengths.u32", "weight_sums.f64"):
        shutil.copy(file_of(store, name), remote.path / name)
    again = open_dataset(URL)
    assert isinstance(again.table.lengths, np.ndarray)
    assert [again[n] for n in (0, 2299)] == [local_copy(store)[n] for n in (0, 2299)]


def test_after_a_restart_of_the_machine_ranges_are_checked(store):
    table = open_dataset(URL).table
    assert len(table.lengths[:]) == DOCUMENTS
    ranges = table.lengths.ranges
    ranges._record.header["boot"] = 12345
    with open(ranges._folder / "lengths.u32", "r+b") as file:
        file.seek(8 * 1500)
        file.write(bytes(80))  # what had not reached the disk
    del table, ranges
    gc.collect()
    store.forget()
    np.testing.assert_array_equal(
        open_dataset(URL).table.lengths[:], local_copy(store).table.lengths
    )
    assert [span for _, path, span in store.log if path.endswith("lengths.u32")] == [
        "bytes=12000-12799"
    ]


def test_a_killed_process_leaves_nothing_that_counts(store):
    """Killed between the two tables of a range, then started again."""
    fault = store.fail("slow", 1, "weight_sums.f64")
    code = """
        import os, signal, sys, threading, time, penstock as ps
        table = ps.open_dataset(sys.argv[1]).table
        table.lengths.ranges.want(*__import__("numpy").array([[300], [400]]))
        path = table.lengths.ranges._folder / "lengths.u32"
        while not any(path.read_bytes()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run_code(code, URL).returncode == -9
    fault.times = 0
    fault.gate.set()
    store.forget()
    table, local = open_dataset(URL).table, local_copy(store).table
    np.testing.assert_array_equal(table.weight_sums[:], local.weight_sums)
    np.testing.assert_array_equal(table.lengths[:], local.lengths)
    assert store.count("lengths.u32") == 1


def test_processes_share_what_comes(store, monkeypatch):
    """What one brings the other does not, also while it is on its way."""
    code = """
        import sys, numpy as np, penstock as ps
        table = ps.open_dataset(sys.argv[1]).table
        print(int(np.array(table.lengths[:]).sum()), int(table.weight_sums[:].sum() * 4))
    """
    slow = store.fail("slow", 1, "lengths.u32")
    outputs = []
    others = [
        threading.Thread(target=lambda: outputs.append(run_code(code, URL, check=True).stdout))
        for _ in range(2)
    ]
    for other in others:
        other.start()
    while store.count("lengths.u32") == 0:
        others[0].join(0.01)
    slow.times = 0
    slow.gate.set()
    for other in others:
        other.join()
    local = local_copy(store).table
    assert outputs == [f"{int(local.lengths.sum())} {int(local.weight_sums.sum() * 4)}\n"] * 2
    for name in ("lengths.u32", "weight_sums.f64"):
        assert store.count(name) == 1
    store.forget()
    # Ranges that were brought by others are found, those of this process as well as a later one's.
    assert open_dataset(URL).table.lengths.ranges.has(0, DOCUMENTS)
    np.testing.assert_array_equal(open_dataset(URL).table.lengths[:], local.lengths)
    assert store.count("lengths.u32") == 0


def test_a_range_that_another_is_bringing_is_waited_for(store):
    mine, theirs = (open_dataset(URL).table.lengths.ranges for _ in range(2))
    assert theirs._record.own(3)
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(mine.need(np.array([200]), np.array([600])))
    )
    waiting.start()
    while mine.here.sum() == 0:
        waiting.join(0.01)
        mine._adopt(np.arange(23))
    assert not found
    theirs._record.free(3)
    waiting.join()
    assert found == [None]
    assert mine.here[2:6].tolist() == [1, 1, 1, 1]


def test_what_is_only_wanted_waits_and_is_left_at_the_end(store):
    """What is needed goes first; when the interpreter ends, what has not begun never begins."""
    store.latency = 0.2
    code = """
        import sys, numpy as np, penstock as ps, penstock.data.shards.remote.length_ranges as ranges
        ranges.THREADS, ranges.THREADS_AHEAD, ranges.REQUEST_BYTES = 4, 2, 800
        table = ps.open_dataset(sys.argv[1]).table
        table.lengths.ranges.want(np.array([0]), np.array([2300]))
        print(table.lengths[2250].tolist())
    """
    expected = local_copy(store).table.lengths[2250].tolist()
    assert run_code(code, URL, check=True).stdout == f"{expected}\n"
    asked = [span for _, path, span in store.log if path.endswith("lengths.u32")]
    assert "bytes=17600-18399" in asked[:4]
    assert len(asked) < 12


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_waits_for_nothing_of_its_parent(store):
    code = """
        import os, sys, warnings, numpy as np, penstock as ps
        warnings.simplefilter("ignore")
        table = ps.open_dataset(sys.argv[1]).table
        ranges = table.lengths.ranges
        ranges._coming[5], ranges._running = 1, ranges.size  # as if the parent was bringing it, and had no room
        ranges._changed.acquire()
        if (child := os.fork()) == 0:
            ranges._adopt(np.arange(4))
            os._exit(10 + int(ranges._coming.any()) + 2 * ranges._running)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), ranges._coming[5])
    """  # noqa: E501
    assert run_code(code, URL, check=True).stdout == "10 1\n"


def test_large_requests_are_divided_and_shown(store, monkeypatch, capsys):
    monkeypatch.setattr("penstock.data.shards.remote.length_ranges.REQUEST_BYTES", 8 * 500)
    monkeypatch.setattr("penstock.data.shards.remote.length_ranges.SHOWN_BYTES", 8 * 4000)
    remote = open_dataset(URL)
    assert len(remote.table.lengths[:]) == DOCUMENTS
    assert store.count("lengths.u32") == 5
    assert "fetching lengths of s3://bucket/web: 100%" in capsys.readouterr().err
    assert len(open_dataset(URL).table.lengths[:]) == DOCUMENTS
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("fractional", [False, True])
def test_joined_numbers_are_copied_in_ranges(monkeypatch, fractional):
    monkeypatch.setattr("penstock.data.shards.remote.length_ranges.RANGE_DOCUMENTS", 7)
    generator = np.random.default_rng(0)
    sizes = (5, 1, 30, 3)
    lengths = [generator.integers(1, 99, (size, 2)).astype(np.uint32) for size in sizes]
    sums = [generator.random(size) if fractional and size > 4 else None for size in sizes]
    joined, joined_sums = np.zeros((39, 2), np.uint32), np.zeros(39) if fractional else None
    ranges = JoinedRanges(list(zip(lengths, sums, strict=True)), joined, joined_sums)
    ranges.need(np.array([12, 36]), np.array([13, 36]))
    assert ranges.here.tolist() == [0, 1, 0, 0, 0, 0]
    np.testing.assert_array_equal(joined[7:14], np.concatenate(lengths)[7:14])
    assert not joined[:7].any()
    ranges.need(np.array([0, 30]), np.array([3, 39]))
    assert ranges.here.tolist() == [1, 1, 0, 0, 1, 1]
    ranges.need(np.array([0]), np.array([39]))
    np.testing.assert_array_equal(joined, np.concatenate(lengths))
    if fractional:
        expected = [
            one[:, 1] if sum_ is None else sum_ for one, sum_ in zip(lengths, sums, strict=True)
        ]
        np.testing.assert_array_equal(joined_sums, np.concatenate(expected))
