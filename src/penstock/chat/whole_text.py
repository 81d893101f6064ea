"""The slow way: vocabularies that do not simply cut a text at their control entries."""

from typing import Any

import numpy as np

from penstock.errors import TokenizerError
from penstock.tokenizers import Tokenizer


def encode_whole(tokenizer: Tokenizer, text: str, literal: Any) -> tuple[Any, Any, Any, Any, tuple[Any, ...]]:
    """Thin for now."""
    ids, positions = tokenizer.encode_with_positions(text, allow_control=True)
    control = np.isin(ids, list(tokenizer.special_tokens.values()))
    if any(not literal[b:e].all() for b, e in positions[control]):
        raise TokenizerError("forged control text cannot be kept out with this tokenizer yet")
    return ids.astype(np.uint32), positions[:, 0], positions[:, 1], control, ()
