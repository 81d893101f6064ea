"""The output folder: empty, or holding the same preparation, or refused; one preparation at a time.

`prepare.json` says what is prepared here: the settings and the input with sizes and times. It is written first and
stays. A lock, which the system lets go when its processes end, however they end, keeps a second preparation out;
workers hold it too, so that none of a killed run can still write into a new one.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from penstock.errors import OutputError
from penstock.locks import lock_folder
from penstock.prepare.part import WORK
from penstock.shards import output_errors, write_json

PLAN, REPORT, REJECTED, MANIFEST = "prepare.json", "report.json", "rejected.jsonl", "manifest.json"
OURS = (
    WORK,
    PLAN,
    REPORT,
    REJECTED,
    MANIFEST,
    "lengths.u32",
    "batches.u64",
    "weight_sums.f64",
    "files.json",
    "unfinished",
    "tokenizer",
    "chat.json",
    "chat_template.jinja",
    "train",
    "validation",
)
"""Names that a preparation makes, besides its shards."""


@final
class OutputFolder:
    """The folder of one preparation; use as a context manager, which locks it.

    Raises:
        OutputError: It cannot be written, is in use, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = -1

    def __enter__(self) -> "OutputFolder":
        if self.path.exists() and not self.path.is_dir():
            raise OutputError(f"{self.path}: is a file; name a folder")
        if self.path.is_dir():
            self._refuse_strangers()
        with output_errors(self.path):
            (self.path / WORK).mkdir(parents=True, exist_ok=True)
            self.lock = lock_folder(self.path, self.path / WORK / "lock", doing="preparing")
        return self

    def __exit__(self, *error: object) -> None:
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def adopt(self, plan: dict[str, Any], *, overwrite: bool) -> bool:
        """Begin, or go on with, the preparation that `plan` describes.

        Returns:
            Whether it is already finished.

        Raises:
            OutputError: The folder holds a preparation of other input or with other settings.
        """
        if overwrite:
            self._clear()
        before = self._plan()
        if before is None or (before != plan and not self._has_results()):
            write_json(self.path / PLAN, plan)
            return False
        changes = list(_changes(before, plan))
        if changes:
            raise OutputError(
                f"{self.path}: holds another preparation: {'; '.join(changes[:4])}"
                f"{f'; and {len(changes) - 4} more changes' if len(changes) > 4 else ''}; "
                "choose another folder, or replace what is there: --overwrite"
            )
        return (self.path / REPORT).is_file()

    def close_work(self) -> None:
        """Remove what lay between the parts; the last thing that a preparation does."""
        shutil.rmtree(self.path / WORK, ignore_errors=True)

    def _plan(self) -> dict[str, Any] | None:
        try:
            plan: dict[str, Any] = json.loads((self.path / PLAN).read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise OutputError(f"{self.path / PLAN}: damaged: {error}; prepare anew with --overwrite") from error
        return plan

    def _has_results(self) -> bool:
        return (self.path / REPORT).exists() or any((self.path / WORK).glob("part-*.json"))

    def _refuse_strangers(self) -> None:
        names = sorted(name for name in os.listdir(self.path) if name not in (WORK, f"{PLAN}.partial"))
        if names and PLAN not in names:
            shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            raise OutputError(f"{self.path}: holds something else ({shown}); name an empty or a new folder")

    def _clear(self) -> None:
        """Remove an earlier preparation: what says that it is finished first, what says that it is ours last."""
        with output_errors(self.path):
            (self.path / REPORT).unlink(missing_ok=True)
            for path in (self.path / WORK).iterdir():
                if path.name != "lock":
                    path.unlink()
            for name in os.listdir(self.path):
                path = self.path / name
                if name not in (WORK, PLAN) and (name in OURS or name.startswith("part-")):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            (self.path / PLAN).unlink(missing_ok=True)


def begun_on(output: Path) -> str | None:
    """The day that a preparation which was begun in a folder writes into its chats."""
    try:
        day: str | None = json.loads((output / PLAN).read_bytes())["settings"].get("chat.date")
    except (OSError, ValueError, KeyError):
        return None
    return day


def _changes(before: dict[str, Any], now: dict[str, Any]) -> Sequence[str]:
    """What differs between two plans, in words."""
    old, new = before.get("settings", {}), now["settings"]
    names = sorted(set(old) | set(new))
    changes = [
        f"{name} was {old.get(name)!r}, is {new.get(name)!r}" for name in names if old.get(name) != new.get(name)
    ]
    was, now_is = before.get("inputs", []), now["inputs"]
    gone = [item for item in was if item not in set(now_is)]
    added = [item for item in now_is if item not in set(was)]
    for word, items in (("the input had", gone), ("the input now has", added)):
        if items:
            changes.append(f"{word} {items[0]!r}{f' and {len(items) - 1} more' if len(items) > 1 else ''}")
    if was != now_is and not gone and not added:
        changes.append("the input has another order")
    return changes
