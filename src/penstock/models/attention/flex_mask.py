"""The attention rule in the words of FlexAttention."""

from collections.abc import Callable

from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) → whether the query sees the key: FlexAttention's `mask_mod`."""


def flex_mask_mod(document_ids: Tensor, prefix: Tensor | None = None) -> MaskMod:
    """The rule as a `mask_mod`, for `create_block_mask` and `create_mask` of FlexAttention.

    Args:
        document_ids: [T] number of each slot's document, on the device of the attention.
        prefix: [T] bool, whether the slot is in its document's prefix; None where all attention is causal.
    """
    if prefix is None:
        return lambda batch, head, query, key: (document_ids[query] == document_ids[key]) & (key <= query)
    return lambda batch, head, query, key: (
        (document_ids[query] == document_ids[key]) & ((key <= query) | (prefix[query] & prefix[key]))
    )
