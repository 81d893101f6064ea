"""Runs that come in one request: which ones, and what happens where they cannot come together."""

from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_data import TOKENIZER, make_documents

from makers.datasets import unit_record
from penstock import Dataset, write_dataset
from penstock.core.errors import CorruptionError
from penstock.data.shards.remote.eviction import HERE, NOT_HERE
from penstock.data.shards.remote.stretches import UNUSED, Line, Stretches
from penstock.data.stores.unit_record import ABSENT, PRESENT

RUNS, MEGABYTES = 40, 20  # so two runs a megabyte, and sixteen in eight


@given(st.data())
def test_what_comes_together_is_absent_and_around_the_wanted_run(data):
    flags = st.lists(st.booleans(), min_size=RUNS, max_size=RUNS)
    present, mine, no_lengths = (
        np.array(data.draw(flags)) & data.draw(st.booleans()) for _ in "abc"
    )
    pins = np.array(data.draw(flags)).astype(np.int32)
    record = SimpleNamespace(states=np.where(present, PRESENT, ABSENT))
    states = np.where(mine, HERE, NOT_HERE)
    units = SimpleNamespace(runs=RUNS, has_lengths=lambda unit: not no_lengths[unit])
    line = Line()
    line.is_fast, may_add = data.draw(st.booleans()), data.draw(st.booleans())
    found = Stretches(record, units, states, pins, MEGABYTES << 20, line)
    used, unused = 0, set()
    for unit in data.draw(st.lists(st.integers(0, RUNS - 1), max_size=8)):
        pins[unit] += 1
        found.want(np.array([unit]))
        used, unused = used + (unit in unused), unused - {unit}
        if record.states[unit] != ABSENT or states[unit] != NOT_HERE:
            continue
        room = UNUSED * (used + 1) - len(unused)
        adds = line.is_fast and may_add and room > 0
        low, high = unit, unit + 2
        if adds:
            low = max(unit // 16 * 16, unit - room)
            high = min(unit // 16 * 16 + 16, unit + room)

        def comes(one, unit=unit, adds=adds):
            return one == unit or (
                record.states[one] == ABSENT
                and states[one] == NOT_HERE
                and not no_lengths[one]
                and (adds or pins[one])
            )

        begin = end = unit
        while begin > low and comes(begin - 1):
            begin -= 1
        while end < min(high, RUNS) and comes(end):
            end += 1
        stretch = found.of(unit, may_add=may_add)
        assert stretch == range(begin, end)
        found.came(stretch)
        states[begin:end] = HERE
        unused |= {one for one in stretch if not pins[one]}
        used += sum(pins[one] > 0 for one in stretch)
        assert found._unused == len(unused) <= UNUSED * used
    assert found._under_way == 0


@pytest.mark.parametrize(
    ("latency", "rate", "is_fast"),
    [
        (0.0005, 1e9, True),
        (0.0005, 125e6, True),
        (0.0, 50e6, False),
        (0.03, 50e6, False),
        (0.03, 1e10, False),
        (0.01, 1e9, False),
    ],
)
def test_a_line_is_fast_only_where_neither_latency_nor_rate_limits_it(latency, rate, is_fast):
    line, size = Line(), 1 << 18
    for number in range(40):
        # Many that are under way together share the rate.
        together = min(number + 1, 32)
        line.note(latency + together * size / rate, together, size)
        assert line.is_fast <= (is_fast and number > 6)
    assert line.is_fast == is_fast


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A dataset of twelve runs in three shards in memory, behind a fast line."""
    documents = make_documents(3000, longest=60)
    local = write_dataset(tmp_path / "d", documents, tokenizer=TOKENIZER, documents_per_shard=1024)
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists("/stretches"):
        filesystem.rm("/stretches", recursive=True)
    filesystem.put(str(tmp_path / "d"), "/stretches", recursive=True)
    opened = Dataset.open("memory://stretches", cache=tmp_path / "cache")
    line = opened.table.holder._stretches._line
    monkeypatch.setattr(line, "note", lambda *_: None)
    line.is_fast = True
    return SimpleNamespace(holder=opened.table.holder, opened=opened, local=local, files=filesystem)


def ahead(holder, *runs):
    holder.want(np.array(runs), lambda: False)
    return np.array(runs)


def test_a_fast_line_brings_what_lies_around_a_wanted_run(remote):
    holder, record = remote.holder, unit_record(remote.holder)
    units = ahead(holder, 5)
    holder.wait(units)
    assert (record.states[:12] == PRESENT).all()
    assert holder.requests == 3  # one a shard: tokens and checksums of four runs
    assert [record.own(unit) for unit in (4, 5, 6)] == [True, False, True]
    record.free_all(np.array([4, 6]))
    holder.release(units)
    assert record.own(5)
    record.free(5)
    expected = remote.local.table.read(0, 3000).values
    np.testing.assert_array_equal(remote.opened.table.read(0, 3000).values, expected)
    assert holder.requests == 3
    assert holder.size == sum(holder.units.size(unit) for unit in range(12))
    assert int(record.header["begun"][0]) == 0


@pytest.mark.parametrize("why", ["a budget", "a reading that is not ahead", "a slow line"])
def test_nothing_unwanted_comes_with(remote, why):
    holder = remote.holder
    if why == "a budget":
        holder.budget = holder.stored_bytes // 2
    holder._stretches._line.is_fast = why != "a slow line"
    units = np.array([5, 6, 8])
    holder.want(units, None if why == "a reading that is not ahead" else lambda: False)
    holder.wait(units)
    assert np.flatnonzero(unit_record(holder).states[:12]).tolist() == [5, 6, 8]
    assert holder.requests <= 4  # runs 5 and 6 came together
    holder.release(units)


def test_a_damaged_neighbour_is_an_error_only_where_it_is_wanted(remote):
    holder = remote.holder
    (tokens, *_) = holder.units.unit(6).fetched
    name = f"/stretches/{holder._shards.names[tokens.shard]}"
    data = bytearray(remote.files.cat_file(name))
    data[tokens.begin + 3] ^= 1
    remote.files.pipe_file(name, bytes(data))
    units = ahead(holder, 5)
    holder.wait(units)
    expected = remote.local.table.read(1280, 1536).values
    np.testing.assert_array_equal(remote.opened.table.read(1280, 1536).values, expected)
    wrong = ahead(holder, 6)
    with pytest.raises(CorruptionError, match=r"document \d+ is not what was prepared"):
        holder.wait(wrong)
    holder.release(units)
    holder.release(wrong)
    assert holder._coming == holder._stretches._under_way == 0
    assert int(unit_record(holder).header["begun"][0]) == 0
    assert holder.size == holder.units.size(5)


def test_what_another_process_brings_is_left_to_it(remote):
    holder, other = remote.holder, unit_record(remote.holder)
    assert other.own(7)
    units = ahead(holder, 4, 7)
    holder.wait(units[:1])
    assert other.states[4] == PRESENT
    assert other.states[7] == ABSENT
    other.free(7)
    holder.wait(units)
    assert other.states[7] == PRESENT
    assert not other.own(7)
    holder.release(units)


def test_what_came_together_is_what_is_in_the_store(remote):
    holder = remote.holder
    assert holder._fetcher.fetch_together(range(1, 11))
    for unit in range(1, 11):
        for one in holder.units.unit(unit).places:
            path = remote.local.table.paths[one.shard]
            with open(path, "rb") as file:
                file.seek(one.begin)
                expected = file.read(one.end - one.begin)
            with open(holder._shards.paths[one.shard], "rb") as file:
                file.seek(one.begin)
                assert file.read(one.end - one.begin) == expected
