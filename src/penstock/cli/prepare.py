"""`penstock prepare`: raw text or conversations into a dataset of shards."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.options import (
    AsJson,
    ChatAssignments,
    ChatConfig,
    Format,
    OnDamagedFile,
    RunConfig,
    Separator,
    TextField,
    takes_chat_options,
)


@takes_chat_options
def run(
    *,
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE", help="Files, folders, globs (quoted) or URLs such as s3://….")
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer", "-t", metavar="PATH", help="A tokenizer.json, .model or .tiktoken, a folder, or a hub name."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the dataset, new or empty.")
    ],
    format: Format = None,
    text_field: TextField = "text",
    weights_field: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Field with loss-weight ranges: [{begin, end, weight}], in characters. What is outside all of them is "
            "not trained; a record without the field is, in full.",
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:TYPE",
            help="Another field for --transform: string, int64, float64 or bool; string without a type. "
            "May be repeated.",
        ),
    ] = None,
    separator: Separator = None,
    chat_options: dict[str, Any],
    config: RunConfig = None,
    chat_config: ChatConfig = None,
    assignments: ChatAssignments = None,
    transform: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Python function that changes a record (a dict), or drops it (None)."
        ),
    ] = None,
    add_bos: Annotated[
        str,
        typer.Option(
            metavar="auto|yes|no", help="BOS before each document; auto: if the tokenizer has one that is not its EOS."
        ),
    ] = "auto",
    add_eos: Annotated[
        str, typer.Option(metavar="auto|yes|no", help="EOS after each document; auto: if the tokenizer has one.")
    ] = "auto",
    validation: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Share of documents (0.01) for OUTPUT/validation, the rest for OUTPUT/train; 0: no split.",
        ),
    ] = 0.0,
    keep_text: Annotated[
        bool, typer.Option("--keep-text", metavar="", help="Store the text beside its tokens.")
    ] = False,
    on_error: Annotated[
        str,
        typer.Option(metavar="stop|skip", help="At a bad record: stop, or skip it and write it to rejected.jsonl."),
    ] = "stop",
    on_damaged_file: OnDamagedFile = "stop",
    max_rejects: Annotated[
        str | None,
        typer.Option(
            metavar="LIMIT",
            help="With skip: more bad records are an error. 1000 is a number of them; 1% or 0.01 is a share of all "
            "records, judged at the end. [default: 1%, or 100 records where that is more]",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Processes; by default as many as cores, fewer for little text."),
    ] = None,
    executor: Annotated[
        str,
        typer.Option(
            metavar="processes|ray",
            help="Processes of this machine, or a Ray cluster: that of RAY_ADDRESS, else a new one here.",
        ),
    ] = "processes",
    part_bytes: Annotated[
        int | None,
        typer.Option(metavar="BYTES", min=1, help="Raw bytes of a part, which becomes a shard; by default 64 MiB."),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", metavar="", help="Throw away what was prepared there before; needed for other settings."
        ),
    ] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="Show no progress.")] = False,
) -> None:
    """Turn raw text, or with --template or --config conversations, into a dataset of shards.

    Reads JSONL and plain text (also .gz, .bz2, .xz, .zst, .lz4), Parquet, Arrow, and folders that `datasets` saved;
    conversations also from JSON arrays. Stopped or killed at any moment, the same command goes on from the finished
    parts. After the input changed, it prepares again only what changed.
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
        **_chat(chat_options, config, chat_config, assignments or []),
        transform=transform,
        add_bos=add_bos,
        add_eos=add_eos,
        validation=validation,
        keep_text=keep_text,
        on_error=on_error,
        on_damaged_file=on_damaged_file,
        max_rejects=max_rejects,
        processes=processes,
        executor=executor,
        part_bytes=part_bytes,
        overwrite=overwrite,
        progress=not quiet,
    )
    from penstock.terminal import visible

    if as_json:
        for line in report.warnings():
            print(f"penstock: {visible(line, lines=True)}", file=sys.stderr)
    print(json.dumps(report.as_json(), indent=1) if as_json else visible(report.as_text(), lines=True))


def _chat(given: dict[str, Any], run_file: Path | None, path: Path | None, assignments: list[str]) -> dict[str, Any]:
    """The setting `chat` of prepare, if records are conversations."""
    from penstock.config.chats import load_chat_section, load_chat_settings
    from penstock.errors import ConfigError

    if run_file is not None and path is not None:
        raise ConfigError("--config and --chat-config both hold settings of chats; give one of them")
    if run_file is not None:
        return {"chat": load_chat_section(run_file, assignments, given)}
    if not given and path is None and not assignments:
        return {}
    return {"chat": load_chat_settings(path, assignments, given)}


def _column(given: str) -> tuple[str, str]:
    name, _, kind = given.partition(":")
    return name, kind or "string"
