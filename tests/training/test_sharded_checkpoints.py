"""Sharded parts by gloo: FSDP2 on two processes, read on two and on one; a failure in one process
is one in each.
"""

import pytest
import torch
from training_makers import on_two_processes

from penstock.learn.training.checkpoints import newest_complete
from penstock.learn.training.optimizer_settings import OptimizerSettings
from penstock.learn.training.optimizers import Optimizers

SCRIPT = """
    import os, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from penstock.core.errors import PenstockError
    from penstock.learn.training import checkpoints
    from penstock.learn.training.checkpoints import newest_complete, save_checkpoint
    from penstock.learn.training.optimizer_settings import OptimizerSettings
    from penstock.learn.training.optimizers import Optimizers

    torch.set_num_threads(1)
    rank, folder = int(os.environ["RANK"]), sys.argv[1]
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=2)

    def build(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 5), nn.RMSNorm(5), nn.Linear(5, 3))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        return model, Optimizers(model, OptimizerSettings(kind=NAME))

    def train(model, optimizers, steps):
        losses = []
        for step in steps:
            x = torch.arange(12.0).reshape(2, 6) * (step + 1) / 50
            loss = model(x).square().mean()
            loss.backward()
            norm = optimizers.step(0.02)
            losses.append((loss.item(), norm.item()))
        return losses

    model, optimizers = build(0)
    train(model, optimizers, range(3))
    parts = {
        "weights.shards": dict(model.named_parameters()),
        "optimizer.shards": optimizers.state_tensors(),
        "state.json": {"step": 3},
    }
    save_checkpoint(folder, 3, parts)
    due = train(model, optimizers, range(3, 6))

    read, plain = [], checkpoints.digest
    def noted(path, **more):
        read.append(path.relative_to(folder).as_posix())
        return plain(path, **more)
    checkpoints.digest = noted
    again, resumed = build(1)
    found = newest_complete(folder, together=True)
    checkpoints.digest = plain
    found.stored("weights.shards").read_into(dict(again.named_parameters()))
    resumed.fill_state()
    found.stored("optimizer.shards").read_into(resumed.state_tensors())
    assert train(again, resumed, range(3, 6)) == due, "resumed differently"
    print("losses", *(loss for loss, _ in due))

    def wrong(path):
        raise OSError(28, "No space left on device")

    try:
        save_checkpoint(folder, 4, {"model": wrong, "state.json": {}})
    except PenstockError as error:
        print(type(error).__name__, "No space left on device" in str(error))
    print("read", *sorted(name for name in read if not name.endswith("manifest.json")))

    # Rank 0 sees none of the files of a folder that is not shared; both are told.
    own = f"{folder}-{rank}"
    try:
        save_checkpoint(own, 3, parts)
    except PenstockError as error:
        print(type(error).__name__, "share" in str(error))
    try:
        newest_complete(folder if rank else own, together=True)
    except PenstockError as error:
        print(type(error).__name__, error)

    # A byte of what rank 1 has written: both go back to the one before.
    save_checkpoint(folder, 5, parts)
    if rank == 0:
        name = f"{folder}/step-00000005/optimizer.shards/rank-00001-of-00002.safetensors"
        with open(name, "r+b") as file:
            file.seek(-3, 2)
            byte = file.read(1)
            file.seek(-3, 2)
            file.write(bytes([byte[0] ^ 1]))
    dist.barrier()
    said = []
    print("found", newest_complete(folder, say=said.append, together=True).step, *said)
    dist.destroy_process_group()
"""


def train_on_two(tmp_path, kind: str) -> list[list[str]]:
    """The lines that each of two processes printed."""
    code = SCRIPT.replace("NAME", repr(kind))
    ended = on_two_processes(tmp_path / "train.py", code, tmp_path / "checkpoints")
    return [out.split("\n") for out, _ in ended]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_two_processes_save_and_one_goes_on(tmp_path, kind):
    first, second = train_on_two(tmp_path, kind)
    assert first[0] == second[0]
    assert first[1] == "OutputError True"
    assert second[1] == "DistributedError True"
    due = {"state.json"} | {
        f"{part}.shards/rank-0000{rank}-of-00002.safetensors"
        for part in ("weights", "optimizer")
        for rank in (0, 1)
    }
    read = [line[2].removeprefix("read ").split() for line in (first, second)]
    assert all(read)
    assert sorted(read[0] + read[1]) == sorted(f"step-00000003/{name}" for name in due)
    assert first[3] == "OutputError True"
    assert second[3] == "DistributedError True"
    assert "the ranks find different checkpoints, this one step 0" in first[4]
    assert "the ranks find different checkpoints, this one step 3" in second[4]
    for lines in (first, second):
        assert lines[5].startswith("found 3 ")
        assert "the bytes of optimizer.shards/rank-00001-of-00002.safetensors differ" in lines[5]

    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.RMSNorm(5), torch.nn.Linear(5, 3))
    optimizers = Optimizers(model, OptimizerSettings(kind=kind))
    optimizers.fill_state()
    found = newest_complete(tmp_path / "checkpoints")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    found.stored("weights.shards").read_into(weights)
    found.stored("optimizer.shards").read_into(optimizers.state_tensors())
    losses = []
    for step in range(3, 6):
        loss = model(torch.arange(12.0).reshape(2, 6) * (step + 1) / 50).square().mean()
        loss.backward()
        optimizers.step(0.02)
        losses.append(loss.item())
    # Muon's matrix products are in bfloat16, and are cut otherwise on two processes.
    tolerance = {"adamw": 1e-5, "muon": 0.01}[kind]
    assert losses == pytest.approx([float(x) for x in first[0].split()[1:]], rel=tolerance)
