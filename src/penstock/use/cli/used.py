"""Modules that verbs work with, imported when a verb that runs first uses them.

So neither the help of a verb nor its completion waits for more than its options. One name stands
for each module, such as `used.opening.load_opened`. What is public is used as `ps.prepare`.
"""

from penstock.core.lazy_imports import lazy

with lazy(__name__):
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
