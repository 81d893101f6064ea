"""Data parallel × context parallel training on one page: ranks with neighbouring numbers share each
row.

    torchrun --standalone --nproc-per-node 4 examples/context_parallel.py DATASET --share 2

With 4 processes and `--share 2`, two groups get different rows, and the two ranks of a group have
half of the slots of each row. The losses printed are those of one process (`python
examples/context_parallel.py DATASET`), to rounding.
"""

import argparse

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps

SIZE = {"layers": 2, "width": 64, "heads": 4}


def train(dataset, steps, mesh):
    """The loss of each step."""
    cp = None if mesh is None else mesh["cp"]
    rank, size = (0, 1) if cp is None else (cp.get_local_rank(), cp.size())
    model = ps.build_model(vocab_size=ps.open_dataset(dataset).tokenizer.vocab_size, **SIZE)
    loader = ps.Loader(
        dataset,
        sequence_length=256,
        rows_per_step=4,
        seed=1,
        requirements=model.requirements(),
        data_parallel=mesh,
    )
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in loader:
        total = torch.zeros(())
        for row in step:  # ranks that share a row get the same
            part = ps.inputs.RowSlice.of(row, rank, size)  # this rank's slots of it
            loss = ps.loss(model, model.slice_tensors(part, cp), step.loss_denominators)
            loss.backward()
            total += loss.detach()
        if mesh is not None:
            # Sums, not means: losses are divided by the targets of the whole step.
            for gradient in (weight.grad for weight in model.parameters()):
                dist.all_reduce(gradient)
            dist.all_reduce(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
        if mesh is None or mesh.get_rank() == 0:
            print(f"step {step.index + 1}: loss {losses[-1]:.4f}", flush=True)
        if len(losses) == steps:
            return losses
    return losses


def main():
    """Train on one process, or on those of torchrun."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("dataset")
    words.add_argument("--share", type=int, default=1, help="ranks that share each row")
    words.add_argument("--steps", type=int, default=20)
    given = words.parse_args()
    if not dist.is_torchelastic_launched():
        train(given.dataset, given.steps, None)
        return
    dist.init_process_group("gloo")
    groups = dist.get_world_size() // given.share
    train(
        given.dataset,
        given.steps,
        init_device_mesh("cpu", (groups, given.share), mesh_dim_names=("dp", "cp")),
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
