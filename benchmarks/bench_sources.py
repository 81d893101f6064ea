"""Many sources, and short documents: CPU time to open, and a step of 8 rows of 4,096 tokens.

The sources are one shard of documents of lognormal lengths (mean 775 tokens) under many names (hard
links). A step of many sources is compared with one of few with as many shards, so that both touch
as many pages; planning alone is next to it. Documents of short datasets have Poisson lengths. One
thread, arrays in int64, kernels compiled before; steps are timed once all windows are of full size.

    python benchmarks/bench_sources.py [--sources 5000] [--few 100]
"""

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

import penstock as ps
from bench_opening import repeated
from common import arguments, cpu_seconds, lognormal_lengths, table, take_turns

SLOTS, ROWS, STEPS, FIRST = 4096, 8, 128, 400
SHORT = (5, 20, 80)


def loader(data: object) -> ps.Loader:
    need = ps.InputRequirements(positions=True, document_ids=True, cu_seqlens=True, dtype="int64")
    return ps.Loader(
        data,  # type: ignore[arg-type]
        sequence_length=SLOTS,
        rows_per_step=ROWS,
        threads=0,
        requirements=need,
    )


def sources(folder: Path, number: int, copies: int) -> list[str]:
    """Paths of datasets with `copies` shards each, all of them one shard."""
    repeated(folder / "one", folder / f"one-{number}", copies)
    paths = [folder / f"{number}" / f"{i:05}" for i in range(number)]
    for path in paths:
        shutil.copytree(folder / f"one-{number}", path, copy_function=os.link)
    return [str(path) for path in paths]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sources", type=int, default=5000)
    parser.add_argument("--few", type=int, default=100)
    flags = parser.parse_args()
    rows: list[tuple[str, str, str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = np.maximum(lognormal_lengths(2000), 2)
        tokens = np.arange(lengths.max()) % 50
        ps.write_dataset(folder / "one", [tokens[:length] for length in lengths], vocab_size=50)
        rivals: dict[str, Callable[[], float]] = {}
        for number, copies in ((flags.few, flags.sources // flags.few), (flags.sources, 1)):
            paths = sources(folder, number, copies)
            made: list[ps.Loader] = []
            maps = len(Path("/proc/self/maps").read_bytes().splitlines())
            spent = cpu_seconds(lambda p=paths, m=made: m.append(loader(p)))  # type: ignore[misc]
            maps = len(Path("/proc/self/maps").read_bytes().splitlines()) - maps
            opened = made[0]
            rows.append((f"{number:,} sources: open", f"{spent:.2f} s", f"{maps:,} mappings"))
            steps = iter(opened)
            rows.append(
                (
                    f"{number:,}: first step",
                    f"{1e3 * cpu_seconds(lambda s=steps: next(s)):.0f} ms",
                    "",
                )
            )  # type: ignore[misc]
            for _ in itertools.islice(steps, FIRST):
                pass
            plan = loader(paths)._planner
            for _ in range(FIRST):
                plan.next()
            rivals[f"{number:,}: a step"] = lambda s=steps: cpu_seconds(  # type: ignore[misc]
                lambda: [next(s) for _ in range(STEPS)]
            )
            rivals[f"{number:,}: planning it"] = lambda p=plan: cpu_seconds(  # type: ignore[misc]
                lambda: [p.next() for _ in range(STEPS)]
            )
        for label, seconds in take_turns(rivals, flags.repeats).items():
            rows.append((label, f"{1e3 * seconds / STEPS:.3f} ms", ""))
        rivals = {}
        generator = np.random.default_rng(0)
        for mean in SHORT:
            lengths = np.maximum(generator.poisson(mean, 4_000_000 // mean), 1)
            ids = generator.integers(0, 50_000, lengths.sum()).astype(np.uint16)
            ps.write_dataset(
                folder / f"short-{mean}", np.split(ids, np.cumsum(lengths)[:-1]), vocab_size=50_000
            )
            steps = iter(loader(ps.open_dataset(folder / f"short-{mean}")))
            for _ in itertools.islice(steps, FIRST):
                pass
            rivals[f"documents of {mean} tokens: step.torch()"] = lambda s=steps: cpu_seconds(  # type: ignore[misc]
                lambda: [next(s).torch() for _ in range(STEPS)]
            )
        for label, seconds in take_turns(rivals, flags.repeats).items():
            speed = ROWS * SLOTS * STEPS / seconds
            rows.append((label, f"{1e3 * seconds / STEPS:.3f} ms", f"{speed / 1e6:.0f} M tokens/s"))
    table("many sources, short documents", rows)


if __name__ == "__main__":
    main()
