"""`penstock inspect`: the contents of raw conversations or a dataset, and the rows that a trainer
gets from them.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

import penstock as ps
from penstock.use.cli.options import AsJson, ChatConfig, Dtype, EosId, Format, takes_chat_options


@takes_chat_options
def run(
    *,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help=(
                "Raw conversations (a file, folder or glob, with --template), a dataset folder, a "
                "Megatron prefix, a glob of these, a run file (.yaml), or a run's folder."
            ),
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write an offline HTML page that shows every token."),
    ] = None,
    format: Format = None,
    rows: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of packed rows to show. [default: 1 for a run file, in a page 8]",
            min=1,
        ),
    ] = None,
    document: Annotated[
        list[int] | None,
        typer.Option(metavar="NUMBER", help="Show this document in full, from 0; may be repeated."),
    ] = None,
    documents: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=(
                "Number of documents to show, spread evenly. [default: 3, in a page or a list 500]"
            ),
            min=0,
        ),
    ] = None,
    listed: Annotated[
        bool,
        typer.Option(
            "--list",
            metavar="",
            help="A line for each document: tokens, trained share, and its first words.",
        ),
    ] = False,
    step: Annotated[int, typer.Option(metavar="NUMBER", help="Show rows of this step.", min=0)] = 0,
    row: Annotated[
        list[int] | None,
        typer.Option(
            metavar="NUMBER",
            help="Show this row, from 0; may be repeated.",
        ),
    ] = None,
    slots: Annotated[
        str | None,
        typer.Option(
            metavar="A:B", help="Show slots A:B of each row, one per line, with all targets."
        ),
    ] = None,
    sequence_length: Annotated[
        int, typer.Option(metavar="N", help="Slots of a row, if TARGET is a dataset.", min=2)
    ] = 1024,
    distances: Annotated[
        int,
        typer.Option(
            metavar="N", help="Targets at distances 1 to N, if TARGET is a dataset.", min=1
        ),
    ] = 1,
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=(
                "Maximum tokens of a document in the terminal. [default: 120, for conversations "
                "600]"
            ),
            min=2,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            "-t",
            metavar="PATH",
            help="Encode or decode with this tokenizer instead of the dataset's own.",
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help=(
                "A chat setting, such as field_messages=dialogue, or a key of the run file, such "
                "as data.loader.seed=7; may be repeated."
            ),
        ),
    ] = None,
    dtype: Dtype = None,
    eos_id: EosId = None,
    as_json: AsJson = False,
    chat_options: dict[str, Any],
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help=(
                "Also show conversations with this setting, side by side: mask_history=true, "
                "template=other.jinja; may be repeated."
            ),
            rich_help_panel="Chats",
        ),
    ] = None,
    chat_config: ChatConfig = None,
) -> None:
    """Show raw conversations, a dataset, or the rows of a run exactly as they will be trained.

    Conversations: the rendered text, the author of each part, what is trained, and the reasons for
    refusals. A dataset: counts, tokenizer, lengths, and some documents with their origin. Rows:
    document borders, text, what is trained and what is only context, targets, positions and
    padding. For documents that an objective rewrote: task, inputs, targets, and each sentinel with
    the span that it replaces.

    Example:
        penstock inspect chats.jsonl -t tokenizer --template chatml
        penstock inspect data/chats --rows 8 --html rows.html
    """
    ps.inspect(
        target,
        rows=row or rows,
        documents=document or documents,
        step=step,
        listed=listed,
        slots=_slot_range(slots),
        tokens=tokens,
        tokenizer=tokenizer,
        sequence_length=sequence_length,
        distances=distances,
        html=html,
        as_json=as_json,
        format=format,
        dtype=dtype,
        eos_id=eos_id,
        assignments=assignments or (),
        chat_config=chat_config,
        compare=compare or (),
        **chat_options,
    )


def _slot_range(text: str | None) -> tuple[int, int] | None:
    """ "8:24" → (8, 24)."""
    if text is None:
        return None
    begin, _, end = text.partition(":")
    try:
        return int(begin or 0), int(end or 1 << 40)
    except ValueError:
        raise typer.BadParameter(f"--slots {text}: expected A:B, such as 0:40") from None
