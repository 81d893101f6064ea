"""FSDP2 and torch.distributed.checkpoint in a plain loop; killed and started again, with any number
of ranks.

torchrun --nproc-per-node 2 examples/fsdp_loop.py DATASET CHECKPOINTS --steps 40

A checkpoint holds weights and optimizer in shards, and the loader's place after the last trained
step. The losses of a run that was stopped are those of one that was not; other ranks change only
the order of additions.
"""

import argparse
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import penstock as ps

SIZE = {"layers": 2, "width": 64, "heads": 4}


def sharded_model(vocab_size, mesh):
    """A model whose gradients are summed over ranks: a loss is divided by the denominator of the
    whole step.
    """
    model = ps.build_model(vocab_size=vocab_size, **SIZE).to(mesh.device_type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in (model, *model.blocks):
        # By default FSDP2 takes the mean: multiply the loss by the number of ranks then.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    return model


def save(folder, done, model, optimizer, place):
    """A checkpoint is complete once it has its `.metadata`, which is written last."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save(
        {"model": weights, "optimizer": state, "loader": place},
        checkpoint_id=folder / f"step-{done:06d}",
    )


def resume(folder, model, optimizer, place):
    """Load the newest complete checkpoint, if there is one."""
    complete = sorted(path.parent for path in folder.glob("step-*/.metadata"))
    if not complete:
        return
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state, "loader": place}, checkpoint_id=complete[-1])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def train(dataset, folder, steps, every=10):
    """Train to a step; the loss of each step that was trained here."""
    mesh = init_device_mesh(
        "cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),)
    )
    torch.manual_seed(0)
    model = sharded_model(ps.open_dataset(dataset).tokenizer.vocab_size, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = ps.Loader(
        dataset,
        sequence_length=64,
        rows_per_step=4,
        seed=1,
        requirements=model.requirements(),
        data_parallel=mesh,
    )
    place = ps.integrations.LoaderState(loader)
    resume(folder, model, optimizer, place)
    losses = []
    for step in place if loader.step < steps else ():
        total = torch.zeros(1, device=mesh.device_type)
        for number, row in enumerate(step, 1):
            # Gradients of all rows are exchanged with those of the last.
            model.set_requires_gradient_sync(number == len(step))
            loss = ps.loss(model, row, step.loss_denominators)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        place.trained(step)
        dist.all_reduce(total)
        losses.append(float(total))
        done = step.index + 1
        if done % every == 0 or done == steps:
            save(folder, done, model, optimizer, place)
            if dist.get_rank() == 0:
                print(f"step {done}: loss {losses[-1]:.4f}", flush=True)
        if done == steps:
            break
    return losses


def main():
    """Read the command line, and train among the processes that torchrun started."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--again", action="store_true", help="remove earlier checkpoints first")
    options = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    if options.again and dist.get_rank() == 0:
        shutil.rmtree(options.folder, ignore_errors=True)
    dist.barrier()
    train(options.dataset, options.folder, options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
