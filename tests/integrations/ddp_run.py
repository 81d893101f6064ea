"""A plain loop with DDP, as one of several processes: what it saw, and its losses."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_runs import loss_of_documents, run_program
from tiny_models import make_loader, make_model
from torch.nn.parallel import DistributedDataParallel

import penstock as ps


def train(data: str, checkpoint: str, steps: int) -> dict[str, Any]:
    """Train to a step, from the checkpoint if there is one, and write it after each step."""
    dist.init_process_group("gloo")
    rank, size, path = dist.get_rank(), dist.get_world_size(), Path(checkpoint)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    place = ps.integrations.LoaderState(make_loader(Path(data), ranks=(rank, size)))
    if path.exists():
        saved = torch.load(path)
        model.module.load_state_dict(saved["model"])
        place.load_state_dict(saved["loader"])
    dist.barrier()
    seen, losses, alone = [], [], []
    for step in place:
        alone.append(loss_of_documents(model.module, step))
        seen.append([row.tokens.tolist() for row in step])
        total = 0.0
        for number, row in enumerate(step, 1):
            with nullcontext() if number == len(step) else model.no_sync():
                loss = ps.huggingface.loss(model, row, step.loss_denominator)
                (loss * size).backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        place.trained(step)
        losses.append(total)
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "loader": place.state_dict()}, path)
        if step.index + 1 == steps:
            break
    return {"seen": seen, "losses": losses, "alone": alone}


if __name__ == "__main__":
    run_program(train)
