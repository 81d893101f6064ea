"""Attention over one row: the backend is chosen or refused once, then each layer calls it."""

from dataclasses import dataclass, field
from typing import Self, final

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.inputs import AttentionRule, InputRequirements
from penstock.models.attention.backend import HALF, Attend
from penstock.models.attention.dense import DENSE
from penstock.models.attention.flex import FLEX
from penstock.models.attention.per_document import PER_DOCUMENT
from penstock.models.attention.varlen import VARLEN

BACKENDS = {backend.name: backend for backend in (PER_DOCUMENT, VARLEN, FLEX, DENSE)}
"""All backends by name."""

REQUIREMENTS = InputRequirements(asked_by="penstock.models.attention", cu_seqlens=True, prefix=True)
"""What an `AttentionRule` is made from."""


def choose(rule: AttentionRule, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that `auto` takes for such a row."""
    fast = ("varlen", "flex") if device.type == "cuda" and dtype in HALF else ()
    return next((name for name in fast if BACKENDS[name].refusal(rule, device, dtype) is None), "per_document")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RowAttention:
    """How the tokens of one row attend; made once a row, called in each layer."""

    backend: str
    """The name of what computes it, also where `auto` chose."""
    slots: int
    """T, of the row it was made for."""
    device: torch.device
    """Where queries, keys and values must be."""
    dtype: torch.dtype
    """Of queries, keys and values."""
    _attend: Attend = field(repr=False)

    @classmethod
    def of(cls, rule: AttentionRule, *, device: torch.device | str, dtype: torch.dtype, backend: str = "auto") -> Self:
        """Choose a backend, or take the one asked for, and make it ready.

        Args:
            rule: Whom the tokens of the row see.
            device: Where queries, keys and values will be.
            dtype: What they will be in; under autocast, its dtype.
            backend: A name of `BACKENDS`, or auto.

        Raises:
            ConfigError: No such backend, or it cannot do this: says what, and which can.
        """
        device = torch.device(device)
        name = choose(rule, device, dtype) if backend == "auto" else backend
        if name not in BACKENDS:
            raise ConfigError(f"attention backend {name!r} is unknown; known: auto, {', '.join(BACKENDS)}")
        reason = BACKENDS[name].refusal(rule, device, dtype)
        if reason is not None:
            others = [other.name for other in BACKENDS.values() if other.refusal(rule, device, dtype) is None]
            raise ConfigError(f"attention backend {name!r} {reason}; for this row take {' or '.join(others)}")
        return cls(
            backend=name,
            slots=rule.num_slots,
            device=device,
            dtype=dtype,
            _attend=BACKENDS[name].prepare(rule, device, dtype),
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: q [T, heads, dim] to k and v [T, kv_heads, dim], kv_heads a divisor of heads → [T, heads, dim].

        Raises:
            ConfigError: Shapes, device or dtype are not those this was made for.
        """
        slots, heads, dim = self.slots, q.shape[1], q.shape[2]
        fit = q.shape[0] == slots and k.shape == v.shape and k.shape[0] == slots and k.shape[2] == dim
        if not fit or heads % k.shape[1]:
            raise ConfigError(
                f"attention over a row of {slots} slots needs q [{slots}, heads, dim] and k, v [{slots}, a divisor of "
                f"heads, dim]; got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
            )
        for x in (q, k, v):
            if x.dtype != self.dtype or x.device.type != self.device.type:
                raise ConfigError(
                    f"attention was made ready for {self.dtype} on {self.device.type}, got {x.dtype} on "
                    f"{x.device.type}; give RowAttention.of the device and dtype of q, k and v (under autocast, its "
                    "dtype)"
                )
        return self._attend(q, k, v)


def attend(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, backend: str = "auto") -> Tensor:
    """Attend once; a model with several layers makes a `RowAttention` once a row instead.

    Args:
        q: [T, heads, dim].
        k: [T, kv_heads, dim], kv_heads a divisor of heads.
        v: As k.
        rule: Whom the tokens of the row see.
        backend: A name of `BACKENDS`, or auto.

    Raises:
        ConfigError: As `RowAttention.of` and its call.
    """
    return RowAttention.of(rule, device=q.device, dtype=q.dtype, backend=backend)(q, k, v)
