"""Modules that verbs work with, imported when a verb that runs first uses them.

So neither the help of a verb nor its completion waits for more than its options. One name stands
for each module, such as `used.teacher_audit.Audit`. What is public is used as `ps.prepare`.
"""

from typing import TYPE_CHECKING

from penstock.core.lazy_imports import lazy, public_names

if TYPE_CHECKING:
    from penstock.data.shards import opening as datasets
    from penstock.data.sources import records
    from penstock.learn.distillation import projection
    from penstock.learn.evaluation import results as evaluation_results
    from penstock.learn.training import distributed
    from penstock.use import config
    from penstock.use.config import document, run_file, teacher_cache
    from penstock.use.config import models as checked_models
    from penstock.use.config.axolotl import conversion, notes
    from penstock.use.inspection import teacher_audit, teacher_terminal
    from penstock.use.runs import kernels

_MODULES = {
    "checked_models": "use.config.models",
    "config": "use.config",
    "conversion": "use.config.axolotl.conversion",
    "datasets": "data.shards.opening",
    "distributed": "learn.training.distributed",
    "document": "use.config.document",
    "evaluation_results": "learn.evaluation.results",
    "kernels": "use.runs.kernels",
    "notes": "use.config.axolotl.notes",
    "projection": "learn.distillation.projection",
    "records": "data.sources.records",
    "run_file": "use.config.run_file",
    "teacher_audit": "use.inspection.teacher_audit",
    "teacher_cache": "use.config.teacher_cache",
    "teacher_terminal": "use.inspection.teacher_terminal",
}
"""Name here → the module, relative to penstock."""

if not TYPE_CHECKING:
    __getattr__, _ = lazy("penstock", {}, _MODULES)
    __dir__ = public_names(__name__)

__all__ = [
    "checked_models",
    "config",
    "conversion",
    "datasets",
    "distributed",
    "document",
    "evaluation_results",
    "kernels",
    "notes",
    "projection",
    "records",
    "run_file",
    "teacher_audit",
    "teacher_cache",
    "teacher_terminal",
]
