"""Units of remote datasets: what is here is what is in the store, and pages of what went are
holes.
"""

import os
from itertools import pairwise
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_data import TOKENIZER, VOCAB, make_documents, make_spans

from makers.datasets import unit_record
from penstock import Dataset, write_dataset
from penstock.core.ragged import Ragged
from penstock.data.shards import ShardLayout, ShardWriter, finish_dataset
from penstock.data.shards.format.layout import Column
from penstock.data.shards.remote.residency import Residency
from penstock.data.shards.remote.units import PAGE, Range, joined_requests, without
from penstock.data.shards.tables.holder import EXTRAS, ORIGINS, SPANS, TOKENS
from penstock.data.stores.unit_record import ABSENT, PRESENT, UnitRecord

KINDS = (TOKENS, SPANS, ORIGINS, EXTRAS)


def make(
    folder: Path, count: int, per_shard: int, longest: int, spans: bool, text: bool, columns: bool
) -> Dataset:
    """A dataset with any of spans, texts and columns."""
    layout = ShardLayout(
        vocab_size=VOCAB, has_spans=spans, has_text=text,
        columns=(Column(name="score", dtype="float32"),) if columns else (),
    )  # fmt: skip
    documents = make_documents(count, longest=longest)
    folder.mkdir()
    shards = []
    for begin in range(0, count, per_shard):
        part = documents[begin : begin + per_shard]
        with ShardWriter(folder, f"{len(shards):05}.arrow", layout) as writer:
            writer.write(
                Ragged.from_rows(part, np.int64),
                files=0,
                lines=np.arange(begin, begin + len(part)),
                spans=None if not spans else _span_block(part),
                texts=pa.array(
                    [f"text {n} " * (n % 7) for n in range(len(part))], pa.large_string()
                )
                if text
                else None,
                columns={"score": Ragged.from_rows([one / 7 for one in part], np.float32)}
                if columns
                else {},
            )
            shards.append(writer.finish())
    finish_dataset(
        folder, shards=shards, layout=layout, tokenizer=TOKENIZER, files=["a"], configuration="c"
    )
    return Dataset.open(folder)


def _span_block(part):
    from penstock.data.shards.writing.blocks import spans_of

    return spans_of(Ragged.from_rows([np.arange(len(one)) % 3 == 1 for one in part], np.float32))


def put_in_memory(folder: Path, name: str) -> str:
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists(f"/{name}"):
        filesystem.rm(f"/{name}", recursive=True)
    filesystem.put(str(folder), f"/{name}", recursive=True)
    return f"memory://{name}"


def ranges_of(holder: Residency, unit: int) -> list[Range]:
    parts = holder.units.unit(unit)
    made = [Range(one.shard, one.begin, one.begin + len(one.content)) for one in parts.made]
    return [*parts.fetched, *made, *holder.units.later(unit, holder._table.mappings)]


def check_disk(holder: Residency, originals: list[bytes]) -> None:
    """Present units hold the store's bytes, and pages that no present unit lies on are zeros."""
    files = [Path(file).read_bytes() for file in holder._shards.paths]
    kept = [np.zeros(-(-len(one) // PAGE), bool) for one in originals]
    for unit in np.flatnonzero(unit_record(holder).states == PRESENT).tolist():
        for shard, begin, end in ranges_of(holder, unit):
            assert files[shard][begin:end] == originals[shard][begin:end], (
                unit,
                holder.units.kind(unit),
            )
        for shard, begin, end in holder.units.pages(unit, holder._table.mappings):
            kept[shard][begin:end] = True
    for pages, file in zip(kept, files, strict=True):
        for page in np.flatnonzero(~pages).tolist():
            assert not file[page * PAGE : (page + 1) * PAGE].strip(b"\0")


@settings(deadline=None, max_examples=12)
@given(st.data())
def test_what_is_here_is_what_is_in_the_store(tmp_path_factory, data):
    folder, flags = tmp_path_factory.mktemp("units"), st.booleans()
    count, longest = data.draw(st.integers(1, 2600)), data.draw(st.sampled_from([3, 60, 700]))
    options = [data.draw(flags) for _ in range(3)]
    local = make(
        folder / "d", count, data.draw(st.sampled_from([90, 1300, 5000])), longest, *options
    )
    remote = Dataset.open(put_in_memory(folder / "d", "units"), cache=folder / "cache")
    holder = remote.table.holder
    assert isinstance(holder, Residency)
    originals = [Path(path).read_bytes() for path in map(str, local.table.paths)]
    holder.budget = data.draw(st.sampled_from([1, 100_000, 10**9]))
    for number in data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=25)):
        if data.draw(flags):
            assert remote[number] == local[number]
        elif data.draw(flags):  # ahead of reading, which brings more
            units = holder.find(np.arange(number, min(number + 600, count)), (TOKENS, SPANS))
            holder.want(units, lambda: False)
            holder.wait(units)
            holder.release(units)
            assert remote[number] == local[number]
        else:
            last = min(number + data.draw(st.integers(1, 600)), count)
            assert np.array_equal(
                remote.table.read(number, last).values, local.table.read(number, last).values
            )
    check_disk(holder, originals)
    record = unit_record(holder)
    present = np.flatnonzero(record.states != ABSENT).tolist()
    assert holder.size == sum(holder._shards.size(unit) for unit in present)
    assert int(record.header["begun"][0]) == 0


@settings(deadline=None, max_examples=12)
@given(st.data())
def test_units_hold_what_their_documents_need(tmp_path_factory, data):
    """The units of a document are of the kinds that its dataset has, and all units together are
    about its bytes.
    """
    folder, flags = tmp_path_factory.mktemp("needs"), st.booleans()
    count = data.draw(st.integers(1, 1500))
    options = [data.draw(flags) for _ in range(3)]
    local = make(folder / "d", count, data.draw(st.sampled_from([90, 5000])), 300, *options)
    remote = Dataset.open(put_in_memory(folder / "d", "needs"), cache=folder / "cache")
    holder = remote.table.holder
    assert isinstance(holder, Residency)
    for number in data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3)):
        assert remote[number] == local[number]
        found = holder.find(np.array([number]), KINDS)
        kinds = [holder.units.kind(unit) for unit in found.tolist()]
        assert kinds == [
            TOKENS,
            *([SPANS] if options[0] else []),
            ORIGINS,
            *([EXTRAS] if options[2] else []),
        ]
        for unit in found.tolist():
            first, last = holder.units.documents(unit)
            assert first <= number < last
            assert last - first <= 1024
    units = holder.find(np.arange(count), KINDS).tolist()
    requested = sum(
        one.end - one.begin for unit in units for one in holder.units.unit(unit).fetched
    )
    assert requested <= 1.2 * sum(shard.bytes for shard in local.manifest.shards)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(1, 9)), max_size=6),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(1, 9)), max_size=6),
    st.integers(0, 5),
)
def test_ranges_equal_sets_of_bytes(first, second, gap):
    def cells(ranges):
        return {(one.shard, at) for one in ranges for at in range(one.begin, one.end)}

    ranges, others = ([Range(s, b, b + n) for s, b, n in given] for given in (first, second))
    assert cells(without(ranges, others)) == cells(ranges) - cells(others)
    requests = joined_requests(ranges, gap)
    assert cells(part for _, parts in requests for part in parts) == cells(ranges)
    for whole, parts in requests:
        assert whole.begin == min(part.begin for part in parts)
        assert whole.end == max(part.end for part in parts)
        assert len(cells([whole])) <= len(cells(parts)) + gap * (len(parts) - 1)
    for (one, _), (two, _) in pairwise(requests):
        assert one.shard < two.shard or one.end + gap < two.begin


def test_a_file_system_without_holes_is_said_once(tmp_path, caplog, monkeypatch):
    documents = make_documents(1200)
    write_dataset(tmp_path / "d", documents, spans=make_spans(documents), tokenizer=TOKENIZER)
    monkeypatch.setattr("penstock.data.shards.remote.sparse_shards.punch", lambda *_: False)
    remote = Dataset.open(put_in_memory(tmp_path / "d", "no-holes"), cache=tmp_path / "cache")
    remote.table.holder.budget = 1
    for number in range(0, 1200, 100):
        assert np.array_equal(remote[number].tokens, documents[number])
    said = [
        record.message
        for record in caplog.records
        if "cannot give back parts of files" in record.message
    ]
    assert len(said) == 1
    assert "memory://no-holes" in said[0]


def test_disk_space_is_given_back_while_files_are_mapped(tmp_path):
    documents = make_documents(3000)
    write_dataset(tmp_path / "d", documents, tokenizer=TOKENIZER)
    remote = Dataset.open(put_in_memory(tmp_path / "d", "holes"), cache=tmp_path / "cache")
    holder = remote.table.holder

    def blocks():
        return sum(os.stat(path).st_blocks * 512 for path in remote.path.glob("*.arrow"))

    remote.table.read(0, 3000)
    whole = blocks()
    assert whole > 1_000_000
    holder.budget = whole // 4
    assert np.array_equal(remote[2999].tokens, documents[2999])
    remote.table.read(0, 256)
    assert blocks() <= holder.size <= whole // 4
    before = holder.fetched_bytes
    assert np.array_equal(remote.table.read(128, 129).values, documents[128])
    assert holder.fetched_bytes == before
    assert np.array_equal(remote.table.read(1500, 1501).values, documents[1500])
    assert holder.fetched_bytes > before


@pytest.mark.parametrize("kind", ["text", "columns"])
def test_more_than_a_token_is_fetched_only_where_it_is_read(tmp_path, kind):
    local = make(tmp_path / "d", 600, 5000, 200, False, kind == "text", kind == "columns")
    remote = Dataset.open(put_in_memory(tmp_path / "d", f"only-{kind}"), cache=tmp_path / "cache")
    remote.table.read(0, 600)
    tokens = int(local.table.lengths[:, 0].sum()) * 2
    assert remote.table.holder.fetched_bytes < 1.3 * tokens
    assert remote[5] == local[5]


def test_what_another_holds_stays(tmp_path):
    """Two openings lock each other out as two processes do."""
    documents = make_documents(3000)
    write_dataset(tmp_path / "d", documents, tokenizer=TOKENIZER)
    url = put_in_memory(tmp_path / "d", "shared")
    mine, theirs = (Dataset.open(url, cache=tmp_path / "cache") for _ in range(2))
    units = mine.table.holder.find(np.array([5]), (TOKENS,))
    theirs.table.holder.budget = 1
    with mine.table.holder.held(units):
        for number in (1000, 2000, 2900):
            assert np.array_equal(theirs.table.read(number, number + 1).values, documents[number])
        assert unit_record(theirs.table.holder).states[units] == PRESENT
        before = mine.table.holder.fetched_bytes
        assert np.array_equal(mine.table.read(5, 6).values, documents[5])
        assert mine.table.holder.fetched_bytes == before
    for number in (1000, 2000):
        assert np.array_equal(theirs.table.read(number, number + 1).values, documents[number])
    assert unit_record(mine.table.holder).states[units] == ABSENT
    assert np.array_equal(mine.table.read(5, 6).values, documents[5])


@settings(deadline=None, max_examples=12)
@given(st.data())
def test_ranges_of_units_are_the_units_of_all_documents(tmp_path_factory, data):
    folder, flags = tmp_path_factory.mktemp("ranges"), st.booleans()
    count = data.draw(st.integers(1, 2600))
    make(
        folder / "d",
        count,
        data.draw(st.sampled_from([90, 1300, 5000])),
        20,
        *(data.draw(flags) for _ in range(3)),
    )
    holder = Dataset.open(
        put_in_memory(folder / "d", "ranges"), cache=folder / "cache"
    ).table.holder
    assert isinstance(holder, Residency)
    for _ in range(5):
        begin = data.draw(st.integers(0, count))
        end = data.draw(st.integers(begin, count))
        kinds = data.draw(st.lists(st.sampled_from(KINDS), unique=True))
        found = [
            unit
            for first, last in holder.units.ranges(begin, end, kinds)
            for unit in range(first, last)
        ]
        assert sorted(found) == holder.find(np.arange(begin, end), kinds).tolist()


def test_all_is_held_only_where_all_is_here(tmp_path):
    documents = make_documents(3000)
    write_dataset(tmp_path / "d", documents, tokenizer=TOKENIZER)
    url = put_in_memory(tmp_path / "d", "all")
    mine, theirs = (Dataset.open(url, cache=tmp_path / "cache").table for _ in range(2))
    holder, other = mine.holder, theirs.holder
    assert isinstance(holder, Residency)
    assert isinstance(other, Residency)
    record = unit_record(other)
    mine.read(0, 2000)
    kinds, runs = (TOKENS, SPANS, EXTRAS), holder.units.runs
    assert holder.hold_all(0, 3000, kinds) is None
    part = holder.hold_all(300, 1800, kinds)
    assert part.tolist() == list(range(1, 8))
    assert holder.hold_all(0, 256, (TOKENS, ORIGINS)) is None
    other.budget = 1
    theirs.read(2000, 3000)  # gives back all that is not held
    theirs.read(0, 1)
    assert (record.states == PRESENT).nonzero()[0].tolist() == list(range(8))
    holder.release(part)
    theirs.read(2999, 3000)
    assert (record.states == PRESENT).nonzero()[0].tolist() == [runs - 1]
    other.budget = None
    theirs.read(0, 3000)
    holder.budget = holder.size - 1  # something has to go
    assert holder.hold_all(0, 3000, kinds) is None
    holder.budget = holder.size
    assert record.own(5)  # another process is about to give it back, or to bring it
    assert holder.hold_all(0, 3000, kinds) is None
    assert all(record.own(unit) for unit in range(runs))  # nothing stays locked
    record.free_all(np.arange(runs))
    whole = holder.hold_all(0, 3000, kinds)
    with holder.held(whole[2:5]):
        pass
    assert not any(record.own(unit) for unit in range(runs))
    holder.release(whole)
    assert all(record.own(unit) for unit in range(runs))


def test_nothing_stays_locked_where_a_part_cannot_be(tmp_path):
    make(tmp_path / "d", 1500, 5000, 40, True, False, False)
    url = put_in_memory(tmp_path / "d", "part")
    remote, other = (
        Dataset.open(url, cache=tmp_path / "cache"),
        Dataset.open(url, cache=tmp_path / "cache"),
    )
    holder, theirs = remote.table.holder, other.table.holder
    record = unit_record(theirs)
    units, tokens = (holder.find(np.arange(1500), kinds) for kinds in ((TOKENS, SPANS), (TOKENS,)))
    with holder.held(units):
        pass
    assert record.own(int(units[-1]))
    with holder.held(tokens[2:4]):
        assert holder.hold_all(0, 1500, (TOKENS, SPANS)) is None
        assert [unit for unit in tokens.tolist() if not record.own(unit)] == tokens[2:4].tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), unique=True), st.lists(st.integers(0, 30), unique=True))
def test_unlocking_in_ranges_equals_unlocking_one_by_one(tmp_path_factory, locked, freed):
    folder = tmp_path_factory.mktemp("locks")
    mine, other = UnitRecord(folder, 31), UnitRecord(folder, 31)
    for unit in locked:
        mine.share(unit)
    mine.free_all(np.array(freed, np.int64))
    assert {unit for unit in range(31) if not other.own(unit)} == set(locked) - set(freed)


def test_what_was_used_least_recently_goes_first(tmp_path):
    """Units are read in an order that is neither that of their numbers nor that in which they
    came.
    """
    documents = [[n % VOCAB] * 200 for n in range(256 * 8)]
    write_dataset(tmp_path / "d", documents, tokenizer=TOKENIZER)
    remote = Dataset.open(put_in_memory(tmp_path / "d", "least-recently"), cache=tmp_path / "cache")
    holder = remote.table.holder
    record = unit_record(holder)

    def read(block):
        remote.table.read(256 * block, 256 * block + 1)

    def here():
        units = [int(holder.find(np.array([256 * block]), (TOKENS,))[0]) for block in range(8)]
        return {block for block, unit in enumerate(units) if record.states[unit] == PRESENT}

    read(3)
    holder.budget = int(4.5 * holder.size)
    for block in (0, 5, 1):
        read(block)
    assert here() == {0, 1, 3, 5}
    read(3)
    for block, gone in ((6, 0), (2, 5)):
        before = here()
        read(block)
        assert here() == before - {gone} | {block}
    # Neither is the order that was found then kept: 1 would be next, but is used again.
    read(1)
    before = here()
    read(7)
    assert here() == before - {3} | {7}
