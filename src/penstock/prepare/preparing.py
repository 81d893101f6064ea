"""Sources to shards: finds the parts, has them prepared in several processes, finishes the datasets, reports.

The result is byte-identical for any number of processes, and for any number of interruptions and changes of the input:
a part depends on its own input alone, counts when its record is on the disk, and is used again while its input is the
same.
"""

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from penstock.chat import Template
from penstock.errors import ConfigError, OutputError, RecordError
from penstock.locations import local_path
from penstock.prepare.documents import Framing
from penstock.prepare.earlier import Earlier, finished_records
from penstock.prepare.executors import Hire, choose_executor
from penstock.prepare.finishing import finish, input_of
from penstock.prepare.first_look import check_encoder, checked_first, say
from penstock.prepare.folder import OutputFolder, Place, begun_on, input_changes
from penstock.prepare.interrupted import Interrupted
from penstock.prepare.part import REPORT, PartRecord, Task, Workshop, prepare_part
from penstock.prepare.pool import Pool
from penstock.prepare.recipe import ChatRecipe, TextRecipe
from penstock.prepare.report import PrepareReport, describe_changes, read_report
from penstock.prepare.settings import PrepareSettings, fingerprint
from penstock.prepare.transform import Transform, describe_transform, load_transform
from penstock.progress import Progress
from penstock.shards import ShardLayout
from penstock.sources import Part, number_lines, open_records, open_sources
from penstock.tokenizers import Tokenizer, load_tokenizer

FREE_SHARE = 0.2
"""Free bytes needed for each raw byte; less than any real text takes, so that a refusal is never wrong."""

Paths = str | os.PathLike[str]


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
    **options: Any,
) -> PrepareReport:
    """Turn raw text, or with a template conversations, into a dataset of shards.

    ```python
    prepare("web/*.jsonl.zst", tokenizer="tokenizer.json", output="data/web")
    prepare(iter(texts), tokenizer="tokenizer.json", output="data/mine", validation=0.01)
    prepare("chats.jsonl", tokenizer="Qwen3-0.6B/", template="auto", output="data/chats", mask_history=True)
    ```

    Killed at any moment, it goes on from the finished parts when it is called again. Where the input has changed since
    the last call, only the parts whose input changed are prepared again; what was finished stays whole until then.

    Args:
        source: Paths, folders, globs, URLs, one or several; or an iterator of texts or of dicts.
        tokenizer: A tokenizer, or where one is.
        output: Folder for the result, new, empty, or holding this very preparation. With a validation share, the
            datasets are its folders `train` and `validation`.
        template: Records are conversations, and this chat template writes them: a .jinja file, a folder with a
            tokenizer, the text of one, or "auto", the one that came with the tokenizer.
        settings: What decides the result; or give its fields as keywords.
        transform: Function, or `"module:function"`, that changes records (dicts) or drops them (None).
        processes: Parts at once; None: as many as there are cores, fewer for a few megabytes.
        executor: `processes` of this machine, or `ray`: the cluster of RAY_ADDRESS or of `ray.init`, else a new one
            here; its nodes need the same file system.
        overwrite: Throw away what is there, and begin from nothing; needed for other settings.
        progress: Show progress on standard error.
        options: Fields of `PrepareSettings`, and of `Fields` as `text_field`, `weights_field`, `columns`; of chats,
            those of `chat.Knobs`, `chat.LayoutSettings` and `CleaningSettings`.

    Raises:
        RecordError: A record cannot be read, with file and line; a conversation cannot be trained; too many were
            rejected; or no document came out.
        DamagedFileError: A file was cut or is damaged, and `on_damaged_file` is "stop".
        OutputError: The folder cannot be used.
        ConfigError: A setting is out of range, or the output is a URL.
        TokenizerError: The tokenizer cannot be loaded, or has no byte table for loss weights.
    """
    from penstock.prepare.options import merge_options

    started, output = time.monotonic(), local_path(output, "the output of prepare")
    settings = merge_options(settings, options if template is None else {"template": template, **options})
    loaded = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(os.fspath(tokenizer))
    function = load_transform(transform)
    if settings.fields.weights:
        _ = loaded.byte_table
    recipe = _make_recipe(settings, loaded, output, overwrite)
    _refuse_output(source, output)
    parts = open_parts(source, settings, progress)
    known = parts if isinstance(parts, list) else None
    hire = choose_executor(executor, processes=processes, parts=known, transform=function)
    chat_template = recipe.encoder.template if isinstance(recipe, ChatRecipe) else None
    plan_settings = settings.as_plan(loaded, describe_transform(function), chat_template)
    plan = {"settings": plan_settings, **_input(parts)}
    with OutputFolder(output) as folder:
        changes = {} if overwrite else input_changes(folder.plan(), plan)
        place = folder.adopt(plan, overwrite=overwrite)
        if place.finished:
            report = read_report((folder.path / REPORT).read_bytes(), str(folder.path))
            if known is not None and settings.accepts(report.rejects, report.damaged):
                folder.close_work()
                return report
            place = folder.renew(plan)
        layout = ShardLayout(
            vocab_size=loaded.vocab_size,
            has_spans=settings.fields.weights is not None or settings.chat is not None,
            has_text=settings.keep_text,
        )
        shop = Workshop(
            output=place.path,
            tokenizer=loaded,
            settings=settings,
            transform=function,
            layout=layout,
            recipe=recipe,
        )
        if progress and place.earlier and changes:
            say(f"since the last run {describe_changes(changes)}; only parts whose input changed are prepared again")
        done = _prepare_parts(shop, parts, hire, folder, place, progress)
        if known is not None:
            _refuse_changes(plan, source, settings)
        report = _settle(shop, done, folder, place, fingerprint(plan_settings))
        folder.close_work()
    seconds = None if done.unchanged else time.monotonic() - started
    return replace(report, seconds=seconds, parts_resumed=done.resumed, input_changes=changes if place.earlier else {})


def _settle(shop: Workshop, done: "_Done", folder: OutputFolder, place: Place, configuration: str) -> PrepareReport:
    """Finish what is new; where nothing is, let what is there stand."""
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
    """Raise when the input is another now than when the work began."""
    again = "run it again: parts whose input is still the same are kept"
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
    """How records become documents; a template that writes the day writes that of the run which began it."""
    if settings.chat is None:
        return TextRecipe(tokenizer, Framing.of(tokenizer, settings), settings)
    day = None if overwrite else begun_on(output)
    return ChatRecipe(settings.chat.open(tokenizer, day), settings.chat, settings)


def open_parts(source: Any, settings: PrepareSettings, progress: bool) -> list[Part] | Iterator[Part]:
    """The parts of paths, as a list; of an iterable, as they come."""
    if _paths(source) is not None:
        return open_sources(
            source,
            format=settings.format,
            fields=settings.fields,
            separator=settings.separator,
            part_bytes=settings.part_bytes,
            notice=say if progress else None,
            damaged=settings.on_damage([]),
        )
    return open_records(source, fields=settings.fields, part_bytes=settings.part_bytes)


def _input(parts: list[Part] | Iterator[Part]) -> dict[str, Any]:
    """What tells whether the input changed: what the parts read, and the versions of their files."""
    if not isinstance(parts, list):
        return {"inputs": ["<python>"], "files": {}}
    files = {file.path: file.version for part in parts for file in part.sources}
    return {"inputs": [part.identity for part in parts], "files": files}


def _refuse_output(source: Any, output: Path) -> None:
    """Refuse an output that cannot be opened under its name, or whose results would be read as input the next time."""
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
    """The paths that a source is; None where it is an iterable of records."""
    listed = [source] if isinstance(source, (str, os.PathLike)) else source
    if isinstance(listed, (list, tuple)) and all(isinstance(one, (str, os.PathLike)) for one in listed):
        return listed
    return None


@final
@dataclass(frozen=True, slots=True)
class _Done:
    """What became of the parts."""

    records: list[PartRecord]
    resumed: int
    """Parts that were finished before."""
    files: list[str]
    """Names of all files."""
    unchanged: bool
    """Whether it is all as it is in the output, finished."""


def _prepare_parts(
    shop: Workshop, parts: list[Part] | Iterator[Part], hire: Hire, folder: OutputFolder, place: Place, progress: bool
) -> _Done:
    """Prepare the parts that are not finished yet."""
    records: dict[int, PartRecord] = {}
    names: dict[str, int] = {}
    interrupted, earlier = Interrupted(shop), Earlier(place.earlier, shop)
    stayed: set[int] = set()
    resumed = 0
    for split in shop.settings.splits:
        (shop.output / split).mkdir(exist_ok=True)
    with Pool(shop, hire(shop, folder)) as pool:
        if isinstance(parts, list):
            parts = _numbered(parts, pool)
            if check_encoder(shop, parts, progress):
                pool.renew()  # who counted lines has the tokenizer as it was
            found = [(interrupted.find(n, part), earlier.find(part)) for n, part in enumerate(parts)]
            missing = [part for part, (there, kept) in zip(parts, found, strict=True) if there is None and kept is None]
            _check_room(shop, missing)
        else:
            parts, found = checked_first(shop, parts, progress), None

        def todo() -> Iterator[tuple[str, Task]]:
            nonlocal resumed
            for number, part in enumerate(parts):
                files = tuple(names.setdefault(name, len(names)) for name in part.files)
                there, kept = found[number] if found else (interrupted.find(number, part), earlier.find(part))
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
    finished = len(finished_records(folder.path)) if (folder.path / REPORT).is_file() else -1
    unchanged = place.path != folder.path and finished == len(records) == len(stayed)
    return _Done([records[number] for number in sorted(records)], resumed, list(names), unchanged)


def _prepare_one(shop: Workshop, task: Task, report: Any) -> tuple[int, PartRecord]:
    return task.number, prepare_part(shop, task, report)


def _check_room(shop: Workshop, missing: Sequence[Part]) -> None:
    needed = FREE_SHARE * sum(part.size_bytes for part in missing)
    free = shutil.disk_usage(shop.output).free
    if free < needed:
        raise OutputError(
            f"{shop.output}: {free / 1e6:,.1f} MB are free, at least {needed / 1e6:,.1f} MB will be needed; "
            "make room or choose another folder"
        )


def _numbered(parts: list[Part], pool: Pool) -> list[Part]:
    """Tell ranges of large files their first line numbers, counting in the pool."""

    def count(_: Any, ranges: Iterable[Any]) -> Iterable[int]:
        listed = list(ranges)
        found = dict(pool.run(_count, [(part.name, (n, part)) for n, part in enumerate(listed)], lambda: None))
        return [found[n] for n in range(len(listed))]

    return number_lines(parts, count)


def _count(_: Workshop, argument: tuple[int, Any], report: Any) -> tuple[int, int]:
    number, part = argument
    return number, part.newlines()
