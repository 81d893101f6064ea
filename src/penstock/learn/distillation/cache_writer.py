"""Writes a teacher's outputs to disk, once for all runs that learn from it.

Guarantees: a folder without `cache.json` is not a cache. A part is renamed into place when it is
complete, together with the loader's place after it, so a killed run continues after the last part.
A folder that was begun with other settings is refused. Costs: the teacher's pass over the data, 16
bytes a token of the teacher and 4 to 8 bytes for each kept token.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np

from penstock.core.arrays import Array
from penstock.core.errors import ConfigError, CorruptionError, OutputError
from penstock.core.folders import local_path
from penstock.core.json_values import JsonObject
from penstock.core.terminal import Progress
from penstock.data.stores.files import (
    checksum,
    output_errors,
    read_json,
    sync,
    write_file,
    write_json,
)
from penstock.learn.distillation import cache_format as layout
from penstock.learn.distillation.cache_format import CacheManifest, CacheSettings, Precision
from penstock.learn.distillation.outputs import TeacherOutputs, Wanted
from penstock.learn.distillation.teacher_rows import TeacherRow
from penstock.learn.distillation.teachers import Teacher
from penstock.plan.loader.loader import Loader
from penstock.tokenizers import Tokenizer

PART_BYTES = 256 << 20
"""A part ends at the first step with at least this many bytes…"""
PART_SECONDS = 300.0
"""… or after this many seconds: the most that a kill can cost."""


def write_cache(
    loader: Loader,
    teacher: Teacher,
    output: str | Path,
    *,
    tokenizer: Tokenizer,
    wanted: Wanted,
    number: int = 0,
    name: str = "",
    weights: str = "",
    precision: Precision = "float16",
    max_tokens: int | None = None,
    bos: bool | None = None,
    trained_with_bos: bool | None = None,
    part_bytes: int = PART_BYTES,
    progress: bool = False,
) -> CacheManifest:
    """Run a teacher once over all documents of a loader, and write its outputs.

    Args:
        loader: Reads each source once (`max_epochs=1`), in one process, with `TeacherRows` as its
            companion.
        teacher: Opened with the same `wanted`.
        output: New, or begun with the same settings.
        tokenizer: The teacher's.
        wanted: What to keep; needs a `top_k` and `boundary`.
        number: Index of the teacher in the companion.
        name: Name of the teacher, for people; a cache begun under another name is refused.
        weights: Fingerprint of the teacher's model, such as `Run.fingerprint`; a cache begun with
            another is refused.
        precision: Dtype of the stored top-k log-probabilities.
        max_tokens: Maximum tokens per document that the companion lets the teacher read. Training
            with the cache needs the same value.
        bos: `bos` of the companion's `TeacherText`; likewise `trained_with_bos`.
        part_bytes: A part ends at the first step with at least this many bytes.
        progress: Show a progress bar.

    Raises:
        ConfigError: The loader does not read whole sources once, or `wanted` has no `top_k` or no
            `boundary`.
        OutputError: The folder holds something else or a cache with other settings, or cannot be
            written.
        CorruptionError: The folder holds a finished cache with a missing or damaged file.
    """
    output = local_path(output, "a teacher's cache")
    settings = replace(
        _settings(loader, tokenizer, wanted, name, weights, precision),
        max_tokens=max_tokens,
        bos=bos,
        trained_with_bos=trained_with_bos,
    )
    if (output / layout.MANIFEST).is_file():
        manifest = CacheManifest.load(output)
        _require_same(output, settings, manifest.settings)
        layout.open_index(output, manifest)
        _clean(output, len(manifest.part_bytes))
        return manifest
    with output_errors(output):
        _begin(output, settings, tokenizer)
        done = _finished_parts(output)
        if done:
            loader.load_state_dict(done[-1]["state"])
        total = loader.rows_before(loader.count_steps()) - loader.rows_before(loader.step)
        rates = {"tokens": "tok/s"}
        with Progress(
            "asking the teacher", total=total, unit=" rows", enabled=progress, rates=rates
        ) as bar:
            done += _parts(loader, teacher, number, output, settings, len(done), part_bytes, bar)
        return _finish(output, settings, done)


def _settings(
    loader: Loader,
    tokenizer: Tokenizer,
    wanted: Wanted,
    name: str,
    weights: str,
    precision: Precision,
) -> CacheSettings:
    if wanted.top_k is None or not wanted.boundary:
        raise ConfigError("a cache needs top_k and boundary; pass Wanted(top_k=…, boundary=True)")
    if loader.data_parallel.size != 1 or loader.settings.packing == "concat":
        raise ConfigError(
            f"a cache is written by one process, with a packing that keeps documents whole; found "
            f"{loader.data_parallel.size} ranks and packing {loader.settings.packing!r}"
        )
    for source in loader.mixture.sources:
        if source.max_epochs != 1:
            raise ConfigError(
                f"source {source.name!r}: a cache reads each document once; set max_epochs=1"
            )
    return CacheSettings(
        teacher=name,
        weights=weights,
        tokenizer=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        temperature=float(wanted.temperature),
        top_k=min(wanted.top_k, tokenizer.vocab_size),
        precision=precision,
        sequence_length=loader.settings.sequence_length,
        sources=tuple(dataset.fingerprint for dataset in loader.datasets),
        names=tuple(source.name for source in loader.mixture.sources),
    )


def _begin(folder: Path, settings: CacheSettings, tokenizer: Tokenizer) -> None:
    """Create the folder, or check that it was begun with the same settings."""
    known = folder / layout.SETTINGS
    if known.is_file():
        _require_same(folder, settings, _begun_with(known))
        return
    if folder.exists() and any(
        path.name != f"{layout.SETTINGS}.partial" for path in folder.iterdir()
    ):
        raise OutputError(
            f"{folder}: the folder is not empty and holds no cache; choose another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(known, asdict(settings))
    tokenizer.save(folder / layout.TOKENIZER)


def _begun_with(path: Path) -> CacheSettings:
    try:
        return CacheSettings.from_json(read_json(path))
    except ValueError as error:
        raise OutputError(f"{path}: damaged: {error}; choose another folder") from None


def _require_same(folder: Path, settings: CacheSettings, found: CacheSettings) -> None:
    differences = settings.differences(found)
    if differences:
        raise OutputError(
            f"{folder}: holds a cache with other settings ({'; '.join(differences)}); choose "
            "another folder"
        )


def _finished_parts(folder: Path) -> list[JsonObject]:
    """The records of all complete parts, in order."""
    found: list[JsonObject] = []
    while (path := folder / f"{layout.part_name(len(found))}.json").is_file():
        found.append(json.loads(path.read_bytes()))
    return found


def _parts(
    loader: Loader,
    teacher: Teacher,
    number: int,
    folder: Path,
    settings: CacheSettings,
    first: int,
    part_bytes: int,
    bar: Progress,
) -> Iterator[JsonObject]:
    """Write parts until the loader ends; yields each part's record."""
    part: _Part | None = None
    try:
        for step in loader:
            # The last step is padded with empty rows.
            rows = [_teacher_row(row.distillation, number) for row in step if row.num_documents]
            teacher.ask(rows)
            part = part or _Part(folder, first, settings)
            for row in rows:
                bar.advance(1, tokens=part.add(row, teacher.outputs(row)))
            if part.size >= part_bytes or time.monotonic() - part.began >= PART_SECONDS:
                yield part.close(step.resume_state)
                part, first = None, first + 1
        if part is not None:
            yield part.close(loader.state_dict())
    finally:
        if part is not None:
            part.stop()


def _teacher_row(found: Any, number: int) -> TeacherRow:
    if found is None:
        raise ConfigError("the loader makes no teacher rows; give it companion=TeacherRows(…)")
    row: TeacherRow = found[number]
    return row


@final
class _Part:
    """A part that is being written."""

    def __init__(self, folder: Path, number: int, settings: CacheSettings) -> None:
        self._path, self._number, self._settings = (
            folder / layout.part_name(number),
            number,
            settings,
        )
        self._partial = self._path.with_name(f"{self._path.name}.partial")
        self._file: BinaryIO = open(self._partial, "wb")  # noqa: SIM115  (closed by `stop`)
        self._lines: list[tuple[int, ...]] = []
        self.size, self.began = 0, time.monotonic()
        # Two sources of one dataset share its pieces.
        self._numbers = [settings.sources.index(fingerprint) for fingerprint in settings.sources]

    def add(self, row: TeacherRow, outputs: TeacherOutputs) -> int:
        """Write the pieces of a row; returns their number of tokens."""
        arrays = {name: tensor.cpu().numpy() for name, tensor in outputs.tensors().items()}
        bounds = document_bounds(row)
        for (source, *piece), (begin, end) in zip(row.pieces.tolist(), bounds, strict=True):
            data = np.zeros(self._settings.bytes_of(end - begin), np.uint8)
            _fill(
                self._settings.views(data, end - begin),
                {name: array[begin:end] for name, array in arrays.items()},
            )
            ids = ids_checksum(row, begin, end)
            place = self._number, self.size
            self._lines.append(
                (self._numbers[source], *piece, end - begin, *place, checksum(data), ids)
            )
            self._file.write(data.data)
            self.size += len(data)
        return int(row.input.num_tokens)

    def close(self, state: dict[str, object]) -> JsonObject:
        """Move the part into place, together with the loader's place after it; returns the part's
        record.
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        self.stop()
        os.replace(self._partial, self._path)
        index = np.array(self._lines, np.uint64).reshape(-1, layout.COLUMNS)
        write_file(self._path.with_name(f"{self._path.name}.index"), index)
        record = {
            "bytes": self.size,
            "pieces": len(index),
            "index": checksum(index),
            "state": state,
        }
        write_json(self._path.with_name(f"{self._path.name}.json"), record)
        return record

    def stop(self) -> None:
        """Close the file. Without `close` before, it never becomes a part."""
        self._file.close()


def _fill(views: dict[str, Array], outputs: dict[str, Array]) -> None:
    """Copy a teacher's arrays of a piece into the views of the stored piece."""
    kept = np.log(np.exp(outputs["top_log_probs"], dtype=np.float64).sum(-1))
    views["kept"][:] = np.minimum(kept, 0.0)
    for name in ("token_log_probs", "boundary_log_probs", "entropy"):
        views[name][:] = outputs[name]
    # A masked token may be less likely than float16 can express; it becomes −∞, which adds nothing
    # to the sum.
    with np.errstate(over="ignore"):
        views["log_probs"][:] = outputs["top_log_probs"]
    views["ids"][:] = outputs["top_ids"]


def document_bounds(row: TeacherRow) -> list[tuple[int, int]]:
    """First slot of each document of a row, and the slot after its last."""
    read = row.input
    if read.positions is None:
        raise ConfigError(
            "the row has no positions, which a teacher needs; make it with TeacherRows"
        )
    starts = np.flatnonzero(read.positions[: read.num_tokens] == 0).tolist()
    if len(starts) != len(row.pieces):
        raise ConfigError(
            'a cache needs documents that do not see each other; leave out attention="row"'
        )
    return list(zip(starts, [*starts[1:], read.num_tokens], strict=True))


def ids_checksum(row: TeacherRow, begin: int, end: int) -> int:
    """Checksum of the teacher's tokens in a range of slots."""
    return checksum(np.ascontiguousarray(row.input.tokens[begin:end], np.int32))


def _finish(folder: Path, settings: CacheSettings, parts: list[JsonObject]) -> CacheManifest:
    """Join the parts' indexes, write the manifest, and remove temporary files."""
    lines = [np.empty((0, layout.COLUMNS), np.uint64)]
    for number, part in enumerate(parts):
        path = folder / f"{layout.part_name(number)}.index"
        found = np.fromfile(path, np.uint64).reshape(-1, layout.COLUMNS)
        if checksum(found) != part["index"]:
            raise CorruptionError(
                f"{path}: differs from its checksum; make the cache again in another folder"
            )
        lines.append(found)
    joined = np.concatenate(lines)
    order = np.lexsort(
        (joined[:, layout.BEGIN], joined[:, layout.DOCUMENT], joined[:, layout.SOURCE])
    )
    index = np.ascontiguousarray(joined[order].T)
    write_file(folder / layout.INDEX, index)
    manifest = CacheManifest(
        settings=settings,
        pieces=index.shape[1],
        tokens=int(index[layout.SLOTS].sum()),
        part_bytes=tuple(part["bytes"] for part in parts),
        index_checksum=checksum(index),
    )
    sync(folder)
    write_json(folder / layout.MANIFEST, manifest.to_json())
    sync(folder)
    _clean(folder, len(parts))
    return manifest


def _clean(folder: Path, parts: int) -> None:
    """Remove files that only an unfinished cache needs."""
    for number in range(parts):
        for ending in ("index", "json"):
            (folder / f"{layout.part_name(number)}.{ending}").unlink(missing_ok=True)
    (folder / layout.SETTINGS).unlink(missing_ok=True)
