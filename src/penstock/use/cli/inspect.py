"""`penstock inspect`: the contents of raw conversations or a dataset, and the rows that a trainer
gets from them.
"""

from typing import Annotated

import typer

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.use.cli.declared_options import Option, options, takes
from penstock.use.cli.options import CHAT, AsJson, Given


def _slot_range(text: str) -> tuple[int, int]:
    """ "8:24" → (8, 24)."""
    begin, _, end = text.partition(":")
    try:
        return int(begin or 0), int(end or 1 << 40)
    except ValueError:
        raise ConfigError(f"slots: found {text}, expected A:B, such as 0:40") from None


_TARGET = "use.runs.inspecting.inspect"


@takes(
    settings=(
        options(
            _TARGET,
            target=Option(
                argument=True,
                hint=str,
                metavar="TARGET",
                help=(
                    "Raw conversations (a file, folder or glob, with --template), a dataset "
                    "folder, a Megatron prefix, a glob of these, a run file (.yaml), or a run's "
                    "folder."
                ),
            ),
            html=Option(metavar="FILE"),
            rows=Option(
                hint=int,
                metavar="N",
                help="Number of packed rows to show.",
                default="1 for a run file, in a page 8",
            ),
            documents=Option(
                hint=int,
                metavar="N",
                help="Number of documents to show, spread evenly.",
                default="3, in a page or a list 500",
            ),
            listed=Option(flag="--list"),
            step=Option(metavar="NUMBER"),
            slots=Option(hint=str, metavar="A:B", read=_slot_range),
            sequence_length=Option(),
            distances=Option(),
            tokens=Option(default="120, for conversations 600"),
            log_probabilities=Option(),
            tokenizer=Option(),
            format=Option(),
            assignments=Option(flag="--set", metavar="KEY=VALUE"),
            dtype=Option(),
            eos_id=Option(),
        ),
        *CHAT,
        options(
            _TARGET,
            panel="Chats",
            compare=Option(metavar="KEY=VALUE"),
            chat_config=Option(metavar="FILE"),
        ),
    )
)
def run(
    *,
    settings: Given,
    row: Annotated[
        list[int] | None,
        typer.Option(metavar="NUMBER", help="Show this row, from 0. May be repeated."),
    ] = None,
    document: Annotated[
        list[int] | None,
        typer.Option(metavar="NUMBER", help="Show this document in full, from 0. May be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show raw conversations, a dataset, or the rows of a run exactly as they will be trained.

    Conversations: the rendered text, the author of each part, what is trained, and the reasons for
    refusals. A dataset: counts, tokenizer, lengths, and some documents with their origin. Rows:
    document borders, text, what is trained and what is only context, targets, positions and
    padding. For documents that an objective rewrote: task, inputs, targets, and each sentinel with
    the span that it replaces. Trajectories: each branch under the one that it forks from, which
    tokens were sampled, rendered, masked, repeated or rewritten, and log-probabilities.

    Example:
        penstock inspect chats.jsonl -t tokenizer --template chatml
        penstock inspect data/chats --rows 8 --html rows.html
    """
    if row:
        settings["rows"] = row
    if document:
        settings["documents"] = document
    ps.inspect(**settings, as_json=as_json)
