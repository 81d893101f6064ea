"""Attention over one row: the backend is chosen or refused once, then called in each layer.

| row | on CUDA in half precision | on CUDA in float32 | elsewhere |
|---|---|---|---|
| documents, with or without a sliding window | varlen | per_document | per_document |
| bidirectional prefixes | flex | per_document | per_document |
| prefix trees | flex | flex | per_document |
| prefix trees with a sliding window | flex | flex | dense |
| scores within a number (soft cap) | flex | flex | per_document |

A model whose layers differ in their windows has one attention for each window, not for each layer:
`RowAttend`. A sliding window and a bidirectional prefix exclude each other, because it is not
defined what a query at the prefix's beginning sees of its end.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self, final

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.models.attention.backends import (
    DENSE,
    PER_DOCUMENT,
    VARLEN,
    Backend,
)
from penstock.models.attention.calls import PLAIN, Attend, Scores
from penstock.models.attention.flex import FLEX
from penstock.models.attention.kernels import HALF
from penstock.models.attention.varlen import flash_name
from penstock.plan.inputs import AttentionRule
from penstock.plan.inputs.requirements import InputRequirements

BACKENDS = {backend.name: backend for backend in (PER_DOCUMENT, VARLEN, FLEX, DENSE)}
"""All backends by name."""

REQUIREMENTS = InputRequirements(
    asked_by="penstock.models.attention", cu_seqlens=True, prefix=True, trees=True
)
"""What an `AttentionRule` needs from a loader."""


def choose(
    rule: AttentionRule, device: torch.device, dtype: torch.dtype, scores: Scores = PLAIN
) -> str:
    """The backend that `auto` selects for such a row; the table above."""
    wanted = device.type == "cuda" and (dtype in HALF or rule.forked or scores.softcap is not None)
    fast: tuple[Backend, ...] = (VARLEN, FLEX) if wanted else ()
    return next(
        backend.name
        for backend in (*fast, PER_DOCUMENT, DENSE)
        if backend.refusal(rule, device, dtype, scores) is None
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
        window: int | None = None,
        softcap: float | None = None,
    ) -> Self:
        """Choose a backend, or take the named one, and prepare it.

        Args:
            rule: Which slots each slot of the row sees.
            device: Device of queries, keys and values.
            dtype: Dtype of queries, keys and values; under autocast, its dtype.
            backend: A name of `BACKENDS`, or auto.
            window: Maximum tokens that a token sees, including itself; None: all before it.
            softcap: Scores are kept within ± this number; None: they are as they come.

        Raises:
            ConfigError: There is no such backend, or it does not support this row; says why, and
                which backends do. The row has bidirectional prefixes and a window.
        """
        device, scores = torch.device(device), Scores(window, softcap)
        if window is not None and rule.bidirectional:
            raise ConfigError(
                f"a sliding window of {window} tokens and a bidirectional prefix exclude each "
                "other; take a model without sliding_window, or an objective with "
                "bidirectional=False"
            )
        name = choose(rule, device, dtype, scores) if backend == "auto" else backend
        if name not in BACKENDS:
            raise ConfigError(
                f"attention backend {name!r} is unknown; known: auto, {', '.join(BACKENDS)}"
            )
        reason = BACKENDS[name].refusal(rule, device, dtype, scores)
        if reason is not None:
            others = [
                other.name
                for other in BACKENDS.values()
                if other.refusal(rule, device, dtype, scores) is None
            ]
            raise ConfigError(
                f"attention backend {name!r} {reason}; for this row take {' or '.join(others)}"
            )
        return cls(
            backend=name,
            slots=rule.num_slots,
            device=device,
            dtype=dtype,
            softcap=softcap,
            _attend=BACKENDS[name].prepare(rule, device, dtype, scores),
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend: q [T, heads, dim] to k and v [T, kv_heads, dim], kv_heads a divisor of heads →
        [T, heads, dim]; `sinks` [heads] are numbers of gpt-oss, None: there are none.

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
        return self._attend(q, k, v, sinks)


class AttentionLayer(Protocol):
    """What an attention function may ask of the layer that calls it.

    Compiled code is made again for each number that it asks for. So attention over a row asks for
    the window, of which there are few, and never for the place.
    """

    @property
    def place(self) -> int:
        """Its number among the model's attentions: for what is kept between calls."""

    @property
    def window(self) -> int | None:
        """Maximum tokens that a token sees, including itself; None: all before it."""

    @property
    def sinks(self) -> Tensor | None:
        """[heads], a number in each softmax that has no value; None: there are none."""


LayerAttend = Callable[[AttentionLayer, Tensor, Tensor, Tensor], Tensor]
"""(layer, rotated q [..., heads, dim], rotated k [..., kv_heads, dim], v as k) → [..., heads,
dim].
"""


@final
@dataclass(frozen=True, slots=True)
class RowAttend:
    """The `LayerAttend` of a row: what a block calls, compiled or not; made once for each row."""

    by_window: Mapping[int | None, RowAttention]

    @classmethod
    def of(
        cls, windows: tuple[int | None, ...], make: Callable[[int | None], RowAttention]
    ) -> Self:
        """One attention for each window; without windows, one for all that a token may see."""
        return cls({window: make(window) for window in dict.fromkeys(windows or (None,))})

    @property
    def window(self) -> int | None:
        """The smallest; None: no layer has one."""
        return min((one for one in self.by_window if one is not None), default=None)

    def describe(self) -> str:
        """What runs, in words: "varlen (FlashAttention 2), windows of 512 and all"."""
        [(backend, device)] = {(one.backend, one.device.type) for one in self.by_window.values()}
        kernel = flash_name(device) if backend == "varlen" else ""
        limits = sorted(one for one in self.by_window if one is not None)
        windows = [*map(str, limits), *["all"] * (None in self.by_window)]
        return (
            backend
            + (f" ({kernel})" if kernel else "")
            + (f", windows of {' and '.join(windows)}" if limits else "")
        )

    def __call__(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one layer, by its window."""
        return self.by_window[layer.window](q, k, v, layer.sinks)


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
