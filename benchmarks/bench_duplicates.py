"""Duplicates: what hashing adds to a preparation, and time and memory of the search among all
hashes. CPU time.

The search runs on made hashes, sorted in parts as preparations write them; a fifth are duplicates.
A plain set of the hashes in Python, the obvious way, is timed on the first million.

    python benchmarks/bench_duplicates.py [--documents N]
"""

import tempfile
from pathlib import Path

import numpy as np

import penstock as ps
from common import arguments, cpu_seconds, standard_library, table
from penstock.core.system import peak_memory_bytes
from penstock.data.prepare.duplicates import find_duplicates
from penstock.data.prepare.hashes import HASH

PART = 100_000
TEXT_BYTES = 8 << 20


def make_parts(documents: int) -> list[np.ndarray]:
    """Hashes of parts, of which a fifth are those of the first part."""
    random, parts = np.random.default_rng(0), []
    for _ in range(max(documents // PART, 1)):
        rows = np.zeros(PART, HASH)
        rows["high"], rows["low"] = random.integers(0, 2**64, (2, PART), dtype=np.uint64)
        if parts:
            rows[["high", "low"]][: PART // 5] = parts[0][["high", "low"]][: PART // 5]
        rows["document"] = np.arange(PART)
        parts.append(rows[np.lexsort((rows["document"], rows["low"], rows["high"]))])
    return parts


def slow_search(rows: np.ndarray) -> int:
    """Duplicates by a set."""
    seen, again = set(), 0
    for one in zip(rows["high"].tolist(), rows["low"].tolist(), strict=True):
        again += one in seen
        seen.add(one)
    return again


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--documents", type=int, default=8_000_000, help="hashes to search")
    given = parser.parse_args()
    parts = make_parts(given.documents)
    count = sum(map(len, parts))
    before, found = peak_memory_bytes(), [0]
    search = cpu_seconds(lambda: found.__setitem__(0, sum(map(len, find_duplicates(parts)))))
    memory = peak_memory_bytes() - before
    first = np.concatenate(parts[:10])
    by_set = cpu_seconds(lambda: slow_search(first))
    rows = [
        (
            "search, documents a second",
            f"{count / search:,.0f}",
            f"{count:,} documents, {found[0]:,} dropped",
        ),
        (
            "a set in Python, documents a second",
            f"{len(first) / by_set:,.0f}",
            f"{len(first):,} documents",
        ),
        (
            "memory of the search",
            f"{memory / 1e6:,.0f} MB",
            "on top of the hashes, which are mapped files",
        ),
    ]
    texts = standard_library(TEXT_BYTES)
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = ps.train_tokenizer(
            texts[:200], vocab_size=8000, output=Path(folder) / "t", progress=False
        )
        for drop in (False, True, False, True):
            output, options = (
                Path(folder) / f"{drop}",
                {"processes": 1, "progress": False, "overwrite": True},
            )
            seconds[drop] = cpu_seconds(
                lambda output=output, options=options, drop=drop: ps.prepare(
                    iter(texts), tokenizer=tokenizer, output=output, drop_duplicates=drop, **options
                )
            )
    rows.append(
        (
            "prepare with it, times as long",
            f"{seconds[True] / seconds[False]:.2f}",
            f"{len(texts):,} files of Python",
        )
    )
    table("duplicates", rows)


if __name__ == "__main__":
    main()
