"""One run of the Hugging Face Trainer under DeepSpeed, on CPUs, as one of several processes."""

import os
import warnings
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
warnings.simplefilter("ignore")  # of DeepSpeed, about itself

from rank_runs import run_program  # noqa: E402
from training_run import train_once  # noqa: E402

AUTO = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


def train(stage: int, **settings: Any) -> dict[str, Any]:
    """Train with ZeRO at a stage."""
    config = {
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **dict.fromkeys(AUTO, "auto"),
    }
    place = {"rank": int(os.environ["RANK"]), "ranks": int(os.environ["WORLD_SIZE"])}
    found = train_once(**settings, **place, optim="adamw_torch", deepspeed=config)
    return {name: found[name] for name in ("losses", "norms", "seen", "loader_step")}


if __name__ == "__main__":
    run_program(train)
