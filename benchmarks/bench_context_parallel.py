"""Ranks that share a row: how evenly `row.split` divides its attention, against zigzag, and what a
division costs.

Attention is counted in pairs of query and key, which is exact and the same everywhere: the time of
the most loaded rank over the mean is what context parallelism loses by waiting. Zigzag cuts a row
into two chunks for each rank and gives rank i the chunks i and 2n − 1 − i, as torch's
`context_parallel` does by default. That is even for one document a row. Lengths are lognormal. Each
line: rows; most loaded over mean by `split` (median, worst); the same by zigzag.

    python benchmarks/bench_context_parallel.py [--rows 30]
"""

import statistics
from time import process_time

import numpy as np

import penstock as ps
from common import arguments, table
from penstock.plan.inputs import RowSlice

RANKS = (2, 4, 8)
ROWS = ((8192, 1000), (32768, 2000), (131072, 2000), (131072, 30000), (131072, None))
"""Slots of a row, and the mean length of its documents; None: one document."""


def lengths_of(random: np.random.Generator, slots: int, mean: int | None) -> np.ndarray:
    """Lengths of documents that fill a row."""
    if mean is None:
        return np.array([slots])
    drawn = np.clip(random.lognormal(np.log(mean) - 0.5, 1.0, slots // 8), 8, slots).astype(
        np.int64
    )
    ends = np.minimum(np.cumsum(drawn), slots)
    return np.diff(ends[: np.searchsorted(ends, slots) + 1], prepend=0)


def row_of(lengths: np.ndarray) -> ps.ModelInput:
    """A row of these documents, without padding."""
    documents = [np.zeros(length, np.int32) for length in lengths]
    return ps.inputs.pack_documents(documents, np.zeros(len(lengths), np.int32))[0]


def zigzag(lengths: np.ndarray, ranks: int) -> float:
    """Pairs of the most loaded rank over the mean."""
    seen = np.concatenate([np.arange(1, length + 1) for length in lengths])
    chunks = seen.reshape(2 * ranks, -1).sum(1)
    loads = chunks[:ranks] + chunks[: ranks - 1 : -1]
    return float(loads.max() / loads.mean())


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=30)
    given = parser.parse_args()
    random, lines = np.random.default_rng(0), []
    for slots, mean in ROWS:
        drawn = [lengths_of(random, slots, mean) for _ in range(given.rows)]
        rows = [row_of(lengths) for lengths in drawn]
        for ranks in RANKS:
            begun = process_time()
            parts = [RowSlice.of(row, 0, ranks) for row in rows]
            each = (process_time() - begun) / len(rows)
            ours = [float(part.loads.max() / part.loads.mean()) for part in parts]
            theirs = [zigzag(lengths, ranks) for lengths in drawn]
            what = (
                f"{slots:,} slots, {'one document' if mean is None else f'documents of {mean:,}'}"
            )
            lines.append(
                (
                    f"{what}, {ranks} ranks",
                    _ratio(ours),
                    f"zigzag {_ratio(theirs)}; {1e3 * each:.1f} ms a division",
                )
            )
    table(f"pairs of the most loaded rank over the mean, {given.rows} rows", lines)


def _ratio(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f}, worst {max(ratios):.3f}"


if __name__ == "__main__":
    main()
