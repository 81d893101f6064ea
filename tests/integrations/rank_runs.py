"""Programs of these tests as one or several processes (gloo), and what a step's loss must be."""

import importlib.util
import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from makers.ranks import run_ranks

Found = list[dict[str, Any]]


def run_on_ranks(program: str, folder: Path, size: int, /, **settings: Any) -> Found:
    """Run a program with its settings as so many ranks; what each of them wrote.

    Args:
        program: File next to this one.
        folder: For the files of this run.
        size: Ranks.
        settings: What the program reads.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(settings))
    ended = run_ranks(Path(__file__).with_name(program), ["settings.json"], size, folder)
    assert [code for code, _, _ in ended] == [0] * size, "\n".join(
        out + err for _, out, err in ended
    )[-6000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(size)]


def run_program(train: Any) -> None:
    """What such a program does: call `train` with its settings, and write what it returns."""
    torch.set_num_threads(1)
    found = train(**json.loads(Path(sys.argv[1]).read_text()))
    Path(f"found-{os.environ['RANK']}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def load_example(name: str) -> Any:
    """A program of `examples/` as a module."""
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).parents[2] / "examples" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_optimizer() -> None:
    """Let examples descend plainly: AdamW forgives a loss that is too large by a factor, such as
    that of ranks.
    """

    class Descent(torch.optim.SGD):
        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, lr=100 * lr)

    torch.optim.AdamW = Descent  # type: ignore[assignment,misc]


def rows_of(found: Found, steps: int) -> list[list[Any]]:
    """The rows of each step, those of rank 0 first."""
    return [[row for rank in found for row in rank["seen"][step]] for step in range(steps)]


def losses_of(found: Found) -> list[float]:
    """The loss of each step: the sum of what the ranks have of it."""
    return [sum(parts) for parts in zip(*(rank["losses"] for rank in found), strict=True)]


def loss_of_documents(model: Any, step: Any) -> float:
    """The loss of a transformers model on this rank's rows of a step, each document run alone."""
    total = 0.0
    for row in step:
        for begin, end in pairwise(row.cu_seqlens.tolist()):
            if begin >= row.num_tokens:
                continue
            with torch.no_grad():
                logits = model(
                    input_ids=torch.tensor(row.tokens[None, begin:end]).long(), use_cache=False
                ).logits[0]
            targets, weights = (
                torch.tensor(one[0, begin:end]) for one in (row.targets, row.loss_weights)
            )
            total += float(
                (
                    cross_entropy(logits, targets.long(), reduction="none", ignore_index=-100)
                    * weights
                ).sum()
            )
    return total / step.loss_denominator
