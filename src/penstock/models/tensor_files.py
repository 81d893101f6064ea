"""Tensors in safetensors files: whole, or cut into one file per rank, which any ranks read again.

The files of a cut tensor are in the layout of torch.distributed.checkpoint's
`HuggingFaceStorageWriter`: each says where its part begins (`DCP_SHARDING_INFO`). So torch's own
`HuggingFaceStorageReader` reads them too, and no pickle is involved. They are written here because
torch's writer needs a second copy of a rank's tensors and messages between the ranks, while others
train: here a rank writes what it has, a tensor at a time, and asks nobody.
"""

import copy
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.core.errors import CorruptionError

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}
_PLACES, _BEGIN = "DCP_SHARDING_INFO", "saved_offsets"
_SAMPLE = 8
"""Numbers of a stored tensor in each dimension that tell it from another."""


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a tensor, or all of it."""

    values: Tensor
    """The block, on any device."""
    begin: tuple[int, ...]
    """Where it begins in the tensor, in each dimension."""


def piece_of(tensor: Tensor, *, is_first: bool = True) -> Piece | None:
    """What this rank writes of a tensor: of a DTensor its own block; None: another rank writes it.

    Of what several ranks have, the first of them writes it: of a plain tensor rank 0.
    """
    # Only a DTensor says which block it is; importing its class takes seconds.
    blocks = getattr(tensor, "__create_chunk_list__", None)
    if blocks is None:
        return Piece(tensor.detach(), (0,) * tensor.ndim) if is_first else None
    dtensor: Any = tensor
    place = dtensor.device_mesh.get_coordinate()
    copies = zip(dtensor.placements, place or (), strict=False)
    if place is None or any(one.is_replicate() and number for one, number in copies):
        return None
    values = local_part(tensor)
    return Piece(values, _begin(tensor)) if values.numel() else None


def own_pieces(tensors: Mapping[str, Tensor | Piece], *, is_first: bool) -> dict[str, Piece]:
    """What this rank writes of some tensors, by name; pieces stay what they are.

    Args:
        tensors: Tensors or DTensors, of which all ranks have the same names, or pieces.
        is_first: Whether this is rank 0.
    """
    found = {}
    for name, one in tensors.items():
        piece = one if isinstance(one, Piece) else piece_of(one, is_first=is_first)
        if piece is not None:
            found[name] = piece
    return found


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, not copied."""
    inner: Tensor = getattr(tensor.detach(), "_local_tensor", tensor.detach())
    return inner


def write_pieces(path: Path, pieces: Mapping[str, Piece], *, cut: bool) -> None:
    """Write a safetensors file, a tensor at a time: no second copy of all of them is made.

    Args:
        path: The file.
        pieces: Name → block.
        cut: Whether the blocks say where they begin; else they are whole tensors.

    Raises:
        OSError: It cannot be written.
    """
    metadata = {"format": "pt"}
    if cut:
        places = {name: {_BEGIN: list(one.begin)} for name, one in pieces.items()}
        metadata |= {"DCP_VERSION": "1.0", _PLACES: json.dumps(places)}
    header: dict[str, object] = {"__metadata__": metadata}
    # Wide numbers come first, so that each tensor begins at a multiple of its width.
    order = sorted(pieces, key=lambda name: (-pieces[name].values.element_size(), name))
    end = 0
    for name in order:
        values = pieces[name].values
        begin, end = end, end + values.numel() * values.element_size()
        header[name] = {
            "dtype": _DTYPES[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            values = pieces[name].values.cpu().contiguous().reshape(-1)
            if values.numel():
                file.write(values.view(torch.uint8).numpy().data)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise CorruptionError(f"{path}: cannot be read: {error}; copy it again") from None


_Block = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a block begins, and its size, in each dimension."""


@final
class StoredTensors:
    """The tensors of some files, each whole in one or cut into several.

    Args:
        files: Files that `write_pieces` or safetensors wrote.
        prefix: Put before each name.

    Raises:
        CorruptionError: A file cannot be read, or is missing.
    """

    def __init__(self, files: Iterable[Path], prefix: str = "") -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shape of each whole tensor, by name."""
        self._dtypes: dict[str, str] = {}
        self._prefix = prefix
        self._stored: dict[str, str] = {}
        self._files = {path: self._blocks_of(path) for path in sorted(files)}
        stored = dict.fromkeys(self.shapes, 0)
        for name, (_, size) in (item for blocks in self._files.values() for item in blocks.items()):
            stored[name] += math.prod(size)
        self._require_all({name: math.prod(s) - stored[name] for name, s in self.shapes.items()})

    def _require_all(self, left: Mapping[str, int]) -> None:
        for name, count in left.items():
            if count:
                raise CorruptionError(f"{self._where}: {name} lacks {count:,} of its numbers")

    def _blocks_of(self, path: Path) -> dict[str, _Block]:
        found: dict[str, _Block] = {}
        with _reading(path), safe_open(path, framework="pt") as file:
            places = json.loads((file.metadata() or {}).get(_PLACES, "{}"))
            for stored in file.keys():  # noqa: SIM118
                block, name = file.get_slice(stored), self._prefix + stored
                size = tuple(block.get_shape())
                begin = tuple(places[stored][_BEGIN]) if places else (0,) * len(size)
                end = tuple(map(sum, zip(begin, size, strict=True)))
                found[name], self._stored[name] = (begin, size), stored
                self.shapes[name] = tuple(map(max, self.shapes.get(name, end), end))
                self._dtypes[name] = block.get_dtype()
        return found

    @torch.no_grad()
    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Read into tensors of the same names; of a DTensor only this rank's block is read.

        Raises:
            CorruptionError: A tensor is missing, has another shape, or lacks a part.
        """
        self.require_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        targets = {name: (local_part(tensor), _begin(tensor)) for name, tensor in tensors.items()}
        left = {name: values.numel() for name, (values, _) in targets.items()}
        for path, blocks in self._files.items():
            shared = {}
            for name in sorted(blocks.keys() & targets.keys()):
                values, begin = targets[name]
                if (both := _shared(blocks[name], (begin, tuple(values.shape)))) is not None:
                    shared[name] = both
            if not shared:
                continue
            with _reading(path), safe_open(path, framework="pt") as file:
                for name, (stored_part, wanted_part) in shared.items():
                    part = file.get_slice(self._stored[name])[stored_part]
                    targets[name][0][wanted_part].copy_(part)
                    left[name] -= part.numel()
        self._require_all(left)

    def require_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse files that do not have tensors of these names and shapes.

        Raises:
            CorruptionError: A tensor is missing, or has another shape.
        """
        for name, wanted in shapes.items():
            stored = self.shapes.get(name)
            if stored != wanted:
                found = "missing" if stored is None else f"stored as {list(stored)}"
                raise CorruptionError(
                    f"{self._where}: {name} is {found}, and {list(wanted)} is needed"
                )

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype in which a tensor is stored."""
        return next(dtype for dtype, text in _DTYPES.items() if text == self._dtypes[name])

    def chosen(self, names: Mapping[str, str]) -> Self:
        """The same files with some of their tensors, by other names: new name → name here."""
        found = copy.copy(self)
        found.shapes = {new: self.shapes[name] for new, name in names.items()}
        found._dtypes = {new: self._dtypes[name] for new, name in names.items()}
        found._stored = {new: self._stored[name] for new, name in names.items()}
        found._files = {
            path: {new: blocks[name] for new, name in names.items() if name in blocks}
            for path, blocks in self._files.items()
        }
        return found

    def sampled(self) -> bytes:
        """A few numbers of each tensor, as bytes: they tell one model's files from another's, and
        cost a page or two each.

        Raises:
            CorruptionError: A file cannot be read.
        """
        found = []
        for path, blocks in self._files.items():
            with _reading(path), safe_open(path, framework="pt") as file:
                for name in sorted(blocks):
                    place = tuple(slice(0, _SAMPLE) for _ in blocks[name][1])
                    part = file.get_slice(self._stored[name])[place].contiguous()
                    found.append(part.reshape(-1).view(torch.uint8).numpy().tobytes())
        return b"".join(found)

    def read(self) -> dict[str, Tensor]:
        """All tensors, whole, on the CPU."""
        found = {
            name: torch.empty(shape, dtype=self.dtype_of(name))
            for name, shape in self.shapes.items()
        }
        self.read_into(found)
        return found

    @property
    def _where(self) -> Path:
        files = list(self._files)
        return files[0] if len(files) == 1 else files[0].parent


def _begin(tensor: Tensor) -> tuple[int, ...]:
    """Where this process's block of a tensor begins."""
    blocks = getattr(tensor, "__create_chunk_list__", None)
    return (0,) * tensor.ndim if blocks is None else tuple(blocks()[0].offsets)


def _shared(stored: _Block, wanted: _Block) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What two blocks of a tensor share, as a part of each; None: nothing."""
    in_stored, in_wanted = [], []
    for first, size, other, length in zip(*stored, *wanted, strict=True):
        low, high = max(first, other), min(first + size, other + length)
        if low >= high:
            return None
        in_stored.append(slice(low - first, high - first))
        in_wanted.append(slice(low - other, high - other))
    return tuple(in_stored), tuple(in_wanted)
