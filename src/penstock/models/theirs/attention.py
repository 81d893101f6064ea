"""Puts our attention into a model of transformers, and provides the reference that shows whether
this is exact.

The reference is the model's logits for one document alone, as transformers runs it; all other
results are compared with it. A model with unusable logits is refused when it is loaded.

Our attention is a function named "penstock" in transformers' attention interface. Models pass
keyword arguments down to it, and `penstock_attend` among them is the function to call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, final

import torch
from torch import Tensor, nn

from penstock.core.errors import ConfigError
from penstock.models.attention import AttentionLayer, LayerAttend
from penstock.models.isolation.comparison import largest_difference, spread, tolerance
from penstock.models.isolation.lengths import WINDOWS
from penstock.models.isolation.report import describe
from penstock.models.recurrent.packages import PACKAGES, is_installed
from penstock.models.without_dropout import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Result = TypeVar("Result")


class Computes(Protocol):
    """A model that says in which dtype it computes."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of hidden states."""


TRIAL, PROMPT = 16, 9
"""Tokens of the test document, and of its beginning that serves as a prompt."""

NAME = "penstock"
"""Of our attention in transformers' attention interface."""
_UNSUPPORTED = ("position_bias", "head_mask")
"""Arguments of some models to their attention that ours does not support."""


def trial_tokens(inner: "PreTrainedModel") -> Tensor:
    """The test document, int64 [TRIAL], on the model's device."""
    weight = inner.get_input_embeddings().weight
    # Not from 0, which often is padding: RoBERTa counts positions from 1, but from 0 where padding
    # comes first.
    return (torch.arange(TRIAL, device=weight.device) * 7 + 3) % len(weight)


def true_logits(inner: "PreTrainedModel", *, causal: bool = True) -> Tensor:
    """[TRIAL, vocabulary]: transformers' own logits of the test document alone.

    Args:
        inner: A model of transformers.
        causal: Whether to require that later tokens change nothing.

    Raises:
        ConfigError: The model cannot be run, its logits are NaN, or it is not causal.
    """
    with evaluating(inner):
        whole, part = attempt(
            inner, lambda: [_document(inner, trial_tokens(inner)[:n]) for n in (TRIAL, PROMPT)]
        )
    if bool(whole.isnan().any()):
        raise ConfigError(
            f"{describe(inner)}: its logits of {TRIAL} tokens are NaN; load it with dtype float32"
        )
    # The median, not the maximum: in half precision a mixture of experts may route a token
    # differently.
    far = float((part - whole[:PROMPT]).float().nan_to_num().abs().amax(-1).median()) / spread(
        whole
    )
    # Some models compute in half precision and return float32.
    coarse = max(tolerance(whole.dtype), tolerance(next(inner.parameters()).dtype))
    if causal and not far <= coarse:
        raise ConfigError(
            f"{describe(inner)} is not a causal language model: logits of a token change by "
            f"{far:.2g} standard deviations with later tokens, so it cannot be trained, "
            "scored or used for generation; take another model"
        )
    return whole


def _document(inner: "PreTrainedModel", tokens: Tensor) -> Tensor:
    restart_rotary(inner)
    logits: Tensor = inner(input_ids=tokens[None], use_cache=False).logits
    if logits.shape[:2] != (1, len(tokens)):
        raise ValueError(f"logits of shape {list(logits.shape)} for {len(tokens)} tokens")
    return logits[0]


def distance(found: Tensor, truth: Tensor) -> float:
    """Largest difference of logits, in standard deviations of the true ones."""
    return largest_difference(found.to(truth.dtype), truth) / spread(truth)


def rounding(model: Computes) -> float:
    """The largest `distance` that counts as rounding in a model's logits."""
    return tolerance(model.compute_dtype)


def attempt(inner: "PreTrainedModel", run: Callable[[], Result]) -> Result:
    """Run a model with code that is not ours.

    Raises:
        ConfigError: It raised an error other than lack of memory.
    """
    try:
        return run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        found = (
            f"{describe(inner)} cannot be run on tokens alone by {_transformers()}: "
            f"{one_line(error)}"
        )
        kernels = [name for name in PACKAGES if is_installed(name)]
        if kernels and next(inner.parameters()).device.type == "cpu":
            raise ConfigError(
                f"{found}. Perhaps because {', '.join(kernels)} are installed, need CUDA, and "
                "are taken by transformers on the CPU too: uninstall them, or load the model "
                "on a GPU"
            ) from error
        raise ConfigError(
            f"{found}; install what it needs or another version of transformers, or take a "
            "text-only model"
        ) from error


def _transformers() -> str:
    from transformers import __version__

    return f"transformers {__version__}"


def one_line(error: BaseException) -> str:
    """An error of other people's code, in one line of at most 300 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:299]}…"


def restart_rotary(inner: "PreTrainedModel") -> None:
    """Reset rotary frequencies of type `dynamic`, which depend on the longest document so far."""
    for module in inner.modules():
        if "dynamic" not in str(getattr(module, "rope_type", "")):
            continue
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            setattr(module, name, module.original_max_seq_len)
        for name, buffer in list(module.named_buffers(recurse=False)):
            original = getattr(module, name.replace("inv_freq", "original_inv_freq"), None)
            if name.endswith("inv_freq") and "original" not in name and original is not None:
                setattr(module, name, original.to(buffer.device))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The attention that a model needs."""

    layers: int
    kv_heads: int
    head_width: int
    windows: tuple[int | None, ...]
    """Of each layer."""
    softcap: float | None = None
    """Scores are kept within ± this number."""

    @property
    def window(self) -> int | None:
        """The smallest; None: no layer has one."""
        return min((one for one in self.windows if one is not None), default=None)


@final
@dataclass(slots=True)
class AttentionFit:
    """Whether our attention replaces that of a model."""

    own: str
    """The name of transformers' own."""
    shape: AttentionShape | None = None
    """What our attention must know; None: it does not replace the model's."""
    reason: str = ""
    """Why it does not."""


class TheirLayer(NamedTuple):
    """A layer of a model of transformers as an `AttentionLayer`, with what its call gave."""

    module: nn.Module
    window: int | None = None
    sinks: Tensor | None = None
    softcap: float | None = None

    @property
    def place(self) -> int:
        """Read when it is asked for: compiled code is made again for each number that it reads."""
        found: Any = self.module.layer_idx
        return int(found)


@final
@dataclass(frozen=True, slots=True)
class InBatch:
    """The `LayerAttend` of a row, for models that have it as a batch [1, T, heads, dim]."""

    attend: LayerAttend

    def __call__(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same, in a batch of one."""
        return self.attend(layer, q[0], k[0], v[0])[None]


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """transformers' attention function: [B, heads, n, dim] each → [B, n, heads, dim]."""
    attend = given.get("penstock_attend")
    unsupported = [name for name in _UNSUPPORTED if given.get(name) is not None]
    if given.get("dropout"):
        unsupported.append("dropout")
    if attend is None or unsupported or attention_mask is not None:
        raise ConfigError(
            f"{type(module).__name__}: our attention cannot replace its own "
            f"({', '.join(unsupported) or 'a mask'}); load it with attn_implementation='sdpa'"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scaling, dim = given.get("scaling"), query.shape[-1]
    if scaling is not None and abs(scaling * dim**0.5 - 1) > 1e-6:
        q = q * (scaling * dim**0.5)
    sinks = given.get("s_aux")
    layer = TheirLayer(module, given.get("sliding_window"), sinks, given.get("softcap"))
    return attend(layer, q, k, v), None


def use_attention(inner: "PreTrainedModel", name: str) -> None:
    """Choose the attention of a model's text; that of a tower for images or sounds stays
    transformers' own.
    """
    config = inner.config
    has_tower = any(
        getattr(config, name, None) is not None for name in ("vision_config", "audio_config")
    )
    if has_tower and getattr(config, "text_config", None) is not None:
        inner.set_attn_implementation({"text_config": name})
    else:
        inner.set_attn_implementation(name)


@contextmanager
def with_our_attention(inner: "PreTrainedModel") -> Iterator[None]:
    """Our attention in a model's text within the block; calls must give `penstock_attend`."""
    config = inner.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def values_alone(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of each token to itself only: its own values; for testing a model."""
    return v.repeat_interleave(q.shape[2] // v.shape[2], 2)


@final
class UnfitAttentionError(Exception):
    """Why our attention cannot replace a model's own."""


def take_attention(inner: "PreTrainedModel") -> AttentionShape:
    """Put our attention into a model; returns what the model needs of it.

    Raises:
        UnfitAttentionError: Our attention does not fit.
    """
    # Here, not at the top: our own models load without transformers.
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)
    seen: list[tuple[int, tuple[int, int]]] = []
    windows: dict[int, int | None] = {}
    softcaps: set[float | None] = set()

    def record(layer: TheirLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if k.shape != v.shape or q.shape[3] != k.shape[3]:
            raise UnfitAttentionError("heads of keys and values differ in width")
        if layer.sinks is not None and layer.sinks.shape != q.shape[2:3]:
            raise UnfitAttentionError("its sinks are not one number for each head")
        seen.append((layer.place, (k.shape[2], k.shape[3])))
        windows[layer.place] = layer.window
        softcaps.add(layer.softcap)
        return values_alone(layer, q, k, v)

    with evaluating(inner):
        try:
            use_attention(inner, NAME)
            # Dropout is passed only in training mode.
            inner.train()
            inner(input_ids=trial_tokens(inner)[None, :2], use_cache=False, penstock_attend=record)
        except (UnfitAttentionError, torch.OutOfMemoryError):
            raise
        except ConfigError as error:
            # The message's cure is for users who chose our attention themselves.
            raise UnfitAttentionError(str(error).partition(";")[0]) from None
        except Exception as error:
            raise UnfitAttentionError(
                f"our attention cannot replace its own ({one_line(error)})"
            ) from None
    layers, shapes = [layer for layer, _ in seen], {shape for _, shape in seen}
    if not seen or len(set(layers)) != len(layers):
        raise UnfitAttentionError(
            "a layer attends several times" if seen else "its layers have their own attention code"
        )
    if sorted(layers) != list(range(len(layers))) or len(shapes) != 1:
        raise UnfitAttentionError("its layers are of different kinds")
    kv_heads, head_width = shapes.pop()
    config = inner.config.get_text_config()
    if len(layers) != getattr(config, "num_hidden_layers", None):
        raise UnfitAttentionError(f"it has layers other than the {len(layers)} with attention")
    if len(softcaps) > 1:
        raise UnfitAttentionError("its layers keep scores within different numbers")
    each = tuple(windows[layer] for layer in sorted(layers))
    if _masks_more(config, set(each)):
        raise UnfitAttentionError("its mask hides more than its attention function can know")
    return AttentionShape(
        layers=len(layers),
        kv_heads=kv_heads,
        head_width=head_width,
        windows=each,
        softcap=softcaps.pop(),
    )


def _masks_more(config: object, windows: set[int | None]) -> bool:
    """Whether the model's settings name a window that its attention function does not receive."""
    named = {name: getattr(config, name, None) for name in WINDOWS}
    if not getattr(config, "use_sliding_window", True):
        named = {name: length for name, length in named.items() if "sliding" not in name}
    return any(
        isinstance(length, int) and length > 0 and length not in windows
        for length in named.values()
    )
