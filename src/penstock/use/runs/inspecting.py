"""Show raw conversations, a dataset, a loader or a run file; `ps.inspect` and `penstock inspect` share this code."""

import dataclasses
import glob
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.folders import base_name
from penstock.core.suggestions import refuse_unknown
from penstock.data.prepare.chat_settings import chat_names
from penstock.data.shards.opening import open_dataset
from penstock.data.sources.formats import EXTENSIONS
from penstock.plan.inputs.requirements import InputRequirements
from penstock.plan.loader.loader import Loader
from penstock.plan.loader.mixture import Mixture, Source
from penstock.tokenizers.loading import load_tokenizer
from penstock.use.config import load_data, make_loader, run_file_of
from penstock.use.config.run_file import LOOKED_AT, load_chat_settings
from penstock.use.inspection import (
    Style,
    dataset_view,
    document_view,
    make_console,
    row_view,
    slots_view,
    summarise,
    tokenizer_of,
    view_document,
    view_rows,
)
from penstock.use.inspection.conversation_views import (
    conversations_as_json,
    conversations_list,
    conversations_view,
    page_of_conversations,
)
from penstock.use.inspection.conversations import sample_records, show_conversations
from penstock.use.inspection.page import write_html
from penstock.use.inspection.pages import page_of_dataset, page_of_mixture, pages_of, settings_of_chats
from penstock.use.inspection.terminal_tokens import conversation_view, documents_list, legend

RUN_FILES = {".yaml", ".yml"}
IN_TERMINAL, IN_PAGE = 3, 500
"""Default number of documents to show."""
ROWS_IN_PAGE = 8
COUNTED = 500
"""Minimum number of conversations that the figures in a terminal are counted over."""
TOKENS, TOKENS_OF_CHATS = 120, 600
"""Default number of tokens of a document that a terminal shows."""


def inspect(
    target: Any,
    *,
    rows: bool = False,
    step: int = 0,
    row: Sequence[int] | None = None,
    document: Sequence[int] | None = None,
    documents: int | None = None,
    listed: bool = False,
    tokens: int | None = None,
    tokenizer: Any = None,
    sequence_length: int = 1024,
    html: str | Path | None = None,
    **chat: Any,
) -> None:
    """Print what `penstock inspect` prints, or write its page.

    Args:
        target: A dataset or its folder, a loader (its rows over all ranks; it does not move), a run file (.yaml), or
            raw conversations with `tokenizer`.
        rows: For a dataset, show packed rows; for a loader and a run file they are always shown.
        step: The step to show rows of.
        row: Numbers of the step's rows to show; None: the first, in a page the first eight.
        document: Numbers of documents to show in full.
        documents: Number of documents to show, spread over all; None: three, in a page or a list 500.
        listed: Print a line for each document instead: its number, tokens, trained share and first words.
        tokens: Maximum tokens of a document to print.
        tokenizer: Decodes instead of the dataset's own, and encodes raw conversations; an object or its path.
        sequence_length: Slots per row, if the target is a dataset.
        html: Write a page for any browser to this file.
        chat: Settings of raw conversations, such as template and mask_history; see `ChatSettings`.

    Raises:
        ConfigError: There is no such row or document, or raw conversations have no tokenizer.
    """
    refuse_unknown(chat, [*(inspect.__kwdefaults__ or ()), *chat_names()], "an option of inspect")
    if isinstance(target, os.PathLike):
        target = Path(target)
    override = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    page = None if html is None else Path(html)
    is_path = isinstance(target, str | Path)
    name = run_file_of(str(target)) if is_path else str(getattr(target, "path", "loader"))
    if is_path and (chat or (override is not None and is_raw(name))):
        count = documents if page is not None else max(COUNTED, documents or 0)
        numbers = None if document is None else list(document)
        shown, _ = load_conversations(name, override, chat_settings_of(chat, None, [], []), (None, numbers, count))
        print_conversations(shown, None, name, page, (documents, tokens or TOKENS_OF_CHATS), False, listed=listed)
        return
    if chat:
        raise ConfigError(f"ps.inspect: {', '.join(chat)}: settings of raw conversations, and {name} is none")
    if is_path:
        refuse_raw(name)
    is_file = is_path and Path(name).suffix in RUN_FILES

    given = isinstance(target, Loader)
    dataset = None if is_file or given else open_dataset(target) if is_path else target
    loader = None
    if given:
        loader = whole_steps(target)
    elif rows or is_file or page:
        loader = open_loader(name, dataset, [], sequence_length, 1)
    numbers, chosen = None if document is None else list(document), None if row is None else list(row)
    if page is not None:
        write_page(name, loader, step, chosen, override, (numbers, documents), page, mixed=is_file or given)
        report_page(page, False)
    if loader is not None and (rows or is_file or given):
        print_rows(loader, step, chosen or [0], None, tokens or TOKENS, override, False)
    elif listed:
        print_list(dataset, chosen_documents(dataset, numbers, IN_PAGE if documents is None else documents), override)
    else:
        print_dataset(dataset, numbers, documents, tokens, override, False)


def open_loader(target: str, dataset: Any, assignments: list[str], sequence_length: int, distances: int) -> Any:
    """A loader of a run file, or of a single dataset."""
    if dataset is None:
        return make_loader(load_data(target, assignments), run_file=target)
    return Loader(
        Mixture([Source(dataset)]),
        sequence_length=sequence_length,
        rows_per_step=1,
        requirements=LOOKED_AT.merge(InputRequirements(asked_by="distances", target_distances=distances)),
        threads=0,
    )


def whole_steps(loader: Any) -> Any:
    """A loader of the same steps with the rows of all ranks and all fields, so that the given one stays where it is."""
    asked = loader.requirements
    requirements = replace(LOOKED_AT, attention=asked.attention, target_distances=asked.target_distances)
    settings = replace(
        loader.loader_settings.elsewhere(), requirements=requirements, attention=None, data_parallel=(0, 1), threads=0
    )
    return Loader.of(loader.mixture, settings)


def print_rows(
    loader: Any, step: int, rows: list[int], slots: tuple[int, int] | None, tokens: int, override: Any, as_json: bool
) -> None:
    """Print packed rows, as text or as JSON."""
    views = view_rows(loader, step, rows, lambda dataset: override or tokenizer_of(dataset))
    refuse_no_rows(views, loader, step, rows)
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


def refuse_no_rows(views: list[Any], loader: Any, step: int, rows: list[int]) -> None:
    """Refuse numbers of rows that a step does not have.

    Raises:
        ConfigError: There are no views.
    """
    if not views:
        count = loader.settings.ramp.rows(step)
        found = "1 row, row 0" if count == 1 else f"rows 0 to {count - 1}"
        raise ConfigError(f"row {', '.join(map(str, rows))}: the step has {found}")


def print_dataset(
    dataset: Any, numbers: list[int] | None, count: int | None, tokens: int | None, override: Any, as_json: bool
) -> None:
    """Print counts and some documents of a dataset, as text or as JSON."""
    decoder = override or tokenizer_of(dataset)
    asked = chosen_documents(dataset, numbers, IN_TERMINAL if count is None else count)
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
        console.print("This dataset stores no tokenizer, so ids are shown; set tokenizer to decode them.\n")
    if decoder is not None and dataset.chat is not None:
        print_chats(console, style, dataset, asked, decoder, None if numbers is not None else tokens or TOKENS_OF_CHATS)
        return
    for view in views:
        console.print(document_view(view, style, (tokens or TOKENS) if numbers is None else len(view.tokens) + 1))
    if views:
        console.print(style.legend())


def print_list(dataset: Any, numbers: list[int], override: Any) -> None:
    """Print a line for each of some documents of a dataset."""
    make_console().print(documents_list(pages_of(dataset, numbers, override or tokenizer_of(dataset))))


def print_chats(console: Any, style: Any, dataset: Any, numbers: list[int], decoder: Any, tokens: int | None) -> None:
    """Print the settings of a dataset of chats, and documents turn by turn."""
    if tokens is not None:
        settings = (f"{name} {value}" for name, value in settings_of_chats(dataset.chat).items())
        console.print(f"Chats: {', '.join(settings)}\n", markup=False)
    for page in pages_of(dataset, numbers, decoder):
        console.print(conversation_view(page, style, len(page.ids) if tokens is None else tokens))
    if numbers:
        console.print(legend(style))


def chosen_documents(dataset: Any, numbers: list[int] | None, count: int) -> list[int]:
    """The requested documents, or `count` spread over the dataset."""
    if numbers is None:
        return [len(dataset) * i // count for i in range(count)] if count < len(dataset) else [*range(len(dataset))]
    wrong = [number for number in numbers if not 0 <= number < len(dataset)]
    if wrong:
        raise ConfigError(f"{dataset.name}: no document {wrong[0]}; it has {len(dataset):,}, from 0")
    return numbers


def write_page(
    target: str,
    loader: Any,
    step: int,
    rows: list[int] | None,
    override: Any,
    documents: tuple[list[int] | None, int | None],
    html: Path,
    *,
    mixed: bool | None = None,
) -> None:
    """Write the page of a dataset or of a mixture; `mixed` selects which; None: decided by the target's name."""

    def tokenizer_for(dataset: Any) -> Any:
        return override or tokenizer_of(dataset)

    decoder = tokenizer_for(loader.datasets[0])
    if Path(target).suffix in RUN_FILES if mixed is None else mixed:
        views = view_rows(loader, step, rows or [*range(ROWS_IN_PAGE)], tokenizer_for, lines=True)
        refuse_no_rows(views, loader, step, rows or [])
        page = page_of_mixture(base_name(target), loader, views, decoder)
    else:
        # A step of a single dataset has one row.
        steps = [step + number for number in rows or range(ROWS_IN_PAGE)]
        views = [view for each in steps for view in view_rows(loader, each, [0], tokenizer_for, lines=True)]
        asked = chosen_documents(loader.datasets[0], documents[0], IN_PAGE if documents[1] is None else documents[1])
        page = page_of_dataset(loader.datasets[0], asked, views, decoder)
    write_html(html, page)


def report_page(html: Path, as_json: bool) -> None:
    """Print where the page is; on standard error if JSON goes to standard output."""
    size = html.stat().st_size
    line = f"{html.resolve()}: {size / 1e6:.1f} MB, for any browser, no network needed"
    print(line, file=sys.stderr if as_json else sys.stdout)


def is_raw(target: str) -> bool:
    """Whether the target can only be raw records: not a run file, a corpus or a dataset."""
    path = Path(target)
    if glob.has_magic(target) and not path.exists():
        matches = sorted(glob.glob(target))
        return not matches or is_raw(matches[0])
    if path.suffix in {*RUN_FILES, ".npy", ".bin", ".idx"} or Path(f"{target}.idx").is_file():
        return False
    return not path.is_dir() or not any((path / name).is_file() for name in ("manifest.json", "train/manifest.json"))


def refuse_raw(target: str) -> None:
    """Refuse a file of raw records, and say how to show it."""
    suffixes = Path(target).suffixes
    if any(suffix in EXTENSIONS for suffix in suffixes) and not Path(target).is_dir():
        raise ConfigError(
            f"{target}: raw records; to show conversations set tokenizer and template, and for texts "
            "prepare them first: penstock prepare"
        )


def chat_settings_of(
    options: dict[str, Any], path: Path | None, assignments: list[str], compared: list[str]
) -> tuple[Any, Any]:
    """(settings of chats, settings to compare them with or None)."""
    given = options if path is not None else {"template": "auto", **options}
    settings = load_chat_settings(path, assignments, given)
    if not compared:
        return settings, None
    changed = {assignment.partition("=")[0] for assignment in compared}
    rest = {name: value for name, value in given.items() if name not in changed}
    return settings, load_chat_settings(path, [*assignments, *compared], rest)


def load_conversations(
    target: str,
    tokenizer: Any,
    settings: tuple[Any, Any],
    chosen: tuple[str | None, list[int] | None, int | None],
) -> tuple[Any, Any]:
    """Render raw conversations under one or two settings."""
    if tokenizer is None:
        raise ConfigError(f"{target}: raw conversations need a tokenizer: set tokenizer")
    format, numbers, count = chosen
    sample = sample_records(target, IN_PAGE if count is None else count, format=format, numbers=numbers)
    shown, other = (None if each is None else show_conversations(sample, tokenizer, each) for each in settings)
    return shown, other


def print_conversations(
    shown: Any,
    other: Any,
    target: str,
    html: Path | None,
    amounts: tuple[int | None, int],
    as_json: bool,
    *,
    listed: bool = False,
) -> None:
    """Show conversations in a page, in a terminal (in full, or as a list), or as JSON."""
    count, tokens = amounts
    if html is not None:
        write_html(html, page_of_conversations(base_name(target), shown, other))
    if as_json:
        print(json.dumps(conversations_as_json(shown), ensure_ascii=False))
    elif listed:
        make_console().print(conversations_list(shown, IN_PAGE if count is None else count))
    else:
        console = make_console()
        count = 0 if html is not None else IN_TERMINAL if count is None else count
        console.print(conversations_view(shown, Style(console), count, tokens, other))
    if html is not None:
        report_page(html, as_json)
