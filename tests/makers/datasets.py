"""Small datasets."""

from typing import Any

import numpy as np

from penstock import prepare
from penstock.data.reports import PrepareReport
from penstock.data.shards import TokenizerInfo
from penstock.data.stores.unit_record import UnitRecord


def random_documents(
    count: int, shortest: int, longest: int, *, below: int = 900, seed: int = 0
) -> list[np.ndarray]:
    """Documents of random ids below a bound, of at least `shortest` and less than `longest`
    tokens.
    """
    generator = np.random.default_rng(seed)
    return [
        generator.integers(0, below, length)
        for length in generator.integers(shortest, longest, count)
    ]


def tokenizer_info(name: str = "t", **fields: Any) -> TokenizerInfo:
    """What a dataset says of its tokenizer."""
    return TokenizerInfo(**{"name": name, "fingerprint": name, "vocab_size": 1000, **fields})


def prepare_here(source: Any, tokenizer: Any, output: Any, **options: Any) -> PrepareReport:
    """The report of `prepare` in this process, without a progress bar."""
    return prepare(
        source, tokenizer=tokenizer, output=output, **{"processes": 1, "progress": False, **options}
    ).report


def unit_record(holder: Any) -> UnitRecord:
    """The record of the units of a remote dataset, opened as by another process."""
    return UnitRecord(holder.folder, len(holder.units))
