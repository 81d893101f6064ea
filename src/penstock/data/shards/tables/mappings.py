"""Maps shards on demand where a process may not have a mapping for each of them: the least recently
used ones leave.

Linux allows a process some 65,000 mappings (vm.max_map_count). While there is room, all shards of a
dataset are mapped when it is opened, and nothing here costs anything. Beyond half of the limit,
address space for all shards of a dataset is reserved at once, which is one mapping and takes no
memory, and a shard is mapped into its place when it is read. So its address is known from the
beginning, and stays. A shard may be read only while it is held (`Holder`), and what is held stays
mapped; of the others, all datasets of a process together keep an eighth of the limit.
"""

import ctypes
import errno
import mmap
import os
import stat
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, final, overload

import numpy as np

from penstock.core.arrays import Array, Bool, Int64, UInt64
from penstock.core.errors import ConfigError, CorruptionError
from penstock.core.system import explain_cut_files, handlers, mapped, mapping_limit
from penstock.data.stores.daemons import LOOK_SECONDS, refuse_at_end
from penstock.data.stores.files import (
    FAILED,
    check_size,
    libc,
    map_file,
    mapped_at,
    unreadable,
)

_ALL_SHARE, _SOME_SHARE = 2, 8
"""Files that are mapped when they are opened take at most this part of the limit of mappings;
shards that are mapped on demand, this one: each may need two, one for itself and one for the gap to
the next.
"""
_ROOM = 64
"""Mappings that are given up at once, where the system refuses one more."""
_FIXED = 0x10
"""MAP_FIXED of Linux and of macOS."""

Shards = Annotated[Int64, "shards"]
_numbers = iter(range(1 << 62))


def map_shards(
    folder: Path, names: Sequence[str], sizes: Sequence[int], *, is_cache: bool
) -> "Sequence[Array]":
    """The bytes of each shard: arrays, all mapped, or `MappedShards` if there are too many.

    Args:
        folder: Theirs.
        names: Files in it.
        sizes: Bytes of each.
        is_cache: Whether this library writes them, so that they may change.

    Raises:
        CorruptionError: A file is missing, a link, or has another size.
        ConfigError: The system refuses, because of a limit; names it.
    """
    if len(mapped) + len(names) <= mapping_limit() // _ALL_SHARE:
        try:
            return [
                map_file(f"{folder}/{name}", size) for name, size in zip(names, sizes, strict=True)
            ]
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise unreadable(
                    error.filename or folder, error, f" and mapped, one of {len(names):,} shards"
                ) from None
    stamps = np.array(
        [_stamp(folder, name, size) for name, size in zip(names, sizes, strict=True)], np.int64
    )
    if not is_cache:
        return MappedShards(folder, names, sizes, stamps.reshape(-1, 2))
    return MappedShards(folder, names, sizes, None)


def _stamp(folder: Path, name: str, size: int) -> tuple[int, int]:
    """Number and time of a file, which change when it is replaced."""
    try:
        status = os.lstat(f"{folder}/{name}")
    except OSError:
        status = None
    if status is None or not stat.S_ISREG(status.st_mode) or status.st_size != size:
        check_size(folder / name, size)
        status = os.lstat(folder / name)
    return status.st_ino - (1 << 64 if status.st_ino >> 63 else 0), status.st_mtime_ns


@final
class _Pool:
    """The shards of all datasets of this process that are mapped on demand."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.idle: OrderedDict[tuple[int, int], None] = OrderedDict()
        """(dataset, shard) of those that are mapped and not held, the least recently used first."""
        self.held = 0
        """Shards that are held."""
        self.datasets: dict[int, weakref.ref[MappedShards]] = {}
        self.left: deque[tuple[int, int]] = deque()
        """(dataset, shards that it held) of those that are gone. Their collection may happen while
        this is locked.
        """

    def forget_left(self) -> None:
        """Forget datasets that are gone."""
        while self.left:
            number, held = self.left.popleft()
            del self.datasets[number]
            self.held -= held
            for key in [key for key in self.idle if key[0] == number]:
                del self.idle[key]

    def give_up(self, keep: int) -> bool:
        """Unmap what was used least recently until at most `keep` are left that nobody holds;
        whether there was any.
        """
        found = False
        while len(self.idle) > max(keep, 0):
            (number, shard), _ = self.idle.popitem(last=False)
            if (dataset := self.datasets[number]()) is not None:
                dataset._unmap(shard)
            found = True
        return found


pool = _Pool()


def _begin_again() -> None:
    """In a forked process, no other thread holds the lock; what those held stays mapped."""
    pool.changed = threading.Condition()


os.register_at_fork(after_in_child=_begin_again)


class _Mapped:
    """A file that is mapped, for `core.system.cut_files`."""

    __slots__ = ("__weakref__", "path", "size")

    def __init__(self, path: str, size: int) -> None:
        self.path, self.size = Path(path), size


class _View:
    """The bytes of one shard as NumPy takes them; keeps the address space reserved."""

    def __init__(self, owner: "MappedShards", address: int, size: int) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (address, True),
        }


@final
class MappedShards(Sequence[Array]):
    """The bytes of each shard of one dataset, uint8 [size]; they may be read while they are held.

    Args:
        folder: Its folder.
        names: Files in it.
        sizes: Bytes of each.
        stamps: int64 [shards, 2] number and time of each file, which it must keep; None: they may
            change.

    Raises:
        ConfigError: The system has no room for the addresses.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        sizes: Sequence[int],
        stamps: Annotated[Int64, "shards 2"] | None,
    ) -> None:
        self._folder, self._names, self._stamps = folder, names, stamps
        self.sizes = np.array(sizes, np.int64)
        pages = -(-self.sizes // mmap.PAGESIZE)
        ends = np.cumsum(pages) * mmap.PAGESIZE
        total = int(ends[-1]) if len(ends) else 0
        begin = _map(0, max(total, mmap.PAGESIZE), None)
        if begin is None:
            raise ConfigError(
                f"{folder}: no address space for {total:,} bytes of {len(names):,} shards; "
                "raise the limit of this process's memory (ulimit -v)"
            )
        self.addresses: Annotated[UInt64, "shards"] = np.uint64(begin) + (
            ends - pages * mmap.PAGESIZE
        ).astype(np.uint64)
        self._pins = np.zeros(len(names), np.int64)
        self._files: dict[int, _Mapped] = {}
        self._held = [0]
        self._number = next(_numbers)
        weakref.finalize(self, _leave, begin, max(total, mmap.PAGESIZE), self._number, self._held)
        with pool.changed:
            pool.datasets[self._number] = weakref.ref(self)

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> Array: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Array]: ...
    def __getitem__(self, index: int | slice) -> Array | Sequence[Array]:
        if isinstance(index, slice):
            return Parts([(self, range(*index.indices(len(self))))])
        number = range(len(self))[index]
        if not self.sizes[number]:
            return np.empty(0, np.uint8)
        return np.asarray(_View(self, int(self.addresses[number]), int(self.sizes[number])))

    def want(self, shards: Shards, may_wait: Callable[[], bool] | None = None) -> None:
        """Have shards mapped, until each is released as often as it was wanted; they may be given
        several times.

        Args:
            shards: Their numbers.
            may_wait: Asked while there is no room: False maps them nevertheless. None: never wait.

        Raises:
            CorruptionError: A file is missing, or is not the one that was opened.
            ConfigError: The system refuses, and nothing can be given up; names the limit.
        """
        shards, counts = np.unique(shards, return_counts=True)
        most = mapping_limit() // _SOME_SHARE
        with pool.changed:
            pool.forget_left()
            while (
                pool.held + int((self._pins[shards] == 0).sum()) > most
                and may_wait is not None
                and may_wait()
            ):
                pool.changed.wait(LOOK_SECONDS)
                refuse_at_end()
            new = shards[self._pins[shards] == 0].tolist()
            absent = [shard for shard in new if (self._number, shard) not in pool.idle]
            self._pin(shards, counts)
            pool.give_up(most - pool.held)
            try:
                for shard in absent:
                    self._bring(shard)
            except BaseException:
                self._unpin(shards, counts)
                raise

    def release(self, shards: Shards) -> None:
        """Let shards go that were wanted, as often as they are given; they stay mapped while there
        is room.
        """
        with pool.changed:
            self._unpin(*np.unique(shards, return_counts=True))
            pool.give_up(mapping_limit() // _SOME_SHARE - pool.held)
            pool.changed.notify_all()

    @contextmanager
    def held(self, shards: Shards) -> Iterator[None]:
        """Have shards mapped while the block runs."""
        self.want(shards)
        try:
            yield
        finally:
            self.release(shards)

    def _pin(self, shards: Shards, counts: Shards) -> None:
        new = shards[self._pins[shards] == 0].tolist()
        self._pins[shards] += counts
        for shard in new:
            pool.idle.pop((self._number, shard), None)
        self._held[0] += len(new)
        pool.held += len(new)

    def _unpin(self, shards: Shards, counts: Shards) -> None:
        self._pins[shards] -= counts
        done = shards[self._pins[shards] == 0].tolist()
        self._held[0] -= len(done)
        pool.held -= len(done)
        for shard in done:
            if shard in self._files:
                pool.idle[self._number, shard] = None

    def _bring(self, shard: int) -> None:
        """Map a shard into its place; under the lock."""
        size = int(self.sizes[shard])
        if not size or shard in self._files:
            return
        path = f"{self._folder}/{self._names[shard]}"
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                self._check(path, shard, os.fstat(handle))
                while _map(int(self.addresses[shard]), size, handle) is None:
                    code = ctypes.get_errno()
                    if code != errno.ENOMEM or not pool.give_up(len(pool.idle) - _ROOM):
                        raise OSError(code, os.strerror(code), path)
            finally:
                os.close(handle)
        except OSError as error:
            raise unreadable(path, error, f" and mapped, one of {len(self):,} shards") from None
        self._files[shard] = _Mapped(path, size)
        if not handlers:
            explain_cut_files(traces=False)
        mapped.add(self._files[shard])

    def _check(self, path: str, shard: int, status: os.stat_result) -> None:
        """The file must be the one that was there when the dataset was opened: mapped, it would
        have stayed that.
        """
        is_same = stat.S_ISREG(status.st_mode) and status.st_size == self.sizes[shard]
        if self._stamps is not None:
            number = status.st_ino - (1 << 64 if status.st_ino >> 63 else 0)
            is_same &= (number, status.st_mtime_ns) == tuple(self._stamps[shard].tolist())
        if not is_same:
            raise CorruptionError(
                f"{path}: was changed or replaced since the dataset was opened, which has too "
                f"many shards ({len(self):,}) to have all of them mapped; open it again, and "
                "write other data to another folder"
            )

    def _unmap(self, shard: int) -> None:
        """Give a shard's mapping up; its place stays reserved. Under the lock."""
        del self._files[shard]
        if _map(int(self.addresses[shard]), int(self.sizes[shard]), None) is None:
            raise ConfigError(
                f"{self._folder}: a mapping cannot be given up: {os.strerror(ctypes.get_errno())}"
            )


def _map(address: int, size: int, handle: int | None) -> int | None:
    """Map a file to an address (0: any), or reserve a place where nothing can be read; the address,
    or None.
    """
    if handle is None:
        kind, access = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0
    else:
        kind, access = mmap.MAP_SHARED, mmap.PROT_READ
    found = libc.mmap(
        address or None,
        size,
        access,
        kind | (_FIXED if address else 0),
        -1 if handle is None else handle,
        0,
    )
    return None if found is None or found == FAILED else int(found)


def _leave(begin: int, size: int, number: int, held: list[int]) -> None:
    """A dataset is gone, and nothing that it gave is left."""
    libc.munmap(begin, size)
    pool.left.append((number, held[0]))


@final
class Parts(Sequence[Array]):
    """The mappings of several datasets, end to end, none of which is made before it is asked for.

    Args:
        parts: Mappings, and which of them.
    """

    def __init__(self, parts: Sequence[tuple[Sequence[Array], range]]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(numbers) for _, numbers in parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @overload
    def __getitem__(self, index: int) -> Array: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Array]: ...
    def __getitem__(self, index: int | slice) -> Array | Sequence[Array]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        part = int(np.searchsorted(self._ends, number, side="right"))
        mappings, numbers = self._parts[part]
        return mappings[numbers[number - int(self._ends[part]) + len(numbers)]]


def joined_mappings(parts: Sequence[Sequence[Array]]) -> Sequence[Array]:
    """The mappings of several datasets, end to end."""
    if not any(isinstance(part, (MappedShards, Parts)) for part in parts):
        return [mapping for part in parts for mapping in part]
    return Parts([(part, range(len(part))) for part in parts])


def addresses_of(
    mappings: Sequence[Array],
) -> tuple[Annotated[UInt64, "shards"], Annotated[UInt64, "shards"]]:
    """Address and bytes of each mapping."""
    if isinstance(mappings, MappedShards):
        return mappings.addresses, mappings.sizes.astype(np.uint64)
    addresses = np.array([mapped_at(mapping) for mapping in mappings], np.uint64)
    return addresses, np.array([len(mapping) for mapping in mappings], np.uint64)


@final
class ShardHolder:
    """Holds documents of a local dataset whose shards are mapped on demand; its units are shards.

    Args:
        mappings: The shards.
        starts: First document of each, then the number of documents.
    """

    def __init__(self, mappings: MappedShards, starts: Annotated[Int64, "shards+1"]) -> None:
        self.mappings, self._starts = mappings, starts

    @property
    def stored(self) -> tuple[()]:
        """As in `Holder`: none of it."""
        return ()

    def __len__(self) -> int:
        return len(self.mappings)

    def find(self, documents: Annotated[Int64, "documents"], kinds: Sequence[int]) -> Shards:
        """As in `Holder`."""
        found: Shards = np.unique(np.searchsorted(self._starts, documents, side="right") - 1)
        return found

    def is_remote(self, documents: Annotated[Int64, "documents"]) -> Annotated[Bool, "documents"]:
        """As in `Holder`: none is."""
        return np.zeros(len(documents), np.bool_)

    def file_near(self, document: int, suffix: str) -> tuple[str, Callable[[int, int], bytes]]:
        """Only documents in a store have files that must be asked for."""
        raise AssertionError("a local document")

    def held(self, units: Shards) -> AbstractContextManager[None]:
        """As in `Holder`."""
        return self.mappings.held(units)

    def hold_all(self, begin: int, end: int, kinds: Sequence[int]) -> Shards | None:
        """As in `Holder`: there are too many."""
        return None

    def want(self, units: Shards, may_wait: Callable[[], bool] | None = None) -> None:
        """As in `Holder`: they are here at once."""
        self.mappings.want(units, may_wait)

    def wait(self, units: Shards) -> None:
        """As in `Holder`."""

    def release(self, units: Shards) -> None:
        """As in `Holder`."""
        self.mappings.release(units)

    def renew(self, units: Shards, error: CorruptionError) -> None:
        """As in `Holder`: there is no other copy."""

    def explained(self, units: Shards, error: CorruptionError) -> CorruptionError:
        """As in `Holder`."""
        return error


def shards_of(spans: Sequence[tuple[int, int]], starts: Annotated[Int64, "shards+1"]) -> Shards:
    """The shards of spans of documents [begin, end), each as often as a span has documents in
    it.
    """
    found = [np.empty(0, np.int64)]
    for begin, end in spans:
        first, last = np.searchsorted(starts, [begin, max(end - 1, begin)], side="right").tolist()
        found.append(np.arange(first - 1, last))
    return np.concatenate(found)
