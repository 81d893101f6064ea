"""Small data and small models for the tests of the integrations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from makers.models import tiny_huggingface
from penstock import DataParallel, Loader, Mixture, Source, write_dataset

VOCABULARY = 64
LENGTH = 32


def make_dataset(folder: Path, documents: int = 200, seed: int = 0, spans: bool = False) -> Path:
    """Documents of 1 to 40 tokens that count upwards, so that there is something to learn; some
    with loss weights.
    """
    random = np.random.default_rng(seed)
    tokens = [
        (random.integers(VOCABULARY) + np.arange(random.integers(1, 41))) % VOCABULARY
        for _ in range(documents)
    ]
    weights: Sequence[Any] | None = None
    if spans:
        weights = [None if i % 3 else [(0, len(t) // 2 + 1, 0.5)] for i, t in enumerate(tokens)]
    write_dataset(folder, tokens, spans=weights, vocab_size=VOCABULARY)
    return folder


def make_loader(
    folder: Path,
    *,
    rows: int = 4,
    ranks: tuple[int, int] = (0, 1),
    max_epochs: float | None = None,
    **kwargs: Any,
) -> Loader:
    mixture = Mixture([Source(folder, max_epochs=max_epochs, name="data")])
    settings: dict[str, Any] = {
        "sequence_length": LENGTH,
        "rows_per_step": rows,
        "seed": 3,
        **kwargs,
    }
    return Loader(mixture, data_parallel=DataParallel(*ranks), **settings)


def make_model(kind: str = "llama", attention: str = "sdpa", seed: int = 0, **extra: Any) -> Any:
    """A causal language model of two small layers, with weights large enough that everything
    depends on something.
    """
    return tiny_huggingface(
        kind, std=0.1, seed=seed, attention=attention, vocab_size=VOCABULARY, **extra
    ).train()
