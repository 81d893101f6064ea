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

    again, resumed = build(1)
    found = newest_complete(folder)
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
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]

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
