"""Little datasets and runs for the verbs that take a model."""

import random
from pathlib import Path

import yaml

from penstock.cli.train import run as train

WORDS = ("the", "a", "cat", "dog", "tree", "house", "river", "sees", "likes", "finds", "near", "small", "big", "old")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SETTINGS = {
    "steps": 6,
    "threads": 1,
    "device": "cpu",
    "optimizer": {"learning_rate": 0.01},
    "schedule": {"warmup_steps": 2},
    "checkpoints": {"every": 4, "keep": 2},
}


def sentences(number: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(3, 30))) + "." for _ in range(number)]


def train_on(data: Path, run: Path, **sections: object) -> Path:
    """The folder of a run on a dataset, as `penstock train` makes it."""
    written = {
        "data": {"sources": [{"path": str(data)}], "loader": {"sequence_length": 64, "rows_per_step": 4}},
        "model": {"layers": 2, "width": 16, "heads": 2},
        **sections,
    }
    run_file = run.with_suffix(".yaml")
    run_file.write_text(yaml.safe_dump(written))
    train(str(run_file), output=str(run))
    return run
