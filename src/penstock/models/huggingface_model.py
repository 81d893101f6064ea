"""Any causal model of transformers behind the door of our own, on the same rows.

Where the model lets us, its attention is ours: a function under the name "penstock" in transformers' attention
interface, which gets what attends through the keyword arguments that models hand down to it. So packed rows, prefixes,
caches and micro-sequences work as for our own transformer, and documents are kept apart without a mask. Whether it lets
us is tried on a few tokens when it is loaded, and the logits are compared: layers of other kinds, soft caps, sinks,
dropout and layers with different windows do not. Such a model runs as transformers runs packed rows (`model_inputs`),
without prefixes and without our cache.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, MissingExtraError
from penstock.inputs import AttentionRule, InputRequirements, ModelInput
from penstock.integrations.isolation import check_isolation
from penstock.models.cache import Cache, LayerAttend
from penstock.models.lora import LoraSettings
from penstock.models.row_tensors import RowTensors
from penstock.models.windows import attention_of

try:
    from transformers import AttentionInterface, AutoModelForCausalLM
except ImportError as error:
    raise MissingExtraError("transformers", "huggingface") from error

from penstock.integrations.huggingface import REQUIREMENTS, model_inputs

_NAME = "penstock"
TRIAL = 16
"""Tokens of the document on which our attention is compared with the model's own."""
_UNKNOWN = ("softcap", "s_aux", "position_bias", "head_mask")
"""What some models ask of their attention, and ours does not do."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
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


def _values(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """What a token alone would get: its own values; for trying a model."""
    return v.repeat_interleave(q.shape[2] // v.shape[2], 2)


def _masks_more(config: Any) -> bool:
    """Whether a model's own mask hides what lies far back, and so more than its attention is told."""
    windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return windowed or getattr(config, "attention_chunk_size", None) is not None


@final
class HuggingFaceModel(nn.Module):
    """A model of transformers; make it with `load_huggingface`.

    Attributes:
        inner: The model itself.
        lora: What trains beside it, see `add_lora`.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.lora: LoraSettings | None = None
        self._plain_head = False
        own, due = inner.config._attn_implementation, self._trial_logits()
        self._shape = self._try_attention()
        if self._shape is not None and not self._same(due):
            self._shape = None
        if self._shape is None:
            inner.set_attn_implementation(own)
        self._plain_head = self._try_head()

    @property
    def ours(self) -> bool:
        """Whether our attention stands in for the model's own."""
        return self._shape is not None

    def forward(self, row: RowTensors) -> Tensor:
        """Final hidden states [1, T, width] of a row."""
        if self.ours:
            return self.run(row.tokens, row.positions, lambda layer, q, k, v: row.attention(q, k, v))
        return self._hidden(model_inputs(row.source, self.device))

    def run(self, tokens: Tensor, positions: Tensor, attend: LayerAttend, distances: int | None = None) -> Tensor:
        """Final hidden states [1, ..., width] of tokens [T] or [B, n], attending by a function of yours.

        Raises:
            ConfigError: Our attention cannot stand in for that of this model.
        """
        self._refuse_without_ours()
        batched = tokens.ndim == 2

        def call(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
            return attend(layer, q, k, v) if batched else attend(layer, q[0], k[0], v[0])[None]

        rows, places = (x if batched else x[None] for x in (tokens, positions))
        given = {"input_ids": rows, "position_ids": places, "use_cache": False, "penstock_attend": call}
        hidden = self._hidden(given)
        return hidden[None] if batched else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., width] → [..., vocab], in float32 or wider."""
        scores: Tensor = self.inner.get_output_embeddings()(hidden) if self._plain_head else hidden
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def new_cache(self, sequences: int, capacity: int) -> Cache:
        """Room for so many sequences of at most so many tokens.

        Raises:
            ConfigError: Our attention cannot stand in for that of this model.
        """
        self._refuse_without_ours()
        assert self._shape is not None
        return Cache(
            layers=self._shape.layers,
            sequences=sequences,
            capacity=capacity,
            kv_heads=self._shape.kv_heads,
            head_width=self._shape.head_width,
            device=self.device,
            dtype=self.compute_dtype,
            window=self._shape.window,
        )

    @torch.no_grad()
    def extend(self, tokens: Tensor, lengths: Tensor, cache: Cache, sequences: Tensor | None = None) -> Tensor:
        """As `Transformer.extend`."""
        growth = cache.growth(tokens, lengths, sequences)
        hidden = self.run(tokens, growth.positions, growth.attend)[0]
        growth.done()
        return self.logits(hidden[growth.last])

    def tensors(self, row: ModelInput, backend: str = "auto") -> RowTensors:
        """A row on the model's device, with attention as this model attends."""
        window = None if self._shape is None else self._shape.window
        return RowTensors.of(
            row,
            device=self.device,
            dtype=self.compute_dtype,
            backend=backend,
            window=window,
            vocab_size=self.vocab_size,
        )

    def requirements(self) -> InputRequirements:
        """What a loader must give for it."""
        prefixes = self._shape is not None and self._shape.window is None
        return InputRequirements(
            asked_by=f"the model {type(self.inner).__name__}", loss_weights=True, positions=True, cu_seqlens=True,
            prefix=prefixes or REQUIREMENTS.prefix,
        )  # fmt: skip

    def check(self, vocab_size: int) -> None:
        """Refuse a model that cannot train on packed rows of a tokenizer.

        Raises:
            ConfigError: It has too few embeddings.
            IsolationError: It lets documents of a row see each other.
        """
        if vocab_size > self.vocab_size:
            raise ConfigError(
                f"{type(self.inner).__name__} has embeddings for {self.vocab_size} ids and the tokenizer has "
                f"{vocab_size}; prepare the data with the model's tokenizer"
            )
        check_isolation(self, forward=lambda model, row: model.logits(model(model.tensors(row)))[0])

    def get_input_embeddings(self) -> nn.Module:
        """The embedding: by it `check_isolation` follows tokens."""
        embeddings: nn.Module = self.inner.get_input_embeddings()
        return embeddings

    @property
    def config(self) -> Any:
        """That of the model itself."""
        return self.inner.config

    @property
    def vocab_size(self) -> int:
        """Ids below it are known."""
        return int(self.inner.get_input_embeddings().weight.shape[0])

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.inner.parameters()).device  # type: ignore[no-any-return]

    @property
    def compute_dtype(self) -> torch.dtype:
        """That of its weights."""
        return next(self.inner.parameters()).dtype  # type: ignore[no-any-return]

    @property
    def prediction_weights(self) -> tuple[float, ...]:
        """It predicts the next token only."""
        return (1.0,)

    def _hidden(self, given: dict[str, Any]) -> Tensor:
        """[B, n, width], or the logits themselves where the head is more than a matrix."""
        if self._plain_head:
            hidden: Tensor = self.inner.base_model(**given).last_hidden_state
            return hidden
        logits: Tensor = self.inner(**given).logits
        return logits

    def _trial_tokens(self) -> Tensor:
        """A document [1, TRIAL]."""
        return (torch.arange(TRIAL, device=self.device) * 7 % self.vocab_size)[None]

    @torch.no_grad()
    def _trial_logits(self) -> Tensor:
        """The model's own logits of the trial document."""
        training = self.inner.training
        logits: Tensor = self.inner.eval()(input_ids=self._trial_tokens(), use_cache=False).logits[0].float()
        self.inner.train(training)
        return logits

    @torch.no_grad()
    def _same(self, due: Tensor) -> bool:
        """Whether our attention gives the logits that the model's own gives."""
        assert self._shape is not None
        rule, training = AttentionRule(np.array([[0, 0, TRIAL]])), self.inner.training
        attention = attention_of(rule, self._shape.window, device=self.device, dtype=self.compute_dtype)
        tokens, places = self._trial_tokens()[0], torch.arange(TRIAL, device=self.device)
        self.inner.eval()
        found = self.logits(self.run(tokens, places, lambda layer, q, k, v: attention(q, k, v)))[0].float()
        self.inner.train(training)
        rounding = 1e-3 if self.compute_dtype in (torch.float32, torch.float64) else 0.2
        return bool((found - due).abs().max() <= rounding * due.std())

    @torch.no_grad()
    def _try_head(self) -> bool:
        """Whether logits are the output matrix applied to the final hidden states: to the last bit, as a soft cap
        changes small logits hardly at all."""
        head, training = self.inner.get_output_embeddings(), self.inner.training
        if head is None:
            return False
        given: dict[str, Any] = {"input_ids": torch.arange(2, device=self.device)[None], "use_cache": False}
        if self.ours:
            given["penstock_attend"] = _values
        self.inner.eval()
        found, due = head(self.inner.base_model(**given).last_hidden_state), self.inner(**given).logits
        self.inner.train(training)
        return torch.equal(found.float(), due.float())

    @torch.no_grad()
    def _try_attention(self) -> _Shape | None:
        """What the model asks of its attention, which is ours from now on; None where that cannot be."""
        seen: dict[int, tuple[int, int, int | None]] = {}

        def record(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
            if k.shape != v.shape or q.shape[3] != k.shape[3]:
                raise ConfigError("heads of keys and values differ in width")
            seen[layer] = (k.shape[2], k.shape[3], window)
            return _values(layer, q, k, v, window)

        was_training = self.inner.training
        try:
            self.inner.set_attn_implementation(_NAME)
            tokens = torch.arange(2, device=self.device)[None]
            self.inner.train()(input_ids=tokens, use_cache=False, penstock_attend=record)
        except (ConfigError, TypeError, ValueError, AttributeError, KeyError):
            seen.clear()
        finally:
            self.inner.train(was_training)
        config = self.inner.config.get_text_config()
        layers = getattr(config, "num_hidden_layers", None)
        if len(set(seen.values())) == 1 and seen[0][2] is None and _masks_more(config):
            return None
        if len(seen) == layers and sorted(seen) == list(range(len(seen))) and len(set(seen.values())) == 1:
            kv_heads, head_width, window = seen[0]
            return _Shape(layers=len(seen), kv_heads=kv_heads, head_width=head_width, window=window)
        return None

    def _refuse_without_ours(self) -> None:
        if not self.ours:
            raise ConfigError(
                f"{type(self.inner).__name__}: our attention cannot stand in for its own, so it has no cache and no "
                "micro-sequences here; it trains on packed rows, and transformers' own generate() generates"
            )


def load_huggingface(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> HuggingFaceModel:
    """Load a causal model of transformers from a folder.

    Args:
        folder: In the Hugging Face layout.
        device: Where to.
        dtype: Of the weights; None: as they are stored.

    Raises:
        ConfigError: There is no causal model.
    """
    try:
        inner = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype or "auto", trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: no causal model of transformers there: {error}") from None
    return HuggingFaceModel(inner.to(device).train())
