"""Hugging Face: model arguments and loss for bare loops, and a `Trainer` that resumes exactly.

```python
for step in loader:
    for row in step:
        ps.huggingface.loss(model, row, step.loss_denominator).backward()
```

`VisionCollator` labels the batches of multimodal processors by role boundaries.

Importing it needs torch and transformers (`pip install 'penstock[huggingface]'`); `Trainer` needs accelerate too and is
loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.errors import MissingExtraError

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise MissingExtraError("transformers", "huggingface") from error

from penstock.integrations.huggingface.losses import loss, weighted_loss
from penstock.integrations.huggingface.tensors import REQUIREMENTS, model_inputs
from penstock.integrations.isolation import IsolationReport, check_isolation
from penstock.integrations.torch_tensors import to_torch

if TYPE_CHECKING:
    from penstock.integrations.huggingface.trainer import Trainer as Trainer
    from penstock.integrations.huggingface.vision_collator import VisionCollator as VisionCollator

__all__ = [
    "REQUIREMENTS",
    "IsolationReport",
    "Trainer",
    "VisionCollator",
    "check_isolation",
    "loss",
    "model_inputs",
    "to_torch",
    "weighted_loss",
]


_LATE = {"Trainer": "trainer", "VisionCollator": "vision_collator"}
"""Name → the module that is loaded when it is first used."""


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
