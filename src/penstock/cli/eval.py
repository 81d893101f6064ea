"""`penstock eval`: how well a model predicts held-out data."""

from typing import Annotated, Any

import typer

from penstock.cli.options import AsJson
from penstock.cli.writing import ContextLength, Device, Model, Threads


def run(
    model: Model,
    data: Annotated[
        list[str], typer.Option("--data", "-d", metavar="DATASET", help="A dataset's folder; may be repeated.")
    ],
    rows: Annotated[
        int | None, typer.Option(metavar="N", help="Use about so many rows of each dataset; by default all.", min=1)
    ] = None,
    context_length: ContextLength = None,
    device: Device = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Measure the loss of a model on datasets: nats a target, and bits per byte of their text.

    Every document counts once, packed as in training and apart from the others. Bits per byte can be compared between
    tokenizers; they are told where all of a dataset's text is trained and all rows are used.
    """
    from penstock.cli.writing import trained_length
    from penstock.errors import MissingExtraError

    try:
        import torch
    except ImportError:
        raise MissingExtraError("torch", "train") from None
    from penstock.models import load_model
    from penstock.tokenizers import load_tokenizer
    from penstock.training import open_run
    from penstock.training.distributed import local_device

    if threads is not None:
        torch.set_num_threads(threads)
    found = open_run(model)
    length = context_length or trained_length(found.path)
    fingerprint = load_tokenizer(found.tokenizer).fingerprint
    for one in data:
        _check_tokenizer(one, fingerprint, model)
    trained: Any = load_model(found.model, local_device(device))
    trained.eval()
    results = [_measure(trained, one, length, rows) for one in data]
    if as_json:
        import json

        print(json.dumps({"model": model, "step": found.step, "context_length": length, "results": results}))
    else:
        _print_table(results)


def _check_tokenizer(data: str, fingerprint: str, model: str) -> None:
    """Refuse a dataset of other ids than the model's, whose loss would mean nothing."""
    from penstock.errors import ConfigError
    from penstock.shards import open_dataset

    made_with = getattr(open_dataset(data), "tokenizer", None)
    if made_with is not None and made_with.fingerprint != fingerprint:
        raise ConfigError(
            f"{data}: was made with another tokenizer ({made_with.name}) than the one of {model}; prepare it with that"
        )


def _measure(model: Any, data: str, length: int, rows: int | None) -> dict[str, Any]:
    """The figures of one dataset."""
    from penstock.loader import Loader, Source
    from penstock.training.distributed import Ranks
    from penstock.training.evaluators import HeldOutLoss
    from penstock.training.settings import EvaluatorSettings

    loader = Loader(Source(data, max_epochs=1), sequence_length=length, rows_per_step=1)
    settings = EvaluatorSettings(data=data, rows=rows)
    figures = HeldOutLoss(data, settings, loader, model, Ranks(model.device))(model)
    return {"data": data, **figures}


def _print_table(results: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from penstock.inspection import make_console

    table = Table("dataset", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("targets", "nats a target", "bits a byte"):
        table.add_column(name, justify="right")
    for found in results:
        bits = found.get("bits_per_byte")
        table.add_row(
            found["data"], f"{found['targets']:,.0f}", f"{found['loss']:.4f}", "–" if bits is None else f"{bits:.4f}"
        )
    make_console().print(table)
