"""How many graphs does compiling make? Recompilations and breaks over 50 different rows, by kind.

    python benchmarks/gpu/03_graphs.py --output results

Wanted: at most two graphs a kind of block, no break, and no limit that is hit. With inductor; in a
toy run by torch's backend `eager`, which traces the same and generates nothing.
"""

import functools
import time
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

import penstock as ps
from common import Data, Figures, Report, folder, own_model, their_model, train
from penstock.models.settings import BlockSettings

KINDS = ("llama", "qwen3", "gemma3_text", "mixtral", "qwen3_moe")
"""Models of transformers."""


def graphs(report: Report, model: Any, data: Path) -> Figures:
    """Graphs, breaks, and steps a second before and after compiling."""
    torch._dynamo.reset()
    counters.clear()
    rows = 8 if report.toy else 50
    loader = ps.Loader(ps.Source(data), sequence_length=64 if report.toy else 4096, rows_per_step=1)
    begun = time.monotonic()
    found = train(report, model, loader, steps=rows, compile=True)
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "whole_seconds": time.monotonic() - begun,
        **found,
        "reasons": dict(counters["graph_break"].most_common(5)),
        "frames": dict(counters["frames"]),
        "unimplemented": dict(counters["unimplemented"].most_common(5)),
    }


def main() -> None:
    report = Report(__file__, __doc__)
    if report.toy:
        plain = torch.nn.Module.compile
        torch.nn.Module.compile = functools.partialmethod(plain, backend="eager")  # type: ignore[method-assign,assignment]
    own: dict[str, dict[str, Any]] = {
        "ours": {},
        "ours, grouped heads": {"kv_heads": 1},
        "ours, mixed windows": {
            "blocks": {"local": BlockSettings(sliding_window=16), "global": BlockSettings()},
            "pattern": ("local", "global"),
        },
        "ours, hybrid": {
            "blocks": {"delta": BlockSettings(mixer="gated_delta"), "full": BlockSettings()},
            "pattern": ("delta", "full"),
        },
        "ours, experts": {
            "blocks": {"sparse": BlockSettings(experts=4, balance=0.01)},
            "pattern": ("sparse",),
        },
    }
    with folder() as where:
        data = Data(where, 400 if report.toy else 4000, 20.0 if report.toy else 600.0)
        for name, made in own.items():
            report.part(name, lambda made=made: graphs(report, own_model(report, **made), data.web))
        for kind in KINDS:
            report.part(
                kind,
                lambda kind=kind: graphs(
                    report, f"hf:{their_model(report, where, kind)}", data.web
                ),
            )
    report.done()


if __name__ == "__main__":
    main()
