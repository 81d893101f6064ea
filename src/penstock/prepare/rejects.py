"""Rejected records of a part, written down as they come, so that memory does not grow with their number."""

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, Self, final

from penstock.errors import RecordError
from penstock.prepare.settings import PrepareSettings
from penstock.shards import output_errors
from penstock.sources import Reject


@final
class RejectFile:
    """Takes the rejects of one part; use as a context manager, and call `finish` inside it.

    Without rejects there is no file; leaving without `finish` removes what was written.

    Args:
        path: Where they go, one JSON object a line.
        settings: Whether a reject stops the work, and how many may be.
    """

    def __init__(self, path: Path, settings: PrepareSettings) -> None:
        self.count = 0
        self._path, self._settings = path, settings
        self._partial = path.with_name(f"{path.name}.partial")
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._partial.unlink(missing_ok=True)

    def stop_at(self, found: Sequence[Reject]) -> None:
        """Raise where the settings allow no such rejects, or not so many.

        Raises:
            RecordError: With the first of them, or the last.
        """
        if not found:
            return
        if self._settings.on_error == "stop":
            raise RecordError(f"{found[0]} (or skip such records: --on-error skip)")
        limit = self._settings.reject_count
        if limit is not None and self.count + len(found) > limit:
            raise RecordError(
                f"{found[-1]}; more than {self._settings.max_rejects} records were rejected: raise --max-rejects"
            )

    def write(self, found: Iterable[Reject]) -> None:
        """Write some down."""
        for reject in found:
            with output_errors(self._path):
                self._file = self._file or open(self._partial, "wb")  # noqa: SIM115  (closed when this is left)
                line = json.dumps(asdict(reject), ensure_ascii=False) + "\n"
                self._file.write(line.encode("utf-8", "backslashreplace"))
            self.count += 1

    def finish(self) -> None:
        """Force them to the disk, and give the file its name; an older one goes."""
        with output_errors(self._path):
            if self._file is None:
                self._path.unlink(missing_ok=True)
                return
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            os.replace(self._partial, self._path)


def join_files(paths: Iterable[Path], target: Path) -> None:
    """Write files end to end into one, forced to the disk, then renamed; without any, `target` goes."""
    partial = target.with_name(f"{target.name}.partial")
    with output_errors(target):
        listed = list(paths)
        if not listed:
            target.unlink(missing_ok=True)
            return
        with open(partial, "wb") as joined:
            for path in listed:
                with open(path, "rb") as one:
                    shutil.copyfileobj(one, joined)
            joined.flush()
            os.fsync(joined.fileno())
        os.replace(partial, target)


def copy_lines(source: Path, first: int, count: int, target: Path) -> bool:
    """Write `count` lines of a file, from number `first` on, to another.

    Returns:
        Whether they are there now; not where `source` cannot be opened, or holds too few.
    """
    partial, found = target.with_name(f"{target.name}.partial"), 0
    try:
        lines = open(source, "rb")  # noqa: SIM115  (closed below)
    except OSError:
        return False
    with lines, output_errors(target):
        with open(partial, "wb") as copied:
            for line in islice(lines, first, first + count):
                copied.write(line)
                found += line.endswith(b"\n")
            copied.flush()
            os.fsync(copied.fileno())
        if found == count:
            os.replace(partial, target)
        else:
            partial.unlink()
    return found == count


def in_order(rejects: list[Reject], files: tuple[str, ...]) -> list[Reject]:
    """Sorted by the files of their part, then by line."""
    numbers = {name: number for number, name in enumerate(files)}
    return sorted(rejects, key=lambda reject: (numbers.get(reject.file, 0), reject.line))
