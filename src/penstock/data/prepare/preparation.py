"""`prepare`: finds the parts of the sources, prepares them in several processes, finishes the datasets, and reports.

The parts are prepared by this process, child processes, or a Ray cluster. The result is byte-identical for any number
of processes, and for any number of interruptions and changes of the input: a part depends on its own input alone, is
finished once its record is on the disk, and is reused as long as its input is the same.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack, final

from penstock.chat import Template
from penstock.core.errors import ConfigError, OutputError, RecordError
from penstock.core.folders import is_url, local_path, normal_url
from penstock.core.system import usable_processors
from penstock.core.terminal import Progress, short_number
from penstock.core.urls import shown_url
from penstock.data.prepare.chat_summary import describe_template
from penstock.data.prepare.documents import Framing
from penstock.data.prepare.duplicates import drop_duplicates
from penstock.data.prepare.earlier_parts import Earlier, Interrupted, finished_records
from penstock.data.prepare.folder import OutputFolder, Place, begun_on, input_changes
from penstock.data.prepare.part import COPIES, Task, Workshop, prepare_part, using_copies
from penstock.data.prepare.part_record import REPORT, WORK, PartRecord
from penstock.data.prepare.pool import Crew, Pool, Processes
from penstock.data.prepare.probe import check_encoder, checked_first, say
from penstock.data.prepare.ray_tasks import RayTasks, end_earlier_runs, import_ray
from penstock.data.prepare.recipe import ChatRecipe, TextRecipe
from penstock.data.prepare.report import SHOWN, PrepareReport, describe_changes, finish, input_of, read_report
from penstock.data.prepare.settings import PrepareOptions, PrepareSettings, fingerprint, merge_options
from penstock.data.prepare.stored_shards import MAKING, StoreOutput
from penstock.data.prepare.transform import Transform, describe_transform, load_transform, require_picklable
from penstock.data.prepare.upload import prepare_remote
from penstock.data.shards import ShardLayout
from penstock.data.sources import Part, open_records, open_sources
from penstock.data.sources.json_files import number_lines
from penstock.data.stores.copies import Copies
from penstock.data.stores.files import output_errors
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.loading import load_tokenizer

EXECUTORS = ("processes", "ray")
"""`processes`: of this machine. `ray`: tasks of a Ray cluster."""

WORTH_A_PROCESS = 8 << 20
"""Raw bytes per process if their number is chosen automatically: starting one takes a second or two."""

FREE_SHARE = 0.2
"""Free bytes required per raw byte; less than any real text takes, so a refusal is never wrong."""

Paths = str | os.PathLike[str]
MakeCrew = Callable[[Workshop, OutputFolder], Crew | None]


def choose_executor(
    executor: str, *, processes: int | None, parts: Sequence[Part] | None, transform: Transform | None
) -> MakeCrew:
    """Choose who will do the work, and refuse impossible choices before anything is written.

    Args:
        executor: One of `EXECUTORS`.
        processes: Parts at once; None: one per core of this machine or the cluster, as far as there is work.
        parts: The work; None if it is not known beforehand.
        transform: The user's function.

    Returns:
        A function that makes the crew, once the folder is locked.

    Raises:
        ConfigError: There is no such executor, or child processes cannot import the transform.
        MissingExtraError: Ray is not installed.
    """
    if executor not in EXECUTORS:
        raise ConfigError(f"executor must be one of {', '.join(EXECUTORS)}; got {executor!r}")
    if executor == "ray":
        import_ray()
        return lambda shop, folder: RayTasks(shop, _cleared(folder), processes)
    count = processes or usable_processors()
    if parts is not None:
        count = min(count, max(len(parts), 1))
        if processes is None and transform is None:
            count = min(count, 1 + sum(part.size_bytes for part in parts) // WORTH_A_PROCESS)
    if transform is not None and count > 1:
        require_picklable(transform)

    def make_crew(shop: Workshop, folder: OutputFolder) -> Crew | None:
        _cleared(folder)
        return Processes(shop, count, (folder.lock,)) if count > 1 else None

    return make_crew


def _cleared(folder: OutputFolder) -> Path:
    """The working folder, once no Ray task of a killed run writes to it any more."""
    end_earlier_runs(folder.path / WORK)
    return folder.path / WORK


def prepare(
    source: Paths | Sequence[Paths] | Iterable[str | dict[str, Any]],
    *,
    tokenizer: Paths | Tokenizer,
    output: Paths,
    template: Paths | Template | None = None,
    settings: PrepareSettings | None = None,
    transform: str | Transform | None = None,
    processes: int | None = None,
    executor: str = "processes",
    overwrite: bool = False,
    progress: bool = True,
    verbose: bool = False,
    **options: Unpack[PrepareOptions],
) -> PrepareReport:
    """Turn raw text, or conversations with a template, into a dataset of shards.

    ```python
    prepare("web/*.jsonl.zst", tokenizer="tokenizer.json", output="data/web")
    prepare(iter(texts), tokenizer="tokenizer.json", output="data/mine", validation=0.01)
    prepare("chats.jsonl", tokenizer="Qwen3-0.6B/", output="data/chats", chat=ChatOptions(mask_history=True))
    ```

    If it is killed at any moment, the next call continues after the finished parts. If the input has changed since the
    last call, only the changed parts are prepared again; the old dataset stays complete until then.

    Args:
        source: Paths, folders, globs, URLs, one or several; an iterator of texts or of dicts; a `datasets.Dataset`, or
            a table of Arrow, polars or pandas.
        tokenizer: A tokenizer, or its path.
        output: Folder for the result: new, empty, or with an earlier run of this preparation. With a validation share,
            the datasets are its folders `train` and `validation`. A URL (`s3://bucket/web`): shards go there from
            where they are made, the rest of the result at the end.
        template: Records are conversations, and this chat template renders them: a .jinja file, a folder with a
            tokenizer, the text of a template, or "auto", the tokenizer's own.
        settings: Settings that determine the result; its fields can also be given as keywords.
        transform: Function, or `"module:function"`, that changes records (dicts) or drops them (None).
        processes: Parts at once; None: one per core, fewer for a few megabytes.
        executor: `processes` of this machine, or `ray`: the cluster of RAY_ADDRESS or of `ray.init`, otherwise a new
            one on this machine; nodes that do not see the output send their parts here, or their shards to the URL.
        overwrite: Discard existing results and start again; required to change settings.
        progress: Show progress on standard error, after one line on what is read and how.
        verbose: For chats, also print all settings in effect, and the layout of the first record.
        options: See `PrepareOptions`: fields of `PrepareSettings`, and of `Fields` as `text_field`, `weights_field`,
            `columns`; of chats, those of `ChatOptions`, one by one or together as `chat`.

    Raises:
        RecordError: A record cannot be read, with file and line; a conversation cannot be trained; too many were
            rejected; or there is no document.
        DamagedFileError: A file was cut or is damaged, and `on_damaged_file` is "stop".
        OutputError: The folder cannot be used.
        ConfigError: A setting is out of range.
        StoreError: The output is a URL, and its store cannot be written.
        TokenizerError: The tokenizer cannot be loaded, or has no byte table for loss weights.
    """
    into = partial(
        _prepare_folder, source, tokenizer=tokenizer, template=template, settings=settings, transform=transform,
        processes=processes, executor=executor, overwrite=overwrite, progress=progress, verbose=verbose, **options,
    )  # fmt: skip
    if is_url(output):
        return prepare_remote(normal_url(output), overwrite, progress, into)
    return into(local_path(output, "the output of prepare"), None)


def _prepare_folder(
    source: Any,
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
    settings = merge_options(settings, options if template is None else {"template": template, **options})
    loaded = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(os.fspath(tokenizer))
    function = load_transform(transform)
    if settings.fields.weights:
        _ = loaded.byte_table
    recipe = _make_recipe(settings, loaded, output, overwrite)
    _refuse_output(source, output)
    copies = Copies()
    with copies.used():
        parts = open_parts(source, settings, progress)
    known = parts if isinstance(parts, list) else None
    make_crew = choose_executor(executor, processes=processes, parts=known, transform=function)
    chat_template = recipe.encoder.template if isinstance(recipe, ChatRecipe) else None
    processor = recipe.encoder.processor if isinstance(recipe, ChatRecipe) else None
    plan_settings = settings.as_plan(
        loaded, describe_transform(function), chat_template, None if processor is None else processor.fingerprint
    )
    plan = {"settings": plan_settings, **_input(parts)}
    with OutputFolder(output) as folder:
        changes = {} if overwrite else input_changes(folder.plan(), plan)
        place = folder.adopt(plan, overwrite=overwrite)
        is_whole = store is None or store.begin(folder.path, is_finished=place.finished and known is not None)
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
            say(f"since the last run {describe_changes(changes)}; only changed parts are prepared again")
        with _keeping(copies, shop.copies), _without_leftovers(folder.path / WORK):
            done = _prepare_parts(shop, parts, make_crew, folder, place, store, progress, verbose)
            if known is not None:
                _refuse_changes(plan, source, settings)
        report = _settle(shop, done, folder, place, fingerprint(plan_settings))
        folder.close_work()
    if progress and (line := report.untrained()):
        say(line)
    seconds = None if done.unchanged else time.monotonic() - started
    return replace(report, seconds=seconds, parts_resumed=done.resumed, input_changes=changes if place.earlier else {})


def _room_for_copies(folder: OutputFolder, parts: list[Part] | Iterator[Part], progress: bool) -> Path | None:
    """The folder for copies of remote files; None: nothing is remote, or the disk has no room for all of it."""
    listed = parts if isinstance(parts, list) else []
    remote = sum(part.size_bytes for part in listed if any(file.is_remote for file in part.sources))
    room = shutil.disk_usage(folder.path).free - FREE_SHARE * sum(part.size_bytes for part in listed)
    if not remote or remote < room:
        return folder.path / WORK / COPIES if remote else None
    if progress:
        say(
            f"reading remote files more than once: {folder.path} has no room for copies of {short_number(remote)}B; "
            "free some, or choose another folder"
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


def _describe_work(source: Any, parts: list[Part] | Iterator[Part], shop: Workshop, output: Path | str) -> str:
    """One line: what is read, with which tokenizer and template, where it goes."""
    paths = [shown_url(path) for path in _paths(source) or ()]
    read = ", ".join(paths[:SHOWN]) + (f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else "")
    if isinstance(parts, list):
        files = len({file.key for part in parts for file in part.sources})
        size = short_number(sum(part.size_bytes for part in parts))
        read += f" ({files:,} file{'' if files == 1 else 's'}, {size}B)"
    tools = f"tokenizer {shop.tokenizer.name}"
    if isinstance(shop.recipe, ChatRecipe):
        tools += f" and {describe_template(shop.recipe.encoder.template)}"
    return f"preparing {read or 'records from Python'} with {tools} into {output}"


def _settle(shop: Workshop, done: "_Done", folder: OutputFolder, place: Place, configuration: str) -> PrepareReport:
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


def _refuse_changes(plan: dict[str, Any], source: Any, settings: PrepareSettings) -> None:
    """Raise if the input has changed since the work began."""
    again = "run it again: unchanged parts are kept"
    try:
        now = _input(open_parts(source, settings, False))
    except (RecordError, ConfigError) as error:
        raise RecordError(f"the input changed while it was prepared: {error}; {again}") from error
    if now != {name: plan[name] for name in now}:
        changes = input_changes(plan, now)
        raise RecordError(f"the input changed while it was prepared: {describe_changes(changes)}; {again}")


def _make_recipe(
    settings: PrepareSettings, tokenizer: Tokenizer, output: Path, overwrite: bool
) -> TextRecipe | ChatRecipe:
    """The recipe for the settings; a template that writes the date gets the date of the first run."""
    if settings.chat is None:
        return TextRecipe(tokenizer, Framing.of(tokenizer, settings), settings)
    day = None if overwrite else begun_on(output)
    return ChatRecipe(settings.chat.open(tokenizer, day), settings.chat, settings)


def open_parts(source: Any, settings: PrepareSettings, progress: bool) -> list[Part] | Iterator[Part]:
    """The parts of paths, as a list; those of an iterable, as they come."""
    if _paths(source) is not None:
        return open_sources(
            source,
            format=settings.format,
            fields=settings.fields,
            separator=settings.separator,
            delimiter=settings.delimiter,
            part_bytes=settings.part_bytes,
            notice=say if progress else None,
            damaged=settings.on_damage([]),
        )
    return open_records(source, fields=settings.fields, part_bytes=settings.part_bytes)


def _input(parts: list[Part] | Iterator[Part]) -> dict[str, Any]:
    """The identity of the input: what the parts read, and the versions of their files."""
    if not isinstance(parts, list):
        return {"inputs": ["<python>"], "files": {}}
    files = {file.key: file.version for part in parts for file in part.sources}
    return {"inputs": [part.identity for part in parts], "files": files}


def _refuse_output(source: Any, output: Path) -> None:
    """Refuse an output path that Arrow cannot open, or that lies inside a source and would be read as input."""
    try:
        str(output).encode()
    except UnicodeEncodeError:
        raise OutputError(f"{str(output)!a}: the path is not UTF-8, which Arrow needs; choose another folder") from None
    if output.is_file():
        return
    for one in _paths(source) or ():
        if os.path.isdir(one) and output.resolve().is_relative_to(Path(one).resolve()):
            raise ConfigError(f"{output}: lies inside the source {os.fspath(one)}; choose a folder outside")


def _paths(source: Any) -> Sequence[Paths] | None:
    """The paths in a source; None if it is an iterable of records."""
    listed = [source] if isinstance(source, (str, os.PathLike)) else source
    if isinstance(listed, (list, tuple)) and all(isinstance(one, (str, os.PathLike)) for one in listed):
        return listed
    return None


@final
@dataclass(frozen=True, slots=True)
class _Done:
    """The results of all parts."""

    records: list[PartRecord]
    resumed: int
    """Number of parts that were already finished."""
    files: list[str]
    """Names of all files."""
    unchanged: bool
    """Whether the finished dataset in the output is still the right one."""


def _prepare_parts(
    shop: Workshop,
    parts: list[Part] | Iterator[Part],
    make_crew: MakeCrew,
    folder: OutputFolder,
    place: Place,
    store: StoreOutput | None,
    progress: bool,
    verbose: bool,
) -> _Done:
    """Prepare the parts that are not finished yet."""
    records: dict[int, PartRecord] = {}
    names: dict[str, int] = {}
    interrupted, earlier = Interrupted(shop), Earlier(place.earlier, shop)
    stayed: set[int] = set()
    resumed = 0
    for split in shop.settings.splits:
        (shop.output / split).mkdir(exist_ok=True)
    with Pool(shop, make_crew(shop, folder)) as pool:
        if isinstance(parts, list):
            parts = _numbered(parts, pool)
            if check_encoder(shop, parts, progress, verbose):
                pool.renew()  # the workers that counted lines have the old tokenizer
            found = [(interrupted.find(n, part), earlier.find(part)) for n, part in enumerate(parts)]
            missing = [part for part, (there, kept) in zip(parts, found, strict=True) if there is None and kept is None]
            if shop.store is None:
                _check_room(shop, missing)
            listed = parts
        else:
            parts, found, listed = checked_first(shop, parts, progress, verbose), None, []

        def todo() -> Iterator[tuple[str, Task]]:
            nonlocal resumed
            for number, part in enumerate(parts):
                files = tuple(names.setdefault(name, len(names)) for name in part.files)
                there, kept = found[number] if found else (interrupted.find(number, part), earlier.find(part))
                if found is None:  # a part from Python cannot be prepared again later, should others be duplicates now
                    there, kept = _whole(there), kept if kept and _whole(kept.record) else None
                record = there
                if record is None:
                    interrupted.forget(number)
                    record = earlier.take(kept, number, part, files) if kept is not None else None
                if record is None:
                    yield part.name, Task(number, part, files)
                    continue
                records[number] = record
                resumed += 1
                if kept is not None and (kept.home, kept.number, kept.record.files) == (folder.path, number, [*files]):
                    stayed.add(number)

        total = sum(part.size_bytes for part in missing) if found is not None else None
        with Progress("preparing", total=total, unit="B", enabled=progress, rates={"tokens": "tok/s"}) as bar:

            def advance(size_bytes: int, tokens: int, rejects: int) -> None:
                bar.advance(size_bytes, tokens=tokens, **({"rejects": rejects} if rejects else {}))

            records.update(pool.run(_prepare_one, todo(), advance))
        interrupted.keep_only(records)

        def prepare_again(numbers: Sequence[int]) -> Iterator[tuple[int, PartRecord]]:
            if not listed:
                raise OutputError(f"{shop.output}: a shard was lost while it was written; run it again")
            for number in numbers:
                interrupted.forget(number)
                stayed.discard(number)
            tasks = [(listed[n].name, Task(n, listed[n], tuple(records[n].files))) for n in numbers]
            return pool.run(_prepare_one, tasks, lambda *_: None)

        def without_duplicates() -> dict[int, PartRecord]:
            if not shop.settings.drop_duplicates:
                return records
            return drop_duplicates(shop, pool, records, prepare_again, interrupted.reopen, progress)

        records = without_duplicates()
        if store is not None:
            while lost := store.find_lost(shop.output, records):
                records.update(prepare_again(lost))
                records = without_duplicates()
            store.keep_only(shop.output, records, shop.settings.splits)
    finished = len(finished_records(folder.path)) if (folder.path / REPORT).is_file() else -1
    unchanged = place.path != folder.path and finished == len(records) == len(stayed)
    return _Done([records[number] for number in sorted(records)], resumed, list(names), unchanged)


def _whole(record: PartRecord | None) -> PartRecord | None:
    """The record, unless documents were dropped from its part."""
    return None if record is None or record.drops else record


def _prepare_one(shop: Workshop, task: Task, report: Any) -> tuple[int, PartRecord]:
    with using_copies(shop):
        return task.number, prepare_part(shop, task, report)


def _check_room(shop: Workshop, missing: Sequence[Part]) -> None:
    needed = FREE_SHARE * sum(part.size_bytes for part in missing)
    free = shutil.disk_usage(shop.output).free
    if free < needed:
        raise OutputError(
            f"{shop.output}: {free / 1e6:,.1f} MB are free, but at least {needed / 1e6:,.1f} MB are needed; "
            "make room or choose another folder"
        )


def _numbered(parts: list[Part], pool: Pool) -> list[Part]:
    """Give ranges of large files their first line numbers, counted in the pool."""

    def count(_: Any, ranges: Iterable[Any]) -> Iterable[Any]:
        listed = list(ranges)
        found = dict(pool.run(_count, [(part.name, (n, part)) for n, part in enumerate(listed)], lambda: None))
        return [found[n] for n in range(len(listed))]

    return number_lines(parts, count)


def _count(shop: Workshop, argument: tuple[int, Any], report: Any) -> tuple[int, Any]:
    number, part = argument
    with using_copies(shop):
        return number, part.survey()
