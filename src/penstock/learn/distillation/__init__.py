"""Distillation from one or several teachers, each with its own tokenizer. Losses and teachers need
the extra `train`.

Text is the common coordinate. `ps.tokenizers.align` divides two tokenizations of a text into chunks
of equal bytes, `TeacherRows` makes the teachers' rows and chunks in the loader's threads, and
`distillation_loss` compares student and teacher chunk by chunk. Settings and rows need no torch;
everything else is imported on first use.
"""

from penstock.core.lazy_imports import lazy
from penstock.learn.distillation.settings import DistillationSettings, LossSettings, TeacherSettings
from penstock.learn.distillation.teacher_rows import TeacherRow, TeacherRows, TeacherText

with lazy(__name__):
    from penstock.learn.distillation.blocks import Pairing
    from penstock.learn.distillation.cache_writer import write_cache
    from penstock.learn.distillation.cached_teacher import CachedTeacher
    from penstock.learn.distillation.distiller import Distiller, OpenTeacher
    from penstock.learn.distillation.losses import distillation_loss
    from penstock.learn.distillation.outputs import TeacherOutputs, Wanted
    from penstock.learn.distillation.process_teacher import ProcessTeacher
    from penstock.learn.distillation.projection import Projection, project
    from penstock.learn.distillation.teachers import ModelTeacher, Teacher, starts_boundary
    from penstock.learn.distillation.token_losses import Projector

__all__ = [
    "CachedTeacher",
    "DistillationSettings",
    "Distiller",
    "LossSettings",
    "ModelTeacher",
    "OpenTeacher",
    "Pairing",
    "ProcessTeacher",
    "Projection",
    "Projector",
    "Teacher",
    "TeacherOutputs",
    "TeacherRow",
    "TeacherRows",
    "TeacherSettings",
    "TeacherText",
    "Wanted",
    "distillation_loss",
    "project",
    "starts_boundary",
    "write_cache",
]
