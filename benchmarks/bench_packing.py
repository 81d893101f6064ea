"""Packing: documents a second, padding, and how steady a step's shares are. One core, CPU time, lognormal lengths.

    python benchmarks/bench_packing.py [--peers PYTHON]     # a Python with trl

TRL's figure includes gathering the tokens of its rows, which its packing always does; ours is the assignment alone,
so its bare algorithm (`trl.data_utils` has none to call) would be nearer. The reference measured 34 to 49 thousand
documents a second for TRL's whole call.
"""

import tempfile
from pathlib import Path

import numpy as np

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


def main() -> None:
    flags = arguments(__doc__).parse_args()
    lengths = lognormal_lengths(400_000)
    rivals = {name: lambda p=name: cpu_seconds(lambda: pack(lengths, SLOTS, p)) for name in PACKINGS}
    few = lengths[:20_000]
    peer = None
    with tempfile.TemporaryDirectory() as folder:
        if flags.peers:
            np.save(Path(folder) / "lengths.npy", few)
            rivals["trl"] = peer = Peer(flags.peers, "trl_bfd.py", f"{folder}/lengths.npy", str(SLOTS))
        seconds = take_turns(rivals, flags.repeats)
    rate = {name: len(few if name == "trl" else lengths) / spent for name, spent in seconds.items()}
    rows = []
    for name in PACKINGS:
        _, used = pack(lengths, SLOTS, name)
        rows.append(
            (name, f"{rate[name] / 1e6:.1f} M/s", f"padding {100 * (1 - lengths.sum() / (used * SLOTS)):.3f} %")
        )
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
        rows.append(("best_fit_decreasing / trl", f"{rate['best_fit_decreasing'] / rate['trl']:.0f}", "due: ≥ 100"))
    table(f"packing into rows of {SLOTS}, documents a second", rows)


if __name__ == "__main__":
    main()
