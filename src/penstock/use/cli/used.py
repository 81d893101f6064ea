"""Modules that verbs work with, imported when a verb that runs first uses them.

So neither the help of a verb nor its completion waits for more than its options. One name stands
for each module, such as `used.projection.control_pairs`. What is public is used as `ps.prepare`.
"""

from penstock.core.lazy_imports import lazy

with lazy(__name__):
    from penstock.data.shards import opening as datasets
    from penstock.data.sources import records
    from penstock.learn.distillation import projection
    from penstock.learn.evaluation import results as evaluation_results
    from penstock.learn.evaluation import tasks as evaluation_tasks
    from penstock.use import config
    from penstock.use.config import document, run_file
    from penstock.use.config import models as checked_models
    from penstock.use.config.imports import notes, reading
    from penstock.use.inspection import teacher_audit_inputs, teacher_terminal
    from penstock.use.runs import kernels

__all__ = [
    "checked_models",
    "config",
    "datasets",
    "document",
    "evaluation_results",
    "evaluation_tasks",
    "kernels",
    "notes",
    "projection",
    "reading",
    "records",
    "run_file",
    "teacher_audit_inputs",
    "teacher_terminal",
]
