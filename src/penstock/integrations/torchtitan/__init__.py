"""torchtitan: a dataloader for its trainer, which packs, blends and resumes as a `Loader` does.

```python
config.dataloader = ps.torchtitan.DataLoader.Config(mixture={"data/web": 0.7, "data/code": 0.3}, rows_per_step=64)
```

It needs `pip install 'penstock[train]' torchtitan`.
"""  # noqa: E501

from penstock.core.lazy_imports import lazy

with lazy(__name__):
    from penstock.integrations.torchtitan.dataloader import DataLoader

__all__ = ["DataLoader"]
