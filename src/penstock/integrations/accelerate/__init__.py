"""Accelerate: a loader's steps in a loop with an `Accelerator`, with exact resume.

```python
data = ps.accelerate.AcceleratorSteps(accelerator, loader)
```

It needs `pip install 'penstock[huggingface]'`.
"""

from penstock.core.lazy_imports import lazy

with lazy(__name__):
    from penstock.integrations.accelerate.steps import AcceleratorSteps

__all__ = ["AcceleratorSteps"]
