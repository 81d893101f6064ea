"""Checkpoints of a run: `RUN/checkpoints/step-00000100/`, complete or not there, the last few kept.

A checkpoint is a folder of named parts; the name of a part says what it is:

| name | what is given | what is written |
|---|---|---|
| `optimizer.safetensors` | name → tensor | safetensors |
| `state.json` | anything JSON can say | JSON |
| `optimizer.dcp` | name → tensor, DTensors among them, on all ranks | torch.distributed.checkpoint, a file a rank |
| `model`, `tokenizer`, … | a function of a path, or the path of a file or folder | what it writes there, or a copy |

With several processes all of them call `save_checkpoint` with the same names; the first writes everything but the parts
`.dcp`, which all write. A failure on one of them is an error on each, never a wait without end.

How it survives kills is told in `checkpoint_files`. Writing costs about one more reading of the files, from memory, for
their checksums; opening reads them once.
"""

import json
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from penstock.errors import CorruptionError, FormatError
from penstock.shards import usual_mode
from penstock.terminal import visible
from penstock.training import checkpoint_files as files
from penstock.training.processes import in_step, is_first

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})(\.old)?")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on the disk."""

    folder: Path
    """Where it is."""
    step: int
    """Steps that were done when it was made."""

    def part(self, name: str) -> Path:
        """Where a part is.

        Raises:
            FormatError: There is none of that name.
        """
        path = self.folder / name
        if not path.exists():
            known = ", ".join(sorted(p.name for p in self.folder.iterdir() if p.name != files.MANIFEST))
            raise FormatError(f"{self.folder}: no part {name}; there are: {known}")
        return path

    def value(self, name: str) -> Any:
        """A part `.json`."""
        return json.loads(self.part(name).read_text(encoding="utf-8"))

    def tensors(self, name: str) -> dict[str, "Tensor"]:
        """A part `.safetensors`, on the CPU."""
        from safetensors.torch import load_file

        return load_file(self.part(name))

    def read_into(self, name: str, tensors: Mapping[str, "Tensor"]) -> None:
        """Read a part `.dcp` into tensors of the same names, sharded in any way; all processes together.

        Raises:
            CorruptionError: The part lacks one of them, or has it in another shape.
        """
        from torch.distributed import is_initialized
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        try:
            with _one_process_is_meant():
                load(dict(tensors), checkpoint_id=str(self.part(name)), no_dist=not is_initialized())
        except (Exception, CheckpointException) as error:
            raise CorruptionError(
                f"{self.folder / name}: {_reasons(error)}; resume with the model that it was saved with"
            ) from error


def save_checkpoint(folder: str | Path, step: int, parts: Mapping[str, Any], *, keep: int = 3) -> Checkpoint:
    """Write a checkpoint; when this returns, it is on the disk.

    Args:
        folder: `RUN/checkpoints`; made where it is missing.
        step: Steps that are done.
        parts: Name → what it is, see above.
        keep: Complete checkpoints up to this step that stay; older ones are deleted when this one is complete.

    Raises:
        OutputError: The disk is full, the folder read-only, and the like. Earlier checkpoints are as they were.
    """
    target = Path(folder) / f"step-{step:08d}"
    with files.output_errors(Path(folder)), in_step():
        partial = files.begin(target) if is_first() else target.with_name(f".{target.name}.partial")
    try:
        for name, part in parts.items():
            with files.output_errors(Path(folder)), in_step():
                if name.endswith(".dcp"):
                    _write_sharded(partial / name, part)
                elif is_first():
                    _write(partial / name, part)
        with files.output_errors(Path(folder)), in_step():
            if is_first():
                files.finish(partial, target, {"format": FORMAT, "step": step})
                _prune(Path(folder), step, keep)
    except BaseException:
        if is_first():
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return Checkpoint(folder=target, step=step)


def newest_complete(folder: str | Path, *, say: Callable[[str], None] | None = None) -> Checkpoint | None:
    """The newest checkpoint all of whose bytes are what was written; None where there is none.

    Args:
        folder: `RUN/checkpoints`.
        say: Told a sentence about each newer one that is passed over; None: standard error.
    """
    say = say or _say
    for step, path in _found(Path(folder)):
        wrong = files.damage(path)
        if wrong is None:
            try:
                return _opened(path, step)
            except FormatError as error:
                # Of another version, or damaged there.
                wrong = str(error).removeprefix(f"{path}: ")
        say(f"{path}: passed over: {wrong}")
    return None


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Open one checkpoint by its folder.

    Raises:
        FormatError: It is no checkpoint, or of another version's format.
        CorruptionError: A file is missing, cut or changed; named.
    """
    path = Path(path)
    named = _NAME.fullmatch(path.name)
    if named is None or not path.is_dir():
        raise FormatError(f"{path}: no checkpoint; give a folder checkpoints/step-… of a run")
    if (wrong := files.damage(path)) is not None:
        raise CorruptionError(f"{path}: {wrong}; take another checkpoint of the run")
    return _opened(path, int(named[1]))


def _opened(path: Path, step: int) -> Checkpoint:
    manifest = files.read_manifest(path)
    assert manifest is not None
    if (found := manifest.get("format")) != FORMAT:
        raise FormatError(f"{path}: checkpoint format {found}, this penstock reads {FORMAT}; use the one that wrote it")
    if manifest.get("step") != step:
        raise FormatError(f"{path}: holds step {manifest.get('step')}; give the folder its own name back")
    return Checkpoint(folder=path, step=step)


def _found(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of what has a checkpoint's name, newest first; one that is being replaced after its successor."""
    if not folder.is_dir():
        return []
    named = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    named.sort(key=lambda pair: (-int(pair[0][1]), pair[0][2] is not None))
    return [(int(match[1]), path) for match, path in named]


def _prune(folder: Path, step: int, keep: int) -> None:
    """Delete all but the last `keep` complete ones up to `step`. Later ones, of a run that was taken back, stay."""
    kept = 0
    for number, path in _found(folder):
        if number > step:
            continue
        if kept >= max(1, keep):
            files.remove(path)
        elif files.damage(path, contents=False) is None:
            kept += 1


def _write(path: Path, part: Any) -> None:
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file({name: tensor.detach().contiguous() for name, tensor in part.items()}, path)
        usual_mode(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(part, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    elif callable(part):
        part(path)
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
        # No Exception but a BaseException, which `in_step` would not pass on to the others.
        raise OSError(_reasons(error)) from error


def _reasons(error: BaseException) -> str:
    """What went wrong on which rank, without the traces that torch's exception carries."""
    failures = getattr(error, "failures", {})
    return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in sorted(failures.items())) or str(error)


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Torch warns that without a process group it takes one process to be meant; it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _say(sentence: str) -> None:
    print(f"penstock: {visible(sentence, lines=True)}", file=sys.stderr)
