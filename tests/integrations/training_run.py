"""One training run with `Trainer`, in this process or (as a program) as one of several: what it saw
and computed.

As a program: `python training_run.py SETTINGS.json OUTPUT.json` with RANK, WORLD_SIZE, MASTER_ADDR
and MASTER_PORT set.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import make_loader, make_model


def recording_trainer(**kwargs: Any) -> Any:
    """A Trainer that keeps, in `seen`, the tokens of every microbatch that it trained on."""
    import penstock as ps

    class Recording(ps.huggingface.Trainer):  # type: ignore[name-defined,misc]
        seen: list[Any]

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if model.training:
                self.seen.append(inputs["input_ids"].tolist())
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = Recording(**kwargs)
    trainer.seen = []
    return trainer


def train_once(
    data: str,
    output: str,
    *,
    max_steps: int = 6,
    rank: int = 0,
    ranks: int = 1,
    rows: int = 4,
    max_epochs: float | None = None,
    resume: str | None = None,
    model: Any = None,
    eval_data: str | None = None,
    rows_per_microbatch: int = 1,
    threads: int = 1,
    packing: str = "best_fit",
    **arguments: Any,
) -> dict[str, Any]:
    """Train and say: loss of each step, tokens of each microbatch, metrics of the evaluation, last
    weights.
    """
    import transformers

    place = (rank, ranks)
    loader = make_loader(
        Path(data), rows=rows, ranks=place, max_epochs=max_epochs, threads=threads, packing=packing
    )
    eval_loader = make_loader(Path(eval_data), ranks=place, max_epochs=1) if eval_data else None
    settings: dict[str, Any] = {
        "max_steps": max_steps,
        "logging_steps": 1,
        "save_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "seed": 1,
        "learning_rate": 1e-2,
        "disable_tqdm": True,
        **arguments,
    }
    trainer = recording_trainer(
        model=make_model() if model is None else model,
        args=transformers.TrainingArguments(output, **settings),
        loader=loader,
        eval_loader=eval_loader,
        rows_per_microbatch=rows_per_microbatch,
    )
    trainer.train(resume)
    history = trainer.state.log_history
    weights = np.concatenate([p.detach().numpy().ravel() for p in trainer.model.parameters()])
    return {
        "losses": [log["loss"] for log in history if "loss" in log],
        "norms": [log["grad_norm"] for log in history if "loss" in log],
        "epochs": [log["epoch"] for log in history if "loss" in log],
        "seen": trainer.seen,
        "evaluation": trainer.evaluate() if eval_loader else None,
        "weights": weights.tolist(),
        "steps": trainer.state.global_step,
        "loader_step": loader.step,
    }


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    found = train_once(**json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
