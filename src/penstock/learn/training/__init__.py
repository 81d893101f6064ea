"""Training: loss, optimisers, schedules, checkpoints, metrics, and the trainer that joins them.
Needs extra `train`.

Settings can be read without torch; everything else is imported when it is first used.
"""

from typing import TYPE_CHECKING

from penstock.core.lazy_imports import lazy
from penstock.learn.training.settings import TrainSettings

if TYPE_CHECKING:
    from penstock.learn.training.curve_picture import plot_runs
    from penstock.learn.training.curves import View
    from penstock.learn.training.failures import one_error
    from penstock.learn.training.losses import RowLoss, row_loss
    from penstock.learn.training.run_folder import RunFolder
    from penstock.learn.training.trainer import Trainer
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "RowLoss": "losses",
            "RunFolder": "run_folder",
            "Trainer": "trainer",
            "View": "curves",
            "one_error": "failures",
            "plot_runs": "curve_picture",
            "row_loss": "losses",
        },
    )

__all__ = [
    "RowLoss",
    "RunFolder",
    "TrainSettings",
    "Trainer",
    "View",
    "one_error",
    "plot_runs",
    "row_loss",
]
