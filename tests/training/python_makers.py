"""Runs that are started from Python, like that of `training_makers.RUN_FILE`."""

import penstock as ps

SETTINGS = {
    "steps": 12,
    "threads": 1,
    "learning_rate": 0.01,
    "warmup_steps": 3,
    "checkpoints": {"every": 2, "keep": 2},
    "progress": False,
}


def make_loader(data, **more):
    return ps.Loader(
        data / "data" / "train", **{"sequence_length": 64, "rows_per_step": 4, "seed": 1, **more}
    )


def make_model(data, **more):
    vocab_size = ps.open_dataset(data / "data" / "train").tokenizer.vocab_size
    return ps.build_model(
        **{"layers": 2, "width": 16, "heads": 2, "vocab_size": vocab_size, **more}
    )


def start(data, output, model=None, **more):
    """A run like that of the run file."""
    model = make_model(data) if model is None else model
    return ps.train(model, make_loader(data), output=output, **{**SETTINGS, **more})


class KilledError(Exception):
    """Stands for a kill after some step."""


class KillAfter:
    """An `on_step` that ends the run."""

    def __init__(self, step):
        self.step = step

    def __call__(self, model, step, record):
        if record["step"] == self.step:
            raise KilledError(f"after step {self.step}")
