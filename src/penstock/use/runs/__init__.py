"""The Python interface: train, distill, resume, and use trained models. `penstock` calls the same
functions.

```python
run = ps.train(model, loader, steps=2000, learning_rate=1e-3, output="runs/a", resume=True)
run.generate("def "); run.evaluate("gsm8k"); run.export("my-model")
```

All public names of this package are at the top, in `penstock`. It is above `config`, which builds a
trainer from settings, and above `serving`.
"""

from penstock.core.lazy_imports import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
