"""Small datasets for the tests of shards."""

from pathlib import Path
from typing import Any

import numpy as np

from penstock import Dataset, write_dataset
from penstock.data.shards import TokenizerInfo

VOCAB = 1000
TOKENIZER = TokenizerInfo(name="tiny", fingerprint="abc", vocab_size=VOCAB, bos_id=None, eos_id=0)


def make_documents(count: int, seed: int = 0, longest: int = 600) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, VOCAB, length).astype(np.uint32)
        for length in rng.integers(0, longest, count)
    ]


def make_spans(documents: list[np.ndarray]) -> list[list[tuple[int, int, float]] | None]:
    """In turn: none given, an empty list, one span, two spans with other weights."""
    kinds: list[Any] = [None, [], [(1, 3, 1.0)], [(0, 2, 1.0), (4, 9, 0.5)]]
    return [
        kinds[i % 4] if len(document) >= 9 or i % 4 < 2 else None
        for i, document in enumerate(documents)
    ]


def make_dataset(
    folder: Path, count: int = 40, *, spans: bool = True, longest: int = 600, **options: Any
) -> Dataset:
    documents = make_documents(count, longest=longest)
    return write_dataset(
        folder,
        documents,
        spans=make_spans(documents) if spans else None,
        tokenizer=TOKENIZER,
        **options,
    )


def slow_weights(num_tokens: int, spans: list[tuple[int, int, float]] | None) -> np.ndarray:
    weights = np.ones(num_tokens, np.float32) if spans is None else np.zeros(num_tokens, np.float32)
    for begin, end, weight in spans or []:
        weights[begin:end] = weight
    return weights
