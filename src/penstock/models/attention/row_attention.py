"""Attention over one row: the backend is chosen or refused once, then called in each layer."""

from dataclasses import dataclass, field
from typing import Self, final

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.models.attention.backends import DENSE, HALF, PER_DOCUMENT, VARLEN, Attend
from penstock.models.attention.flex import FLEX
from penstock.plan.inputs import AttentionRule
from penstock.plan.inputs.requirements import InputRequirements

BACKENDS = {backend.name: backend for backend in (PER_DOCUMENT, VARLEN, FLEX, DENSE)}
"""All backends by name."""

REQUIREMENTS = InputRequirements(
    asked_by="penstock.models.attention", cu_seqlens=True, prefix=True, trees=True
)
"""What an `AttentionRule` needs from a loader."""


def choose(rule: AttentionRule, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that `auto` selects for such a row."""
    fast = ("varlen", "flex") if device.type == "cuda" and (dtype in HALF or rule.forked) else ()
    return next(
        (name for name in fast if BACKENDS[name].refusal(rule, device, dtype) is None),
        "per_document",
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RowAttention:
    """Attention of one row; made once per row, called in each layer."""

    backend: str
    """Name of the backend in use, also if `auto` selected it."""
    slots: int
    """T, number of slots of the row."""
    device: torch.device
    """Device of queries, keys and values."""
    dtype: torch.dtype
    """Dtype of queries, keys and values."""
    softcap: float | None = None
    """Scores are kept within ± this number; None: they are as they come."""
    _attend: Attend = field(repr=False)

    @classmethod
    def of(
        cls,
        rule: AttentionRule,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        backend: str = "auto",
    ) -> Self:
        """Choose a backend, or take the named one, and prepare it.

        Args:
            rule: Which slots each slot of the row sees.
            device: Device of queries, keys and values.
            dtype: Dtype of queries, keys and values; under autocast, its dtype.
            backend: A name of `BACKENDS`, or auto.

        Raises:
            ConfigError: There is no such backend, or it does not support this row; says why, and
                which backends do.
        """
        device = torch.device(device)
        name = choose(rule, device, dtype) if backend == "auto" else backend
        if name not in BACKENDS:
            raise ConfigError(
                f"attention backend {name!r} is unknown; known: auto, {', '.join(BACKENDS)}"
            )
        reason = BACKENDS[name].refusal(rule, device, dtype)
        if reason is not None:
            others = [
                other.name
                for other in BACKENDS.values()
                if other.refusal(rule, device, dtype) is None
            ]
            raise ConfigError(
                f"attention backend {name!r} {reason}; for this row take {' or '.join(others)}"
            )
        return cls(
            backend=name,
            slots=rule.num_slots,
            device=device,
            dtype=dtype,
            _attend=BACKENDS[name].prepare(rule, device, dtype),
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: q [T, heads, dim] to k and v [T, kv_heads, dim], kv_heads a divisor of heads →
        [T, heads, dim].

        Raises:
            ConfigError: Shapes, device or dtype are not those that this was made for.
        """
        slots, heads, dim = self.slots, q.shape[1], q.shape[2]
        fit = (
            q.shape[0] == slots and k.shape == v.shape and k.shape[0] == slots and k.shape[2] == dim
        )
        if not fit or heads % k.shape[1]:
            raise ConfigError(
                f"attention over a row of {slots} slots needs q [{slots}, heads, dim] and k, "
                f"v [{slots}, a divisor of heads, dim]; got q {list(q.shape)}, k "
                f"{list(k.shape)}, v {list(v.shape)}"
            )
        for x in (q, k, v):
            if x.dtype != self.dtype or x.device.type != self.device.type:
                raise ConfigError(
                    f"attention was prepared for {self.dtype} on {self.device.type}, got "
                    f"{x.dtype} on {x.device.type}; pass RowAttention.of the device and dtype "
                    "of q, k and v (under autocast, its dtype)"
                )
        return self._attend(q, k, v)


def attend(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, backend: str = "auto") -> Tensor:
    """Attend once; a model with several layers makes a `RowAttention` once per row instead.

    Args:
        q: [T, heads, dim].
        k: [T, kv_heads, dim], kv_heads a divisor of heads.
        v: [T, kv_heads, dim].
        rule: Which slots each slot of the row sees.
        backend: A name of `BACKENDS`, or auto.

    Raises:
        ConfigError: As `RowAttention.of` and its call.
    """
    return RowAttention.of(rule, device=q.device, dtype=q.dtype, backend=backend)(q, k, v)
