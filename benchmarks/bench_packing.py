"""Packing: documents a second, padding, and how steady a step's shares are. One core, CPU time,
lognormal lengths.

Two tables. The first is the assignment alone: lengths in, the row of each document out. TRL's is
timed within its call, from its segment tree to where it takes the tokens. The second is the whole
work, documents of tokens in, packed rows of tokens with the lengths of their documents out, all of
it kept. TRL's call (`pack_dataset`, its defaults) goes from an Arrow column of int32 lists to
another. Against it:

- `pack` and Arrow's `take`, from the same column to the same layout;
- the loader, from a dataset on the disk (uint16, in memory after the first turn) to rows of tokens,
  targets and cumulative lengths in int32; it also shuffles, and compares checksums.

The tokens are 59 million, so that neither they nor the rows fit the last cache (32 MiB here).

    python benchmarks/bench_packing.py [--peers PYTHON]     # a Python with trl
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import penstock as ps
from common import Peer, against, arguments, cpu_seconds, lognormal_lengths, table, take_turns
from penstock.plan.packing import pack

SLOTS = 4096
DOCUMENTS = 80_000
PACKINGS = ("best_fit", "best_fit_decreasing", "next_fit")
IDS = 50_000


def spread(lengths: np.ndarray, packing: str) -> float:
    """Standard deviation of one source's share of a step of 64 rows."""
    mine = np.random.default_rng(1).random(len(lengths)) < 0.3
    row_of, rows = pack(lengths, SLOTS, packing)
    used, marked = np.bincount(row_of, lengths), np.bincount(row_of, lengths * mine, minlength=rows)
    whole = rows // 64 * 64
    return float(
        (marked[:whole].reshape(-1, 64).sum(1) / used[:whole].reshape(-1, 64).sum(1)).std()
    )


def packed_column(documents: pa.ListArray) -> pa.Table:
    """Packed rows of a column of documents, in TRL's layout: tokens, and the lengths of each row's
    documents.
    """
    lengths = pc.list_value_length(documents).to_numpy()
    row_of, rows = pack(lengths, SLOTS, "best_fit_decreasing")
    order = np.argsort(row_of, kind="stable")
    taken, used = (
        pc.take(documents, pa.array(order)),
        np.bincount(row_of, lengths, rows).astype(np.int64),
    )
    tokens = pa.ListArray.from_arrays(_edges(used), taken.values)
    counts = _edges(np.bincount(row_of, minlength=rows))
    return pa.table(
        {
            "input_ids": tokens,
            "seq_lengths": pa.ListArray.from_arrays(counts, pa.array(lengths[order])),
        }
    )


def _edges(sizes: np.ndarray) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(sizes)]), pa.int32())


def loaded_rows(dataset: ps.Dataset) -> list[Any]:
    """All rows of one epoch, in steps of 64."""
    need = ps.InputRequirements(cu_seqlens=True)
    source = ps.Source(dataset, max_epochs=1)
    loader = ps.Loader(
        source,
        sequence_length=SLOTS,
        rows_per_step=64,
        packing="best_fit_decreasing",
        threads=0,
        requirements=need,
    )
    return [step.arrays() for step in loader]


def measure_assignment(repeats: int) -> dict[str, float]:
    """Print padding, shares and documents a second of the assignment; returns the rates."""
    lengths = lognormal_lengths(400_000)
    rivals = {
        name: lambda p=name: cpu_seconds(lambda: pack(lengths, SLOTS, p)) for name in PACKINGS
    }
    rate = {name: len(lengths) / spent for name, spent in take_turns(rivals, repeats).items()}
    rows = []
    for name in PACKINGS:
        _, used = pack(lengths, SLOTS, name)
        rows.append(
            (
                name,
                f"{rate[name] / 1e6:.1f} M/s",
                f"padding {100 * (1 - lengths.sum() / (used * SLOTS)):.3f} %",
            )
        )
    ratio = spread(lengths, "best_fit") / spread(lengths, "next_fit")
    rows.append(("share spread, best_fit / next_fit", f"{ratio:.2f}", "target: ≤ 1.2"))
    table(f"assignment to rows of {SLOTS}: lengths in, row numbers out, documents a second", rows)
    return rate


def main() -> None:
    flags = arguments(__doc__).parse_args()
    rate = measure_assignment(flags.repeats)
    lengths = lognormal_lengths(DOCUMENTS)
    tokens = np.random.default_rng(2).integers(0, IDS, lengths.sum()).astype(np.uint16)
    column = pa.ListArray.from_arrays(_edges(lengths), pa.array(tokens.astype(np.int32)))
    with tempfile.TemporaryDirectory() as folder:
        dataset = ps.write_dataset(
            Path(folder, "data"), np.split(tokens, np.cumsum(lengths)[:-1]), vocab_size=IDS
        )
        rivals = {
            "pack and Arrow's take": lambda: cpu_seconds(lambda: packed_column(column)),
            "the loader": lambda: cpu_seconds(lambda: loaded_rows(dataset)),
        }
        peer = None
        if flags.peers:
            np.save(Path(folder, "tokens.npy"), tokens)
            np.save(Path(folder, "lengths.npy"), lengths)
            rivals["trl's pack_dataset"] = peer = Peer(
                flags.peers,
                "trl_bfd.py",
                f"{folder}/tokens.npy",
                f"{folder}/lengths.npy",
                str(SLOTS),
            )
        seconds = take_turns(rivals, flags.repeats)
        slots = {
            "pack and Arrow's take": SLOTS * len(packed_column(column)),
            "the loader": sum(step["tokens"].size for step in loaded_rows(dataset)),
        }
    rows = [
        (
            name,
            f"{DOCUMENTS / spent / 1e3:,.0f} k/s",
            f"{lengths.sum() / spent / 1e6:,.0f} M tokens/s"
            + (
                f", padding {100 * (1 - lengths.sum() / slots[name]):.2f} %"
                if name in slots
                else ""
            ),
        )
        for name, spent in seconds.items()
    ]
    if peer is not None:
        whole = seconds["trl's pack_dataset"]
        padding = 100 * (1 - lengths.sum() / (peer.last["rows"] * SLOTS))
        rows[-1] = (*rows[-1][:2], f"{rows[-1][2]}, padding {padding:.2f} %")
        for name, spent in list(seconds.items())[:-1]:
            rows.append((f"{name} / trl", f"{whole / spent:.1f}", ""))
            against(
                "Data",
                f"documents in, packed rows out, {name}",
                "TRL's pack_dataset",
                ours=spent,
                theirs=whole,
            )
        assigned = DOCUMENTS / peer.last["assigned"]
        rows.append(("trl's assignment alone", f"{assigned / 1e3:,.0f} k/s", ""))
        rows.append(
            (
                "best_fit_decreasing / trl, assignment",
                f"{rate['best_fit_decreasing'] / assigned:.0f}",
                "",
            )
        )
    table(
        f"documents of tokens ({lengths.sum() / 1e6:.0f} M) in, packed rows and lengths out, "
        "documents a second",
        rows,
    )


if __name__ == "__main__":
    main()
