"""What may be given in place of settings: a mapping of their values, a name, an object."""

from collections.abc import Callable, Mapping
from typing import Any

from penstock.learn.distillation.settings import Kind, LossSettings, TeacherSettings
from penstock.learn.evaluation.tasks import TaskSettings
from penstock.learn.training.evaluator_settings import EvaluatorSettings
from penstock.plan.loader.mixture import Mixture, Source

Values = Mapping[str, Any]
"""Settings of a section by their names."""
Evaluation = EvaluatorSettings | TaskSettings | Source | Mixture | Values | str | Callable[..., Any]
"""Settings; a task; held-out data (a source, a mixture, a dataset's folder); or a function of your
own.
"""
TeacherLike = str | TeacherSettings | Values
"""A run's folder or a model of transformers, or settings of a teacher."""
DistillLoss = LossSettings | Values | Kind
"""The loss between student and teacher."""
