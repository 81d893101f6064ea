"""Little datasets and runs for the verbs that take a model."""

from pathlib import Path

import yaml

from penstock.use.cli.train import run as train

SETTINGS = {
    "steps": 6,
    "threads": 1,
    "device": "cpu",
    "optimizer": {"learning_rate": 0.01},
    "schedule": {"warmup_steps": 2},
    "checkpoints": {"every": 4, "keep": 2},
}


def train_on(data: Path, run: Path, **sections: object) -> Path:
    """The folder of a run on a dataset, as `penstock train` makes it."""
    written = {
        "data": {
            "sources": [{"path": str(data)}],
            "loader": {"sequence_length": 64, "rows_per_step": 4},
        },
        "model": {"layers": 2, "width": 16, "heads": 2},
        **sections,
    }
    run_file = run.with_suffix(".yaml")
    run_file.write_text(yaml.safe_dump(written))
    train(run_file=str(run_file), output=str(run))
    return run
