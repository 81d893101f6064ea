"""Accelerate: a loader's steps in a loop with an `Accelerator`, with exact resume.

```python
data = ps.accelerate.AcceleratorSteps(accelerator, loader)
```

It needs `pip install 'penstock[huggingface]'`.
"""

from typing import TYPE_CHECKING

from penstock.core.lazy_imports import lazy

if TYPE_CHECKING:
    from penstock.integrations.accelerate.steps import AcceleratorSteps
else:
    __getattr__, __dir__ = lazy(__name__, {"AcceleratorSteps": "steps"})

__all__ = ["AcceleratorSteps"]
