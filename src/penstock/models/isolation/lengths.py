"""Lengths that a model's settings name, and lengths of the documents that test it.

Some models of transformers behave differently above such a length, for example that of a sliding
window.
"""

from collections.abc import Iterator

DOCUMENT_LENGTHS = (13, 1, 18)
"""Lengths of the documents in the test row; one has a single token, for which restarting positions
matter least.
"""

PADDING = 5

MOST_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
"""Settings of transformers: maximum tokens of a document."""

WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "window_size",
    "attention_window",
    "attention_window_size",
    "attention_chunk_size",
    "local_attention",
)
"""Settings of transformers: maximum tokens that a token sees."""

_OTHER_LENGTHS = ("index_topk", "block_size", "chunk_size", "mamba_chunk_size")
"""Settings of transformers: lengths at which something else changes."""


def longer_documents(model: object, sequence_length: int) -> tuple[int, ...] | None:
    """Document lengths beyond every length within a row that the model's settings name; None if
    they name none.

    Only longer rows exercise masks of windows and chunks, tables of positions and the like.
    """
    named = _named_lengths(text_config(model))
    within = [length for length in named.values() if length < sequence_length]
    if not within:
        return None
    limits = [length for name, length in named.items() if name in MOST_POSITIONS]
    rotary = rotary_limit(model)
    return (5, min([max(within) + 8, *limits, *([] if rotary is None else rotary[:1])]), 11)


def documents_of_a_row(model: object, slots: int) -> tuple[int, ...] | None:
    """Lengths of documents, long and short, that fill a row of `slots` slots; None if that is
    hardly more than a trial.

    Some models do with a row what depends on its length: biases by place in half precision, tables
    of positions.
    """
    room = slots - PADDING
    if room <= 2 * sum(DOCUMENT_LENGTHS):
        return None
    named = _named_lengths(text_config(model))
    limits = [length for name, length in named.items() if name in MOST_POSITIONS]
    rotary = rotary_limit(model)
    longest = min([room * 2 // 5, *limits, *([] if rotary is None else rotary[:1])])
    lengths: list[int] = []
    while room:
        lengths.append(min(longest if len(lengths) % 2 == 0 else 7, room))
        room -= lengths[-1]
    return tuple(lengths)


def changing_lengths(model: object) -> set[int]:
    """Lengths that the model's settings name, where it may begin to treat texts differently."""
    return set(_named_lengths(text_config(model)).values())


def _named_lengths(config: object) -> dict[str, int]:
    found = {
        name: getattr(config, name, None) for name in (*MOST_POSITIONS, *WINDOWS, *_OTHER_LENGTHS)
    }
    return {
        name: length for name, length in found.items() if isinstance(length, int) and length > 0
    }


def text_config(model: object) -> object:
    """A model's settings; those of its text model if it has several."""
    config: object = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def asks_for_router_loss(model: object) -> bool:
    """Whether a model of transformers asks for its auxiliary router loss.

    That loss counts padding as tokens, and the documents of a row as one; no loss of ours includes
    it.
    """
    return any(
        getattr(config, "output_router_logits", False)
        for config in (getattr(model, "config", None), text_config(model))
    )


def rotary_limit(model: object) -> tuple[int, str] | None:
    """Document length above which the rotary frequencies of the whole batch change, and the
    responsible type.

    transformers recomputes the frequencies of types `dynamic` and `longrope` from the highest
    position of the batch.
    """
    config = text_config(model)
    limits = []
    for settings in _rotary_settings(
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    ):
        kind = settings.get("rope_type", settings.get("type"))
        original = settings.get("original_max_position_embeddings")
        original = original or getattr(config, "original_max_position_embeddings", None)
        limit = original or getattr(config, "max_position_embeddings", None)
        if kind in ("dynamic", "longrope") and isinstance(limit, int | float):
            limits.append((int(limit), str(kind)))
    return min(limits, default=None)


def _rotary_settings(value: object) -> Iterator[dict[str, object]]:
    """Every mapping with a type, at any depth: some models have one for each kind of layer."""
    if isinstance(value, dict):
        if "rope_type" in value or "type" in value:
            yield value
        for entry in value.values():
            yield from _rotary_settings(entry)
