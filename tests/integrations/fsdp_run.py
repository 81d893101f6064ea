"""`examples/fsdp_loop.py` as one of several processes: what it saw, and its losses."""

import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rank_runs import load_example, plain_optimizer, run_program

import penstock as ps

warnings.simplefilter("ignore")  # torch's, about its own checkpoints


def train(data: str, checkpoints: str, steps: int, every: int = 10) -> dict[str, Any]:
    """Run it, recording each row on its way to the loss."""
    dist.init_process_group("gloo")
    plain_optimizer()
    loss, rows = ps.loss, []

    def recording(model: Any, row: Any, denominators: Any) -> Any:
        rows.append(row.tokens.tolist())
        return loss(model, row, denominators)

    ps.loss = recording  # type: ignore[assignment]
    losses = load_example("fsdp_loop").train(data, Path(checkpoints), steps, every)
    each = 4 // dist.get_world_size()
    # The example adds the ranks' losses up: rank 0 reports them.
    shown = losses if dist.get_rank() == 0 else [0.0] * len(losses)
    return {"seen": [rows[i : i + each] for i in range(0, len(rows), each)], "losses": shown}


if __name__ == "__main__":
    run_program(train)
