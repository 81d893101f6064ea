"""Little runs for the tests of the trainer: data, run files, trainers in this process, and processes that train."""

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.config import load_run
from penstock.config.run import resolved_text
from penstock.config.training import make_trainer
from penstock.prepare import prepare
from penstock.tokenizers import train_tokenizer
from penstock.training import Trainer
from penstock.training.distributed import Ranks
from penstock.training.metrics import Metrics, read_metrics

WORDS = (
    "the",
    "a",
    "one",
    "cat",
    "dog",
    "tree",
    "river",
    "sees",
    "likes",
    "finds",
    "under",
    "over",
    "small",
    "big",
    "old",
)
SENTINELS = [f"<extra_id_{n}>" for n in range(40)]
LENGTH = 64
RUN_FILE = """\
data:
  sources: [{{path: {data}/train}}]
  loader: {{sequence_length: 64, rows_per_step: 4, seed: 1}}
model: {{layers: 2, width: 16, heads: 2}}
training:
  steps: 12
  threads: 1
  optimizer: {{learning_rate: 0.01}}
  schedule: {{warmup_steps: 3}}
  checkpoints: {{every: 2, keep: 2}}
"""


def make_texts(number: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(3, 30))) + "." for _ in range(number)]


def make_data(folder: Path, number: int = 300, seed: int = 0) -> Path:
    """`train`, `validation`, the tokenizer and a run file of a dataset of made-up sentences."""
    texts = make_texts(number, seed)
    tokenizer = folder / "tokenizer"
    train_tokenizer(
        make_texts(300), vocab_size=340, output=tokenizer, special_tokens=["[NLU]", *SENTINELS], progress=False
    )
    prepare(
        iter(texts), tokenizer=tokenizer, output=folder / "data", validation=0.2, processes=1, keep_text=True,
        progress=False,
    )  # fmt: skip
    (folder / "run.yaml").write_text(RUN_FILE.format(data=folder / "data"))
    return folder


def make(
    data: Path,
    run: Path,
    *assignments: str,
    resume: bool = False,
    ranks: Ranks | None = None,
    say: Callable[[str], None] = lambda _: None,
    dry_run: bool = False,
) -> Trainer:
    """What `penstock train` makes of the run file and `--set` of the assignments."""
    path = data / "run.yaml"
    return make_trainer(
        load_run(path, assignments),
        run_file=str(path),
        text=resolved_text(path, assignments),
        output=run,
        resume=resume,
        ranks=ranks or Ranks(torch.device("cpu")),
        say=say,
        dry_run=dry_run,
    )


def train(
    data: Path, run: Path, *assignments: str, resume: bool = False, until: int | None = None, **options: Any
) -> list[dict[str, Any]]:
    """Train, and all records of the run; given up without a word after step `until`."""
    trainer = make(data, run, *assignments, resume=resume, **options)
    shown = trainer.ranks.is_first
    with Metrics(run, total_steps=trainer.steps, done=trainer.loader.step, shown=shown) as metrics:
        for record in trainer.train():
            metrics.see(record)
            if record["step"] == until:
                break
    return read_metrics(run) if shown else []


def losses(records: Sequence[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """Of each step its number, loss and gradient norm, to the last bit."""
    return [(record["step"], record["loss"], record["gradient_norm"]) for record in records]


def values(records: Sequence[dict[str, Any]], name: str = "loss") -> list[float]:
    return [record[name] for record in records]


def environment(rank: int = 0, size: int = 1, port: int = 0) -> dict[str, str]:
    """What torchrun sets; of a single process nothing."""
    named = {**os.environ, "OMP_NUM_THREADS": "1"}
    if size == 1:
        return named
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {**named, **{name: str(value) for name, value in place.items()}, "MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_two_processes(script: Path, *arguments: str) -> list[tuple[int, str, str]]:
    """Run a script as two ranks; (exit code, standard output, standard error) of each."""
    # Not on the path of those scripts, which import this module.
    from patience import PATIENCE_SECONDS

    # Somebody else may take the port before rank 0 does.
    for _ in range(3):
        told = _on_two_processes(script, arguments, PATIENCE_SECONDS)
        if not any("EADDRINUSE" in err for _, _, err in told):
            break
    return told


def _on_two_processes(script: Path, arguments: Sequence[str], seconds: float) -> list[tuple[int, str, str]]:
    port = free_port()
    children = [
        subprocess.Popen(
            [sys.executable, script, *arguments],
            env=environment(rank, 2, port), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        told = [child.communicate(timeout=seconds) for child in children]
    finally:
        for child in children:
            child.kill()
    return [(child.returncode, out, err) for child, (out, err) in zip(children, told, strict=True)]


def last_json(text: str) -> Any:
    return json.loads(text.strip().splitlines()[-1])
