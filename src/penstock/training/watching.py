"""Shows how a run goes, and writes its figures."""

import json
from types import TracebackType
from typing import Any, Self

from penstock.training.run_folder import METRICS
from penstock.training.trainer import Trainer


class Watcher:
    """Placeholder until metrics are there."""

    def __init__(self, trainer: Trainer, *, shown: bool) -> None:
        self.last: dict[str, Any] = {}
        self._shown, self._path = shown, trainer.run / METRICS

    def __enter__(self) -> Self:
        self._file = self._path.open("a") if self._shown else open("/dev/null", "a")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def see(self, record: dict[str, Any]) -> None:
        """Take a record."""
        self.last = record
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._shown:
            print(record, flush=True)
