"""How many rows fit? Rows of a pass are doubled until memory is full, with each checkpointing.

    python benchmarks/gpu/08_memory.py --output results

`estimate_gb`: what the library takes for the activations of that many rows; `peak_gb` less the
weights, gradients and optimizer state is what they are. On the CPU nothing is filled: two sizes.
"""

from pathlib import Path
from typing import Any

import torch

import penstock as ps
from common import Data, Figures, Report, folder, own_model, peak_gb, train
from penstock.learn.training.settings import TrainSettings


def estimate(model: Any, slots: int, **settings: Any) -> float | None:
    """What the library takes for activations, in GB; None: this version estimates otherwise."""
    try:
        from penstock.learn.training.computing import kept_bytes
    except ImportError:
        return None
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return kept_bytes(model, TrainSettings(**settings), dtype) * slots / 1e9


def rows(report: Report, data: Path, size: str, slots: int, count: int, **settings: Any) -> Figures:
    """Two steps of one pass with a number of rows."""
    model = own_model(report, size)
    fixed = 16 * sum(p.numel() for p in model.parameters()) / 1e9
    guess = estimate(model, slots * count, **settings)
    loader = ps.Loader(ps.Source(data), sequence_length=slots, rows_per_step=count)
    found = train(report, model, loader, steps=3, rows_per_pass=count, **settings)
    peak = peak_gb()
    return {
        "estimate_gb": guess,
        "activations_gb": peak - fixed if peak else None,
        "over_estimate": (peak - fixed) / guess if guess and peak else None,
        **found,
    }


def main() -> None:
    report = Report(__file__, __doc__)
    slots = 64 if report.toy else 8192
    with folder() as place:
        data = Data(place, 400 if report.toy else 12000, 20.0 if report.toy else 800.0)
        for size in ("125M",) if report.toy else ("125M", "1B"):
            for kind in ("none", "selective", "full"):
                count, fits = 1, True
                while fits and count <= (2 if report.toy else 64):
                    found = report.part(
                        f"{size}, {kind}, {count} rows",
                        rows,
                        report,
                        data.web,
                        size,
                        slots,
                        count,
                        activation_checkpointing=kind,
                    )
                    fits, count = bool(found), count * 2
    report.done()


if __name__ == "__main__":
    main()
