"""`penstock rollouts`: sample answers from a model, judge them, and write a dataset that a policy
learns from.
"""

from pathlib import Path
from typing import Annotated

import typer

import penstock as ps
from penstock.use.cli.model_options import ContextLength, Device, Model, Seed, Temperature, Threads


def run(
    model: Model,
    prompts: Annotated[
        Path,
        typer.Argument(
            metavar="PROMPTS",
            help='JSON lines with "prompt", a text, or "messages", a conversation.',
        ),
    ],
    reward: Annotated[
        str,
        typer.Option(
            metavar="CODE",
            help=(
                "Your function of (record, answer) that gives a number: path/to/file.py:function. "
                "With a parameter finish_reason it is told why the answer ended: stop or length."
            ),
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="A new folder for the dataset.")
    ],
    samples: Annotated[int, typer.Option(metavar="N", help="Answers to each prompt.", min=2)] = 8,
    temperature: Temperature = 1.0,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", help="Maximum tokens of an answer.", min=1)
    ] = 256,
    seed: Seed = 0,
    context_length: ContextLength = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    r"""Sample several answers to each prompt, judge them with your function, and write them as a
    dataset.

    Train on it with training.policy; temperature and the log-probability of each sampled token are
    stored with it.

    Example:
        penstock rollouts runs/first prompts.jsonl --reward rewards.py:shorter \
            --samples 4 --max-tokens 32 -o data/rollouts
    """
    found = ps.open_run(model).rollouts(
        prompts,
        reward,
        output,
        samples=samples,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        context_length=context_length,
        device=device,
        threads=threads,
    )
    print(f"{output}: {found}")
    for prompt, answer, judged in found.examples:
        print(f"  {judged:g}  {prompt!r:.60} → {answer!r:.60}")
