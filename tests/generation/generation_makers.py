"""A model that is a table, and tokenizers small enough to read."""

import json
from typing import Any, final

import torch

from penstock.tokenizers import Tokenizer, train_tokenizer

torch.set_num_threads(1)


@final
class TableCache:
    """Remembers tokens instead of keys."""

    def __init__(self, sequences: int, capacity: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(sequences)]
        self.capacity = capacity

    def truncate(self, sequence: int, length: int) -> None:
        assert 0 <= length <= len(self.tokens[sequence])
        del self.tokens[sequence][length:]


@final
class TableModel:
    """Logits after a sequence are a function of its last token and its length: rows of a table.

    `fed` counts the tokens of each `extend`, and `seen` what the cache held at each.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.vocab_size = table.shape[1]
        self.device = torch.device("cpu")
        self.fed: list[list[int]] = []
        self.seen: list[list[int]] = []

    def new_cache(self, sequences: int, capacity: int) -> Any:
        return TableCache(sequences, capacity)

    def extend(self, tokens: Any, lengths: Any, cache: Any, sequences: Any = None) -> torch.Tensor:
        chosen = range(len(cache.tokens)) if sequences is None else sequences.tolist()
        self.fed.append([length for length in lengths.tolist() if length])
        for row, slot in enumerate(chosen):
            if not lengths[row]:
                continue
            cache.tokens[slot] += tokens[row, : lengths[row]].tolist()
            assert len(cache.tokens[slot]) <= cache.capacity
            self.seen.append(list(cache.tokens[slot]))
        return self.table[[cache.tokens[slot][-1] if cache.tokens[slot] else 0 for slot in chosen]]


def byte_tokenizer(*controls: str) -> Tokenizer:
    """One id a byte: id = byte, then the control entries."""
    letters = _byte_letters()
    vocabulary = {letters[byte]: byte for byte in range(256)}
    added = [
        {"id": 256 + place, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for place, text in enumerate(controls)
    ]  # fmt: skip
    described = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": vocabulary, "merges": [],
        },
    }  # fmt: skip
    return Tokenizer("bytes", {"tokenizer.json": json.dumps(described).encode()})


def _byte_letters() -> list[str]:
    """GPT-2's letter of each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def successor_table(text: bytes, vocab: int, end: int) -> torch.Tensor:
    """Greedy writes `text` from its first byte on (each byte at most once), then `end`."""
    table = torch.zeros(vocab, vocab)
    for here, there in zip(text, [*text[1:], end], strict=True):
        table[here, there] = 10.0
    return table


__all__ = ["TableCache", "TableModel", "byte_tokenizer", "successor_table", "train_tokenizer"]
