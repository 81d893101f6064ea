"""Checkpoints of a run: `RUN/checkpoints/step-00000100/`, complete or not there, the last few kept.

A checkpoint is written under a hidden name in the same folder. Every file and folder is forced to
the disk (fsync), then the manifest with size and SHA-256 of each file; then an atomic rename makes
the folder visible, and the rename is forced to the disk. So a visible folder with a manifest is
complete, whenever the process is killed or the power fails. A folder is hidden before it is
deleted. An older folder of the same name is kept as `NAME.old` until the new one is in place, so
one of the two is always there. Writing reads the files once more, from memory, for their checksums;
opening reads them once. Several files are read at a time.

A checkpoint is a folder of named parts; the name of a part decides its format:

| name | given | written |
|---|---|---|
| `optimizer.safetensors` | name → tensor | one safetensors file |
| `optimizer.shards` | name → tensor or DTensor, on all ranks | a folder: one safetensors file per rank, `penstock.models.tensor_files` |
| `state.json` | a value that JSON can hold | JSON |
| any, such as `model` | a function of a path, or the path of a file or folder | what it writes there, or a copy |

With several processes, all of them call `save_checkpoint` with the same names. Rank 0 writes
everything except the `.shards` parts, of which each rank writes, and hashes, its own file. A
failure on one rank is an error on every rank; no rank waits forever.
"""  # noqa: E501

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

from penstock.core.errors import CorruptionError, FormatError, OutputError, StateError
from penstock.core.formats import CHECKPOINT
from penstock.core.json_values import JsonObject
from penstock.core.terminal import visible
from penstock.data.stores.files import sync
from penstock.learn.training.processes import gather, in_step, is_first, rank_of

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.models.tensor_files import Piece, StoredTensors

MANIFEST = "manifest.json"
STATE, OPTIMIZER, SHARDED_OPTIMIZER = "state.json", "optimizer.safetensors", "optimizer.shards"
"""Parts of a run's checkpoint, besides its model."""
SHARDS = ".shards"
"""Ending of a part, of which each rank writes a file."""
OLD = ".old"
_OLD_SHARDS = "optimizer.dcp"
"""Part of sharded checkpoints of version 1, which held pickles."""
READERS = 4
"""Files that a process reads, or forces to the disk, at a time."""
_PARTIAL, _DELETED = ".partial", ".deleted"
_NAME = re.compile(r"step-(\d{8,})(\.old)?")


@contextmanager
def output_errors(folder: Path) -> Iterator[None]:
    """Turn a failure to write below `folder` into an error that says that earlier checkpoints are
    intact.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(_message(folder, error.strerror or str(error))) from error
    except Exception as error:
        # safetensors reports a full disk by its own exception, which is not an OSError.
        if type(error).__name__ != "SafetensorError":
            raise
        raise OutputError(_message(folder, str(error))) from error


def _message(folder: Path, reason: str) -> str:
    return (
        f"{folder}: the checkpoint cannot be written: {reason}; earlier checkpoints are "
        "untouched; make room or choose another folder, then resume"
    )


def begin(target: Path) -> Path:
    """Make an empty hidden folder next to `target`, for the caller to fill; remove leftovers of
    killed processes.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.iterdir():
        if left.name.startswith(".") and left.suffix in (_PARTIAL, _DELETED):
            shutil.rmtree(left)
    partial = target.with_name(f".{target.name}{_PARTIAL}")
    partial.mkdir()
    return partial


def finish(
    partial: Path,
    target: Path,
    facts: Mapping[str, object],
    written: Mapping[str, JsonObject] = MappingProxyType({}),
) -> None:
    """Force the files of `partial` to the disk, add the manifest, and rename the folder to
    `target`.

    Args:
        partial: The folder that `begin` made, filled.
        target: Its final path.
        facts: Further entries of the manifest.
        written: Files that other ranks have written and forced to the disk: their `entries`.
    """
    for name in written:
        if not (partial / name).is_file():
            raise OutputError(
                f"{target.parent}: {name} was written by another rank, and is not there: the "
                "run's folder must be on a file system that all ranks share"
            )
    found = [path for path in sorted(partial.rglob("*")) if path.is_file()]
    mine = [path for path in found if path.relative_to(partial).as_posix() not in written]
    files = dict(sorted({**entries(partial, mine), **written}.items()))
    for path in sorted(partial.rglob("*")):
        if path.is_dir():
            sync(path)
    manifest = partial / MANIFEST
    manifest.write_text(json.dumps({**facts, "files": files}, indent=1) + "\n", encoding="utf-8")
    sync(manifest)
    sync(partial)
    old = target.with_name(target.name + OLD)
    if target.exists():
        remove(old)
        os.rename(target, old)
    os.rename(partial, target)
    sync(target.parent)
    remove(old)


def entries(folder: Path, files: Iterable[Path]) -> dict[str, JsonObject]:
    """Force files below a folder to the disk; the entries of the manifest for them."""

    def entry(path: Path) -> tuple[str, JsonObject]:
        sync(path)
        found = {"bytes": path.stat().st_size, "sha256": digest(path)}
        return path.relative_to(folder).as_posix(), found

    with ThreadPoolExecutor(READERS) as readers:
        return dict(readers.map(entry, files))


def remove(folder: Path) -> None:
    """Delete a folder if it exists; a half-deleted one is never visible."""
    if folder.exists():
        hidden = folder.with_name(f".{folder.name}{_DELETED}")
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(folder, hidden)
        shutil.rmtree(hidden)


def read_manifest(folder: Path) -> JsonObject | None:
    """The manifest; None if it is missing or cannot be read."""
    try:
        manifest: JsonObject = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        entries = [
            (name, entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return None if any("\0" in name for name, _, _ in entries) else manifest


def damage(folder: Path, *, contents: bool = True, part: tuple[int, int] = (0, 1)) -> str | None:
    """One sentence on what is wrong with a folder that `finish` made; None if it is intact.

    Args:
        folder: The folder.
        contents: Also read all files and compare their checksums (about 1 GB/s and core), not only
            their sizes.
        part: (k, n): look at every n-th file alone, from the k-th one on; largest files first.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return f"{MANIFEST} is missing or cannot be read, so it was never complete"

    def wrong(item: tuple[str, JsonObject]) -> str | None:
        name, entry = item
        path = folder / name
        try:
            size = path.stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes, {entry['bytes']} were written"
            if contents and digest(path) != entry["sha256"]:
                return f"the bytes of {name} differ from their checksum"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        return None

    files = sorted(manifest["files"].items(), key=lambda item: (-int(item[1]["bytes"]), item[0]))
    with ThreadPoolExecutor(READERS) as readers:
        found = list(readers.map(wrong, files[part[0] :: part[1]]))
    return next((one for one in found if one is not None), None)


def digest(path: Path, *, missing: str | None = None) -> str:
    """SHA-256 of a file, in hexadecimal; `missing`, if given, where there is no such file."""
    if missing is not None and not path.is_file():
        return missing
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on the disk."""

    folder: Path
    """Its path."""
    step: int
    """Steps done when it was saved."""

    def part(self, name: str) -> Path:
        """Path of a part.

        Raises:
            FormatError: The checkpoint has no part of that name.
        """
        path = self.folder / name
        if not path.exists():
            known = ", ".join(sorted(p.name for p in self.folder.iterdir() if p.name != MANIFEST))
            raise FormatError(f"{self.folder}: has no part {name}; its parts are: {known}")
        return path

    def value(self, name: str) -> Any:
        """Read a `.json` part."""
        return json.loads(self.part(name).read_text(encoding="utf-8"))

    def tensors(self, name: str) -> dict[str, "Tensor"]:
        """Read a `.safetensors` part, on the CPU."""
        from safetensors.torch import load_file

        return load_file(self.part(name))

    def stored(self, name: str) -> "StoredTensors":
        """The tensors of a `.safetensors` or `.shards` part, to read into others, cut in any way.

        Raises:
            CorruptionError: A file cannot be read.
        """
        from penstock.models.tensor_files import StoredTensors

        path = self.part(name)
        return StoredTensors(path.iterdir() if path.is_dir() else [path])


def save_checkpoint(
    folder: str | Path, step: int, parts: Mapping[str, Any], *, keep: int = 3, group: Any = None
) -> Checkpoint:
    """Write a checkpoint; when this returns, it is on the disk.

    Args:
        folder: `RUN/checkpoints`; created if missing.
        step: Number of steps done.
        parts: Name → content; see the table of the module.
        keep: Complete checkpoints up to this step to keep; older ones are deleted once this one is
            complete.
        group: Process group in which the ranks speak about it; None: the default one. A thread
            beside the training needs its own.

    Raises:
        OutputError: The checkpoint cannot be written (a full disk, a read-only folder). Earlier
            ones are untouched.
    """
    folder, first = Path(folder), is_first()
    target = folder / f"step-{step:08d}"
    with output_errors(folder), in_step(group):
        partial = begin(target) if first else target.with_name(f".{target.name}{_PARTIAL}")
    try:
        written: dict[str, JsonObject] = {}
        with output_errors(folder), in_step(group):
            for name, part in parts.items():
                if name.endswith(SHARDS):
                    written |= _write_shard(partial, name, part)
                elif first:
                    _write(partial / name, part)
        written = {name: one for each in gather(written, group) for name, one in each.items()}
        with output_errors(folder), in_step(group):
            if first:
                finish(partial, target, {**CHECKPOINT.fields(), "step": step}, written)
                _prune(folder, step, keep)
    except BaseException:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return Checkpoint(folder=target, step=step)


def newest_complete(
    folder: str | Path,
    *,
    say: Callable[[str], None] | None = None,
    together: bool = False,
    group: Any = None,
) -> Checkpoint | None:
    """The newest checkpoint with intact checksums; None if there is none.

    Args:
        folder: `RUN/checkpoints`.
        say: Called with one sentence for each newer checkpoint that is skipped; None: print to
            standard error.
        together: Whether all ranks call it, for the same folder: each file is then read by one of
            them, and all find the same.
        group: Process group in which they then speak; None: the default one.

    Raises:
        StateError: Ranks that look together see different checkpoints.
    """
    say, folder = say or _say, Path(folder)
    candidates = _found(folder)
    if together:
        _require_same(folder, [(step, path.name) for step, path in candidates], group)
    for step, path in candidates:
        if together:
            found = gather(damage(path, part=rank_of()), group)
            wrong = next((one for one in found if one is not None), None)
        else:
            wrong = damage(path)
        if wrong is None:
            try:
                return _opened(path, step)
            except FormatError as error:
                # Written by another version, or damaged.
                wrong = str(error).removeprefix(f"{path}: ")
        say(f"{path}: skipped: {wrong}")
    return None


def _require_same(folder: Path, mine: list[tuple[int, str]], group: Any) -> None:
    prints = [digest(folder / name / MANIFEST, missing="") for _, name in mine]
    if any(one != (mine, prints) for one in gather((mine, prints), group)):
        step = mine[0][0] if mine else 0
        raise StateError(
            f"{folder.parent}: the ranks find different checkpoints, this one step {step}; "
            "the run's folder must be the same on all of them"
        )


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Open one checkpoint by its folder.

    Raises:
        FormatError: The path is not a checkpoint, or its format is of another version.
        CorruptionError: A file is missing, truncated or changed; the message names it.
    """
    path = Path(path)
    named = _NAME.fullmatch(path.name)
    if named is None or not path.is_dir():
        raise FormatError(f"{path}: is not a checkpoint; give a folder checkpoints/step-… of a run")
    if (wrong := damage(path)) is not None:
        raise CorruptionError(f"{path}: {wrong}; take another checkpoint of the run")
    return _opened(path, int(named[1]))


def _opened(path: Path, step: int) -> Checkpoint:
    manifest = read_manifest(path)
    assert manifest is not None
    CHECKPOINT.check(manifest, path, cure="take another checkpoint of the run")
    if (path / _OLD_SHARDS).exists():
        raise FormatError(
            f"{path}: its optimizer state is sharded in an older format; resume it with the "
            "penstock that wrote it, without shard, and go on from what this saves"
        )
    if manifest.get("step") != step:
        raise FormatError(
            f"{path}: holds step {manifest.get('step')}; rename the folder to that step"
        )
    return Checkpoint(folder=path, step=step)


def _found(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the folders named like checkpoints, newest first; `NAME.old` comes after
    `NAME`.
    """
    if not folder.is_dir():
        return []
    named = [
        (match, path)
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    ]
    named.sort(key=lambda pair: (-int(pair[0][1]), pair[0][2] is not None))
    return [(int(match[1]), path) for match, path in named]


def _prune(folder: Path, step: int, keep: int) -> None:
    """Delete all but the last `keep` complete checkpoints up to `step`; later ones, of a rewound
    run, stay.
    """
    kept = 0
    for number, path in _found(folder):
        if number > step:
            continue
        if kept >= max(1, keep):
            remove(path)
        elif damage(path, contents=False) is None:
            kept += 1


def _write(path: Path, part: Any) -> None:
    if callable(part):
        part(path)
    elif path.suffix == ".safetensors":
        from penstock.models.tensor_files import Piece, write_pieces

        whole = {name: Piece(one.detach(), (0,) * one.ndim) for name, one in part.items()}
        write_pieces(path, whole, cut=False)
    elif path.suffix == ".json":
        path.write_text(json.dumps(part, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    elif Path(part).is_dir():
        shutil.copytree(part, path)
    else:
        shutil.copyfile(part, path)


def _write_shard(
    partial: Path, name: str, tensors: Mapping[str, "Tensor | Piece"]
) -> dict[str, JsonObject]:
    """Write this rank's file of a part; its entry of the manifest."""
    from penstock.models.tensor_files import own_pieces, write_pieces

    rank, size = rank_of()
    path = partial / name / f"rank-{rank:05d}-of-{size:05d}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_pieces(path, own_pieces(tensors, is_first=rank == 0), cut=True)
    return entries(partial, [path])


def _say(sentence: str) -> None:
    print(f"penstock: {visible(sentence, lines=True)}", file=sys.stderr)
