"""The Python interface: train, distil, resume, and use trained models. The `penstock` command calls the same functions.

```python
run = ps.train(model, loader, steps=2000, learning_rate=1e-3, output="runs/a", resume=True)
run.generate("def "); run.evaluate("gsm8k"); run.export("my-model")
```

This package is above `config`, which builds a trainer from settings, and above `serving`.
"""

from typing import TYPE_CHECKING

from penstock.core.lazy_imports import lazy

if TYPE_CHECKING:
    from penstock.runs.inspecting import inspect
    from penstock.runs.opening import build_model, load_model
    from penstock.runs.run import Run, open_run
    from penstock.runs.training import distil, train
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "Run": "run",
            "build_model": "opening",
            "distil": "training",
            "inspect": "inspecting",
            "load_model": "opening",
            "open_run": "run",
            "train": "training",
        },
    )

__all__ = ["Run", "build_model", "distil", "inspect", "load_model", "open_run", "train"]
