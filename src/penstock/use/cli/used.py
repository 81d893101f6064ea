"""Modules that verbs work with, imported when a verb that runs first uses them.

So neither the help of a verb nor its completion waits for more than its options. One name stands
for each module, such as `used.opening.load_opened`. What is public is used as `ps.prepare`.
"""

from typing import TYPE_CHECKING

from penstock.core.lazy_imports import lazy, public_names

if TYPE_CHECKING:
    from penstock.core import yaml_files
    from penstock.data.shards import opening as datasets
    from penstock.data.sources import records
    from penstock.learn.distillation import projection
    from penstock.learn.evaluation import results as evaluation_results
    from penstock.learn.evaluation import tasks
    from penstock.learn.training import curve_picture, curves, distributed, run_folder
    from penstock.use import config
    from penstock.use.config import document, run_file, teacher_cache
    from penstock.use.config import models as checked_models
    from penstock.use.config import summary as run_summary
    from penstock.use.config import training as config_training
    from penstock.use.config.axolotl import conversion, notes
    from penstock.use.inspection import teacher_audit, teacher_terminal
    from penstock.use.runs import actions, kernels, opening, reference, rollouts, starting

_MODULES = {
    "actions": "use.runs.actions",
    "checked_models": "use.config.models",
    "config": "use.config",
    "config_training": "use.config.training",
    "conversion": "use.config.axolotl.conversion",
    "curve_picture": "learn.training.curve_picture",
    "curves": "learn.training.curves",
    "datasets": "data.shards.opening",
    "distributed": "learn.training.distributed",
    "document": "use.config.document",
    "evaluation_results": "learn.evaluation.results",
    "kernels": "use.runs.kernels",
    "notes": "use.config.axolotl.notes",
    "opening": "use.runs.opening",
    "projection": "learn.distillation.projection",
    "records": "data.sources.records",
    "reference": "use.runs.reference",
    "rollouts": "use.runs.rollouts",
    "run_file": "use.config.run_file",
    "run_folder": "learn.training.run_folder",
    "run_summary": "use.config.summary",
    "starting": "use.runs.starting",
    "tasks": "learn.evaluation.tasks",
    "teacher_audit": "use.inspection.teacher_audit",
    "teacher_cache": "use.config.teacher_cache",
    "teacher_terminal": "use.inspection.teacher_terminal",
    "yaml_files": "core.yaml_files",
}
"""Name here → the module, relative to penstock."""

if not TYPE_CHECKING:
    __getattr__, _ = lazy("penstock", {}, _MODULES)
    __dir__ = public_names(__name__)

__all__ = [
    "actions",
    "checked_models",
    "config",
    "config_training",
    "conversion",
    "curve_picture",
    "curves",
    "datasets",
    "distributed",
    "document",
    "evaluation_results",
    "kernels",
    "notes",
    "opening",
    "projection",
    "records",
    "reference",
    "rollouts",
    "run_file",
    "run_folder",
    "run_summary",
    "starting",
    "tasks",
    "teacher_audit",
    "teacher_cache",
    "teacher_terminal",
    "yaml_files",
]
