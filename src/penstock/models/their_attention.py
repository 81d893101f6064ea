"""Our attention in a model of transformers, in place of its own: how it is called there, and what it is asked for.

A function under the name "penstock" in transformers' attention interface gets what attends (`penstock_attend`) through
the keyword arguments that models hand down to it.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, MissingExtraError
from penstock.integrations.model_limits import WINDOWS
from penstock.models.trials import evaluating, one_line, trial_tokens

try:
    from transformers import AttentionInterface
except ImportError as error:
    raise MissingExtraError("transformers", "huggingface") from error

_NAME = "penstock"
_UNKNOWN = ("softcap", "s_aux", "position_bias", "head_mask")
"""What some models ask of their attention, and ours does not do."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What a model asks of its attention."""

    layers: int
    kv_heads: int
    head_width: int
    window: int | None


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """transformers' attention function: [B, heads, n, dim] each → [B, n, heads, dim]."""
    ask = given.get("penstock_attend")
    asked = [name for name in _UNKNOWN if given.get(name) is not None]
    if given.get("dropout"):
        asked.append("dropout")
    if ask is None or asked or attention_mask is not None:
        raise ConfigError(
            f"{type(module).__name__}: our attention cannot stand in for its own ({', '.join(asked) or 'a mask'}); "
            "load it with attn_implementation='sdpa'"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scaling, dim = given.get("scaling"), query.shape[-1]
    if scaling is not None and abs(scaling * dim**0.5 - 1) > 1e-6:
        q = q * (scaling * dim**0.5)
    return ask(module.layer_idx, q, k, v, given.get("sliding_window")), None


AttentionInterface.register(_NAME, _attend)


def values_alone(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """What a token alone would get: its own values; for trying a model."""
    return v.repeat_interleave(q.shape[2] // v.shape[2], 2)


@final
class UnfitAttentionError(Exception):
    """Why our attention does not stand in for a model's own."""


def take_attention(inner: Any) -> AttentionShape:
    """What the model asks of its attention, which is ours from now on.

    Raises:
        UnfitAttentionError: That cannot be.
    """
    seen: list[tuple[int, tuple[int, int, int | None]]] = []

    def record(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        if k.shape != v.shape or q.shape[3] != k.shape[3]:
            raise UnfitAttentionError("heads of keys and values differ in width")
        seen.append((layer, (k.shape[2], k.shape[3], window)))
        return values_alone(layer, q, k, v, window)

    with evaluating(inner):
        try:
            inner.set_attn_implementation(_NAME)
            # Dropout shows in training only.
            inner.train()
            inner(input_ids=trial_tokens(inner)[None, :2], use_cache=False, penstock_attend=record)
        except (UnfitAttentionError, torch.OutOfMemoryError):
            raise
        except ConfigError as error:
            # Its second half is for who asked for our attention.
            raise UnfitAttentionError(str(error).partition(";")[0]) from None
        except Exception as error:
            raise UnfitAttentionError(f"our attention cannot stand in for its own ({one_line(error)})") from None
    layers, shapes = [layer for layer, _ in seen], {shape for _, shape in seen}
    if not seen or len(set(layers)) != len(layers):
        raise UnfitAttentionError(
            "its layers attend several times each" if seen else "its layers have attention of their own"
        )
    if sorted(layers) != list(range(len(layers))) or len(shapes) != 1:
        raise UnfitAttentionError("its layers are of different kinds")
    kv_heads, head_width, window = shapes.pop()
    config = inner.config.get_text_config()
    if len(layers) != getattr(config, "num_hidden_layers", None):
        raise UnfitAttentionError(f"it has other layers than the {len(layers)} that attend")
    if _masks_more(config, window):
        raise UnfitAttentionError("it masks more than its attention is given")
    return AttentionShape(layers=len(layers), kv_heads=kv_heads, head_width=head_width, window=window)


def _masks_more(config: Any, window: int | None) -> bool:
    """Whether a model's own mask hides what lies far back, and so more than its attention is given."""
    named = {name: getattr(config, name, None) for name in WINDOWS}
    if not getattr(config, "use_sliding_window", True):
        named = {name: length for name, length in named.items() if "sliding" not in name}
    return any(isinstance(length, int) and length > 0 and length != window for length in named.values())
