"""`penstock prepare`: raw text into a dataset of shards."""

import json
from pathlib import Path
from typing import Annotated

import typer


def run(
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE…", help="Files, folders, globs (quoted) or URLs such as s3://….")
    ],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", "-t", help="tokenizer.json, a folder, a hub name, .model, …")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the dataset, new or empty.")],
    format: Annotated[
        str | None, typer.Option(help="jsonl, parquet, text or arrow; by default the file names tell.")
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field that holds the text; a dot goes into objects.")] = "text",
    weights_field: Annotated[
        str | None, typer.Option(help="Field with loss-weight ranges: [{begin, end, weight}], in characters.")
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="Another field for --transform, as name or name:type; may be repeated.")
    ] = None,
    separator: Annotated[
        str | None, typer.Option(help="Plain text: what stands between documents; by default a file is one.")
    ] = None,
    transform: Annotated[
        str | None, typer.Option(help="module:function that changes a record (a dict), or drops it (None).")
    ] = None,
    add_bos: Annotated[str, typer.Option(help="auto, yes or no: BOS before each document.")] = "auto",
    add_eos: Annotated[str, typer.Option(help="auto, yes or no: EOS after each document.")] = "auto",
    validation: Annotated[
        float, typer.Option(help="Share of documents for OUTPUT/validation, the rest for OUTPUT/train.")
    ] = 0.0,
    keep_text: Annotated[bool, typer.Option("--keep-text", help="Store the text beside its tokens.")] = False,
    on_error: Annotated[str, typer.Option(help="stop, or skip: write bad records to rejected.jsonl.")] = "stop",
    max_rejects: Annotated[str, typer.Option(help="With skip: more than this number or share is an error.")] = "1%",
    processes: Annotated[int | None, typer.Option(min=1, help="By default as many as there are cores.")] = None,
    part_bytes: Annotated[int | None, typer.Option(min=1, help="Raw bytes of a part; by default 64 MiB.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what was prepared there before.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Turn raw text into a dataset of shards.

    Reads JSONL (also .gz, .zst), Parquet, plain text, Arrow, and folders that `datasets` saved. Stopped or killed at
    any moment, the same command goes on from the finished parts.
    """
    from penstock.prepare import prepare

    report = prepare(
        sources,
        tokenizer=tokenizer,
        output=output,
        format=format,
        text_field=text_field,
        weights_field=weights_field,
        columns=dict(_column(name) for name in column or []),
        separator=separator,
        transform=transform,
        add_bos=add_bos,
        add_eos=add_eos,
        validation=validation,
        keep_text=keep_text,
        on_error=on_error,
        max_rejects=max_rejects,
        processes=processes,
        part_bytes=part_bytes,
        overwrite=overwrite,
        progress=not quiet,
    )
    print(json.dumps(report.as_json(), indent=1) if as_json else report.as_text())


def _column(given: str) -> tuple[str, str]:
    name, _, kind = given.partition(":")
    return name, kind or "string"
