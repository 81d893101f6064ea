"""Lightning: a data module whose batches are a loader's steps, with exact resume.

```python
data = ps.lightning.LoaderDataModule(lambda ranks: ps.Loader("data/web", …, data_parallel=ranks))
L.Trainer(max_steps=1000, strategy="ddp").fit(model, data, ckpt_path="last")
```

It needs `pip install 'penstock[train]' lightning`.
"""

from penstock.core.lazy_imports import lazy

with lazy(__name__):
    from penstock.integrations.lightning.data_module import LoaderDataModule

__all__ = ["LoaderDataModule"]
