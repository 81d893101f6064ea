"""`penstock inspect`: what is in raw conversations, a dataset or a mixture, and what a trainer would get of it."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.options import AsJson, ChatConfig, Dtype, EosId, Format, takes_chat_options

RUN_FILES = {".yaml", ".yml"}
IN_TERMINAL, IN_PAGE = 3, 500
"""Documents that are shown unless a number is asked for."""
ROWS_IN_PAGE = 8
COUNTED = 500
"""Conversations over which the figures in a terminal count, at least."""
TOKENS, TOKENS_OF_CHATS = 120, 600
"""Tokens of a document that a terminal shows unless a number is asked for."""


@takes_chat_options
def run(
    *,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="Raw conversations (a file, folder or glob, with --template), a dataset folder, a Megatron prefix, or "
            "a run file (.yaml).",
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page that shows it token by token, for any browser, offline."),
    ] = None,
    format: Format = None,
    rows: Annotated[
        bool, typer.Option("--rows", metavar="", help="Show packed rows; a run file always shows them.")
    ] = False,
    document: Annotated[
        list[int] | None,
        typer.Option(metavar="NUMBER", help="Show this document in full, from 0; may be repeated."),
    ] = None,
    documents: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=f"Documents to show, spread over all. [default: {IN_TERMINAL}, in a page {IN_PAGE}]",
            min=0,
        ),
    ] = None,
    step: Annotated[int, typer.Option(metavar="NUMBER", help="Step whose rows are shown.", min=0)] = 0,
    row: Annotated[
        list[int] | None,
        typer.Option(
            metavar="NUMBER",
            help=f"Row of the step, from 0; may be repeated. [default: 0, in a page the first {ROWS_IN_PAGE}]",
        ),
    ] = None,
    slots: Annotated[
        str | None, typer.Option(metavar="A:B", help="Show slots A:B of each row one a line, with all targets.")
    ] = None,
    sequence_length: Annotated[
        int, typer.Option(metavar="N", help="Slots of a row, where TARGET is a dataset.", min=2)
    ] = 1024,
    distances: Annotated[
        int, typer.Option(metavar="N", help="Targets at distance 1 to N, where TARGET is a dataset.", min=1)
    ] = 1,
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=f"Tokens of a document that a terminal shows, at most. [default: {TOKENS}, of a conversation "
            f"{TOKENS_OF_CHATS}]",
            min=2,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", "-t", metavar="PATH", help="Encode or decode with this tokenizer, not the dataset's own."
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting of chats, such as field_messages=dialogue, or a key of the run file, such as "
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
            help="Show conversations with this setting too, side by side: mask_history=true, template=other.jinja; "
            "may be repeated.",
            rich_help_panel="Chats",
        ),
    ] = None,
    chat_config: ChatConfig = None,
) -> None:
    """Show what is in raw conversations or a dataset, or the rows of a run as they will be trained.

    For conversations: what the template makes of them, who says what, what is trained, what stands against it. For a
    dataset: counts, tokenizer, lengths, and some documents with their origin. For rows: where each document begins and
    ends, what it says, what is trained and what is only read, targets, positions and padding; of documents that an
    objective rewrote their task, inputs and targets, and each sentinel with the span that it stands for.
    """
    from penstock.errors import ConfigError
    from penstock.shards import open_dataset
    from penstock.tokenizers import load_tokenizer

    override = load_tokenizer(tokenizer) if tokenizer else None
    if chat_options.get("template") or compare or chat_config or (override is not None and _is_raw(target)):
        chats = _chat_settings(chat_options, chat_config, assignments or [], compare or [])
        count = documents if html is not None else max(COUNTED, documents or 0)
        shown, other = _conversations(target, override, chats, (format, document, count))
        _show_conversations(shown, other, target, html, (documents, tokens or TOKENS_OF_CHATS), as_json)
        return
    _refuse_raw(target)
    is_run_file = Path(target).suffix in RUN_FILES
    has_rows = rows or is_run_file
    if assignments and not is_run_file:
        raise ConfigError(f"--set {assignments[0]}: {target} is no run file, and no chats are rendered")
    if slots is not None and not has_rows:
        raise ConfigError("--slots are of rows; add --rows")
    opened = None if is_run_file else open_dataset(target, dtype=dtype, eos_id=eos_id)
    loader = None
    if has_rows or html is not None:
        loader = _loader(target, opened, assignments or [], sequence_length, distances)
    if html is not None:
        _write_page(target, loader, step, row, override, (document, documents), html)
        _tell(html, as_json)
        if not as_json:
            return
    if has_rows:
        _show_rows(loader, step, row or [0], _slot_range(slots), tokens or TOKENS, override, as_json)
    else:
        _show_dataset(opened, document, documents, tokens, override, as_json)


def _loader(target: str, dataset: Any, assignments: list[str], sequence_length: int, distances: int) -> Any:
    """A loader of a run file, or of one dataset alone."""
    from penstock.config import load_run, make_loader
    from penstock.inputs import EVERYTHING, InputRequirements
    from penstock.loader import Loader, Mixture, Source

    if dataset is None:
        return make_loader(load_run(target, assignments).data, run_file=target)
    return Loader(
        Mixture([Source(dataset)]),
        sequence_length=sequence_length,
        rows_per_step=1,
        requirements=EVERYTHING.merge(InputRequirements(asked_by="--distances", target_distances=distances)),
        threads=0,
    )


def _show_rows(
    loader: Any, step: int, rows: list[int], slots: tuple[int, int] | None, tokens: int, override: Any, as_json: bool
) -> None:
    import json

    from penstock.inspection import Style, make_console, row_view, slots_view, tokenizer_of, view_rows

    views = view_rows(loader, step, rows, lambda dataset: override or tokenizer_of(dataset))
    _refuse_no_rows(views, loader, rows)
    if as_json:
        print(json.dumps([view.as_json() for view in views], ensure_ascii=False))
        return
    console = make_console()
    style = Style(console)
    for view in views:
        console.print(row_view(view, style, tokens))
        if slots is not None:
            console.print(slots_view(view, *slots))
    console.print(style.legend(rewritten=any(document.stretches for view in views for document in view.documents)))


def _refuse_no_rows(views: list[Any], loader: Any, rows: list[int]) -> None:
    from penstock.errors import ConfigError

    if not views:
        count = loader.settings.rows_per_step
        found = "1 row, row 0" if count == 1 else f"rows 0 to {count - 1}"
        raise ConfigError(f"--row {' --row '.join(map(str, rows))}: the step has {found}")


def _show_dataset(
    dataset: Any, numbers: list[int] | None, count: int | None, tokens: int | None, override: Any, as_json: bool
) -> None:
    import dataclasses
    import json

    from penstock.inspection import (
        Style,
        dataset_view,
        document_view,
        make_console,
        summarise,
        tokenizer_of,
        view_document,
    )

    decoder = override or tokenizer_of(dataset)
    asked = _numbers(dataset, numbers, IN_TERMINAL if count is None else count)
    views = [view_document(dataset, number, decoder) for number in asked]
    if as_json:
        found = {**dataclasses.asdict(summarise(dataset)), "shown": [dataclasses.asdict(view) for view in views]}
        print(json.dumps(found, ensure_ascii=False))
        return
    console = make_console()
    style = Style(console)
    if numbers is None:
        console.print(dataset_view(summarise(dataset)))
        console.print()
    if decoder is None and views:
        console.print("No tokenizer lies beside this dataset: ids are shown; --tokenizer decodes them.\n")
    if decoder is not None and getattr(dataset, "chat", None) is not None:
        _print_chats(
            console, style, dataset, asked, decoder, None if numbers is not None else tokens or TOKENS_OF_CHATS
        )
        return
    for view in views:
        console.print(document_view(view, style, (tokens or TOKENS) if numbers is None else len(view.tokens) + 1))
    if views:
        console.print(style.legend())


def _print_chats(console: Any, style: Any, dataset: Any, numbers: list[int], decoder: Any, tokens: int | None) -> None:
    """The settings of a dataset of chats, and documents turn by turn."""
    from penstock.inspection.html.terminal import conversation_view, legend
    from penstock.inspection.pages import pages_of, settings_of_chats

    if tokens is not None:
        settings = (f"{name} {value}" for name, value in settings_of_chats(dataset.chat).items())
        console.print(f"Chats: {', '.join(settings)}\n", markup=False)
    for page in pages_of(dataset, numbers, decoder):
        console.print(conversation_view(page, style, len(page.ids) if tokens is None else tokens))
    if numbers:
        console.print(legend(style))


def _numbers(dataset: Any, numbers: list[int] | None, count: int) -> list[int]:
    """The documents that are asked for, or some that are spread over the dataset."""
    from penstock.errors import ConfigError

    if numbers is None:
        return [len(dataset) * i // count for i in range(count)] if count < len(dataset) else [*range(len(dataset))]
    wrong = [number for number in numbers if not 0 <= number < len(dataset)]
    if wrong:
        raise ConfigError(f"{dataset.path}: no document {wrong[0]}; it has {len(dataset):,}, from 0")
    return numbers


def _write_page(
    target: str,
    loader: Any,
    step: int,
    rows: list[int] | None,
    override: Any,
    documents: tuple[list[int] | None, int | None],
    html: Path,
) -> None:
    """Write the page of a dataset, or of a mixture."""
    from penstock.inspection import tokenizer_of, view_rows
    from penstock.inspection.html import write_html
    from penstock.inspection.pages import page_of_dataset, page_of_mixture

    def tokenizer_for(dataset: Any) -> Any:
        return override or tokenizer_of(dataset)

    decoder = tokenizer_for(loader.datasets[0])
    if Path(target).suffix in RUN_FILES:
        views = view_rows(loader, step, rows or [*range(ROWS_IN_PAGE)], tokenizer_for, lines=True)
        _refuse_no_rows(views, loader, rows or [])
        page = page_of_mixture(Path(target).name, loader, views, decoder)
    else:
        # A step of a dataset alone has one row.
        steps = [step + number for number in rows or range(ROWS_IN_PAGE)]
        views = [view for each in steps for view in view_rows(loader, each, [0], tokenizer_for, lines=True)]
        asked = _numbers(loader.datasets[0], documents[0], IN_PAGE if documents[1] is None else documents[1])
        page = page_of_dataset(loader.datasets[0], asked, views, decoder)
    write_html(html, page)


def _tell(html: Path, as_json: bool) -> None:
    """Say where the page is; beside JSON on standard error."""
    size = html.stat().st_size
    line = f"{html.resolve()}: {size / 1e6:.1f} MB, for any browser, no network needed"
    print(line, file=sys.stderr if as_json else sys.stdout)


def _is_raw(target: str) -> bool:
    """Whether the target can only be raw records: no run file, no corpus, no dataset."""
    path = Path(target)
    if path.suffix in {*RUN_FILES, ".npy", ".bin", ".idx"} or Path(f"{target}.idx").is_file():
        return False
    return not path.is_dir() or not any((path / name).is_file() for name in ("manifest.json", "train/manifest.json"))


def _refuse_raw(target: str) -> None:
    """Say how raw records are shown, where the target is a file of them."""
    from penstock.errors import ConfigError
    from penstock.sources.opening import EXTENSIONS

    suffixes = Path(target).suffixes
    if any(suffix in EXTENSIONS for suffix in suffixes) and not Path(target).is_dir():
        raise ConfigError(
            f"{target}: raw records; to show conversations give --tokenizer and --template, and for texts "
            "prepare them first: penstock prepare"
        )


def _chat_settings(
    options: dict[str, Any], path: Path | None, assignments: list[str], compared: list[str]
) -> tuple[Any, Any]:
    """The settings of chats, and those that they are compared with, or None."""
    from penstock.config.chats import load_chat_settings

    given = options if path is not None else {"template": "auto", **options}
    settings = load_chat_settings(path, assignments, given)
    if not compared:
        return settings, None
    changed = {assignment.partition("=")[0] for assignment in compared}
    rest = {name: value for name, value in given.items() if name not in changed}
    return settings, load_chat_settings(path, [*assignments, *compared], rest)


def _conversations(
    target: str,
    tokenizer: Any,
    settings: tuple[Any, Any],
    chosen: tuple[str | None, list[int] | None, int | None],
) -> tuple[Any, Any]:
    """Raw conversations under one setting, or two."""
    from penstock.errors import ConfigError
    from penstock.inspection.conversations import show_conversations
    from penstock.inspection.samples import sample_records

    if tokenizer is None:
        raise ConfigError(f"{target}: raw conversations need --tokenizer")
    format, numbers, count = chosen
    sample = sample_records(target, IN_PAGE if count is None else count, format=format, numbers=numbers)
    shown, other = (None if each is None else show_conversations(sample, tokenizer, each) for each in settings)
    return shown, other


def _show_conversations(
    shown: Any, other: Any, target: str, html: Path | None, amounts: tuple[int | None, int], as_json: bool
) -> None:
    """Show conversations in a page, in a terminal, or to a machine."""
    import json

    from penstock.inspection import Style, make_console
    from penstock.inspection.conversation_views import conversations_as_json, conversations_view, page_of_conversations
    from penstock.inspection.html import write_html

    count, tokens = amounts
    if html is not None:
        write_html(html, page_of_conversations(Path(target).name, shown, other))
    if as_json:
        print(json.dumps(conversations_as_json(shown), ensure_ascii=False))
    else:
        console = make_console()
        count = 0 if html is not None else IN_TERMINAL if count is None else count
        console.print(conversations_view(shown, Style(console), count, tokens, other))
    if html is not None:
        _tell(html, as_json)


def _slot_range(text: str | None) -> tuple[int, int] | None:
    """ "8:24" → (8, 24)."""
    if text is None:
        return None
    begin, _, end = text.partition(":")
    try:
        return int(begin or 0), int(end or 1 << 40)
    except ValueError:
        raise typer.BadParameter(f"--slots {text}: expected A:B, such as 0:40") from None
