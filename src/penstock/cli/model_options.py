"""Options of the verbs that open a model."""

from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run, or a Hugging Face model with its tokenizer: its folder, or name on the hub."
    ),
]
Temperature = Annotated[float, typer.Option(metavar="T", help="Sampling temperature; 0 is greedy.", min=0)]
TopK = Annotated[
    int | None, typer.Option(metavar="K", help="Sample from the K most likely tokens; by default all.", min=1)
]
TopP = Annotated[float, typer.Option(metavar="P", help="Sample from the most likely tokens with total probability P.")]
MinP = Annotated[float, typer.Option(metavar="P", help="Drop tokens less likely than P times the most likely.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Seed of sampling; the same seed gives the same text.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text; may be repeated.")]
ContextLength = Annotated[
    int | None,
    typer.Option(metavar="N", help="Maximum context in tokens; by default the training length.", min=2),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, …; auto: a GPU if there is one.")]
Threads = Annotated[int | None, typer.Option(metavar="N", help="Number of CPU threads of torch.", min=1)]
