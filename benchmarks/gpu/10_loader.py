"""Does the GPU wait for data? Share of the time, with pinned memory and without, and CPU use.

    python benchmarks/gpu/10_loader.py --output results

`waiting`: share of training's time in which the next step was not there. `copied_ms`: from arrays
of a step to tensors on the device, by `step.torch`, from pageable memory; and by
`to(non_blocking=True)` from pinned memory.
"""

import time
from pathlib import Path
from typing import Any

import torch

import penstock as ps
from common import Data, Figures, Report, folder, own_model, seconds, train


def loader_of(report: Report, data: Path, **more: Any) -> Any:
    """Rows as in pretraining."""
    slots, rows = (64, 2) if report.toy else (8192, 8)
    return ps.Loader(ps.Source(data), sequence_length=slots, rows_per_step=rows, **more)


def waiting(report: Report, data: Path, **more: Any) -> Figures:
    """Train, and look how long it waits."""
    begun, cpu = time.monotonic(), time.process_time()
    found = train(
        report,
        own_model(report),
        loader_of(report, data, **more),
        steps=3 if report.toy else 20,
        deterministic=False,
    )
    return {"cpu_share": (time.process_time() - cpu) / (time.monotonic() - begun), **found}


def alone(report: Report, data: Path) -> Figures:
    """The loader without a consumer."""
    begun, cpu, tokens = time.perf_counter(), time.process_time(), 0
    for number, step in enumerate(loader_of(report, data)):
        tokens += step.num_tokens
        if number == (2 if report.toy else 40):
            break
    took = time.perf_counter() - begun
    return {"tokens_per_second": tokens / took, "cpu_share": (time.process_time() - cpu) / took}


def copies(report: Report, data: Path) -> Figures:
    """To the device."""
    step = next(iter(loader_of(report, data)))
    arrays = step.torch()
    tensors = [one for one in arrays.values() if isinstance(one, torch.Tensor)]
    repeats = 3 if report.toy else 20
    found = {
        "bytes": sum(one.nbytes for one in tensors),
        "pageable_ms": 1e3 * seconds(lambda: [one.to(report.device) for one in tensors], repeats),
    }
    if report.device.type == "cuda":
        pinned = [one.pin_memory() for one in tensors]
        found["pinned_ms"] = 1e3 * seconds(
            lambda: [one.to(report.device, non_blocking=True) for one in pinned], repeats
        )
    return found


def main() -> None:
    report = Report(__file__, __doc__)
    with folder() as place:
        data = Data(place, 400 if report.toy else 12000, 20.0 if report.toy else 800.0)
        report.part("the loader alone", alone, report, data.web)
        for threads in (0, 1, 2):
            report.part(f"{threads} threads", waiting, report, data.web, threads=threads)
        report.part("copies", copies, report, data.web)
    report.done()


if __name__ == "__main__":
    main()
