"""TensorBoard and Weights & Biases for the figures of a run; imported only when requested."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from textwrap import indent
from types import MappingProxyType
from typing import Any, final

import yaml

from penstock.core.errors import MissingExtraError
from penstock.core.json_values import JsonMapping


@final
class TensorBoard:
    """Event files in a folder. After a resume TensorBoard hides the records after the starting
    step.

    Args:
        folder: The files' folder.
        done: Steps that are done already.
        config: The run file's values, shown as text.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(
        self, folder: Path, done: int, config: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError("tensorboard", "tensorboard") from None
        self._writer: Any = SummaryWriter(str(folder), purge_step=done + 1 if done else None)
        if config:
            # Four spaces make it code, as TensorBoard reads Markdown.
            text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
            self._writer.add_text("run file", indent(text, "    "), done)

    def see(self, record: JsonMapping) -> None:
        """Write the numbers and texts of a record."""
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

    Args:
        run: The run's folder.
        project: Project of Weights & Biases.
        config: The run file's values, to find and compare runs there.

    Raises:
        MissingExtraError: wandb is not installed.
    """

    def __init__(
        self, run: Path, project: str, config: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        try:
            wandb: Any = import_module("wandb")
        except ImportError:
            raise MissingExtraError("wandb", "wandb") from None
        kept = run / "wandb-id"
        known = kept.read_text(encoding="utf-8").strip() if kept.is_file() else None
        self._run: Any = wandb.init(
            project=project,
            name=run.name,
            dir=str(run),
            id=known,
            resume="allow",
            config=dict(config),
        )
        if known is not None:
            # Without this permission a resumed run keeps its old values.
            self._run.config.update(dict(config), allow_val_change=True)
        kept.write_text(str(self._run.id) + "\n", encoding="utf-8")

    def see(self, record: Mapping[str, object]) -> None:
        """Send all numbers of a record."""
        self._run.log(dict(_figures(record)), step=record["step"])

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def _figures(record: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name != "step" and isinstance(value, int | float):
            yield name, float(value)
