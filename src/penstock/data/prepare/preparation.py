"""`prepare`: finds the parts of the sources, prepares them in several processes, finishes the
datasets, and reports.

The parts are prepared by this process, child processes, or a Ray cluster. The result is
byte-identical for any number of processes, and for any number of interruptions and changes of the
input: a part depends on its own input alone, is finished once its record is on the disk, and is
reused as long as its input is the same.
"""

import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

from penstock.chat import Template
from penstock.core.folders import is_url, local_path, normal_url
from penstock.core.terminal import short_number
from penstock.core.urls import shown_url
from penstock.data.prepare.chat_notices import describe_template
from penstock.data.prepare.documents import Framing
from penstock.data.prepare.executors import choose_executor
from penstock.data.prepare.finish import finish, input_of
from penstock.data.prepare.folder import OutputFolder, Place, begun_on, input_changes
from penstock.data.prepare.input import (
    Paths,
    identity_of,
    open_parts,
    paths_of,
    refuse_changes,
    refuse_output,
)
from penstock.data.prepare.options import merge_options
from penstock.data.prepare.part import COPIES, Workshop
from penstock.data.prepare.part_record import WORK
from penstock.data.prepare.prepare_keywords import PrepareOptions
from penstock.data.prepare.prepared import PreparedDataset
from penstock.data.prepare.probe import say
from penstock.data.prepare.recipe import ChatRecipe, TextRecipe
from penstock.data.prepare.settings import PrepareSettings, fingerprint
from penstock.data.prepare.stored_shards import MAKING, StoreOutput
from penstock.data.prepare.transform import Transform, describe_transform, load_transform
from penstock.data.prepare.upload import prepare_remote
from penstock.data.prepare.work import FREE_SHARE, Done, Work
from penstock.data.reports.report import REPORT, SHOWN, PrepareReport, describe_changes, read_report
from penstock.data.shards import ShardLayout
from penstock.data.sources import Part
from penstock.data.stores.copies import Copies
from penstock.data.stores.files import output_errors
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.loading import load_tokenizer


def prepare(
    source: Paths | Sequence[Paths] | Iterable[Any],
    *,
    tokenizer: Paths | Tokenizer,
    output: Paths,
    template: Paths | Template | None = None,
    settings: PrepareSettings | None = None,
    transform: str | Transform | None = None,
    processes: int | None = None,
    executor: Literal["processes", "ray"] = "processes",
    overwrite: bool = False,
    progress: bool = True,
    verbose: bool = False,
    **options: Unpack[PrepareOptions],
) -> PreparedDataset:
    """Turn raw text, or conversations with a template, into a dataset of shards.

    ```python
    web = prepare("web/*.jsonl.zst", tokenizer="tokenizer.json", output="data/web")
    print(web.report)
    train = prepare(iter(texts), tokenizer="tokenizer.json", output="data/mine", validation=0.01)
    train.validation
    prepare("chats.jsonl", tokenizer="Qwen3-0.6B/", output="data/chats", chat=ChatOptions(mask_history=True))
    ```

    If it is killed at any moment, the next call continues after the finished parts. If the input
    has changed since the last call, only the changed parts are prepared again; the old dataset
    stays complete until then.

    Args:
        source: Paths, folders, globs, URLs, one or several; `hf://datasets/OWNER/NAME`; an iterator
            of texts or of dicts; a `datasets.Dataset` (also streaming), or a table of Arrow, polars
            or pandas.
        tokenizer: A tokenizer; or a tokenizer.json, .model or .tiktoken, a folder, or a name on the
            hub.
        output: Folder for the result: new, empty, or with an earlier run of this preparation. With
            a validation share, the datasets are its folders `train` and `validation`. A URL
            (`s3://bucket/web`): shards go there from where they are made, the rest of the result at
            the end.
        template: Records are conversations, and this chat template renders them: a .jinja file, a
            folder with a tokenizer, the text of a template, or "auto", the tokenizer's own.
        settings: Settings that determine the result; its fields can also be given as keywords.
        transform: Function, or `module:function`, that takes a record (a dict) and returns it
            changed, or None to drop it.
        processes: Parts at once; None: one per core, fewer for a few megabytes.
        executor: `processes` of this machine, or `ray`: the cluster of RAY_ADDRESS or of
            `ray.init`, otherwise a new one on this machine; nodes that do not see the output send
            their parts here, or their shards to the URL.
        overwrite: Discard existing results and start again; required to change settings.
        progress: Show progress on standard error, after one line on what is read and how.
        verbose: For chats, also print all settings in effect, and the layout of the first record.
        options: See `PrepareOptions`: fields of `PrepareSettings`, and of `Fields` as `text_field`,
            `weights_field`, `columns`; of chats, those of `ChatOptions`, one by one or together as
            `chat`.

    Returns:
        The dataset, opened; with a validation share that of training, and the other as its
        `validation`. Its `report` says what went in, what came out, and what was rejected.

    Raises:
        RecordError: A record cannot be read, with file and line; a conversation cannot be trained;
            too many were rejected; or there is no document.
        DamagedFileError: A file was cut or is damaged, and `on_damaged_file` is "stop".
        OutputError: The folder cannot be used.
        ConfigError: A setting is out of range.
        StoreError: The output is a URL, and its store cannot be written.
        TokenizerError: The tokenizer cannot be loaded, or has no byte table for loss weights.
    """  # noqa: E501
    into = partial(
        _prepare_folder,
        source,
        tokenizer=tokenizer,
        template=template,
        settings=settings,
        transform=transform,
        processes=processes,
        executor=executor,
        overwrite=overwrite,
        progress=progress,
        verbose=verbose,
        **options,
    )
    if is_url(output):
        url = normal_url(output)
        return PreparedDataset.of(prepare_remote(url, overwrite, progress, into), url)
    folder = local_path(output, "the output of prepare")
    return PreparedDataset.of(into(folder, None), folder)


def _prepare_folder(
    source: object,
    output: Path,
    store: StoreOutput | None,
    *,
    tokenizer: Paths | Tokenizer,
    template: Paths | Template | None,
    settings: PrepareSettings | None,
    transform: str | Transform | None,
    processes: int | None,
    executor: str,
    overwrite: bool,
    progress: bool,
    verbose: bool,
    **options: Unpack[PrepareOptions],
) -> PrepareReport:
    """`prepare` into a folder, or its shards into a store."""
    started = time.monotonic()
    settings = merge_options(
        settings, options if template is None else {"template": template, **options}
    )
    loaded = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
    function = load_transform(transform)
    if settings.fields.weights:
        _ = loaded.byte_table
    recipe = _make_recipe(settings, loaded, output, overwrite)
    refuse_output(source, output)
    copies = Copies()
    with copies.used():
        parts = open_parts(source, settings, progress)
    known = parts if isinstance(parts, list) else None
    make_crew = choose_executor(executor, processes=processes, parts=known, transform=function)
    chat_template = recipe.encoder.template if isinstance(recipe, ChatRecipe) else None
    processor = recipe.encoder.processor if isinstance(recipe, ChatRecipe) else None
    plan_settings = settings.as_plan(
        loaded,
        describe_transform(function),
        chat_template,
        None if processor is None else processor.fingerprint,
    )
    plan = {"settings": plan_settings, **identity_of(parts)}
    with OutputFolder(output) as folder:
        changes = {} if overwrite else input_changes(folder.plan(), plan)
        place = folder.adopt(plan, overwrite=overwrite)
        is_whole = store is None or store.begin(
            folder.path, is_finished=place.finished and known is not None
        )
        if place.finished:
            report = read_report((folder.path / REPORT).read_bytes(), str(folder.path))
            if known is not None and is_whole and settings.accepts(report.rejects, report.damaged):
                folder.close_work()
                return report
            place = folder.renew(plan)
        layout = ShardLayout(
            vocab_size=loaded.vocab_size,
            has_spans=settings.fields.weights is not None or settings.chat is not None,
            has_text=settings.keep_text,
            has_trees=settings.chat is not None and settings.chat.keeps_answers,
            has_images=settings.chat is not None and settings.chat.processor is not None,
            columns=settings.columns,
        )
        shop = Workshop(
            output=place.path,
            tokenizer=loaded,
            settings=settings,
            transform=function,
            layout=layout,
            recipe=recipe,
            copies=_room_for_copies(folder, parts, progress),
            store=None if store is None else store.address,
            scratch=folder.path / WORK if executor == "processes" else None,
        )
        if progress:
            say(_describe_work(source, parts, shop, output if store is None else store.url))
        if progress and place.earlier and changes:
            say(
                f"since the last run {describe_changes(changes)}; only changed parts are "
                "prepared again"
            )
        with _keeping(copies, shop.copies), _without_leftovers(folder.path / WORK):
            work = Work(shop, folder, place, store, progress=progress, verbose=verbose)
            done = work.run(parts, make_crew)
            if known is not None:
                refuse_changes(plan, source, settings)
        report = _settle(shop, done, folder, place, fingerprint(plan_settings))
        folder.close_work()
    if progress and (line := report.untrained()):
        say(line)
    seconds = None if done.unchanged else time.monotonic() - started
    return replace(
        report,
        seconds=seconds,
        parts_resumed=done.resumed,
        input_changes=changes if place.earlier else {},
    )


def _room_for_copies(
    folder: OutputFolder, parts: list[Part] | Iterator[Part], progress: bool
) -> Path | None:
    """The folder for copies of remote files; None: nothing is remote, or the disk has no room for
    all of it.
    """
    listed = parts if isinstance(parts, list) else []
    remote = sum(part.size_bytes for part in listed if any(file.is_remote for file in part.sources))
    room = shutil.disk_usage(folder.path).free - FREE_SHARE * sum(
        part.size_bytes for part in listed
    )
    if not remote or remote < room:
        return folder.path / WORK / COPIES if remote else None
    if progress:
        say(
            f"reading remote files more than once: {folder.path} has no room for copies of "
            f"{short_number(remote)}B; free some, or choose another folder"
        )
    return None


@contextmanager
def _keeping(copies: Copies, folder: Path | None) -> Iterator[None]:
    """Read through the copies, in their folder; they are removed at the end."""
    if folder is None:
        yield
        return
    shutil.rmtree(folder, ignore_errors=True)  # of a killed run
    try:
        with output_errors(folder):
            copies.move_to(folder)
        with copies.used():
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _without_leftovers(work: Path) -> Iterator[None]:
    """Remove unfinished shards of workers that were killed, before and after."""

    def remove() -> None:
        for path in work.glob(f"{MAKING}*"):
            shutil.rmtree(path, ignore_errors=True)

    remove()
    try:
        yield
    finally:
        remove()


def _describe_work(
    source: object, parts: list[Part] | Iterator[Part], shop: Workshop, output: Path | str
) -> str:
    """One line: what is read, with which tokenizer and template, where it goes."""
    paths = [shown_url(path) for path in paths_of(source) or ()]
    read = ", ".join(paths[:SHOWN]) + (
        f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    )
    if isinstance(parts, list):
        files = len({file.key for part in parts for file in part.sources})
        size = short_number(sum(part.size_bytes for part in parts))
        read += f" ({files:,} file{'' if files == 1 else 's'}, {size}B)"
    tools = f"tokenizer {shop.tokenizer.name}"
    if isinstance(shop.recipe, ChatRecipe):
        tools += f" and {describe_template(shop.recipe.encoder.template)}"
    return f"preparing {read or 'records from Python'} with {tools} into {output}"


def _settle(
    shop: Workshop, done: Done, folder: OutputFolder, place: Place, configuration: str
) -> PrepareReport:
    """Finish the new dataset; if nothing changed, keep the old one."""
    if done.unchanged:
        report = read_report((folder.path / REPORT).read_bytes(), str(folder.path))
        report = replace(report, input=input_of(done.records))
        folder.refresh(place.path, report.as_json(lasting=True))
        return report
    report = finish(shop, done.records, done.files, configuration)
    if place.path == folder.path:
        return report
    folder.promote(place.path)
    return read_report((folder.path / REPORT).read_bytes(), str(folder.path))


def _make_recipe(
    settings: PrepareSettings, tokenizer: Tokenizer, output: Path, overwrite: bool
) -> TextRecipe | ChatRecipe:
    """The recipe for the settings; a template that writes the date gets the date of the first
    run.
    """
    if settings.chat is None:
        return TextRecipe(tokenizer, Framing.of(tokenizer, settings), settings)
    day = None if overwrite else begun_on(output)
    return ChatRecipe(settings.chat.open(tokenizer, day), settings.chat, settings)
