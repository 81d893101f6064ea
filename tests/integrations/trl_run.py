"""One run of `penstock.trl.SFTTrainer`, in this process or (as a program) as one of several: what
it saw and computed.

As a program: `python trl_run.py SETTINGS.json OUTPUT.json` with RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT set.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRL_EXPERIMENTAL_SILENCE="1")

import numpy as np
from tiny_models import VOCABULARY, make_model


def make_tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", pad_token="t2")


def make_rows_loader(
    data: str | Path, *, rows: int = 4, ranks: tuple[int, int] = (0, 1), **kwargs: Any
) -> Any:
    import penstock as ps

    source = ps.Source(
        data,
        name="data",
        too_long=kwargs.pop("too_long", "drop"),
        max_epochs=kwargs.pop("epochs", None),
    )
    settings = {"sequence_length": 32, "rows_per_step": rows, "seed": 3, **kwargs}
    return ps.Loader(source, data_parallel=ranks, **settings)


def settings_of(output: str | Path, **more: Any) -> Any:
    from trl import SFTConfig

    settings = {
        "max_steps": 6,
        "logging_steps": 1,
        "save_steps": 2,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "learning_rate": 1e-2,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "seed": 1,
        **more,
    }
    return SFTConfig(str(output), **settings)


def recording_trainer(**kwargs: Any) -> Any:
    """An SFTTrainer that keeps batches, losses and TRL's own count of targets, of training
    alone.
    """
    import penstock as ps

    class Recording(ps.trl.SFTTrainer):  # type: ignore[name-defined,misc]
        seen: list[Any]

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **more)
            if model.training:
                found = {
                    name: inputs[name].tolist() for name in ("input_ids", "labels", "position_ids")
                }
                count = more.get("num_items_in_batch")
                self.seen.append({**found, "loss": float(loss), "count": int(count)})
            return loss

    trainer = Recording(processing_class=make_tokenizer(), **kwargs)
    trainer.seen = []
    return trainer


def train_once(
    data: str,
    output: str,
    *,
    ranks: tuple[int, int] = (0, 1),
    rows: int = 4,
    resume: Any = None,
    rows_per_microbatch: int = 2,
    epochs: float | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    trainer = recording_trainer(
        model=make_model(),
        args=settings_of(output, **arguments),
        loader=make_rows_loader(data, rows=rows, ranks=tuple(ranks), epochs=epochs),
        rows_per_microbatch=rows_per_microbatch,
    )
    trainer.train(resume)
    weights = np.concatenate([p.detach().numpy().ravel() for p in trainer.model.parameters()])
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return {
        "seen": trainer.seen,
        "losses": losses,
        "weights": weights.tolist(),
        "steps": trainer.state.global_step,
    }


if __name__ == "__main__":
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = train_once(**json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
