"""`penstock copy`: datasets between folders and object stores."""

from typing import Annotated

import typer

import penstock as ps
from penstock.core.terminal import short_number, visible
from penstock.core.urls import shown_url


def run(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A dataset's folder, or its URL (s3://bucket/web)."),
    ],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A new folder, or a URL.")],
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", metavar="", help="Hide progress.")
    ] = False,
) -> None:
    """Copy a dataset from anywhere to anywhere, with every file checked; the manifest is written
    last.

    If it is stopped, the same command goes on: files that are there already are not copied again.

    Example:
        penstock copy data/chats backup/chats
    """
    copied = ps.shards.copy_dataset(source, target, progress=not quiet)
    print(f"{short_number(copied)}B copied to {visible(shown_url(target))}")
