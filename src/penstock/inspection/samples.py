"""Some records of any input, spread over all of it, whole and with their places, those that cannot be read among them.

One pass over the input, at some 100 MB/s. At most twice as many records as are asked for are held: whenever there are
more, every second one goes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from penstock.errors import ConfigError
from penstock.progress import Progress
from penstock.sources import Fields, ObjectBlock, number_lines, open_sources

SHOW_PROGRESS_BYTES = 128 << 20
"""Smaller inputs are read before a bar would be of use."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RawRecord:
    """One record of an input."""

    number: int
    """In the whole input, from 0."""
    origin: str
    """`file:line`, from 1; or `file:row`, from 0, where the format has rows."""
    value: dict[str, Any] | None
    """None where there is none that can be read."""
    problem: str = ""
    """Why there is none."""
    excerpt: str = ""
    """How it begins, where it cannot be read."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Some records of an input."""

    records: tuple[RawRecord, ...]
    total: int
    """Records of the input."""


def sample_records(
    sources: str | Sequence[str], count: int, *, format: str | None = None, numbers: Sequence[int] | None = None
) -> Sample:
    """Read some records.

    Args:
        sources: Files, folders, globs or URLs of JSON, Parquet or Arrow.
        count: How many, at most, spread evenly.
        format: jsonl, parquet or arrow; None goes by the file names.
        numbers: These records instead, numbered from 0.

    Raises:
        RecordError: There is no such file, or it cannot be read as its format.
        ConfigError: A format is unknown or holds no objects, or a number is out of range.
    """
    parts = number_lines(open_sources(sources, format=format, fields=Fields(whole=True)))
    size = sum(part.size_bytes for part in parts)
    kept: list[RawRecord] = []
    stride, total = 1, 0
    with Progress("reading", total=size, unit="B", enabled=size > SHOW_PROGRESS_BYTES) as progress:
        for block, files in ((block, part.files) for part in parts for block in part.objects()):
            for record in _records(block, files):
                if total in numbers if numbers is not None else total % stride == 0:
                    kept.append(replace(record, number=total))
                if numbers is None and len(kept) > max(2 * count, 2):
                    kept, stride = kept[::2], 2 * stride
                total += 1
            progress.advance(block.size_bytes)
    missing = [number for number in numbers or () if not 0 <= number < total]
    if missing:
        raise ConfigError(f"no record {missing[0]}; there are {total:,}, from 0")
    if numbers is None and len(kept) > count:
        kept = [kept[len(kept) * place // count] for place in range(count)]
    return Sample(records=tuple(kept), total=total)


def _records(block: ObjectBlock, files: tuple[str, ...]) -> Iterator[RawRecord]:
    """Good and bad records of a block in the order of their lines, not yet numbered."""
    bad = iter([*block.rejects, None])
    reject = next(bad)
    for value, line, file in zip(block.objects, block.lines.tolist(), block.files.tolist(), strict=True):
        while reject is not None and reject.line < line:
            yield _rejected(reject)
            reject = next(bad)
        yield RawRecord(number=-1, origin=f"{files[file]}:{line}", value=value)
    while reject is not None:
        yield _rejected(reject)
        reject = next(bad)


def _rejected(reject: Any) -> RawRecord:
    origin = f"{reject.file}:{reject.line}"
    return RawRecord(number=-1, origin=origin, value=None, problem=reject.reason, excerpt=reject.excerpt)
