"""Packing: documents a second, padding, and how steady a step's shares are. One core, CPU time, lognormal lengths.

    python benchmarks/bench_packing.py [--peers PYTHON]     # a Python with trl

`pack`: which row each of 400,000 documents goes to, from lengths alone. `rows of tokens`: from 50,000 documents of ids
(39 million, int64 in TRL's table, 310 MB) to rows of tokens with the lengths of their documents, which is what TRL's
`pack_dataset` does with a table in memory. Ours is the loader over a dataset on disk (page cache), in the order of its
shuffle, checksums checked; it makes targets as well, which TRL's trainer makes later.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

import penstock as ps
from common import Peer, arguments, cpu_seconds, lognormal_lengths, table, take_turns
from penstock.packing import pack

SLOTS = 4096
PACKINGS = ("best_fit", "best_fit_decreasing", "next_fit")


def spread(lengths: np.ndarray, packing: str) -> float:
    """Standard deviation of one source's share of a step of 64 rows."""
    mine = np.random.default_rng(1).random(len(lengths)) < 0.3
    row_of, rows = pack(lengths, SLOTS, packing)
    used, marked = np.bincount(row_of, lengths), np.bincount(row_of, lengths * mine, minlength=rows)
    whole = rows // 64 * 64
    return float((marked[:whole].reshape(-1, 64).sum(1) / used[:whole].reshape(-1, 64).sum(1)).std())


def rows_of_tokens(dataset: ps.Dataset, packing: str) -> Callable[[], None]:
    """Work that makes all rows of one epoch."""
    need = ps.InputRequirements(cu_seqlens=True, dtype="int64")

    def work() -> None:
        source = ps.Source(dataset, max_epochs=1)
        loader = ps.Loader(
            source, sequence_length=SLOTS, rows_per_step=64, packing=packing, requirements=need, threads=0
        )
        for step in loader:
            step.arrays()

    return work


def main() -> None:
    flags = arguments(__doc__).parse_args()
    lengths = lognormal_lengths(400_000)
    rivals = {name: lambda p=name: cpu_seconds(lambda: pack(lengths, SLOTS, p)) for name in PACKINGS}
    few = lengths[:50_000]
    peer = None
    with tempfile.TemporaryDirectory() as folder:
        numbers = np.random.default_rng(0)
        dataset = ps.write_dataset(
            Path(folder) / "data", (numbers.integers(0, 50_000, n, np.uint16) for n in few), vocab_size=50_000
        )
        for name in PACKINGS[:2]:
            work = rows_of_tokens(dataset, name)
            rivals[f"rows of tokens, {name}"] = lambda work=work: cpu_seconds(work)
        if flags.peers:
            np.save(Path(folder) / "lengths.npy", few)
            rivals["trl"] = peer = Peer(flags.peers, "trl_bfd.py", f"{folder}/lengths.npy", str(SLOTS))
        seconds = take_turns(rivals, flags.repeats)
    rate = {name: len(lengths if name in PACKINGS else few) / spent for name, spent in seconds.items()}
    rows = []
    for name in PACKINGS:
        _, used = pack(lengths, SLOTS, name)
        rows.append(
            (name, f"{rate[name] / 1e6:.1f} M/s", f"padding {100 * (1 - lengths.sum() / (used * SLOTS)):.3f} %")
        )
    rows += [(name, f"{value / 1e6:.2f} M/s", "") for name, value in rate.items() if name.startswith("rows of")]
    rows.append(
        (
            "share spread, best_fit / next_fit",
            f"{spread(lengths, 'best_fit') / spread(lengths, 'next_fit'):.2f}",
            "due: ≤ 1.2",
        )
    )
    if peer is not None:
        padding = 1 - few.sum() / (peer.last["rows"] * SLOTS)
        rows.append(("trl bfd", f"{rate['trl'] / 1e3:.1f} k/s", f"padding {100 * padding:.3f} %"))
        for name in rate:
            if name.startswith("rows of"):
                rows.append((f"{name} / trl", f"{rate[name] / rate['trl']:.1f}", "the same work"))
    table(f"packing into rows of {SLOTS}, documents a second", rows)


if __name__ == "__main__":
    main()
