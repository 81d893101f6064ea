"""Show raw conversations, a dataset, a loader or a run file: `ps.inspect`, which `penstock inspect`
calls too.
"""

import dataclasses
import glob
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack, final

from rich.console import Console
from rich.text import Text

from penstock.chat.trajectories.finished import FinishedTrajectory
from penstock.chat.trajectories.trajectory import Trajectory
from penstock.core.errors import ConfigError
from penstock.core.folders import base_name
from penstock.core.suggestions import refuse_unknown
from penstock.data.prepare.chat_settings import ChatSettings, chat_names
from penstock.data.prepare.prepare_keywords import ChatOptions
from penstock.data.shards.opening import open_dataset
from penstock.data.shards.tables.corpus import Corpus
from penstock.data.sources.formats import EXTENSIONS
from penstock.learn.training.run_folder import RunFolder
from penstock.plan.inputs.requirements import InputRequirements
from penstock.plan.loader.loader import Loader
from penstock.plan.loader.mixture import Mixture, Source
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.loading import load_tokenizer
from penstock.use.config import load_data, make_loader, run_file_of
from penstock.use.config.run_file import LOOKED_AT, load_chat_settings
from penstock.use.inspection import (
    RowView,
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
from penstock.use.inspection.pages import (
    page_of_dataset,
    page_of_mixture,
    page_of_trajectories,
    pages_of,
    settings_of_chats,
)
from penstock.use.inspection.terminal_rewritten import legend_of_rows
from penstock.use.inspection.terminal_tokens import conversation_view, documents_list, legend
from penstock.use.inspection.terminal_trajectories import trajectory_legend
from penstock.use.inspection.trajectories import TrajectoryTree
from penstock.use.inspection.unwritten import Unwritten, corpus_of, views_of_trajectories

RUN_FILES = {".yaml", ".yml"}
IN_TERMINAL, IN_PAGE = 3, 500
"""Default number of documents to show."""
ROWS_IN_PAGE = 8
COUNTED = 500
"""Minimum number of conversations that the figures in a terminal are counted over."""
TOKENS, TOKENS_OF_CHATS = 120, 600
"""Default number of tokens of a document that a terminal shows."""
Chosen = int | Sequence[int] | None
"""How many rows or documents to show, or their numbers; None: the default number."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """What is shown of a target, and how; the fields are arguments of `inspect`."""

    rows: Chosen
    documents: Chosen
    step: int
    listed: bool
    slots: tuple[int, int] | None
    tokens: int | None
    tokenizer: Tokenizer | None
    html: Path | None
    as_json: bool
    log_probabilities: bool

    @property
    def count(self) -> int | None:
        """Number of documents to show; None: the default."""
        return self.documents if isinstance(self.documents, int) else None

    @property
    def numbers(self) -> list[int] | None:
        """Numbers of the documents to show in full; None: some, spread over all."""
        return (
            None
            if self.documents is None or isinstance(self.documents, int)
            else list(self.documents)
        )

    def row_numbers(self, default: int) -> list[int]:
        """Numbers of the rows to show."""
        rows = default if self.rows is None else self.rows
        return [*range(rows)] if isinstance(rows, int) else list(rows)

    def decoder(self, corpus: Corpus) -> Tokenizer | None:
        """The tokenizer that decodes a corpus; None: it stores none, so ids are shown."""
        return self.tokenizer or tokenizer_of(corpus)


def inspect(
    target: str | os.PathLike[str] | Corpus | Loader | RunFolder | Unwritten,
    *,
    rows: Chosen = None,
    documents: Chosen = None,
    step: int = 0,
    listed: bool = False,
    slots: tuple[int, int] | None = None,
    tokens: int | None = None,
    tokenizer: str | Path | Tokenizer | None = None,
    sequence_length: int = 1024,
    distances: int = 1,
    html: str | Path | None = None,
    as_json: bool = False,
    log_probabilities: bool = False,
    format: str | None = None,
    dtype: str | None = None,
    eos_id: int | None = None,
    assignments: Sequence[str] = (),
    chat_config: str | Path | None = None,
    compare: Sequence[str] = (),
    **chat: Unpack[ChatOptions],
) -> None:
    """Print what is in raw conversations, a dataset, a loader, a run file or trajectories, or write
    a page of it.

    Args:
        target: A dataset or its folder, a loader (its rows over all ranks; it does not move), a run
            file (.yaml), a run or its folder, raw conversations with `tokenizer`, or trajectories:
            one, or a list of finished ones, with `tokenizer` to decode them.
        rows: Packed rows to show: how many, from `step` on, or the numbers of some; a step of a
            single dataset is one row. None: for a loader and a run file one, for a dataset none; in
            a page eight.
        documents: Documents to show: how many, spread over all, or the numbers of some, which are
            shown in full. None: three, in a page or a list 500.
        step: The step to show rows of.
        listed: Print a line for each document instead: its number, tokens, trained share and first
            words.
        slots: First slot and one after the last of each row, to show one per line with all targets.
        tokens: Maximum tokens of a document to print.
        tokenizer: Decodes instead of the dataset's own, and encodes raw conversations; an object or
            its path.
        sequence_length: Slots per row, if the target is a dataset.
        distances: Targets at distances 1 to this, if the target is a dataset.
        html: Write a page for any browser to this file.
        as_json: Print one JSON value.
        log_probabilities: Print a line for each sampled token of trajectories, with its
            log-probability.
        format: Format of raw conversations; None: by file names and first bytes.
        dtype: Token type of an .npy file, uint16 or uint32.
        eos_id: Id of the token that ends each document in an .npy file.
        assignments: Keys of the run file, or settings of raw conversations, each "KEY=VALUE".
        chat_config: YAML file of settings of raw conversations.
        compare: Settings of raw conversations, each "KEY=VALUE", to show next to those given.
        chat: Settings of raw conversations, such as template and mask_history; see `ChatSettings`.

    Raises:
        ConfigError: There is no such row or document, raw conversations have no tokenizer, or
            options do not fit.
    """
    refuse_unknown(chat, [*(inspect.__kwdefaults__ or ()), *chat_names()], "an option of inspect")
    path: str | None = None
    if isinstance(target, RunFolder):
        target = target.path
    if isinstance(target, str | os.PathLike):
        name = path = run_file_of(os.fspath(target))
    elif isinstance(target, Loader | Trajectory | FinishedTrajectory | list | tuple):
        name = "loader" if isinstance(target, Loader) else "trajectories"
    else:
        name = str(corpus_of(target).path)
    asked = _Shown(
        rows=rows,
        documents=documents,
        step=step,
        listed=listed,
        slots=slots,
        tokens=tokens,
        tokenizer=load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer,
        html=None if html is None else Path(html),
        as_json=as_json,
        log_probabilities=log_probabilities,
    )
    given = [
        *chat,
        *(["compare"] if compare else []),
        *(["chat_config"] if chat_config is not None else []),
    ]
    if path is not None and is_raw(path) and (given or asked.tokenizer is not None):
        options = dict(chat) if chat_config is not None else {"template": "auto", **chat}
        settings = load_chat_settings(chat_config, assignments, options)
        changed = {assignment.partition("=")[0] for assignment in compare}
        rest = {setting: value for setting, value in options.items() if setting not in changed}
        other = load_chat_settings(chat_config, [*assignments, *compare], rest) if compare else None
        _show_conversations(path, asked, format, settings, other)
        return
    if given:
        raise ConfigError(
            f"ps.inspect: {', '.join(given)}: settings of raw conversations, and {name} is none"
        )
    if path is not None:
        _refuse_raw(path)
    is_run_file = path is not None and Path(path).suffix in RUN_FILES
    mixed = is_run_file or isinstance(target, Loader)
    if assignments and not is_run_file:
        raise ConfigError(
            f"{assignments[0]}: {name} is no run file and no raw conversations; there is "
            "nothing to set"
        )
    if listed and (mixed or rows is not None or as_json):
        raise ConfigError(
            "listed: true shows a list of documents in a terminal; leave out rows and JSON, "
            "and name a dataset"
        )
    if slots is not None and not mixed and rows is None:
        raise ConfigError("slots are those of rows; set rows to 1")
    if isinstance(target, Trajectory | FinishedTrajectory | list | tuple):
        _show_trajectories(target, asked)
    elif isinstance(target, Loader):
        _show_rows(_whole_steps(target), asked, name, mixed=True)
    elif is_run_file:
        _show_rows(
            make_loader(load_data(name, assignments), run_file=name), asked, name, mixed=True
        )
    else:
        corpus = target if path is None else open_dataset(path, dtype=dtype, eos_id=eos_id)
        assert not isinstance(corpus, str | os.PathLike)
        if rows is not None or html is not None:
            _show_rows(_loader_of(corpus, sequence_length, distances), asked, name, mixed=False)
        if rows is None and (html is None or as_json):
            _show_dataset(corpus, asked)


def is_raw(target: str) -> bool:
    """Whether the target can only be raw records: not a run file, a corpus or a dataset."""
    path = Path(target)
    if glob.has_magic(target) and not path.exists():
        matches = sorted(glob.glob(target))
        return not matches or is_raw(matches[0])
    if path.suffix in {*RUN_FILES, ".npy", ".bin", ".idx"} or Path(f"{target}.idx").is_file():
        return False
    return not path.is_dir() or not any(
        (path / name).is_file() for name in ("manifest.json", "train/manifest.json")
    )


def _refuse_raw(target: str) -> None:
    """Refuse a file of raw records, and say how to show it."""
    suffixes = Path(target).suffixes
    if any(suffix in EXTENSIONS for suffix in suffixes) and not Path(target).is_dir():
        raise ConfigError(
            f"{target}: raw records; to show conversations set tokenizer and template, and "
            "for texts prepare them first: penstock prepare"
        )


def _loader_of(corpus: Corpus, sequence_length: int, distances: int) -> Loader:
    """A loader of one corpus, with a row in each step."""
    needs = InputRequirements(asked_by="distances", target_distances=distances)
    return Loader(
        Mixture([Source(corpus)]),
        sequence_length=sequence_length,
        rows_per_step=1,
        requirements=LOOKED_AT.merge(needs),
        threads=0,
    )


def _whole_steps(loader: Loader) -> Loader:
    """A loader of the same steps with the rows of all ranks and all fields, so that the given one
    stays where it is.
    """
    asked = loader.requirements
    requirements = dataclasses.replace(
        LOOKED_AT, attention=asked.attention, target_distances=asked.target_distances
    )
    settings = dataclasses.replace(
        loader.loader_settings.elsewhere(),
        requirements=requirements,
        attention=None,
        data_parallel=(0, 1),
        threads=0,
    )
    return Loader.of(loader.mixture, settings)


def _views(
    loader: Loader, numbers: Sequence[int], asked: _Shown, *, mixed: bool, lines: bool = False
) -> list[RowView]:
    """The rows with these numbers: of one step, or, if a step is one row (not `mixed`), from that
    step on.
    """
    if not mixed:
        steps = [(asked.step + number, [0]) for number in numbers]
        return [
            view
            for step, rows in steps
            for view in view_rows(loader, step, rows, asked.decoder, lines=lines)
        ]
    views = view_rows(loader, asked.step, list(numbers), asked.decoder, lines=lines)
    if not views:
        count = loader.settings.ramp.rows(asked.step)
        found = "1 row, row 0" if count == 1 else f"rows 0 to {count - 1}"
        raise ConfigError(f"row {', '.join(map(str, numbers))}: the step has {found}")
    return views


def _show_rows(loader: Loader, asked: _Shown, name: str, *, mixed: bool) -> None:
    """Show packed rows: in a page, which for a dataset (not `mixed`) has documents too, in a
    terminal or as JSON.
    """
    if asked.html is not None:
        views = _views(loader, asked.row_numbers(ROWS_IN_PAGE), asked, mixed=mixed, lines=True)
        corpus = loader.datasets[0]
        if mixed:
            page = page_of_mixture(base_name(name), loader, views, asked.decoder(corpus))
        else:
            page = page_of_dataset(
                corpus, _chosen(corpus, asked, IN_PAGE), views, asked.decoder(corpus)
            )
        write_html(asked.html, page)
        _report_page(asked.html, asked.as_json)
        if not asked.as_json:
            return
    if not mixed and asked.rows is None:
        return
    views = _views(loader, asked.row_numbers(1), asked, mixed=mixed)
    if asked.as_json:
        print(json.dumps([view.as_json() for view in views], ensure_ascii=False))
        return
    console = make_console()
    style = Style(console)
    for view in views:
        console.print(row_view(view, style, asked.tokens or TOKENS))
        if asked.slots is not None:
            console.print(slots_view(view, *asked.slots))
    console.print(legend_of_rows(views, style))


def _show_trajectories(target: Unwritten, asked: _Shown) -> None:
    """Show trajectories that are not written yet: in a page, as text or as JSON."""
    if asked.rows is not None or asked.listed or asked.slots is not None:
        raise ConfigError("rows, listed and slots are of datasets; write_trajectories makes one")
    views = views_of_trajectories(target, asked.tokenizer, lines=asked.html is not None)
    views = views if asked.numbers is None else [views[number] for number in asked.numbers]
    if asked.html is not None:
        write_html(asked.html, page_of_trajectories(views, target, asked.tokenizer))
        _report_page(asked.html, asked.as_json)
    elif asked.as_json:
        print(json.dumps([dataclasses.asdict(view) for view in views], ensure_ascii=False))
    else:
        console = make_console()
        style = Style(console)
        for view in views:
            count = asked.tokens or len(view.tokens)
            console.print(
                document_view(view, style, count, log_probabilities=asked.log_probabilities)
            )
        console.print(trajectory_legend(style))


def _show_dataset(corpus: Corpus, asked: _Shown) -> None:
    """Print counts and some documents of a dataset, as text, as a list or as JSON."""
    decoder, chosen = (
        asked.decoder(corpus),
        _chosen(corpus, asked, IN_PAGE if asked.listed else IN_TERMINAL),
    )
    if asked.listed:
        make_console().print(documents_list(pages_of(corpus, chosen, decoder)))
        return
    in_full = asked.numbers is not None
    chat = corpus.chat
    views = (
        []
        if decoder is not None and chat is not None and not asked.as_json
        else [view_document(corpus, number, decoder) for number in chosen]
    )
    if asked.as_json:
        shown = [dataclasses.asdict(view) for view in views]
        print(
            json.dumps(
                {**dataclasses.asdict(summarise(corpus)), "shown": shown}, ensure_ascii=False
            )
        )
        return
    console = make_console()
    style = Style(console)
    if not in_full:
        console.print(dataset_view(summarise(corpus)))
        console.print()
    if decoder is not None and chat is not None:
        if not in_full:
            settings = (f"{name} {value}" for name, value in settings_of_chats(chat).items())
            console.print(f"Chats: {', '.join(settings)}\n", markup=False)
        pages = pages_of(corpus, chosen, decoder)
        for page in pages:
            count = len(page.ids) if in_full else asked.tokens or TOKENS_OF_CHATS
            console.print(
                conversation_view(page, style, count, log_probabilities=asked.log_probabilities)
            )
        _print_legends(console, style, [page.trajectory for page in pages], legend(style))
        return
    if decoder is None and views:
        console.print(
            "This dataset stores no tokenizer, so ids are shown; set tokenizer to decode them.\n"
        )
    for view in views:
        usual = TOKENS if view.trajectory is None else TOKENS_OF_CHATS
        count = len(view.tokens) + 1 if in_full else asked.tokens or usual
        console.print(document_view(view, style, count, log_probabilities=asked.log_probabilities))
    _print_legends(console, style, [view.trajectory for view in views], style.legend())


def _print_legends(
    console: Console, style: Style, shown: Sequence[TrajectoryTree | None], of_others: Text
) -> None:
    """The legend of trajectories if some documents are, and that of others if some are not."""
    if any(one is not None for one in shown):
        console.print(trajectory_legend(style))
    if any(one is None for one in shown):
        console.print(of_others)


def _chosen(corpus: Corpus, asked: _Shown, default: int) -> list[int]:
    """The numbers of the documents to show."""
    if asked.numbers is None:
        count, total = default if asked.count is None else asked.count, len(corpus)
        return [total * i // count for i in range(count)] if count < total else [*range(total)]
    wrong = [number for number in asked.numbers if not 0 <= number < len(corpus)]
    if wrong:
        raise ConfigError(f"{corpus.name}: no document {wrong[0]}; it has {len(corpus):,}, from 0")
    return asked.numbers


def _show_conversations(
    target: str,
    asked: _Shown,
    format: str | None,
    settings: ChatSettings,
    other: ChatSettings | None,
) -> None:
    """Show raw conversations under one or two settings: in a page, a terminal (in full, or as a
    list), or as JSON.
    """
    if asked.tokenizer is None:
        raise ConfigError(f"{target}: raw conversations need a tokenizer: set tokenizer")
    count = asked.count if asked.html is not None else max(COUNTED, asked.count or 0)
    sample = sample_records(
        target, IN_PAGE if count is None else count, format=format, numbers=asked.numbers
    )
    shown = show_conversations(sample, asked.tokenizer, settings)
    compared = None if other is None else show_conversations(sample, asked.tokenizer, other)
    if asked.html is not None:
        write_html(asked.html, page_of_conversations(base_name(target), shown, compared))
    if asked.as_json:
        print(json.dumps(conversations_as_json(shown), ensure_ascii=False))
    elif asked.listed:
        make_console().print(
            conversations_list(shown, IN_PAGE if asked.count is None else asked.count)
        )
    else:
        console = make_console()
        count = 0 if asked.html is not None else IN_TERMINAL if asked.count is None else asked.count
        console.print(
            conversations_view(
                shown, Style(console), count, asked.tokens or TOKENS_OF_CHATS, compared
            )
        )
    if asked.html is not None:
        _report_page(asked.html, asked.as_json)


def _report_page(html: Path, as_json: bool) -> None:
    """Print where the page is; on standard error if JSON goes to standard output."""
    size = html.stat().st_size
    line = f"{html.resolve()}: {size / 1e6:.1f} MB, for any browser, no network needed"
    print(line, file=sys.stderr if as_json else sys.stdout)
