"""Sources to shards: finds the parts, has them prepared in several processes, finishes the datasets, reports.

The result is byte-identical for any number of processes, and for any number of interruptions: a part depends on the
input alone, and counts when its record is on the disk.
"""

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.chat import Template
from penstock.errors import ConfigError, OutputError, RecordError
from penstock.prepare.documents import Framing
from penstock.prepare.executors import Hire, choose_executor
from penstock.prepare.finishing import finish, finished_part
from penstock.prepare.first_look import check_encoder, checked_first, say
from penstock.prepare.folder import REPORT, OutputFolder, begun_on
from penstock.prepare.part import PartRecord, Task, Workshop, load_record, prepare_part
from penstock.prepare.pool import Pool
from penstock.prepare.recipe import ChatRecipe, TextRecipe
from penstock.prepare.report import PrepareReport, read_report
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

    Killed at any moment, it goes on from the finished parts when it is called again.

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
        overwrite: Replace a preparation of other input or settings.
        progress: Show progress on standard error.
        options: Fields of `PrepareSettings`, and of `Fields` as `text_field`, `weights_field`, `columns`; of chats,
            those of `chat.Knobs`, `chat.LayoutSettings` and `CleaningSettings`.

    Raises:
        RecordError: A record cannot be read, with file and line; a conversation cannot be trained; too many were
            rejected; or no document came out.
        OutputError: The folder cannot be used.
        ConfigError: A setting is out of range.
        TokenizerError: The tokenizer cannot be loaded, or has no byte table for loss weights.
    """
    from penstock.prepare.options import merge_options

    started = time.monotonic()
    settings = merge_options(settings, options if template is None else {"template": template, **options})
    loaded = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(os.fspath(tokenizer))
    function = load_transform(transform)
    if settings.fields.weights:
        _ = loaded.byte_table
    recipe = _make_recipe(settings, loaded, Path(output), overwrite)
    _refuse_output_inside(source, Path(output))
    parts = open_parts(source, settings, progress)
    known = parts if isinstance(parts, list) else None
    hire = choose_executor(executor, processes=processes, parts=known, transform=function)
    chat_template = recipe.encoder.template if isinstance(recipe, ChatRecipe) else None
    plan_settings = settings.as_plan(loaded, describe_transform(function), chat_template)
    plan = {"settings": plan_settings, "inputs": _identities(parts)}
    with OutputFolder(Path(output)) as folder:
        if folder.adopt(plan, overwrite=overwrite):
            folder.close_work()
            return _report_again(folder.path, parts)
        layout = ShardLayout(
            vocab_size=loaded.vocab_size,
            has_spans=settings.fields.weights is not None or settings.chat is not None,
            has_text=settings.keep_text,
        )
        shop = Workshop(
            output=folder.path,
            tokenizer=loaded,
            settings=settings,
            transform=function,
            layout=layout,
            recipe=recipe,
        )
        records, resumed, files = _prepare_parts(shop, parts, hire, folder, progress)
        if isinstance(parts, list) and _identities(open_parts(source, settings, False)) != plan["inputs"]:
            raise RecordError("the input changed while it was prepared; run it again with --overwrite")
        report = finish(shop, records, files, fingerprint(plan_settings))
        folder.close_work()
    return _with_times(report, time.monotonic() - started, resumed)


def _make_recipe(
    settings: PrepareSettings, tokenizer: Tokenizer, output: Path, overwrite: bool
) -> TextRecipe | ChatRecipe:
    """How records become documents; a template that writes the day writes that of the run which began it."""
    if settings.chat is None:
        return TextRecipe(tokenizer, Framing.of(tokenizer, settings), settings)
    day = None if overwrite else begun_on(output)
    return ChatRecipe(settings.chat.open(tokenizer, day), settings.chat, settings)


def _report_again(output: Path, parts: Iterable[Part]) -> PrepareReport:
    """The report of a finished preparation, if it was of the same input."""
    report = read_report((output / REPORT).read_bytes(), str(output))
    if fingerprint([part.identity for part in parts]) != report.input:
        raise OutputError(f"{output}: was prepared from other records; replace what is there: --overwrite")
    return report


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
        )
    return open_records(source, fields=settings.fields, part_bytes=settings.part_bytes)


def _identities(parts: list[Part] | Iterator[Part]) -> list[str]:
    return [part.identity for part in parts] if isinstance(parts, list) else ["<python>"]


def _refuse_output_inside(source: Any, output: Path) -> None:
    """The results would be read as input the next time."""
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


def _prepare_parts(
    shop: Workshop, parts: list[Part] | Iterator[Part], hire: Hire, folder: OutputFolder, progress: bool
) -> tuple[list[PartRecord], int, list[str]]:
    """Prepare the parts that are not finished yet.

    Returns:
        The record of each part, how many were finished before, and the names of all files.
    """
    records: dict[int, PartRecord] = {}
    names: dict[str, int] = {}
    resumed: list[int] = []
    for split in shop.settings.splits:
        (folder.path / split).mkdir(exist_ok=True)
    if isinstance(parts, list):
        _check_room(shop, parts)
    total = None
    if isinstance(parts, list):
        total = sum(part.size_bytes for n, part in enumerate(parts) if finished_part(shop, n, part) is None)

    def todo(found: Iterable[Part]) -> Iterator[tuple[str, Task]]:
        for number, part in enumerate(found):
            files = tuple(names.setdefault(name, len(names)) for name in part.files)
            record = finished_part(shop, number, part)
            if record is not None:
                records[number] = record
                resumed.append(number)
                continue
            yield part.name, Task(number, part, files)

    with (
        Progress("preparing", total=total, unit="B", enabled=progress, rates={"tokens": "tok/s"}) as bar,
        Pool(shop, hire(shop, folder)) as pool,
    ):

        def advance(size_bytes: int, tokens: int, rejects: int) -> None:
            bar.advance(size_bytes, tokens=tokens, **({"rejects": rejects} if rejects else {}))

        if isinstance(parts, list):
            parts = _numbered(parts, pool)
            check_encoder(shop, parts, progress)
        else:
            parts = checked_first(shop, parts, progress)
        records.update(pool.run(_prepare_one, todo(parts), advance))
    if load_record(shop.output, len(records)) is not None:
        raise OutputError(f"{shop.output}: was begun with more input than there is now; replace it: --overwrite")
    return [records[number] for number in sorted(records)], len(resumed), list(names)


def _prepare_one(shop: Workshop, task: Task, report: Any) -> tuple[int, PartRecord]:
    return task.number, prepare_part(shop, task, report)


def _check_room(shop: Workshop, parts: Sequence[Part]) -> None:
    needed = FREE_SHARE * sum(part.size_bytes for n, part in enumerate(parts) if load_record(shop.output, n) is None)
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


def _with_times(report: PrepareReport, seconds: float, resumed: int) -> PrepareReport:
    from dataclasses import replace

    return replace(report, seconds=seconds, parts_resumed=resumed)
