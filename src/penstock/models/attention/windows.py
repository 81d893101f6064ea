"""Sliding windows: a token sees at most `window` tokens of its document, including itself.

Three backends support them: `per_document` (blocks of queries as long as the window, each over at
most two windows of keys: O(T × window)), `varlen` and `dense`. A window and a bidirectional prefix
exclude each other, because it is not defined what a query at the prefix's beginning sees of its
end; all backends refuse that. In prefix trees distances are those of positions, not of slots, which
only `dense` supports.

Source: Mistral 7B, arXiv:2310.06825; the count is that of transformers (`key > query - window`).
"""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.models.attention import BACKENDS, RowAttention
from penstock.models.attention.backends import HALF, Attend, attend_heads
from penstock.models.attention.softcap import CAPABLE, prepare_capped
from penstock.plan.inputs import AttentionRule


def attention_of(
    rule: AttentionRule,
    window: int | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    backend: str = "auto",
    softcap: float | None = None,
) -> RowAttention:
    """`RowAttention.of` with a sliding window and a limit of scores; None: without.

    Raises:
        ConfigError: The row has bidirectional prefixes and a window, or the backend does not
            support windows, or limits; says which do.
    """
    if softcap is not None:
        return _capped(rule, window, softcap, device, dtype, backend)
    if window is None:
        return RowAttention.of(rule, device=device, dtype=dtype, backend=backend)
    _check_prefixes(rule, window)
    if window >= int(rule.positions.max()) + 1:
        return RowAttention.of(rule, device=device, dtype=dtype, backend=backend)
    automatic = "dense" if rule.forked else _choose(rule, device, dtype)
    name = automatic if backend == "auto" else backend
    # Refuses what is refused without a window, with the same message.
    plain = RowAttention.of(rule, device=device, dtype=dtype, backend=name)
    if (reason := _refusal(name)) is not None:
        raise ConfigError(f"attention backend {name!r} {reason}; take 'per_document' or 'dense'")
    if rule.forked and name != "dense":
        raise ConfigError(
            f"attention backend {name!r} does not support sliding windows in prefix trees; "
            "take 'dense'"
        )
    attend = _PREPARE[name](rule, window, device, dtype)
    return RowAttention(backend=name, slots=plain.slots, device=device, dtype=dtype, _attend=attend)


def _capped(
    rule: AttentionRule,
    window: int | None,
    softcap: float,
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
) -> RowAttention:
    if backend not in ("auto", *CAPABLE):
        # An unknown one is refused as such.
        RowAttention.of(rule, device=device, dtype=dtype, backend=backend)
        raise ConfigError(
            f"attention backend {backend!r} cannot keep scores within {softcap:g}; take "
            f"{' or '.join(CAPABLE)}"
        )
    if window is not None:
        _check_prefixes(rule, window)
    name = CAPABLE[0] if backend == "auto" else backend
    attend = prepare_capped(rule, softcap, window, device)
    return RowAttention(
        backend=name,
        slots=rule.num_slots,
        device=device,
        dtype=dtype,
        softcap=softcap,
        _attend=attend,
    )


def _check_prefixes(rule: AttentionRule, window: int) -> None:
    if rule.bidirectional:
        raise ConfigError(
            f"a sliding window of {window} tokens and a bidirectional prefix exclude each "
            "other; take a model without sliding_window, or an objective with "
            "bidirectional=False"
        )


def _choose(rule: AttentionRule, device: torch.device, dtype: torch.dtype) -> str:
    half = device.type == "cuda" and dtype in HALF
    usable = (
        half
        and BACKENDS["varlen"].refusal(rule, device, dtype) is None
        and _refusal("varlen") is None
    )
    return "varlen" if usable else "per_document"


def band(queries: range, keys: range, window: int, device: torch.device) -> Tensor:
    """bool [queries, keys]: whether a query sees a key, both given by position."""
    query = torch.arange(queries.start, queries.stop, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)
    return (key <= query) & (key > query - window)


def _per_document(
    rule: AttentionRule, window: int, device: torch.device, dtype: torch.dtype
) -> Attend:
    lengths = (rule.pieces[:, 2] - rule.pieces[:, 0]).tolist()

    def document(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(q) <= window:
            return attend_heads(q, k, v, causal=True)
        outputs = []
        for begin in range(0, len(q), window):
            queries = range(begin, min(begin + window, len(q)))
            keys = range(max(begin - window + 1, 0), queries.stop)
            seen = slice(keys.start, keys.stop)
            mask = band(queries, keys, window, device)
            outputs.append(attend_heads(q[begin : queries.stop], k[seen], v[seen], mask=mask))
        return torch.cat(outputs)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        return torch.cat([document(*part) for part in parts])

    return attend


def _dense(rule: AttentionRule, window: int, device: torch.device, dtype: torch.dtype) -> Attend:
    # By positions, which differ from slots in a tree.
    positions = torch.from_numpy(rule.positions).to(device)
    near = positions[:, None] - positions[None, :] < window
    mask = torch.from_numpy(rule.dense_mask()).to(device) & near
    return lambda q, k, v: attend_heads(q, k, v, mask=mask)


def _varlen(rule: AttentionRule, window: int, device: torch.device, dtype: torch.dtype) -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    bounds = torch.from_numpy(rule.cu_seqlens).to(device)
    longest = int((rule.pieces[:, 2] - rule.pieces[:, 0]).max())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        out: Tensor = varlen_attn(
            q, k, v, bounds, bounds, longest, longest, window_size=(window - 1, 0)
        )  # type: ignore[assignment]
        return out

    return attend


def _refusal(backend: str) -> str | None:
    if backend not in _PREPARE:
        return "does not support sliding windows"
    if backend == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        if "window_size" not in inspect.signature(varlen_attn).parameters:
            return f"does not support sliding windows in torch {torch.__version__}"
    return None


_PREPARE: dict[str, Callable[[AttentionRule, int, torch.device, torch.dtype], Attend]] = {
    "per_document": _per_document,
    "varlen": _varlen,
    "dense": _dense,
}
