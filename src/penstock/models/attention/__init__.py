"""Attention over packed rows with a choice of backends; documents never see each other, and
prefixes are supported.

```python
rule = AttentionRule.of(row)
attention = RowAttention.of(rule, device="cuda", dtype=torch.bfloat16)    # once per row
hidden = attention(q, k, v)                                               # in each layer
attention.backend                                                         # "varlen"
```

| backend | where | prefixes | how |
|---|---|---|---|
| `per_document` | everywhere; made for the CPU | yes | one or two `scaled_dot_product_attention` calls per document |
| `varlen` | CUDA, float16 and bfloat16 | refused | `varlen_attn`, FlashAttention over all documents at once |
| `flex` | CUDA; CPU without gradients | yes | FlexAttention with a block mask |
| `dense` | everywhere; for tests and small rows | yes | one call with a [T, T] mask |

`auto` takes `varlen` for half precision on CUDA, `flex` if such a row has prefixes, trees or a soft
cap, and `per_document` otherwise (`row_attention.py` has the whole table). A backend chosen by name is used, or refused with the reason and the
alternatives; it is never replaced by another.

`slice_attention` is the same for ranks that share a row (context parallelism).
"""  # noqa: E501

from penstock.core.errors import MissingExtraError
from penstock.core.lazy_imports import public_names

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingExtraError("torch", "train") from error

from penstock.models.attention.context_parallel import gather_slots, slice_attention
from penstock.models.attention.flex import flex_mask_mod
from penstock.models.attention.row_attention import (
    BACKENDS,
    REQUIREMENTS,
    AttentionLayer,
    LayerAttend,
    RowAttend,
    RowAttention,
    attend,
    choose,
)
from penstock.models.attention.varlen import flash_name

__all__ = [
    "BACKENDS",
    "REQUIREMENTS",
    "AttentionLayer",
    "LayerAttend",
    "RowAttend",
    "RowAttention",
    "attend",
    "choose",
    "flash_name",
    "flex_mask_mod",
    "gather_slots",
    "slice_attention",
]

__dir__ = public_names(__name__)
