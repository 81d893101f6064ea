"""`examples/accelerate_loop.py` as one of several processes: what it saw, its losses, and those of
documents alone.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rank_runs import load_example, loss_of_documents, plain_optimizer, run_program

from penstock.integrations.accelerate import AcceleratorSteps


def train(data: str, folder: str, steps: int, every: int = 10) -> dict[str, Any]:
    """Run it, recording each step on its way."""
    accelerator, optimizer = Accelerator(cpu=True), torch.optim.AdamW
    plain_optimizer()
    seen: list[Any] = []
    alone: list[float] = []
    rows = AcceleratorSteps.rows

    def recording(self: Any, step: Any, model: Any) -> Any:
        seen.append([row.tokens.tolist() for row in step])
        alone.append(loss_of_documents(accelerator.unwrap_model(model), step))
        return rows(self, step, model)

    AcceleratorSteps.rows = recording  # type: ignore[method-assign,assignment]
    try:
        losses = load_example("accelerate_loop").train(
            accelerator, data, Path(folder), steps, every
        )
    finally:
        torch.optim.AdamW = optimizer  # type: ignore[misc]
        AcceleratorSteps.rows = rows  # type: ignore[method-assign]
    # The example adds the ranks' losses up: rank 0 reports them.
    shown = losses if accelerator.is_main_process else [0.0] * len(losses)
    return {"seen": seen, "losses": shown, "alone": alone}


if __name__ == "__main__":
    run_program(train)
