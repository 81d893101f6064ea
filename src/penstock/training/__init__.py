"""Training: loss, optimisers, schedules, checkpoints, metrics, and the trainer that joins them. Needs extra `train`.

Settings can be read without torch; everything else is imported when it is first used.
"""

from typing import TYPE_CHECKING, Any

from penstock.late import import_late
from penstock.training.settings import TrainSettings

if TYPE_CHECKING:
    from penstock.training.losses import RowLoss, loss, row_loss
    from penstock.training.run_folder import Run, open_run
    from penstock.training.trainer import Trainer

_LATE = {
    "RowLoss": "losses",
    "loss": "losses",
    "row_loss": "losses",
    "Run": "run_folder",
    "open_run": "run_folder",
    "Trainer": "trainer",
}
"""Name → the module that is loaded when it is first used."""

__all__ = ["RowLoss", "Run", "TrainSettings", "Trainer", "loss", "open_run", "row_loss"]


def __getattr__(name: str) -> Any:
    return import_late(__name__, _LATE, name)
