"""`penstock reference`: store a reference model's log-probabilities next to the data."""

from pathlib import Path
from typing import Annotated

import typer

import penstock as ps
from penstock.use.cli.model_options import Device, Model, Threads


def run(
    model: Model,
    data: Annotated[
        Path, typer.Argument(metavar="DATASET", help="A dataset that penstock prepare made.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="A new folder for the result.")
    ],
    column: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=(
                "reference_log_probabilities; or trainer_log_probabilities, which policies read "
                "as those of the model that sampled the answers."
            ),
        ),
    ] = "reference_log_probabilities",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Write a copy of a dataset with the log-probability that a reference model gives each trained
    token.

    Train on it with preference.reference: cached, without a second model in memory.

    Example:
        penstock reference runs/first data/chats -o data/chats-with-reference
    """
    found = ps.open_run(model).reference(
        data, output, column=column, device=device, threads=threads
    )
    print(f"{output}: {len(found):,} documents with the column {column}")
