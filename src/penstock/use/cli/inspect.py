"""`penstock inspect`: the contents of raw conversations or a dataset, and the rows that a trainer gets from them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.use.cli.options import AsJson, ChatConfig, Dtype, EosId, Format, takes_chat_options
from penstock.use.runs.inspecting import (
    COUNTED,
    IN_PAGE,
    IN_TERMINAL,
    ROWS_IN_PAGE,
    RUN_FILES,
    TOKENS,
    TOKENS_OF_CHATS,
    chat_settings_of,
    chosen_documents,
    is_raw,
    load_conversations,
    open_loader,
    print_conversations,
    print_dataset,
    print_list,
    print_rows,
    refuse_raw,
    report_page,
    write_page,
)


@takes_chat_options
def run(
    *,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="Raw conversations (a file, folder or glob, with --template), a dataset folder, a Megatron prefix, a "
            "glob of these, a run file (.yaml), or a run's folder.",
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write an offline HTML page that shows every token."),
    ] = None,
    format: Format = None,
    rows: Annotated[
        bool, typer.Option("--rows", metavar="", help="Show packed rows; always on for a run file.")
    ] = False,
    document: Annotated[
        list[int] | None,
        typer.Option(metavar="NUMBER", help="Show this document in full, from 0; may be repeated."),
    ] = None,
    documents: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=f"Number of documents to show, spread evenly. [default: {IN_TERMINAL}, in a page or a list {IN_PAGE}]",
            min=0,
        ),
    ] = None,
    listed: Annotated[
        bool,
        typer.Option(
            "--list", metavar="", help="A line for each document: tokens, trained share, and its first words."
        ),
    ] = False,
    step: Annotated[int, typer.Option(metavar="NUMBER", help="Show rows of this step.", min=0)] = 0,
    row: Annotated[
        list[int] | None,
        typer.Option(
            metavar="NUMBER",
            help=f"Row of the step, from 0; may be repeated. [default: 0, in a page the first {ROWS_IN_PAGE}]",
        ),
    ] = None,
    slots: Annotated[
        str | None, typer.Option(metavar="A:B", help="Show slots A:B of each row, one per line, with all targets.")
    ] = None,
    sequence_length: Annotated[
        int, typer.Option(metavar="N", help="Slots of a row, if TARGET is a dataset.", min=2)
    ] = 1024,
    distances: Annotated[
        int, typer.Option(metavar="N", help="Targets at distances 1 to N, if TARGET is a dataset.", min=1)
    ] = 1,
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=f"Maximum tokens of a document in the terminal. [default: {TOKENS}, for conversations "
            f"{TOKENS_OF_CHATS}]",
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
            help="A chat setting, such as field_messages=dialogue, or a key of the run file, such as "
            "data.loader.seed=7; may be repeated.",
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
            help="Also show conversations with this setting, side by side: mask_history=true, template=other.jinja; "
            "may be repeated.",
            rich_help_panel="Chats",
        ),
    ] = None,
    chat_config: ChatConfig = None,
) -> None:
    """Show raw conversations, a dataset, or the rows of a run exactly as they will be trained.

    Conversations: the rendered text, the author of each part, what is trained, and the reasons for refusals. A dataset:
    counts, tokenizer, lengths, and some documents with their origin. Rows: document borders, text, what is trained and
    what is only context, targets, positions and padding. For documents that an objective rewrote: task, inputs,
    targets, and each sentinel with the span that it replaces.

    Example:
        penstock inspect chats.jsonl -t tokenizer --template chatml
        penstock inspect data/chats --rows --html rows.html
    """
    from penstock.core.errors import ConfigError
    from penstock.data.shards.opening import open_dataset
    from penstock.tokenizers.loading import load_tokenizer
    from penstock.use.config import run_file_of

    target = run_file_of(target)

    override = load_tokenizer(tokenizer) if tokenizer else None
    if chat_options.get("template") or compare or chat_config or (override is not None and is_raw(target)):
        chats = chat_settings_of(chat_options, chat_config, assignments or [], compare or [])
        count = documents if html is not None else max(COUNTED, documents or 0)
        shown, other = load_conversations(target, override, chats, (format, document, count))
        print_conversations(shown, other, target, html, (documents, tokens or TOKENS_OF_CHATS), as_json, listed=listed)
        return
    refuse_raw(target)
    is_run_file = Path(target).suffix in RUN_FILES
    has_rows = rows or is_run_file
    if assignments and not is_run_file:
        raise ConfigError(
            f"--set {assignments[0]}: {target} is not a run file, and no chats are rendered; --set has nothing to set"
        )
    if listed and (has_rows or as_json):
        raise ConfigError("--list is a list of documents in a terminal; leave out --rows, --json and run files")
    if slots is not None and not has_rows:
        raise ConfigError("--slots needs rows; add --rows")
    opened = None if is_run_file else open_dataset(target, dtype=dtype, eos_id=eos_id)
    loader = None
    if has_rows or html is not None:
        loader = open_loader(target, opened, assignments or [], sequence_length, distances)
    if html is not None:
        write_page(target, loader, step, row, override, (document, documents), html)
        report_page(html, as_json)
        if not as_json:
            return
    if listed:
        chosen = chosen_documents(opened, document, IN_PAGE if documents is None else documents)
        print_list(opened, chosen, override)
    elif has_rows:
        print_rows(loader, step, row or [0], _slot_range(slots), tokens or TOKENS, override, as_json)
    else:
        print_dataset(opened, document, documents, tokens, override, as_json)


def _slot_range(text: str | None) -> tuple[int, int] | None:
    """ "8:24" → (8, 24)."""
    if text is None:
        return None
    begin, _, end = text.partition(":")
    try:
        return int(begin or 0), int(end or 1 << 40)
    except ValueError:
        raise typer.BadParameter(f"--slots {text}: expected A:B, such as 0:40") from None
