"""Reads bare tokens in `.npy` files, the format of OLMo-core, in place.

A file holds nothing but little-endian uint16 or uint32 tokens, all documents end to end, each
ending with the end-of-document token (files with a real NumPy header are read too). One scan, at
gigabytes per second, finds the documents; the result is kept in the user's cache folder (8 bytes
per document), so later openings only map it. Source: `olmo_core/data/numpy_dataset.py` of
ai2-olmo-core.
"""

import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.arrays import Array
from penstock.core.errors import ConfigError, FormatError, OutputError
from penstock.core.folders import local_path
from penstock.core.system import limit_cure
from penstock.data.shards.foreign.in_place import InPlaceCorpus, in_place_table, sample_checksum
from penstock.data.shards.format import _check_kernels as check
from penstock.data.stores.files import checksum, map_file, unreadable, write_file

_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 2**17
"""Maximum bytes of a NumPy header; NumPy itself reads ten thousand characters."""
_DTYPES = ("uint16", "uint32")


def open_npy(paths: str | Path | Sequence[str | Path], dtype: str, eos_id: int) -> InPlaceCorpus:
    """Open files of bare tokens without copying them.

    Args:
        paths: One file or several, in order.
        dtype: "uint16" or "uint32".
        eos_id: The token that ends every document, and belongs to it. Tokens after the last one are
            one more document.

    Raises:
        ConfigError: `dtype` or `eos_id` is impossible.
        FormatError: A file is missing, or does not hold such tokens.
    """
    files = [
        local_path(path, "a file of tokens")
        for path in ([paths] if isinstance(paths, (str, Path)) else paths)
    ]
    kind = np.dtype(dtype) if dtype in _DTYPES else None
    if kind is None or not files:
        raise ConfigError(
            f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}; at least one file, "
            f"got {len(files)}"
        )
    if not 0 <= eos_id <= np.iinfo(kind).max:
        raise ConfigError(f"eos_id {eos_id} is not a {dtype}; give the id that ends each document")
    tokens = [_tokens(path, kind) for path in files]
    ends = [_ends(path, part, eos_id) for path, part in zip(files, tokens, strict=True)]
    lengths = np.concatenate([np.diff(part) for part in ends])
    if int(lengths.max(initial=0)) >= 2**32:
        raise FormatError(
            f"{files[0]}: a document of {lengths.max()} tokens; at most 2^32 - 1; is eos_id "
            f"{eos_id} right?"
        )
    table = in_place_table(
        files,
        [part.view(np.uint8) for part in tokens],
        ends,
        lengths.astype(np.uint32).reshape(-1, 1),
        [len(part) - 1 for part in ends],
        token_bytes=kind.itemsize,
        offset_bytes=kind.itemsize,
    )
    content = (
        dtype,
        eos_id,
        *((checksum(e), sample_checksum(t.view("u1"))) for e, t in zip(ends, tokens, strict=True)),
    )
    fingerprint = hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()
    name = files[0].stem if len(files) == 1 else f"{files[0].stem} and {len(files) - 1} more"
    return InPlaceCorpus("npy", name, table, fingerprint, (open_npy, (files, dtype, eos_id)))


def _tokens(path: Path, dtype: np.dtype[Any]) -> Array:
    """The tokens of a file, mapped, without its header if it has one."""
    try:
        data = map_file(path)
    except OSError as error:
        if limit_cure(error):
            raise unreadable(path, error) from None
        raise FormatError(f"{path}: cannot read: {error.strerror or error}") from None
    begin, expected = (
        _after_header(path, data, dtype) if data[: len(_MAGIC)].tobytes() == _MAGIC else (0, None)
    )
    found = (len(data) - begin) / dtype.itemsize
    if found != (int(found) if expected is None else expected):
        what = "a whole number of tokens" if expected is None else f"{expected} tokens"
        raise FormatError(
            f"{path}: {len(data) - begin} bytes of tokens are {found:g} of {dtype}, expected "
            f"{what}; was the file cut? copy it again"
        )
    return data[begin:].view(dtype)


def _after_header(path: Path, data: Array, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Bytes before the first token of a file with a NumPy header, and the number of tokens in that
    header.
    """
    # A copy of the beginning, because NumPy allocates as much memory as the header claims for
    # itself.
    file = io.BytesIO(data[:_MAX_HEADER].tobytes())
    try:
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, _, found = read(file)
    except Exception as error:  # NumPy parses it as Python, which can fail in many ways
        raise FormatError(
            f"{path}: its NumPy header cannot be read: {error}; write the array again"
        ) from None
    if found != dtype or len(shape) != 1:
        raise FormatError(f"{path}: holds {found} {list(shape)}; expected {dtype} [tokens]")
    return file.tell(), shape[0]


def _ends(path: Path, tokens: Array, eos_id: int) -> Array:
    """0, then where each document ends, int64 [documents + 1]; from the cache folder if the file
    did not change.
    """
    stat = path.stat()
    place = (str(path.resolve()), stat.st_size, stat.st_mtime_ns, str(tokens.dtype), eos_id)
    key = hashlib.blake2b(repr(place).encode(), digest_size=16).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "penstock"
    cached = folder / f"documents-{key}.i64"
    if cached.is_file() and cached.stat().st_size % 8 == 0:
        found = map_file(cached).view(np.int64)
        if len(found) and found[0] == 0 and found[-1] == len(tokens):
            return found
    ends = _scan(tokens, eos_id)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(cached, ends)
    except (OSError, OutputError):
        return ends
    return map_file(cached).view(np.int64)


def _scan(tokens: Array, eos_id: int) -> Array:
    last = tokens.dtype.type(eos_id)
    ends = np.zeros(check.find_ends(tokens, last, np.empty(0, np.int64)) + 1, np.int64)
    check.find_ends(tokens, last, ends[1:])
    return ends
