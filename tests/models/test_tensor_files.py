"""Tensors in files: whole ones as safetensors writes them, cut ones as any ranks have them, read
into any other cut, and by torch itself.
"""

import itertools

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.core.errors import CorruptionError
from penstock.models.tensor_files import Piece, StoredTensors, own_pieces, write_pieces

GENERATOR = torch.Generator().manual_seed(0)
TENSORS = {
    "wide": torch.randn(7, 5, generator=GENERATOR, dtype=torch.float64),
    "narrow": torch.randn(9, generator=GENERATOR).bfloat16(),
    "bytes": torch.arange(3, dtype=torch.uint8),
    "flags": torch.tensor([[True], [False]]),
    "step": torch.tensor(3.0),
    "none": torch.zeros(0, 4),
    "turned": torch.arange(12.0).reshape(3, 4).t(),
}


def whole(tensors):
    return {name: Piece(one, (0,) * one.ndim) for name, one in tensors.items()}


def equal(found, due) -> bool:
    return found.keys() == due.keys() and all(
        found[name].dtype == one.dtype and torch.equal(found[name], one)
        for name, one in due.items()
    )


def test_whole_tensors_are_what_safetensors_reads_and_writes(tmp_path):
    write_pieces(tmp_path / "ours", whole(TENSORS), cut=False)
    assert equal(load_file(tmp_path / "ours"), TENSORS)
    plain = {name: one.contiguous() for name, one in TENSORS.items()}
    save_file(plain, tmp_path / "theirs")
    for name in ("ours", "theirs"):
        assert equal(StoredTensors([tmp_path / name]).read(), TENSORS)
    prefixed = StoredTensors([tmp_path / "ours"], "module.").read()
    assert equal(prefixed, {f"module.{name}": one for name, one in TENSORS.items()})


def cut(tensor, counts):
    """A tensor in blocks, so many along each dimension, of unequal sizes."""
    edges = [
        sorted({0, size, *(size * k // n for k in range(1, n))})
        for size, n in zip(tensor.shape, counts, strict=True)
    ]
    for places in itertools.product(*(range(len(one) - 1) for one in edges)):
        low = tuple(one[k] for one, k in zip(edges, places, strict=True))
        high = tuple(one[k + 1] for one, k in zip(edges, places, strict=True))
        yield Piece(tensor[tuple(map(slice, low, high))], low)


def write_cut(folder, tensor, counts):
    folder.mkdir()
    for number, piece in enumerate(cut(tensor, counts)):
        write_pieces(folder / f"{number}.safetensors", {"t": piece}, cut=True)
    return StoredTensors(folder.iterdir())


@pytest.mark.parametrize("counts", [(1, 1), (3, 1), (7, 1), (1, 4), (2, 3)])
def test_blocks_are_read_whole(tmp_path, counts):
    tensor = torch.arange(35.0).reshape(7, 5)
    stored = write_cut(tmp_path / "cut", tensor, counts)
    assert stored.shapes == {"t": (7, 5)}
    assert torch.equal(stored.read()["t"], tensor)


def test_torch_reads_the_files_too(tmp_path):
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    tensor = torch.arange(35.0).reshape(7, 5)
    write_cut(tmp_path / "cut", tensor, (2, 3))
    found = {"t": torch.zeros(7, 5)}
    with pytest.warns(UserWarning, match="single process"):
        load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path / "cut")), no_dist=True)
    assert torch.equal(found["t"], tensor)


def test_what_is_missing_is_named(tmp_path):
    stored = write_cut(tmp_path / "cut", torch.arange(35.0).reshape(7, 5), (3, 1))
    with pytest.raises(CorruptionError, match="u is missing"):
        stored.read_into({"u": torch.zeros(7, 5)})
    with pytest.raises(CorruptionError, match=r"t is stored as \[7, 5\], and \[7, 4\] is needed"):
        stored.read_into({"t": torch.zeros(7, 4)})
    (tmp_path / "cut" / "1.safetensors").unlink()
    with pytest.raises(CorruptionError, match="t lacks 10 of its numbers"):
        StoredTensors((tmp_path / "cut").iterdir()).read()
    (tmp_path / "far").mkdir()
    far = Piece(torch.zeros(2), (10**15,))
    write_pieces(tmp_path / "far" / "0.safetensors", {"t": far}, cut=True)
    with pytest.raises(CorruptionError, match=r"t lacks 1,000,000,000,000,000 of its numbers"):
        StoredTensors((tmp_path / "far").iterdir())
    (tmp_path / "cut" / "0.safetensors").write_bytes(b"none of this")
    with pytest.raises(CorruptionError, match=r"0\.safetensors: cannot be read"):
        StoredTensors((tmp_path / "cut").iterdir())


class Ranks:
    """Processes that are only imagined: of each, tensors know which block they are."""

    def __init__(self, shape):
        self.shape, self.size = shape, torch.Size(shape).numel()

    def each(self):
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        for rank in range(self.size):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=self.size)
            try:
                mesh = dist.device_mesh.init_device_mesh("cpu", self.shape)
                yield rank, mesh
            finally:
                dist.destroy_process_group()


def as_placed(mesh, tensor, placements):
    """A rank's DTensor of a tensor, without messages."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, begin = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    block = tensor[tuple(slice(b, b + s) for b, s in zip(begin, size, strict=True))].clone()
    return DTensor.from_local(
        block, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def meshes():
    from torch.distributed.tensor import Replicate, Shard

    # Sharded over some; copied and sharded, as over nodes; in two directions.
    return {
        "2": ((2,), [Shard(0)]),
        "4": ((4,), [Shard(0)]),
        "copies": ((2, 2), [Replicate(), Shard(0)]),
        "both": ((2, 2), [Shard(0), Shard(1)]),
    }


@pytest.mark.parametrize("before", ["2", "4", "copies", "both"])
@pytest.mark.parametrize("after", ["2", "4", "copies", "both"])
def test_any_mesh_reads_what_any_mesh_has_written(tmp_path, before, after):
    """Each number is written once, also of what several ranks have; an empty block is nothing."""
    tensors = {"even": torch.randn(8, 4), "odd": torch.randn(3, 2), "step": torch.tensor(5.0)}
    shape, placements = meshes()[before]
    written = 0
    for rank, mesh in Ranks(shape).each():
        placed = {
            name: as_placed(mesh, one, placements) if one.ndim else one
            for name, one in tensors.items()
        }
        pieces = own_pieces(placed, is_first=rank == 0)
        written += sum(one.values.numel() for one in pieces.values())
        write_pieces(tmp_path / f"rank-{rank}.safetensors", pieces, cut=True)
    assert written == sum(one.numel() for one in tensors.values())
    stored = StoredTensors(tmp_path.iterdir())
    assert equal(stored.read(), tensors)
    shape, placements = meshes()[after]
    for _, mesh in Ranks(shape).each():
        empty = {
            name: as_placed(mesh, torch.full_like(one, -1), placements) if one.ndim else one * 0
            for name, one in tensors.items()
        }
        stored.read_into(empty)
        for name, one in tensors.items():
            if one.ndim:
                due = as_placed(mesh, one, placements)
                assert torch.equal(empty[name].to_local(), due.to_local())
            else:
                assert empty[name] == one
