"""Attention over packed rows, by backends with names; documents never see each other, and prefixes are honoured.

```python
rule = AttentionRule.of(row)
attention = RowAttention.of(rule, device="cuda", dtype=torch.bfloat16)    # once a row
hidden = attention(q, k, v)                                               # in each layer
attention.backend                                                         # "varlen"
```

| backend | where | prefixes | how |
|---|---|---|---|
| `per_document` | everywhere; made for the CPU | yes | one `scaled_dot_product_attention` a document, or two |
| `varlen` | CUDA, float16 and bfloat16 | refused | `varlen_attn`, FlashAttention over all documents at once |
| `flex` | CUDA; CPU without gradients | yes | FlexAttention with a block mask |
| `dense` | everywhere; for tests and small rows | yes | one call with a [T, T] mask |

`auto` takes `varlen` for half precision on CUDA, `flex` where such a row has prefixes, `per_document` otherwise. A
backend asked for by name is taken, or refused with what it cannot do and which can; none is ever replaced by another.
"""

from penstock.errors import MissingExtraError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingExtraError("torch", "train") from error

from penstock.models.attention.flex_mask import flex_mask_mod
from penstock.models.attention.row_attention import BACKENDS, REQUIREMENTS, RowAttention, attend, choose

__all__ = ["BACKENDS", "REQUIREMENTS", "RowAttention", "attend", "choose", "flex_mask_mod"]
