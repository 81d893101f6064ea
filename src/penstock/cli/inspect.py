"""`penstock inspect`: what is in a dataset, and what a trainer would get of it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.options import AsJson, Assignments

RUN_FILES = {".yaml", ".yml"}


def run(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A dataset folder, a Megatron prefix, or a run file (.yaml).")
    ],
    rows: Annotated[
        bool, typer.Option("--rows", metavar="", help="Show packed rows; a run file always shows them.")
    ] = False,
    document: Annotated[
        list[int] | None,
        typer.Option(metavar="NUMBER", help="Show this document in full, from 0; may be repeated."),
    ] = None,
    documents: Annotated[int, typer.Option(metavar="N", help="Documents to show, spread over the dataset.", min=0)] = 3,
    step: Annotated[int, typer.Option(metavar="NUMBER", help="Step whose rows are shown.", min=0)] = 0,
    row: Annotated[
        list[int] | None,
        typer.Option(metavar="NUMBER", help="Row of the step, from 0; may be repeated. [default: 0]"),
    ] = None,
    slots: Annotated[
        str | None, typer.Option(metavar="A:B", help="Show slots A:B of each row one a line, with all targets.")
    ] = None,
    sequence_length: Annotated[
        int, typer.Option(metavar="N", help="Slots of a row, where TARGET is a dataset.", min=2)
    ] = 1024,
    distances: Annotated[
        int, typer.Option(metavar="N", help="Targets at distance 1 to N, where TARGET is a dataset.", min=1)
    ] = 1,
    tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens of a document that are shown, at most.", min=2)
    ] = 120,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="PATH", help="Decode with this tokenizer, not the dataset's own.")
    ] = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Show what is in a dataset, or the rows of a run as they will be trained.

    For a dataset: counts, tokenizer, lengths, and some documents with their origin. For rows: where each document
    begins and ends, what it says, what is trained and what is only read, targets, positions and padding.
    """
    from penstock.tokenizers import load_tokenizer

    override = load_tokenizer(tokenizer) if tokenizer else None
    if rows or Path(target).suffix in RUN_FILES:
        loader = _loader(target, assignments or [], sequence_length, distances)
        _show_rows(loader, step, row or [0], _slot_range(slots), tokens, override, as_json)
    else:
        _show_dataset(target, document, documents, tokens, override, as_json)


def _loader(target: str, assignments: list[str], sequence_length: int, distances: int) -> Any:
    """A loader of a run file, or of one dataset alone."""
    from penstock.config import load_run, make_loader
    from penstock.inputs import EVERYTHING, InputRequirements
    from penstock.loader import Loader, Mixture, Source

    if Path(target).suffix in RUN_FILES:
        return make_loader(load_run(target, assignments).data, run_file=target)
    return Loader(
        Mixture([Source(target)]),
        sequence_length=sequence_length,
        rows_per_step=1,
        requirements=EVERYTHING.merge(InputRequirements(asked_by="--distances", target_distances=distances)),
        threads=0,
    )


def _show_rows(
    loader: Any, step: int, rows: list[int], slots: tuple[int, int] | None, tokens: int, override: Any, as_json: bool
) -> None:
    import json

    from penstock.errors import ConfigError
    from penstock.inspection import Style, make_console, row_view, slots_view, tokenizer_of, view_rows

    views = view_rows(loader, step, rows, lambda dataset: override or tokenizer_of(dataset))
    if not views:
        count = loader.settings.rows_per_step
        found = "1 row, row 0" if count == 1 else f"rows 0 to {count - 1}"
        raise ConfigError(f"--row {' --row '.join(map(str, rows))}: the step has {found}")
    if as_json:
        print(json.dumps([view.as_json() for view in views], ensure_ascii=False))
        return
    console = make_console()
    style = Style(console)
    for view in views:
        console.print(row_view(view, style, tokens))
        if slots is not None:
            console.print(slots_view(view, *slots))
    console.print(style.legend())


def _show_dataset(
    target: str, numbers: list[int] | None, count: int, tokens: int, override: Any, as_json: bool
) -> None:
    import dataclasses
    import json

    from penstock.errors import ConfigError
    from penstock.inspection import (
        Style,
        dataset_view,
        document_view,
        make_console,
        summarise,
        tokenizer_of,
        view_document,
    )
    from penstock.shards import open_dataset

    dataset = open_dataset(target)
    decoder = override or tokenizer_of(dataset)
    asked = numbers if numbers is not None else [len(dataset) * i // count for i in range(min(count, len(dataset)))]
    wrong = [number for number in asked if not 0 <= number < len(dataset)]
    if wrong:
        raise ConfigError(f"{target}: no document {wrong[0]}; it has {len(dataset):,}, from 0")
    views = [view_document(dataset, number, decoder) for number in asked]
    if as_json:
        found = {**dataclasses.asdict(summarise(dataset)), "shown": [dataclasses.asdict(view) for view in views]}
        print(json.dumps(found, ensure_ascii=False))
        return
    console = make_console()
    style = Style(console)
    if numbers is None:
        console.print(dataset_view(summarise(dataset)))
        console.print()
    if decoder is None and views:
        console.print("No tokenizer lies beside this dataset: ids are shown; --tokenizer decodes them.\n")
    for view in views:
        console.print(document_view(view, style, tokens if numbers is None else len(view.tokens) + 1))
    if views:
        console.print(style.legend())


def _slot_range(text: str | None) -> tuple[int, int] | None:
    """ "8:24" → (8, 24)."""
    if text is None:
        return None
    begin, _, end = text.partition(":")
    try:
        return int(begin or 0), int(end or 1 << 40)
    except ValueError:
        raise typer.BadParameter(f"--slots {text}: expected A:B, such as 0:40") from None
