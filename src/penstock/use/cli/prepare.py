"""`penstock prepare`: raw text or conversations to a dataset of shards."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.core.terminal import visible
from penstock.use.cli import used
from penstock.use.cli.options import (
    AsJson,
    ChatAssignments,
    ChatConfig,
    Delimiter,
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
        list[str],
        typer.Argument(
            metavar="SOURCE", help="Files, folders, globs (quoted) or URLs such as s3://…."
        ),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer",
            "-t",
            metavar="PATH",
            help="A tokenizer.json, .model or .tiktoken, a folder, or a hub name.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Folder for the dataset, new or empty; or a URL in a store (s3://…).",
        ),
    ],
    format: Format = None,
    text_field: TextField = "text",
    weights_field: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=(
                "Field with loss-weight ranges: [{begin, end, weight}], in characters. Text "
                "outside all ranges is not trained; a record without the field is trained in full."
            ),
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:TYPE",
            help=(
                "Extra field for --transform and --token-column, with its type: string (default), "
                "int64, float64, bool or ranges. May be repeated."
            ),
        ),
    ] = None,
    token_column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=(
                "Field that becomes a number for each token: a number, for texts also ranges of "
                "characters [{begin, end, value}], for chats also a list with one number for each "
                "message. May be repeated."
            ),
        ),
    ] = None,
    separator: Separator = None,
    delimiter: Delimiter = None,
    chat_options: dict[str, Any],
    config: RunConfig = None,
    chat_config: ChatConfig = None,
    assignments: ChatAssignments = None,
    transform: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help=(
                "Python function that takes a record (a dict) and returns it changed, or None to "
                "drop it."
            ),
        ),
    ] = None,
    add_bos: Annotated[
        str,
        typer.Option(
            metavar="auto|yes|no",
            help="Put BOS before each document; auto: if the tokenizer's own encoding does.",
        ),
    ] = "auto",
    add_eos: Annotated[
        str,
        typer.Option(
            metavar="auto|yes|no",
            help="Put EOS after each document; auto: if the tokenizer has one.",
        ),
    ] = "auto",
    validation: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help=(
                "Share of documents (0.01) for OUTPUT/validation; OUTPUT/train gets the rest. 0: "
                "no split."
            ),
        ),
    ] = 0.0,
    keep_text: Annotated[
        bool, typer.Option("--keep-text", metavar="", help="Store the text next to its tokens.")
    ] = False,
    drop_duplicates: Annotated[
        bool,
        typer.Option(
            "--drop-duplicates",
            metavar="",
            help="Of documents with the same tokens, keep the first, across all sources.",
        ),
    ] = False,
    on_error: Annotated[
        str,
        typer.Option(
            metavar="stop|skip",
            help="At a bad record: stop, or skip it and write it to rejected.jsonl.",
        ),
    ] = "stop",
    on_damaged_file: OnDamagedFile = "stop",
    max_rejects: Annotated[
        str | None,
        typer.Option(
            metavar="LIMIT",
            help=(
                "With --on-error skip: fail if more records are bad. A number (1000), or a share "
                "of all records (1% or 0.01), checked at the end. [default: 1%, but at least 100 "
                "records]"
            ),
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Number of processes; by default one per core, fewer for small inputs.",
        ),
    ] = None,
    executor: Annotated[
        str,
        typer.Option(
            metavar="processes|ray",
            help="Local processes, or a Ray cluster: the one at RAY_ADDRESS, else a new local one.",
        ),
    ] = "processes",
    part_bytes: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES",
            min=1,
            help="Raw bytes per part; each part becomes a shard. By default 64 MiB.",
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            metavar="",
            help="Delete what was prepared there before; required if settings changed.",
        ),
    ] = False,
    as_json: AsJson = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", metavar="", help="Hide progress.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", metavar="", help="For chats, also print all settings in effect."),
    ] = False,
) -> None:
    """Turn raw text, or conversations (with --template or --config), into a dataset of shards.

    Reads JSONL and plain text (also .gz, .bz2, .xz, .zst, .lz4), Parquet, Arrow, and folders saved
    by `datasets`; conversations also from JSON arrays. If it is killed, the same command resumes
    from the finished parts. If the input changed, only the changed parts are prepared again.

    Example:
        penstock prepare stories.jsonl -t tokenizer -o data/stories --validation 0.1
        penstock prepare chats.jsonl -t tokenizer --template chatml -o data/chats
    """
    # Plain strings from the command line; prepare checks them.
    choices: dict[str, Any] = {
        "add_bos": add_bos,
        "add_eos": add_eos,
        "on_error": on_error,
        "on_damaged_file": on_damaged_file,
    }
    prepared = ps.prepare(
        sources,
        tokenizer=tokenizer,
        output=output,
        format=format,
        text_field=text_field,
        weights_field=weights_field,
        columns=dict(_column(name) for name in column or []),
        token_columns=tuple(token_column or ()),
        separator=separator,
        delimiter=delimiter,
        **_chat(chat_options, config, chat_config, assignments or []),
        transform=transform,
        **choices,
        validation=validation,
        keep_text=keep_text,
        drop_duplicates=drop_duplicates,
        max_rejects=max_rejects,
        processes=processes,
        executor=executor,
        part_bytes=part_bytes,
        overwrite=overwrite,
        progress=not quiet,
        verbose=verbose,
    )
    report = prepared.report
    if as_json:
        for line in report.warnings():
            print(f"penstock: {visible(line, lines=True)}", file=sys.stderr)
    print(
        json.dumps(report.as_json(), indent=1) if as_json else visible(report.as_text(), lines=True)
    )


def _chat(
    given: dict[str, Any], run_file: Path | None, path: Path | None, assignments: list[str]
) -> dict[str, Any]:
    """The argument `chat` of prepare, if records are conversations; else nothing."""
    if run_file is not None and path is not None:
        raise ConfigError(
            "--config and --chat-config both give chat settings; give only one of them"
        )
    if run_file is not None:
        return {"chat": used.run_file.load_chat_section(run_file, assignments, given)}
    if not given and path is None and not assignments:
        return {}
    return {"chat": used.run_file.load_chat_settings(path, assignments, given)}


def _column(given: str) -> tuple[str, str]:
    name, _, kind = given.partition(":")
    return name, kind or "string"
