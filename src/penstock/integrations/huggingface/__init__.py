"""Hugging Face: model arguments and loss for bare loops, and a `Trainer` that resumes exactly.

```python
for step in loader:
    for row in step:
        ps.huggingface.loss(model, row, step.loss_denominator).backward()
```

`VisionCollator` labels the batches of multimodal processors.

Importing it needs torch and transformers (`pip install 'penstock[huggingface]'`); `Trainer` needs
accelerate too and is loaded on first use.
"""

from penstock.core.errors import MissingExtraError
from penstock.core.lazy_imports import lazy

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise MissingExtraError("transformers", "huggingface") from error

from penstock.integrations.huggingface.losses import loss, weighted_loss
from penstock.models.theirs.tensors import REQUIREMENTS, model_inputs

with lazy(__name__):
    from penstock.integrations.huggingface.trainer import Trainer
    from penstock.integrations.huggingface.vision_collator import VisionCollator

__all__ = [
    "REQUIREMENTS",
    "Trainer",
    "VisionCollator",
    "loss",
    "model_inputs",
    "weighted_loss",
]
