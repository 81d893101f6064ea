"""Where does the time go? Three steps of each size: idle share, launches a layer, top 20 kernels.

    python benchmarks/gpu/04_profile.py --output results

In a toy run the operators of the CPU stand for kernels.
"""

import time
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

import penstock as ps
from common import Data, Figures, Report, Watch, folder, own_model, train, wait

WARM, STEPS = 4, 3
"""Steps before those that are looked at, and these."""


def look(report: Report, data: Path, size: str, slots: int, **settings: Any) -> Figures:
    """Profile `STEPS` steps of one row each."""
    activities = [ProfilerActivity.CPU]
    if report.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    profiler, times = profile(activities=activities), [0.0, 0.0]

    def switch(step: int) -> None:
        if step == WARM:
            wait()
            profiler.start()
            times[0] = time.perf_counter()
        elif step == WARM + STEPS:
            wait()
            times[1] = time.perf_counter()
            profiler.stop()

    model = own_model(report, size)
    layers = model.settings.layers
    loader = ps.Loader(ps.Source(data), sequence_length=slots, rows_per_step=1)
    found = train(report, model, loader, steps=WARM + STEPS + 1, watch=Watch(switch), **settings)
    wall = times[1] - times[0]
    on_gpu = report.device.type == "cuda"
    kernels = [
        one
        for one in profiler.events()
        if (one.device_type.name == "CUDA") == on_gpu and (on_gpu or one.name.startswith("aten::"))
    ]
    spent: dict[str, list[float]] = {}
    for one in kernels:
        micro = float(one.time_range.elapsed_us() if on_gpu else one.self_cpu_time_total)
        spent.setdefault(one.name[:90], []).append(micro)
    busy = sum(map(sum, spent.values())) / 1e6
    top = sorted(spent.items(), key=lambda pair: -sum(pair[1]))[:20]
    return {
        "idle_share": 1 - busy / wall,
        "kernels_a_layer": len(kernels) / STEPS / layers,
        "wall_ms_a_step": 1e3 * wall / STEPS,
        "fills": sum(len(n) for name, n in spent.items() if "fill" in name.lower()) / STEPS,
        **found,
        "top": {name: [len(n) / STEPS, sum(n) / 1e3 / STEPS] for name, n in top},
    }


def main() -> None:
    report = Report(__file__, __doc__)
    lengths = (64, 128) if report.toy else (8192, 32768)
    with folder() as where:
        data = Data(where, 400 if report.toy else 3000, 20.0 if report.toy else 800.0)
        for size in ("125M", "1B"):
            for slots in lengths:
                for name, settings in (
                    ("", {}),
                    (", not deterministic", {"deterministic": False}),
                    (", compiled", {"compile": True, "deterministic": False}),
                ):
                    if report.toy and settings.get("compile"):
                        continue
                    big = size == "1B" and slots > 8192
                    more = {"activation_checkpointing": "full"} if big else {}
                    report.part(
                        f"{size}, {slots} slots{name}",
                        look,
                        report,
                        data.web,
                        size,
                        slots,
                        **settings,
                        **more,
                    )
    report.done()


if __name__ == "__main__":
    main()
