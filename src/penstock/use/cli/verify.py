"""`penstock verify`: check datasets against their checksums."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

import penstock as ps
from penstock.core.terminal import visible
from penstock.use.cli import used
from penstock.use.cli.declared_options import options, takes
from penstock.use.cli.options import BARE_TOKENS, AsJson, Given


@takes(settings=(BARE_TOKENS, options("data.shards.verify.verify", "vocab_size")))
def run(
    *,
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help=(
                "Dataset folders, Megatron prefixes or .npy files, or globs of them ('data/web-*')."
            ),
        ),
    ],
    settings: Given,
    as_json: AsJson = False,
) -> None:
    """Check every byte of datasets against their checksums, and name the shard and document of each
    fault.

    Exits with 1 if anything is wrong.

    Example:
        penstock verify data/chats data/stories/train
    """
    reports = []
    for path in (path for given in paths for path in used.datasets.dataset_paths(given)):
        reports.append(ps.shards.verify(path, **settings, progress=not as_json))
        if not as_json:
            _print_text(reports[-1])
    if as_json:
        _print_json(reports)
    if not all(report.sound for report in reports):
        raise typer.Exit(1)


def _print_json(reports) -> None:  # type: ignore[no-untyped-def]
    """Print a JSON object for one dataset, a list of objects for several."""
    found = [{"sound": report.sound, **asdict(report)} for report in reports]
    print(json.dumps(found[0] if len(found) == 1 else found, indent=2))


def _print_text(report) -> None:  # type: ignore[no-untyped-def]

    print(
        f"{visible(report.path)} ({report.kind}): {report.documents:,} documents, "
        f"{report.tokens:,} tokens, {report.bytes:,} bytes"
    )
    for line in report.checked:
        print(f"  checked      {line}")
    for line in report.unchecked:
        print(f"  not checked  {visible(line)}")
    for fault in report.faults:
        print(f"  FAULT        {visible(str(fault), lines=True)}")
    count = f"{len(report.faults):,} {'fault' if len(report.faults) == 1 else 'faults'}"
    print("sound" if report.sound else f"{count}: copy the named files again, or prepare again")
