"""Figures for others to draw: TensorBoard's files, Weights & Biases. Imported when asked for, not before."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, final

from penstock.errors import MissingExtraError


@final
class TensorBoard:
    """Event files in a folder. On resume TensorBoard hides what was after the step that the run goes on from.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(self, folder: Path, done: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError("tensorboard", "tensorboard") from None
        self._writer: Any = SummaryWriter(str(folder), purge_step=done + 1 if done else None)

    def see(self, record: Mapping[str, Any]) -> None:
        """Write all numbers of a record, and its texts."""
        for name, value in _figures(record):
            self._writer.add_scalar(name, value, record["step"])
        for name, value in record.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, record["step"])

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


@final
class WandB:
    """A run of Weights & Biases, the same one after a resume: its id is in `RUN/wandb-id`.

    Raises:
        MissingExtraError: wandb is not installed.
    """

    def __init__(self, run: Path, project: str) -> None:
        try:
            wandb: Any = import_module("wandb")
        except ImportError:
            raise MissingExtraError("wandb", "wandb") from None
        kept = run / "wandb-id"
        known = kept.read_text(encoding="utf-8").strip() if kept.is_file() else None
        self._run: Any = wandb.init(project=project, name=run.name, dir=str(run), id=known, resume="allow")
        kept.write_text(str(self._run.id) + "\n", encoding="utf-8")

    def see(self, record: Mapping[str, Any]) -> None:
        """Send all numbers of a record."""
        self._run.log(dict(_figures(record)), step=record["step"])

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def _figures(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name != "step" and isinstance(value, int | float):
            yield name, float(value)
