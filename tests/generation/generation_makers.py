"""A model that is a table."""

from typing import Any, final

import torch

from penstock.models.facts import ModelFacts

torch.set_num_threads(1)


@final
class TableCache:
    """Remembers tokens instead of keys."""

    def __init__(self, sequences: int, capacity: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(sequences)]
        self.capacity = capacity

    def kept(self, sequence: int, length: int) -> int:
        return length

    def lack(self, growing: dict[int, int]) -> str:
        return ""

    def truncate(self, sequence: int, length: int) -> None:
        assert 0 <= length <= len(self.tokens[sequence])
        del self.tokens[sequence][length:]

    def copy(self, source: int, target: int, length: int) -> None:
        assert 0 <= length <= len(self.tokens[source])
        self.tokens[target] = self.tokens[source][:length]


@final
class TableModel:
    """Logits after a sequence are a function of its last token and its length: rows of a table.

    `fed` counts the tokens of each `extend`, and `seen` what the cache held at each.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.vocab_size = table.shape[1]
        self.facts = ModelFacts()
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


def successor_table(text: bytes, vocab: int, end: int) -> torch.Tensor:
    """Greedy writes `text` from its first byte on (each byte at most once), then `end`."""
    table = torch.zeros(vocab, vocab)
    for here, there in zip(text, [*text[1:], end], strict=True):
        table[here, there] = 10.0
    return table
