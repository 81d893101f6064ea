"""Many small files as a few parts: each part costs a shard, some files of the preparation, and
milliseconds.

Whole files that follow each other are put together. An input of few files keeps a part for each, so
that a changed file is prepared alone. A group ends between half of its greatest size and all of it,
at the file whose path has the smallest hash there: groups that begin at different files soon end at
the same one. So one more file changes the groups near it, not all that follow, and a slightly
greater size, because there is more input, changes few.

Source: content-defined chunks, here of files instead of bytes (Bjørner, Blass, Gurevich,
"Content-dependent chunking for differential compression, the local maximum approach", 2010).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any, final

import numpy as np
import pyarrow as pa

from penstock.data.sources.files import Extent, SourceFile
from penstock.data.sources.lines import BLOCK_BYTES, BLOCK_LINES
from penstock.data.sources.objects import ObjectBlock
from penstock.data.sources.records import OnDamage, RecordBlock, Weights, stop_at_damage
from penstock.data.sources.text import TextPart

FEW_FILES = 256
"""Maximum number of files that are left apart; those of plain text never are."""
SMALLEST, GROUPS = 8 << 20, 64
"""Groups of an input, about, and raw bytes of a group, at the least: what is worth a process."""


@final
@dataclass(frozen=True, slots=True)
class SmallFiles:
    """Several whole files of one format."""

    parts: tuple[Any, ...]
    """A part for each file; they read whole files."""

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"{self.parts[0].name} and {len(self.parts) - 1} more"

    @property
    def identity(self) -> str:
        """Identity of the input (path and range), independent of its bytes."""
        return "\n".join(part.identity for part in self.parts)

    @property
    def sources(self) -> tuple[SourceFile, ...]:
        """The files that it reads."""
        return tuple(part.file for part in self.parts)

    @property
    def files(self) -> tuple[str, ...]:
        """The names that `files` of its blocks points into."""
        return tuple(part.file.path for part in self.parts)

    @property
    def addresses(self) -> tuple[str, ...]:
        """What opens each of `files`; secret."""
        return tuple(part.file.full for part in self.parts)

    @property
    def size_bytes(self) -> int:
        """Raw bytes, for progress."""
        return sum(part.size_bytes for part in self.parts)

    def extents(self) -> tuple[Extent, ...]:
        """The bytes of local files that determine the result."""
        return tuple(extent for part in self.parts for extent in part.extents())

    def blocks(self, damaged: OnDamage = stop_at_damage) -> Iterator[RecordBlock]:
        """Yield the records in order of files."""
        return _gathered((part.blocks(damaged) for part in self.parts), _join_records)

    def objects(self, damaged: OnDamage = stop_at_damage) -> Iterator[ObjectBlock]:
        """Yield whole records in order of files."""
        return _gathered((part.objects(damaged) for part in self.parts), _join_objects)


def join_small(parts: Iterable[Any], sizes: Sequence[int], part_bytes: int) -> Iterator[Any]:
    """Put parts of small whole files together.

    Args:
        parts: Parts in order of the files.
        sizes: Raw bytes of each file of the input.
        part_bytes: Most raw bytes of a part of several files.
    """
    limit = min(max(sum(sizes) // GROUPS, SMALLEST), part_bytes)
    is_few = len(sizes) <= FEW_FILES
    whole = (list(some) for _, some in groupby(parts, key=lambda part: part.sources))

    def kind(some: Sequence[Any]) -> type | None:
        """What may be put together with others of the kind; None: nothing."""
        part = some[0]
        is_small = len(some) == len(part.sources) == 1 and part.size_bytes < limit
        return type(part) if is_small and (isinstance(part, TextPart) or not is_few) else None

    for alike, run in groupby(whole, key=kind):
        listed = [part for some in run for part in some]
        if alike is None:
            yield from listed
            continue
        for begin, end in group_ends(listed, limit):
            yield _as_part(listed[begin:end])


def group_ends(parts: Sequence[Any], limit: int) -> Iterator[tuple[int, int]]:
    """The groups [begin, end) of small files, of at most `limit` raw bytes each."""
    places = np.cumsum([0, *(part.size_bytes for part in parts)])
    hashes = [_hash(part.sources[0].key) for part in parts]
    begin = 0
    while places[-1] - places[begin] > limit:
        last = int(np.searchsorted(places, places[begin] + limit, "right")) - 1
        first = min(int(np.searchsorted(places, places[begin] + limit // 2)), last)
        end = min(range(max(first, begin + 1), last + 1), key=lambda end: hashes[end - 1])
        yield begin, end
        begin = end
    yield begin, len(parts)


def _as_part(group: Sequence[Any]) -> object:
    if len(group) > 1 and isinstance(group[0], TextPart):
        return replace(group[0], sources=tuple(part.sources[0] for part in group))
    return group[0] if len(group) == 1 else SmallFiles(tuple(group))


def _hash(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _gathered(files: Iterable[Iterator[Any]], join: Callable[[list[Any]], Any]) -> Iterator[Any]:
    """Blocks of all files, small ones together, with the number of the file that each record is
    from.
    """
    waiting = []
    size = records = 0
    for number, blocks in enumerate(files):
        for block in blocks:
            waiting.append(replace(block, files=block.files + np.int32(number)))
            size, records = size + block.size_bytes, records + len(block)
            if size >= BLOCK_BYTES or records >= BLOCK_LINES:
                yield join(waiting)
                waiting, size, records = [], 0, 0
    if waiting:
        yield join(waiting)


def _join_objects(blocks: list[ObjectBlock]) -> ObjectBlock:
    first = blocks[0].removed.copy()
    for block in blocks[1:]:
        first.update(block.removed)
    return ObjectBlock(
        [value for block in blocks for value in block.objects],
        np.concatenate([block.lines for block in blocks]),
        np.concatenate([block.files for block in blocks]),
        sum(block.size_bytes for block in blocks),
        [reject for block in blocks for reject in block.rejects],
        first,
    )


def _join_records(blocks: list[RecordBlock]) -> RecordBlock:
    return RecordBlock(
        pa.concat_arrays([block.texts for block in blocks]),
        np.concatenate([block.lines for block in blocks]),
        np.concatenate([block.files for block in blocks]),
        _join_weights([block.weights for block in blocks]),
        {
            name: pa.concat_arrays([block.columns[name] for block in blocks])
            for name in blocks[0].columns
        },
        sum(block.size_bytes for block in blocks),
        [reject for block in blocks for reject in block.rejects],
    )


def _join_weights(given: list[Weights | None]) -> Weights | None:
    found = [one for one in given if one is not None]
    if not found:
        return None
    starts = accumulate((len(one.begin) for one in found[:-1]), initial=0)
    offsets = [one.offsets[:-1] + start for one, start in zip(found, starts, strict=True)]
    return Weights(
        np.concatenate([*offsets, [sum(len(one.begin) for one in found)]]).astype(np.int64),
        *(
            np.concatenate([getattr(one, name) for one in found])
            for name in ("begin", "end", "weight", "present")
        ),
    )
