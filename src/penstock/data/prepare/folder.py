"""The output folder of a preparation: new, or with a preparation of the same settings; anything
else is refused.

`prepare.json` describes the preparation: the settings, and the input with sizes and times. It is
written first and stays. A lock keeps a second preparation out. The system releases it when its
processes end, however they end; workers hold it too, so that none of a killed run can write to a
new one.

If the input has changed, the new preparation is made in a separate folder inside the working
folder, from reusable and new parts. It replaces the old one when it is complete; until then nothing
of the old one is touched. If it is killed during the replacement, the next start continues it.
"""

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from penstock.core.errors import OutputError
from penstock.core.folders import lock_folder
from penstock.core.json_values import JsonObject
from penstock.data.prepare.part_record import HASHES, PARTS, REJECTED, WORK
from penstock.data.prepare.settings import RETIRED, fingerprint
from penstock.data.reports.report import REPORT
from penstock.data.shards import Manifest
from penstock.data.shards.format.manifest import (
    BATCHES,
    FILES,
    LENGTHS,
    MANIFEST,
    PREPARING,
    RANGE_CHECKSUMS,
    WEIGHT_SUMS,
)
from penstock.data.shards.writing.stubs import stub_path
from penstock.data.stores.files import output_errors, write_json

PLAN, LOCK = "prepare.json", PREPARING[1]
NEXT = "next-"
"""Prefix of folders with preparations that will replace the present one."""

SPLITS = ("", "train", "validation")
OURS = (
    WORK,
    PLAN,
    REPORT,
    PARTS,
    REJECTED,
    HASHES,
    MANIFEST,
    LENGTHS,
    BATCHES,
    WEIGHT_SUMS,
    RANGE_CHECKSUMS,
    FILES,
    "unfinished",
    "tokenizer",
    "chat.json",
    "chat_template.jinja",
    *SPLITS[1:],
)
"""Names that a preparation creates, in addition to its shards."""


@final
@dataclass(frozen=True, slots=True)
class Place:
    """Where a preparation is made."""

    path: Path
    earlier: tuple[Path, ...] = ()
    """Folders with finished parts that it may reuse."""
    finished: bool = False
    """Whether it is already finished, for the same input."""


@final
class OutputFolder:
    """The folder of one preparation; use it as a context manager, which locks it.

    Raises:
        OutputError: It cannot be written, is in use, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = -1
        self._made = False

    def __enter__(self) -> "OutputFolder":
        if self.path.exists() and not self.path.is_dir():
            raise OutputError(f"{self.path}: is a file; name a folder")
        if self.path.is_dir():
            self._refuse_strangers()
        self._made = not self.path.exists()
        with output_errors(self.path):
            (self.path / WORK).mkdir(parents=True, exist_ok=True)
            self.lock = lock_folder(self.path, self.path / WORK / LOCK, doing="preparing")
        return self

    def __exit__(self, *error: object) -> None:
        if self.lock >= 0:
            with suppress(OSError):
                self._tidy()
            os.close(self.lock)
            self.lock = -1

    def adopt(self, plan: JsonObject, *, overwrite: bool) -> Place:
        """Begin or continue the preparation that `plan` describes.

        Raises:
            OutputError: The folder holds a preparation with other settings.
        """
        if overwrite:
            self._clear()
        for complete in (self.path / WORK).glob(f"{NEXT}*/{REPORT}"):
            self.promote(complete.parent)
        before = self.plan()
        if before is None or (before != plan and not self._has_results()):
            write_json(self.path / PLAN, plan)
            return Place(self.path)
        if before == plan:
            return Place(self.path, finished=(self.path / REPORT).is_file())
        changes = _changes(before["settings"], plan["settings"])
        if changes:
            raise OutputError(
                f"{self.path}: holds another preparation: {'; '.join(changes[:4])}"
                f"{f'; and {len(changes) - 4} more changes' if len(changes) > 4 else ''}; "
                "choose another folder, or set overwrite to replace it"
            )
        return self.renew(plan)

    def renew(self, plan: JsonObject) -> Place:
        """A place for a preparation that will replace the present one and may reuse its parts."""
        place = self.path / WORK / f"{NEXT}{fingerprint(plan)}"
        others = sorted(path for path in (self.path / WORK).glob(f"{NEXT}*") if path != place)
        with output_errors(place):
            (place / WORK).mkdir(parents=True, exist_ok=True)
            write_json(place / PLAN, plan)
        return Place(place, (*others, self.path))

    def promote(self, place: Path) -> None:
        """Replace the present preparation by a complete one; can be repeated if it was killed
        meanwhile.
        """
        with output_errors(self.path):
            (self.path / REPORT).unlink(missing_ok=True)
            files = [
                path
                for path in place.rglob("*")
                if path.is_file() and WORK not in path.relative_to(place).parts
            ]
            waiting = [path for path in files if path != place / REPORT]
            for path in waiting:
                if path.name == MANIFEST:
                    (self.path / path.relative_to(place)).unlink(missing_ok=True)
            # Manifests come last: a manifest means that the rest is there.
            for path in sorted(waiting, key=lambda path: (path.name == MANIFEST, str(path))):
                target = self.path / path.relative_to(place)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
            self._drop_leftovers(json.loads((place / REPORT).read_bytes()))
            os.replace(place / REPORT, self.path / REPORT)

    def refresh(self, place: Path, report: JsonObject) -> None:
        """Record new times of the same input in a finished preparation that stays as it is."""
        write_json(
            self.path / PARTS,
            [json.loads(path.read_bytes()) for path in sorted((place / WORK).glob("*.json"))],
        )
        write_json(self.path / REPORT, report)
        write_json(self.path / PLAN, json.loads((place / PLAN).read_bytes()))

    def close_work(self) -> None:
        """Remove temporary files; the last step of a preparation."""
        shutil.rmtree(self.path / WORK, ignore_errors=True)

    def plan(self) -> JsonObject | None:
        """The plan of the preparation in this folder, without retired settings; None: there is none
        yet.

        Raises:
            OutputError: It is damaged.
        """
        try:
            plan: JsonObject = json.loads((self.path / PLAN).read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise OutputError(
                f"{self.path / PLAN}: damaged: {error}; set overwrite to prepare again"
            ) from error
        settings = plan.get("settings", {}).items()
        return {
            **plan,
            "settings": {name: value for name, value in settings if name not in RETIRED},
        }

    def _has_results(self) -> bool:
        work = self.path / WORK
        return (
            (self.path / REPORT).exists()
            or any(work.glob("part-*.json"))
            or any(work.glob(f"{NEXT}*"))
        )

    def _refuse_strangers(self) -> None:
        names = sorted(
            name for name in os.listdir(self.path) if name not in (WORK, f"{PLAN}.partial")
        )
        if names and PLAN not in names:
            shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            raise OutputError(
                f"{self.path}: holds other files ({shown}); name an empty or a new folder"
            )

    def _drop_leftovers(self, report: JsonObject) -> None:
        """Remove files of the replaced preparation that the new one does not have."""
        if not report["rejects"]:
            (self.path / REJECTED).unlink(missing_ok=True)
        for folder in (
            self.path / split for split in SPLITS if (self.path / split / MANIFEST).is_file()
        ):
            manifest = Manifest.load(folder)
            shards = [folder / shard.file for shard in manifest.shards]
            kept = {path.name for path in (*shards, *map(stub_path, shards))} | set(
                manifest.checksums
            )
            for name in os.listdir(folder):
                if name not in kept and (
                    name.startswith("part-") or name in (WEIGHT_SUMS, RANGE_CHECKSUMS)
                ):
                    (folder / name).unlink()
            shutil.rmtree(folder / "unfinished", ignore_errors=True)

    def _clear(self) -> None:
        """Remove an earlier preparation: first the report, which marks it as finished; last the
        plan.
        """
        with output_errors(self.path):
            (self.path / REPORT).unlink(missing_ok=True)
            for path in (self.path / WORK).iterdir():
                if path.name != LOCK:
                    _remove(path)
            for name in os.listdir(self.path):
                if name not in (WORK, PLAN) and (name in OURS or name.startswith("part-")):
                    _remove(self.path / name)
            (self.path / PLAN).unlink(missing_ok=True)

    def _tidy(self) -> None:
        """Remove what is left of a preparation that was refused, or failed before its first part
        was finished.
        """
        work = self.path / WORK
        if any(path.name != LOCK for path in work.iterdir()):
            return
        for name in SPLITS[1:]:
            with suppress(OSError):
                (self.path / name).rmdir()
        if set(os.listdir(self.path)) == {WORK, PLAN}:
            (self.path / PLAN).unlink()
        shutil.rmtree(work)
        if self._made:
            self.path.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def begun_on(output: Path) -> str | None:
    """The date in the chats of a preparation that was begun in a folder; None: there is none."""
    try:
        day: str | None = json.loads((output / PLAN).read_bytes())["settings"].get("chat.date")
    except (OSError, ValueError, KeyError):
        return None
    return day


def _changes(old: JsonObject, new: JsonObject) -> Sequence[str]:
    """Which settings differ, in words."""
    names = sorted(set(old) | set(new))
    return [
        f"{name} was {old.get(name)!r}, is {new.get(name)!r}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def input_changes(before: JsonObject | None, now: JsonObject) -> dict[str, str]:
    """File → "changed", "new" or "gone", for each file of the input that is not as it was.

    Empty for a preparation by an earlier version of penstock, which did not record its files.
    """
    if before is None or "files" not in before:
        return {}
    old, new = before["files"], now["files"]
    changes = {
        path: "changed" if path in old else "new" for path in new if old.get(path) != new[path]
    }
    return changes | {path: "gone" for path in old if path not in new}
