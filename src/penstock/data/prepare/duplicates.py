"""Drops exact duplicates from a prepared dataset: of equal documents, the first in input order
stays.

Documents are equal if their tokens are; those with several answers, if also their trees and values
are; those with images, if also their images are. Equal texts always have equal tokens. Loss
weights, columns and origins do not count. The hash is BLAKE2b of 128 bits: among 10⁹ documents, the
chance that any two different ones have the same is 10⁻²¹.

Each part writes its hashes while it is prepared (`prepare/hashes.py`), sorted, 24 bytes a document.
When all parts are there, one process compares them, some millions at a time, and the crew writes
the shards that lose documents again. So the result does not depend on the number of processes.
Memory: `BUCKET` documents, about 150 MB, and 4 bytes for each document that is dropped.

A part's record says which of its documents were dropped. If the input changes, a part of which
other documents would be dropped is prepared again. A part whose shards were being written when the
run was killed, too.

Shards that are in a store are read from there, and their new bytes go there, by any node.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, final

import numpy as np

from penstock.core.arrays import Array
from penstock.core.errors import CorruptionError, OutputError
from penstock.core.terminal import Progress
from penstock.data.prepare.answers import PATH_VALUES
from penstock.data.prepare.hashes import HASH
from penstock.data.prepare.part import Workshop
from penstock.data.prepare.part_record import (
    UNSETTLED,
    PartRecord,
    has_hashes,
    hashes_path,
    load_record,
    save_record,
)
from penstock.data.prepare.pool import Pool
from penstock.data.prepare.stored_shards import get_shard
from penstock.data.shards.writing.dropping import count_origins, drop_documents
from penstock.data.shards.writing.finish import load_shard
from penstock.data.shards.writing.stubs import Stub, load_stub
from penstock.data.stores.files import output_errors

BUCKET = 1 << 20
"""Documents that are compared at once, about."""


@final
@dataclass(frozen=True, slots=True)
class Drop:
    """The task of dropping documents from a finished part."""

    number: int
    record: PartRecord
    dropped: Array
    needs_output: ClassVar[bool] = True
    """It reads the output, so not every node of a cluster can do it."""


@final
@dataclass(frozen=True, slots=True)
class Loss:
    """What a shard in a store loses."""

    stub: Stub
    dropped: Array
    """Numbers of documents in the shard."""
    text_bytes: int
    """UTF-8 bytes that the remaining documents represent."""


@final
@dataclass(frozen=True, slots=True)
class StoredDrop:
    """The task of dropping documents from a finished part that is in a store; needs nothing of the
    output.
    """

    number: int
    record: PartRecord
    dropped: Array
    losses: dict[str, Loss]
    """By split, for those that lose documents."""


def find_duplicates(parts: Sequence[Array]) -> list[Array]:
    """The documents to drop of each part, uint32, ascending.

    Args:
        parts: `HASH` [documents] of each part, in input order, sorted by hash, then by document.
    """
    buckets = 1 << max(-(-sum(map(len, parts)) // BUCKET) - 1, 0).bit_length()
    edges = np.array([(1 << 64) // buckets * number for number in range(1, buckets)], np.uint64)
    places = [
        np.concatenate([[0], np.searchsorted(rows["high"], edges), [len(rows)]]).astype(int)
        for rows in parts
    ]
    found: list[list[Array]] = [[] for _ in parts]
    for bucket in range(buckets):
        _search(
            [rows[at[bucket] : at[bucket + 1]] for rows, at in zip(parts, places, strict=True)],
            found,
        )
    return [np.sort(np.concatenate(some)) if some else np.empty(0, np.uint32) for some in found]


def _search(parts: Sequence[Array], found: list[list[Array]]) -> None:
    """Add the duplicates among some rows of each part to `found`."""
    firsts = []
    for number, rows in enumerate(parts):
        again = _repeats(rows)
        if again.any():
            # However often a document occurs in a part, it is compared once.
            found[number].append(rows["document"][again])
        firsts.append(rows[~again])
    owners = np.repeat(np.arange(len(firsts)), [len(rows) for rows in firsts])
    rows = np.concatenate(firsts) if firsts else np.empty(0, HASH)
    order = np.lexsort((rows["low"], rows["high"]))  # stable: parts stay in order
    again = _repeats(rows[order])
    chosen = order[again]
    owners, documents = owners[chosen], rows["document"][chosen]
    by_owner = np.argsort(owners, kind="stable")
    owners, documents = owners[by_owner], documents[by_owner]
    for number in np.unique(owners).tolist():
        begin, end = np.searchsorted(owners, [number, number + 1])
        found[number].append(documents[begin:end])


def _repeats(rows: Array) -> Array:
    """Whether each of some sorted rows has the hash of the one before."""
    again = np.zeros(len(rows), np.bool_)
    again[1:] = (rows["high"][1:] == rows["high"][:-1]) & (rows["low"][1:] == rows["low"][:-1])
    return again


def drop_duplicates(
    shop: Workshop,
    pool: Pool,
    records: Mapping[int, PartRecord],
    prepare_again: Callable[[Sequence[int]], Iterable[tuple[int, PartRecord]]],
    reopen: Callable[[], None],
    progress: bool,
) -> dict[int, PartRecord]:
    """Drop the duplicates of all parts.

    Args:
        shop: The preparation.
        pool: Does the work.
        records: The finished parts; some may have been filtered by a killed or an earlier run.
        prepare_again: Called with numbers of parts; prepares them from the input and gives their
            records.
        reopen: Called before a shard is changed.
        progress: Show a bar.

    Returns:
        The new records of all parts.
    """
    done, numbers = dict(records), sorted(records)
    found = find_duplicates(
        [_map_hashes(shop.output, number, records[number]) for number in numbers]
    )
    drops = dict(zip(numbers, found, strict=True))
    stale = [n for n in numbers if records[n].drops not in ("", _describe(drops[n]))]
    if stale:
        done.update(prepare_again(stale))
    todo = [n for n in numbers if len(drops[n]) and not done[n].drops]
    if todo:
        reopen()
    with Progress(
        "dropping duplicates", total=len(todo), unit="parts", enabled=progress and bool(todo)
    ) as bar:
        while todo:
            tasks = (
                (f"duplicates of {done[n].identity}", _task(shop, n, done[n], drops[n]))
                for n in todo
            )
            done.update(pool.run(_drop, tasks, lambda: None))
            again = [n for n in todo if done[n].drops == UNSETTLED]
            bar.advance(len(todo) - len(again))
            todo = again
            if todo:
                done.update(prepare_again(todo))
    return done


def _task(shop: Workshop, number: int, record: PartRecord, dropped: Array) -> Drop | StoredDrop:
    """The task for one part. If its shards are in a store, the record says from now on that they
    may be changing.
    """
    losses = {}
    for split, inside, text_bytes in _by_split(
        record, _map_hashes(shop.output, number, record), dropped
    ):
        if len(inside):
            path = shop.output / split / record.shards[split]
            if path.is_file() or (stub := load_stub(path)) is None:
                return Drop(number, record, dropped)
            losses[split] = Loss(stub, inside, text_bytes)
    save_record(shop.output, number, replace(record, drops=UNSETTLED))
    return StoredDrop(number, record, dropped, losses)


def _drop(shop: Workshop, task: Drop | StoredDrop, report: object) -> tuple[int, PartRecord]:
    return _drop_here(shop, task) if isinstance(task, Drop) else _drop_stored(shop, task)


def _drop_stored(shop: Workshop, task: StoredDrop) -> tuple[int, PartRecord]:
    """Bring the shards of one part from the store, and put them there without the dropped
    documents.

    If another object is there, a task of a lost node has replaced it: the record stays unsettled.
    """
    sources, shards = {}, dict(task.record.shards)
    with shop.making() as made:
        for split, loss in task.losses.items():
            name, folder = shards[split], made / split
            try:
                get_shard(shop.store.full if shop.store else "", loss.stub, folder / name)
            except CorruptionError:
                return task.number, replace(task.record, drops=UNSETTLED)
            sources[split] = _origins(folder / name, loss.dropped)
            info = drop_documents(
                folder,
                name,
                shop.layout,
                loss.dropped,
                text_bytes=loss.text_bytes,
                path_values=_path_values(shop),
            )
            if info is None:
                del shards[split]
            else:
                shop.keep(made, split, info)
    new = _without(task.record, task.dropped, sources, shards)
    save_record(shop.output, task.number, new)
    return task.number, new


def _drop_here(shop: Workshop, task: Drop) -> tuple[int, PartRecord]:
    """Write the shards of one part again.

    Ray runs a task again if its node is lost. If that was while a shard got its new bytes, the
    record stays unsettled.
    """
    number, record, dropped = task.number, task.record, task.dropped
    chosen = [
        one
        for one in _by_split(record, _map_hashes(shop.output, number, record), dropped)
        if len(one[1])
    ]
    before = load_record(shop.output, number)
    if before is not None and before.drops == UNSETTLED:
        sources = before.dropped_from
    else:
        sources = {
            split: _origins(shop.output / split / record.shards[split], inside)
            for split, inside, _ in chosen
        }
        save_record(shop.output, number, replace(record, drops=UNSETTLED, dropped_from=sources))
    shards = dict(record.shards)
    for split, inside, text_bytes in chosen:
        name, remaining = record.shards[split], record.hashed[split] - len(inside)
        if not remaining:
            del shards[split]
        info = load_shard(shop.output / split, name)
        documents = 0 if info is None else info.documents
        if documents == record.hashed[split]:
            drop_documents(
                shop.output / split,
                name,
                shop.layout,
                inside,
                text_bytes=text_bytes,
                path_values=_path_values(shop),
            )
        elif documents != remaining:
            return number, replace(record, drops=UNSETTLED)
    new = _without(record, dropped, sources, shards)
    save_record(shop.output, number, new)
    return number, new


def _without(
    record: PartRecord, dropped: Array, sources: dict[str, dict[str, int]], shards: dict[str, str]
) -> PartRecord:
    """The record of a part once its duplicates are dropped."""
    return replace(
        record,
        documents=record.documents - len(dropped),
        duplicates=len(dropped),
        dropped_from=sources,
        drops=_describe(dropped),
        shards=shards,
    )


def _path_values(shop: Workshop) -> tuple[str, ...]:
    return PATH_VALUES if shop.layout.has_trees else ()


def _origins(path: Path, documents: Array) -> dict[str, int]:
    return {str(file): count for file, count in count_origins(path, documents).items()}


def _by_split(record: PartRecord, rows: Array, dropped: Array) -> Iterator[tuple[str, Array, int]]:
    """(split, dropped documents in its shard, text bytes of the remaining ones)."""
    sizes = np.empty(len(rows), np.int64)
    sizes[rows["document"]] = rows["text_bytes"]
    sizes[dropped] = 0
    begin = 0
    for split, count in record.hashed.items():
        inside = dropped[(dropped >= begin) & (dropped < begin + count)].astype(np.int64) - begin
        yield split, inside, int(sizes[begin : begin + count].sum())
        begin += count


def _map_hashes(output: Path, number: int, record: PartRecord) -> Array:
    path = hashes_path(output, number)
    if not has_hashes(path, record):
        raise OutputError(
            f"{path}: was removed or cut meanwhile; run it again: finished parts are kept"
        )
    if not path.stat().st_size:
        return np.empty(0, HASH)
    with output_errors(path):
        return np.memmap(path, HASH, "r")


def _describe(dropped: Array) -> str:
    """A hash of the numbers of dropped documents; empty: there are none."""
    return (
        hashlib.blake2b(dropped.astype("<u4").tobytes(), digest_size=8).hexdigest()
        if len(dropped)
        else ""
    )
