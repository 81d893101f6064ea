"""What a model learns from and is measured by: training, distillation, generation and
evaluation.
"""

from penstock.core.lazy_imports import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
