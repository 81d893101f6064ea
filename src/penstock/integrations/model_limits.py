"""Lengths that the settings of a model of transformers name: where a longer document or row behaves in another way."""

from collections.abc import Iterator
from typing import Any


def longer_documents(model: Any, sequence_length: int) -> tuple[int, ...] | None:
    """Documents that reach beyond every length within a row that the model's settings name; None where there is none.

    Masks of windows and chunks, tables of positions and the like are only put to the test by longer rows.
    """
    named = _named_lengths(_text_config(model))
    within = [length for length in named.values() if length < sequence_length]
    if not within:
        return None
    places = [length for name, length in named.items() if name in _PLACES]
    limit = rotary_limit(model)
    return (5, min([max(within) + 8, *places, *([] if limit is None else limit[:1])]), 11)


def _text_config(model: Any) -> Any:
    """A model's settings, those of its text model where it has several."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _named_lengths(config: Any) -> dict[str, int]:
    found = {name: getattr(config, name, None) for name in (*_PLACES, *WINDOWS, *_OTHER_LENGTHS)}
    return {name: length for name, length in found.items() if isinstance(length, int) and length > 0}


_PLACES = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
"""Settings of transformers: tokens of a document at most."""
WINDOWS = (
    "sliding_window", "sliding_window_size", "window_size", "attention_window", "attention_window_size",
    "attention_chunk_size", "local_attention",
)  # fmt: skip
"""Settings of transformers: tokens that a token sees at most."""
_OTHER_LENGTHS = ("index_topk", "block_size", "chunk_size", "mamba_chunk_size")
"""Settings of transformers: tokens at which something else changes."""


def rotary_limit(model: Any) -> tuple[int, str] | None:
    """Tokens above which a document changes the rotary frequencies of its whole batch, and the type that does it.

    transformers recomputes those of the types `dynamic` and `longrope` from the highest position of the whole batch.
    """
    config = _text_config(model)
    limits = []
    for settings in _rotary_settings(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)):
        kind = settings.get("rope_type", settings.get("type"))
        original = settings.get("original_max_position_embeddings")
        original = original or getattr(config, "original_max_position_embeddings", None)
        limit = original or getattr(config, "max_position_embeddings", None)
        if kind in ("dynamic", "longrope") and limit is not None:
            limits.append((int(limit), str(kind)))
    return min(limits, default=None)


def _rotary_settings(value: Any) -> Iterator[dict[str, Any]]:
    """Every mapping with a type, however deep: some models have one for each kind of layer."""
    if isinstance(value, dict):
        if "rope_type" in value or "type" in value:
            yield value
        for entry in value.values():
            yield from _rotary_settings(entry)
