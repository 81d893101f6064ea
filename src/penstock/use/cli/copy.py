"""`penstock copy`: datasets between folders and object stores."""

import penstock as ps
from penstock.core.terminal import short_number, visible
from penstock.core.urls import shown_url
from penstock.use.cli.declared_options import Option, options, takes
from penstock.use.cli.options import Given, Quiet


@takes(
    settings=(
        options(
            "data.shards.copying.copy_dataset",
            source=Option(argument=True, metavar="SOURCE"),
            output=Option(argument=True, metavar="TARGET"),
        ),
    )
)
def run(*, settings: Given, quiet: Quiet = False) -> None:
    """Copy a dataset from anywhere to anywhere, with every file checked; the manifest is written
    last.

    If it is stopped, the same command goes on: files that are there already are not copied again.

    Example:
        penstock copy data/chats backup/chats
        penstock copy data/chats hf://datasets/me/chats
    """
    copied = ps.shards.copy_dataset(**settings, progress=not quiet)
    print(f"{short_number(copied)}B copied to {visible(shown_url(settings['output']))}")
