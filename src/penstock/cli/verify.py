"""`penstock verify`."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import AsJson, Dtype, EosId


def run(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A dataset's folder, a Megatron prefix, or an .npy file.")
    ],
    dtype: Dtype = None,
    eos_id: EosId = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Megatron and .npy: check that every id is below it. A dataset knows its own."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Check every byte of a dataset against its checksums; name the shard and document of each fault.

    Exits with 1 when something is wrong.
    """
    from penstock.shards import verify

    report = verify(path, dtype=dtype, eos_id=eos_id, vocab_size=vocab_size, progress=not json)
    if json:
        _print_json(report)
    else:
        _print_text(report)
    if not report.sound:
        raise typer.Exit(1)


def _print_json(report) -> None:  # type: ignore[no-untyped-def]
    import json
    from dataclasses import asdict

    print(json.dumps({"sound": report.sound, **asdict(report)}, indent=2))


def _print_text(report) -> None:  # type: ignore[no-untyped-def]
    from penstock.terminal import visible

    print(
        f"{visible(report.path)} ({report.kind}): {report.documents:,} documents, {report.tokens:,} tokens, "
        f"{report.bytes:,} bytes"
    )
    for line in report.checked:
        print(f"  checked      {line}")
    for line in report.unchecked:
        print(f"  not checked  {visible(line)}")
    for fault in report.faults:
        print(f"  FAULT        {visible(str(fault), lines=True)}")
    count = f"{len(report.faults):,} {'fault' if len(report.faults) == 1 else 'faults'}"
    print("sound" if report.sound else f"{count}: copy the files named again, or prepare again")
