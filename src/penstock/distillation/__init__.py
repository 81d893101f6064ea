"""Distillation from one or several teachers, each with its own tokenizer. Losses and teachers need the extra `train`.

Text is the common coordinate: `align` parts two tokenizations of it into chunks of equal bytes, `TeacherRows` makes
teachers' rows and chunks in the loader's threads, `distillation_loss` holds a student against a teacher chunk by chunk.
Settings, alignment and rows are read without torch; everything else is imported when it is first used.
"""

from typing import TYPE_CHECKING, Any

from penstock.distillation.rows import TeacherRow, TeacherRows, TeacherText
from penstock.distillation.settings import LossSettings
from penstock.distillation.teacher_settings import DistillationSettings, TeacherSettings
from penstock.late import import_late
from penstock.tokenizers import Aligner, Alignment, align

if TYPE_CHECKING:
    from penstock.distillation.boundaries import starts_boundary
    from penstock.distillation.cached_teacher import CachedTeacher
    from penstock.distillation.caching import write_cache
    from penstock.distillation.chats import align_chats
    from penstock.distillation.distiller import Distiller, OpenTeacher
    from penstock.distillation.losses import distillation_loss
    from penstock.distillation.outputs import TeacherOutputs, Wanted
    from penstock.distillation.pairing import Pairing
    from penstock.distillation.process_teacher import ProcessTeacher
    from penstock.distillation.projecting import Projector
    from penstock.distillation.projection import Projection, project
    from penstock.distillation.teachers import ModelTeacher, Teacher

_LATE = {
    "CachedTeacher": "cached_teacher",
    "Distiller": "distiller",
    "ModelTeacher": "teachers",
    "OpenTeacher": "distiller",
    "Pairing": "pairing",
    "ProcessTeacher": "process_teacher",
    "Projection": "projection",
    "Projector": "projecting",
    "Teacher": "teachers",
    "TeacherOutputs": "outputs",
    "Wanted": "outputs",
    "align_chats": "chats",
    "distillation_loss": "losses",
    "project": "projection",
    "starts_boundary": "boundaries",
    "write_cache": "caching",
}
"""Name → the module that is loaded when it is first used."""

__all__ = [
    "Aligner",
    "Alignment",
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
    "align",
    "align_chats",
    "distillation_loss",
    "project",
    "starts_boundary",
    "write_cache",
]


def __getattr__(name: str) -> Any:
    return import_late(__name__, _LATE, name)
