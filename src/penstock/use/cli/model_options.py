"""Options of the verbs that open a model."""

from typing import Annotated, Any

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run, or a Hugging Face model with its tokenizer: its folder, or name on the hub.",
    ),
]
OwnTemperature = Annotated[
    float | None,
    typer.Option(
        metavar="T",
        help="Sampling temperature; 0 is greedy. By default the model's own, else 0.8.",
        min=0,
    ),
]
Temperature = Annotated[
    float, typer.Option(metavar="T", help="Sampling temperature; 0 is greedy.", min=0)
]
TopK = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        help="Sample from the K most likely tokens; 0: all. By default the model's own.",
        min=0,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        help=(
            "Sample from the most likely tokens with total probability P. By default the model's "
            "own."
        ),
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        help=(
            "Drop tokens less likely than P times the most likely. By default the model's own, "
            "else 0."
        ),
    ),
]
Seed = Annotated[
    int, typer.Option(metavar="N", help="Seed of sampling; the same seed gives the same text.")
]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text; may be repeated.")
]
ContextLength = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help=(
            "Maximum context in tokens; by default that of the model's base, else the training "
            "length."
        ),
        min=2,
    ),
]
Device = Annotated[
    str, typer.Option(metavar="NAME", help="cpu, cuda, …; auto: a GPU if there is one.")
]
Threads = Annotated[
    int | None, typer.Option(metavar="N", help="Number of CPU threads of torch.", min=1)
]


def given_sampling(**options: float | None) -> dict[str, Any]:
    """The options that were given, as keyword arguments of `Sampling`; `top_k` 0 means all
    tokens.
    """
    given = {name: value for name, value in options.items() if value is not None}
    return {
        name: None if name == "top_k" and value == 0 else value for name, value in given.items()
    }
