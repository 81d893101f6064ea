"""Models in torch: attention that keeps documents apart and honours prefixes. Needs the extra `train`."""

from penstock.models.attention import REQUIREMENTS, RowAttention, attend, flex_mask_mod

__all__ = ["REQUIREMENTS", "RowAttention", "attend", "flex_mask_mod"]
