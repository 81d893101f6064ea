"""Megatron-Core: microbatches in its packed form (THD), shared by the ranks of a tensor-parallel
group, with a state.

```python
loader = ps.Loader("data/web", …, data_parallel=(dp_rank, dp_size)) if tp_rank == 0 else None
batches = ps.megatron.Batches(loader, rows_per_microbatch=2, group=tp_group, device="cuda")


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    output = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
        packed_seq_params=ps.megatron.packed_seq_params(batch),
    )
    return output, partial(ps.megatron.step_loss, model.config, batch)
```

It needs `pip install 'penstock[train]' megatron-core`; `Batches` works without Megatron. Corpora in
Megatron's `.bin` and `.idx` are read in place by `ps.Source`, and written by `penstock convert`.
"""

from penstock.core.lazy_imports import lazy

with lazy(__name__):
    from penstock.integrations.megatron.batches import Batches
    from penstock.integrations.megatron.passes import packed_seq_params, step_loss

__all__ = ["Batches", "packed_seq_params", "step_loss"]
