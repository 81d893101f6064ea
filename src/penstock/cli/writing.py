"""What the verbs that write text share: their options, and a model from its folder with an engine around it."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

Model = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, or a model in the Hugging Face layout with its tokenizer.")
]
Temperature = Annotated[float, typer.Option(metavar="T", help="0 takes the likeliest token.", min=0)]
TopK = Annotated[int | None, typer.Option(metavar="K", help="Keep the K likeliest tokens.", min=1)]
TopP = Annotated[float, typer.Option(metavar="P", help="Keep the likeliest tokens with this share of probability.")]
MinP = Annotated[float, typer.Option(metavar="P", help="Keep tokens this share as likely as the likeliest.")]
Seed = Annotated[int, typer.Option(metavar="N", help="The same seed writes the same text.")]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="End where this text comes, without it; may be repeated.")
]
ContextLength = Annotated[
    int | None,
    typer.Option(metavar="N", help="Tokens that the model sees at most; by default those it was trained on.", min=2),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, …; auto: a GPU where there is one.")]
Threads = Annotated[int | None, typer.Option(metavar="N", help="Of torch on the CPU.", min=1)]


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model from its folder, ready to use."""

    run: Any
    """A `penstock.training.Run`."""
    model: Any
    """In evaluation mode."""
    tokenizer: Any
    template: Any
    """Of its chats; None where it knows none."""
    context_length: int


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A model that can write."""

    name: str
    step: int | None
    engine: Any
    tokenizer: Any
    template: Any
    """Of its chats; None where it knows none."""


def load_opened(path: str, *, context_length: int | None, device: str, threads: int | None) -> Opened:
    """The model of a run, or of a folder in the Hugging Face layout.

    Raises:
        FormatError: There is no model.
        ConfigError: It does not say how long its sequences are, or there is no such device.
    """
    import torch

    from penstock.models import load_model
    from penstock.tokenizers import load_tokenizer
    from penstock.training.distributed import local_device
    from penstock.training.run_folder import open_run

    if threads is not None:
        torch.set_num_threads(threads)
    run = open_run(path)
    length = context_length or context_of(run)
    tokenizer = load_tokenizer(run.tokenizer)
    model: Any = load_model(run.model, local_device(device))
    # Some models of transformers have dropout.
    model.eval()
    template = None if run.template is None else template_of(run, tokenizer)
    return Opened(run=run, model=model, tokenizer=tokenizer, template=template, context_length=length)


def load_writer(path: str, *, context_length: int | None, device: str, threads: int | None, slots: int) -> Writer:
    """The same with an engine around it.

    Raises:
        PenstockError: As `load_opened`.
    """
    found = load_opened(path, context_length=context_length, device=device, threads=threads)
    from penstock.generation import Engine

    engine = Engine(
        found.model,
        found.tokenizer,
        context_length=found.context_length,
        stop_ids=found.run.stop_ids,
        slots=slots,
    )
    return Writer(
        name=found.run.path.resolve().name,
        step=found.run.step,
        engine=engine,
        tokenizer=found.tokenizer,
        template=found.template,
    )


def template_of(run: Any, tokenizer: Any) -> Any:
    """The template with the variables that its conversations were prepared with."""
    from penstock.chat import load_template
    from penstock.shards import ChatInfo

    chat = ChatInfo.load(run.path)
    return load_template(run.template, tokenizer=tokenizer, **({} if chat is None else chat.variables))


def context_of(run: Any) -> int:
    """Tokens that a run's model was trained on.

    Raises:
        ConfigError: It does not say.
    """
    from penstock.errors import ConfigError

    found: int | None = run.trained_length
    if found is None:
        raise ConfigError(f"{run.path}: does not say how long its sequences are; give --context-length")
    return found
