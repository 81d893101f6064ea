"""`penstock prepare`: raw text or conversations to a dataset of shards."""

import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.core.terminal import visible
from penstock.use.cli import used
from penstock.use.cli.declared_options import Option, options, takes
from penstock.use.cli.options import (
    CHAT,
    ESCAPED,
    FIELDS,
    SOURCES,
    AsJson,
    ChatConfig,
    Given,
    Quiet,
)


def _columns(given: list[str]) -> dict[str, str]:
    """NAME:TYPE → the type of each column."""
    parts = [one.partition(":") for one in given]
    return {name: kind or "string" for name, _, kind in parts}


_PREPARE = "data.prepare.preparation.prepare"
_SETTINGS = "data.prepare.settings.PrepareSettings"


@takes(
    settings=(
        options(
            _PREPARE,
            "tokenizer",
            "output",
            source=Option(argument=True, metavar="SOURCE", repeated=True, help=SOURCES),
        ),
        options(_SETTINGS, "format", "subset", "split"),
        FIELDS,
        options(
            "data.sources.records.Fields",
            weights=Option(keyword="weights_field", metavar="NAME"),
            columns=Option(
                flag="--column", metavar="NAME:TYPE", repeated=True, hint=str, read=_columns
            ),
        ),
        options(
            _SETTINGS,
            token_columns=Option(flag="--token-column", metavar="NAME"),
            separator=ESCAPED,
            delimiter=ESCAPED,
        ),
        options(_PREPARE, transform=Option(metavar="MODULE:FUNCTION")),
        options(
            _SETTINGS,
            "add_bos",
            "add_eos",
            "validation",
            "keep_text",
            "drop_duplicates",
            "on_error",
            "on_damaged_file",
            "max_rejects",
            "part_bytes",
        ),
        options(_PREPARE, "processes", "executor", "overwrite", "verbose"),
    ),
    chat=CHAT,
)
def run(
    *,
    settings: Given,
    as_json: AsJson = False,
    quiet: Quiet = False,
    chat: Given,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.YAML",
            help=(
                "A run file; its section `chat` has the chat settings, including template and "
                "role_boundaries."
            ),
            rich_help_panel="Chats",
        ),
    ] = None,
    chat_config: ChatConfig = None,
    trajectories: Annotated[
        bool,
        typer.Option(
            "--trajectories",
            metavar="",
            help=(
                "Records are trajectories of agents, with ids that were sampled, in the layout of "
                "penstock, vLLM, verl, TRL, verifiers or slime; a policy learns from the dataset."
            ),
            rich_help_panel="Trajectories",
        ),
    ] = False,
    history: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help=(
                "How prompts without ids go on after a reply: behind what was `sampled`, as the "
                "`template` writes the whole, or `tool_cycle`: so only where a user speaks. "
                "[default: sampled]"
            ),
            rich_help_panel="Trajectories",
        ),
    ] = None,
    append: Annotated[
        bool,
        typer.Option(
            "--append",
            metavar="",
            help="The output has a folder for each round of a run; write the next one.",
            rich_help_panel="Trajectories",
        ),
    ] = False,
    no_share: Annotated[
        bool,
        typer.Option(
            "--no-share",
            metavar="",
            help=(
                "Store each path apart, for models that read no trees; otherwise what answers of "
                "a group begin with in common is stored once."
            ),
            rich_help_panel="Trajectories",
        ),
    ] = False,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help=(
                "A chat setting, over --config or --chat-config, such as field_messages=dialogue. "
                "May be repeated."
            ),
            rich_help_panel="Chats",
        ),
    ] = None,
) -> None:
    """Turn raw text, or conversations (with --template or --config), into a dataset of shards.

    Reads JSONL and plain text (also .gz, .bz2, .xz, .zst, .lz4), Parquet, Arrow, and folders saved
    by `datasets`; conversations also from JSON arrays. If it is killed, the same command resumes
    from the finished parts. If the input changed, only the changed parts are prepared again.

    Example:
        penstock prepare stories.jsonl -t tokenizer -o data/stories --validation 0.1
        penstock prepare chats.jsonl -t tokenizer --template chatml -o data/chats
        penstock prepare rollouts.jsonl -t tokenizer --trajectories -o data/round-1
    """
    if trajectories:
        if config is not None or chat_config is not None or assignments or as_json:
            raise ConfigError(
                "--trajectories takes none of --config, --chat-config, --set and --json"
            )
        _prepare_trajectories(
            {**settings, **chat},
            history=history or "sampled",
            append=append,
            share=not no_share,
            progress=not quiet,
        )
        return
    if history is not None or append or no_share:
        raise ConfigError("--history, --append and --no-share are for --trajectories")
    if "transform" in settings:
        # A command has the folder of its own script here, where `python` has the current one.
        sys.path.append(os.getcwd())
    prepared = ps.prepare(
        **settings, **_chat(chat, config, chat_config, assignments or []), progress=not quiet
    )
    report = prepared.report
    if as_json:
        for line in report.warnings():
            print(f"penstock: {visible(line, lines=True)}", file=sys.stderr)
    print(
        json.dumps(report.as_json(), indent=1) if as_json else visible(report.as_text(), lines=True)
    )


_OF_TRAJECTORIES = (
    "source",
    "tokenizer",
    "output",
    "on_error",
    "template",
    "chat_template_kwargs",
    "processor",
)


def _prepare_trajectories(given: dict[str, Any], **further: Any) -> None:
    known = [one.name for one in fields(ps.media.ImageSettings) if one.name != "verify_all"]
    of_images = {name: given.pop(name) for name in known if name in given}
    if wrong := [name for name in given if name not in _OF_TRAJECTORIES]:
        flag = wrong[0].replace("_", "-")
        raise ConfigError(f"--trajectories does not take --{flag}; leave it out")
    if of_images:
        given["image_settings"] = ps.media.ImageSettings(**of_images)
    ps.prepare_trajectories(**given, **further)


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
