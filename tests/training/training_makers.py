"""Little runs for the tests of the trainer: data, run files, trainers in this process, and
processes that train.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from makers.datasets import prepare_here
from makers.ranks import run_processes
from makers.texts import WORDS, make_texts
from makers.tokenizers import tiny_tokenizer
from penstock.learn.training import Trainer
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.metrics import Metrics, read_metrics
from penstock.learn.training.step_sums import StepSums
from penstock.use.config import load_run
from penstock.use.config.run_file import resolved_text
from penstock.use.config.training import make_trainer

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


def make_data(folder: Path, number: int = 300, seed: int = 0) -> Path:
    """`train`, `validation`, the tokenizer and a run file of a dataset of made-up sentences."""
    tokenizer = tiny_tokenizer(folder / "tokenizer", make_texts(300), 340, ["[NLU]", *SENTINELS])
    prepare_here(
        iter(make_texts(number, seed)), tokenizer, folder / "data", validation=0.2, keep_text=True
    )
    return write_run_file(folder)


def write_run_file(folder: Path) -> Path:
    """A run file for `data/train` of a folder; returns the folder."""
    (folder / "run.yaml").write_text(RUN_FILE.format(data=folder / "data"))
    return folder


def make_teacher(folder: Path, steps: int) -> Path:
    """A run on the same sentences with a smaller vocabulary."""
    tokenizer = tiny_tokenizer(folder / "tokenizer", [" ".join(WORDS)] * 20, 290)
    prepare_here(iter(make_texts(300)), tokenizer, folder / "data" / "train")
    train(write_run_file(folder), folder / "run", f"training.steps={steps}")
    return folder / "run"


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
    data: Path,
    run: Path,
    *assignments: str,
    resume: bool = False,
    until: int | None = None,
    **options: Any,
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


def figures_of(training: Any, step: Any) -> dict[str, float]:
    """The figures of a step of training on paths, on one process."""
    sums = StepSums(Ranks(torch.device("cpu")))
    sums.add(training.pending())
    sums.same(training.pending_same())
    found: dict[str, float] = training.end(sums.take(), step)
    return found


def losses(records: Sequence[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """Of each step its number, loss and gradient norm, to the last bit."""
    return [(record["step"], record["loss"], record["gradient_norm"]) for record in records]


def values(records: Sequence[dict[str, Any]], name: str = "loss") -> list[float]:
    return [record[name] for record in records]


def on_two_processes(script: Path, code: str, *arguments: Any) -> list[tuple[str, str]]:
    """Run a script as two ranks, which must succeed; (standard output, standard error) of each."""
    return run_processes(script, code, *arguments, processes=2)


def last_json(text: str) -> Any:
    return json.loads(text.strip().splitlines()[-1])
