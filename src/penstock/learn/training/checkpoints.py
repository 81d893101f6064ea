"""Checkpoints of a run: `RUN/checkpoints/step-00000100/`, complete or not there, the last few kept.

A checkpoint is written under a hidden name in the same folder. Every file and folder is forced to
the disk (fsync), then the manifest with size and SHA-256 of each file; then an atomic rename makes
the folder visible, and the rename is forced to the disk. So a visible folder with a manifest is
complete, whenever the process is killed or the power fails. A folder is hidden before it is
deleted. An older folder of the same name is kept as `NAME.old` until the new one is in place, so
one of the two is always there. Writing reads the files once more, from memory, for their checksums;
opening reads them once.

A checkpoint is a folder of named parts; the name of a part decides its format:

| name | given | written |
|---|---|---|
| `optimizer.safetensors` | name → tensor | safetensors |
| `state.json` | a value that JSON can hold | JSON |
| `optimizer.dcp` | name → tensor or DTensor, on all ranks | torch.distributed.checkpoint, one file per rank |
| any, such as `model` | a function of a path, or the path of a file or folder | what it writes there, or a copy |

With several processes, all of them call `save_checkpoint` with the same names. Rank 0 writes
everything except the `.dcp` parts, which all ranks write. A failure on one rank is an error on
every rank; no rank waits forever.
"""  # noqa: E501

import hashlib
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from penstock.core.errors import CorruptionError, FormatError, OutputError
from penstock.core.formats import CHECKPOINT
from penstock.core.json_values import JsonObject
from penstock.core.terminal import visible
from penstock.data.stores.files import sync, usual_mode
from penstock.learn.training.processes import in_step, is_first

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
STATE, OPTIMIZER, SHARDED_OPTIMIZER = "state.json", "optimizer.safetensors", "optimizer.dcp"
"""Parts of a run's checkpoint, besides its model."""
OLD = ".old"
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


def finish(partial: Path, target: Path, facts: dict[str, object]) -> None:
    """Force the files of `partial` to the disk, add the manifest, and rename the folder to
    `target`.

    Args:
        partial: The folder that `begin` made, filled.
        target: Its final path.
        facts: Further entries of the manifest.
    """
    files: dict[str, JsonObject] = {}
    for path in sorted(partial.rglob("*")):
        if path.is_file():
            files[path.relative_to(partial).as_posix()] = {
                "bytes": path.stat().st_size,
                "sha256": digest(path),
            }
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


def damage(folder: Path, *, contents: bool = True) -> str | None:
    """One sentence on what is wrong with a folder that `finish` made; None if it is intact.

    Args:
        folder: The folder.
        contents: Also read all files and compare their checksums (about 1 GB/s), not only their
            sizes.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return f"{MANIFEST} is missing or cannot be read, so it was never complete"
    for name, entry in manifest["files"].items():
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


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
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

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Name → shape of the tensors in a `.dcp` part."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        found = FileSystemReader(str(self.part(name))).read_metadata().state_dict_metadata
        return {
            key: tuple(one.size)
            for key, one in found.items()
            if isinstance(one, TensorStorageMetadata)
        }

    def read_into(self, name: str, tensors: Mapping[str, "Tensor"]) -> None:
        """Read a `.dcp` part into tensors of the same names, sharded in any way; all processes call
        it together.

        Raises:
            CorruptionError: The part lacks one of the tensors, or holds it in another shape.
        """
        from torch.distributed import is_initialized
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        try:
            with _one_process_is_meant():
                load(
                    dict(tensors), checkpoint_id=str(self.part(name)), no_dist=not is_initialized()
                )
        except (Exception, CheckpointException) as error:
            raise CorruptionError(
                f"{self.folder / name}: {_reasons(error)}; resume with the model that it was "
                "saved with"
            ) from error


def save_checkpoint(
    folder: str | Path, step: int, parts: Mapping[str, Any], *, keep: int = 3
) -> Checkpoint:
    """Write a checkpoint; when this returns, it is on the disk.

    Args:
        folder: `RUN/checkpoints`; created if missing.
        step: Number of steps done.
        parts: Name → content; see the table of the module.
        keep: Complete checkpoints up to this step to keep; older ones are deleted once this one is
            complete.

    Raises:
        OutputError: The checkpoint cannot be written (a full disk, a read-only folder). Earlier
            ones are untouched.
    """
    target = Path(folder) / f"step-{step:08d}"
    with output_errors(Path(folder)), in_step():
        partial = begin(target) if is_first() else target.with_name(f".{target.name}.partial")
    try:
        for name, part in parts.items():
            with output_errors(Path(folder)), in_step():
                if name.endswith(".dcp"):
                    _write_sharded(partial / name, part)
                elif is_first():
                    _write(partial / name, part)
        with output_errors(Path(folder)), in_step():
            if is_first():
                finish(partial, target, {**CHECKPOINT.fields(), "step": step})
                _prune(Path(folder), step, keep)
    except BaseException:
        if is_first():
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return Checkpoint(folder=target, step=step)


def newest_complete(
    folder: str | Path, *, say: Callable[[str], None] | None = None
) -> Checkpoint | None:
    """The newest checkpoint with intact checksums; None if there is none.

    Args:
        folder: `RUN/checkpoints`.
        say: Called with one sentence for each newer checkpoint that is skipped; None: print to
            standard error.
    """
    say = say or _say
    for step, path in _found(Path(folder)):
        wrong = damage(path)
        if wrong is None:
            try:
                return _opened(path, step)
            except FormatError as error:
                # Written by another version, or damaged.
                wrong = str(error).removeprefix(f"{path}: ")
        say(f"{path}: skipped: {wrong}")
    return None


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
        from safetensors.torch import save_file

        save_file({name: tensor.detach().contiguous() for name, tensor in part.items()}, path)
        usual_mode(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(part, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    elif Path(part).is_dir():
        shutil.copytree(part, path)
    else:
        shutil.copyfile(part, path)


def _write_sharded(path: Path, tensors: Mapping[str, "Tensor"]) -> None:
    from torch.distributed import is_initialized
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with _one_process_is_meant():
            save(dict(tensors), checkpoint_id=str(path), no_dist=not is_initialized())
    except CheckpointException as error:
        # It is a BaseException and not an Exception, so `in_step` would not pass it on to the other
        # ranks.
        raise OSError(_reasons(error)) from error


def _reasons(error: BaseException) -> str:
    """Each rank's failure, without the tracebacks in torch's exception."""
    failures = getattr(error, "failures", {})
    return "; ".join(
        f"rank {rank}: {failure[0]}" for rank, failure in sorted(failures.items())
    ) or str(error)


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Silence torch's warning that it assumes one process because there is no process group; one is
    meant.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled", category=UserWarning
        )
        yield


def _say(sentence: str) -> None:
    print(f"penstock: {visible(sentence, lines=True)}", file=sys.stderr)
