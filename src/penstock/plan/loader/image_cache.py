"""A cache of processed images on disk: what a processor made of an image, without loss, in a
quarter to half the bytes.

Pixels of 8 bits that are scaled and normalised have few distinct values, at most 256 a channel. So
an array of floats is stored as a table of its values and a code for each element, of one or two
bytes; other arrays as they are. An entry has a checksum; a damaged one is made again. Entries are
files by digest, so several processes and runs may share a folder. Beyond its budget the cache
forgets what was used least recently.
"""

import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

import numpy as np

from penstock.core.arrays import Array
from penstock.core.errors import ConfigError
from penstock.core.folders import local_path
from penstock.data.stores.files import checksum, map_file, output_errors
from penstock.plan.loader._image_kernels import EMPTY, find_codes, look_up

BYTES = 64 << 30
PREFETCH_BYTES = 4 << 30
"""Budget by default."""
_MOST_VALUES = 1 << 13
_KEPT = 0.9
"""Share of the budget that is left after a clean-up."""


@final
class ImageCache:
    """Processed images in a folder.

    Args:
        folder: Made if it is missing; nothing else may be in it.
        kind: What decides the arrays besides the image: processor, settings, versions of packages.
        budget: Maximum bytes of the folder.

    Raises:
        ConfigError: The folder is a URL, or the budget is below 1.
        OutputError: The folder cannot be made.
    """

    def __init__(self, folder: str | Path, kind: str, budget: int = BYTES) -> None:
        if budget < 1:
            raise ConfigError(f"the budget of an image cache must be 1 byte or more, got {budget}")
        self._folder, self._kind, self._budget = local_path(folder, "an image cache"), kind, budget
        self._lock = threading.Lock()
        with output_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        self._size = sum(size for _, size, _ in self._entries())
        self.hits = self.misses = 0

    def get(self, digest: bytes, make: Callable[[], dict[str, Array]]) -> dict[str, Array]:
        """The arrays of an image, by the digest of its bytes; made, and kept, if they are not
        there.
        """
        path = self._path(digest)
        found = _read(path)
        if found is not None:
            self.hits += 1
            os.utime(path)
            return found
        self.misses += 1
        made = make()
        self._write(path, made)
        return made

    def __contains__(self, digest: bytes) -> bool:
        """Whether an image is there; another process may forget it."""
        return self._path(digest).exists()

    def _path(self, digest: bytes) -> Path:
        name = f"{digest.hex()}-{self._kind}"
        return self._folder / name[:2] / name

    def _entries(self) -> list[tuple[float, int, Path]]:
        """(time of the last use, bytes, path) of all entries."""
        found = []
        for path in self._folder.glob("??/*"):
            try:
                status = path.stat()
            except OSError:
                continue  # forgotten by another process
            found.append((status.st_mtime, status.st_size, path))
        return found

    def _write(self, path: Path, arrays: Mapping[str, Array]) -> None:
        content = _encoded(arrays)
        partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
        with output_errors(path):
            path.parent.mkdir(exist_ok=True)
            # Not forced to the disk: a lost or cut entry is made again.
            partial.write_bytes(content)
            os.replace(partial, path)
        with self._lock:
            self._size += len(content)
            if self._size > self._budget:
                self._forget()

    def _forget(self) -> None:
        entries = sorted(self._entries())
        self._size = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if self._size <= _KEPT * self._budget:
                break
            path.unlink(missing_ok=True)
            self._size -= size


def _encoded(arrays: Mapping[str, Array]) -> bytes:
    """An entry: its head as JSON behind two numbers (its size, the checksum of all after it), then
    arrays.
    """
    heads, parts = [], []
    for name, array in arrays.items():
        flat = np.ascontiguousarray(array).reshape(-1)
        found = _coded(flat) if flat.dtype == np.float32 and flat.size else None
        codes, values = (flat, None) if found is None else (found[1], len(found[0]))
        if found is not None:
            parts.append(found[0].tobytes())
        parts.append(codes.tobytes())
        heads.append([name, array.dtype.str, list(array.shape), codes.dtype.str, values])
    head = json.dumps(heads).encode()
    body = head + b" " * (-len(head) % 8) + b"".join(part + bytes(-len(part) % 8) for part in parts)
    size = len(head) + -len(head) % 8
    sums = np.array([size, checksum(np.frombuffer(body, np.uint8))], np.uint64)
    return sums.tobytes() + body


def _coded(values: Array) -> tuple[Array, Array] | None:
    """The distinct values, bit for bit, and the code of each element; None: they are too many to
    save anything.
    """
    table, codes = np.empty(_MOST_VALUES, np.uint32), np.empty(len(values), np.uint16)
    slots = np.full(2 * _MOST_VALUES, EMPTY, np.int32)
    count = find_codes(
        values.view(np.uint32), slots, 32 - (len(slots).bit_length() - 1), table, codes
    )
    if count < 0 or 4 * count + 2 * len(values) >= 4 * len(values):
        return None
    return table[:count], codes.astype(np.uint8) if count <= 256 else codes


def _read(path: Path) -> dict[str, Array] | None:
    """The arrays of an entry; None: it is missing or damaged."""
    try:
        data = map_file(path)
    except OSError:
        return None
    if len(data) < 16:
        return None
    size, expected = data[:16].view(np.uint64).tolist()
    body = data[16:]
    if checksum(body) != expected:
        return None
    arrays, at = {}, size
    for name, dtype, shape, code_dtype, values in json.loads(body[:size].tobytes()):
        table = None
        if values is not None:
            table, at = body[at : at + 4 * values].view(np.uint32), at + -(-4 * values // 8) * 8
        count = int(np.prod(shape)) * np.dtype(code_dtype).itemsize
        codes, at = body[at : at + count].view(code_dtype), at + -(-count // 8) * 8
        if table is None:
            arrays[name] = codes.view(dtype).reshape(shape).copy()
        else:
            numbers = np.empty(len(codes), np.uint32)
            look_up(table, codes, numbers)
            arrays[name] = numbers.view(dtype).reshape(shape)
    return arrays
