"""Training: loss, optimisers, schedules, checkpoints, metrics, and the trainer that joins them.
Needs extra `train`.

Settings can be read without torch; everything else is imported when it is first used.
"""

from penstock.core.lazy_imports import lazy
from penstock.learn.training.settings import TrainSettings

with lazy(__name__):
    from penstock.learn.training.curve_picture import plot_runs
    from penstock.learn.training.curves import View
    from penstock.learn.training.document_losses import DocumentLosses
    from penstock.learn.training.failures import one_error
    from penstock.learn.training.losses import RowLoss, row_loss
    from penstock.learn.training.run_folder import RunFolder
    from penstock.learn.training.trainer import Trainer

__all__ = [
    "DocumentLosses",
    "RowLoss",
    "RunFolder",
    "TrainSettings",
    "Trainer",
    "View",
    "one_error",
    "plot_runs",
    "row_loss",
]
