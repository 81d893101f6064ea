"""One rank of a very large run, with synthetic tables: opening, planning, memory, state; and who
fetches what.

    python benchmarks/bench_scale.py [--documents 1000000000] [--sources 100] [--ranks 1024]
    [--nodes 128]

Sources of documents of lognormal lengths (mean 775 tokens), whose tables are as long as real ones;
the shards are one shard under many names (hard links), because planning reads no shard. A process
of its own opens a loader as rank 0 and plans steps of 8 rows of 4,096 tokens a rank. Warm: the
tables are in the page cache, if they fit. "Memory" is what the process owns; pages of the mapped
tables belong to the page cache, once for all ranks of a node.

Then, by simulation of the plan (no files): documents of one source come in the order of each
shuffle; the rows of a step are spread over the nodes; counted is how many nodes need each run of
256 documents, and how many bytes each node would fetch if it fetched whole runs, or only its
documents.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench_opening import repeated
from common import arguments, lognormal_lengths, table

SHARD = 102_400
ROWS_A_RANK, SLOTS = 8, 4096

CHILD = """
import json, sys, time
from pathlib import Path
import penstock as ps
from penstock.plan.loader.plan import Plan
from penstock.plan.loader.step_planner import StepPlanner

folder, ranks, shuffle, slots, rows = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:6])

def private_megabytes():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["RssAnon"].split()[0]) / 1024

before, begun = private_megabytes(), time.perf_counter()
sources = [ps.Source(str(path), shuffle=shuffle) for path in sorted(folder.iterdir())]
loader = ps.Loader(ps.Mixture(sources), sequence_length=slots, rows_per_step=ranks * rows, data_parallel=(0, ranks),
                   threads=0)
opened = time.perf_counter() - begun
planner = StepPlanner(Plan(loader.mixture, loader.datasets, loader.settings), ranks)
begun = time.perf_counter()
planner.next()
first, seconds = time.perf_counter() - begun, []
for _ in range(int(sys.argv[6])):
    begun = time.perf_counter()
    step = planner.next()
    seconds.append(time.perf_counter() - begun)
state = loader.seek(20).state_dict()
print(json.dumps({
    "opened": opened, "first": first, "steps": seconds, "megabytes": private_megabytes() - before,
    "state": len(json.dumps(state)), "documents": len(step.pieces) if hasattr(step, "pieces") else 0,
}))
"""  # noqa: E501


def synthetic(folder: Path, documents: int, sources: int) -> None:
    """Datasets of `documents` documents together: one shard under many names."""
    import penstock as ps

    lengths = np.maximum(lognormal_lengths(SHARD), 2)
    tokens = np.arange(lengths.max()) % 50
    ps.write_dataset(folder / "one", [tokens[:length] for length in lengths], vocab_size=50)
    for number in range(sources):
        repeated(
            folder / "one",
            folder / "sources" / f"{number:03}",
            max(1, documents // sources // SHARD),
        )


def one_rank(folder: Path, ranks: int, shuffle: str, steps: int) -> dict[str, Any]:
    """What a process of its own measures."""
    command = [
        sys.executable,
        "-c",
        CHILD,
        str(folder),
        str(ranks),
        shuffle,
        str(SLOTS),
        str(ROWS_A_RANK),
        str(steps),
    ]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(found.stdout))


def fetching(shuffle: str, runs: int, nodes: int, ranks: int, documents: int) -> dict[str, float]:
    """How many nodes need each run of 256 documents, and how many bytes are fetched for each byte
    used.
    """
    from penstock.plan.sampling import Permutation

    order = Permutation(size=documents, key=1, shuffle=shuffle, shuffle_runs=runs).images()  # type: ignore[arg-type]
    lengths = lognormal_lengths(documents)
    # Rows of a step in the order of the plan; a rank has adjacent rows, a node adjacent ranks.
    row = np.cumsum(lengths[order]) // SLOTS
    node = row % (ranks * ROWS_A_RANK) // (ranks * ROWS_A_RANK // nodes)
    step = row // (ranks * ROWS_A_RANK)
    full = (step > step[-1] // 4) & (step < 3 * (step[-1] // 4))
    run = order // 256
    pairs = np.unique(run[full] * nodes + node[full])
    counted = np.bincount(pairs // nodes, minlength=documents // 256)
    complete = np.bincount(run[full], minlength=len(counted)) == np.bincount(
        run, minlength=len(counted)
    )
    of_run = np.bincount(run, lengths[order], minlength=len(counted))
    used = float((lengths[order] * full).sum())
    return {
        "nodes": float(counted[complete & (counted > 0)].mean())
        if (complete & (counted > 0)).any()
        else float("nan"),
        "runs": float((of_run * counted).sum()) / used,
        "requests": len(pairs) / float(full.sum()),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000_000)
    parser.add_argument("--sources", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50)
    flags = parser.parse_args()
    rows: list[tuple[str, str, str]] = []
    with tempfile.TemporaryDirectory() as name:
        begun = time.perf_counter()
        synthetic(Path(name), flags.documents, flags.sources)
        tables = sum(path.stat().st_size for path in Path(name).rglob("*.u*"))
        note = f"{tables / 1e9:.1f} GB of tables, made in {time.perf_counter() - begun:.0f} s"
        rows.append(("documents", f"{flags.documents:,}", note))
        for shuffle in ("full", "block"):
            one_rank(Path(name) / "sources", flags.ranks, shuffle, 1)
            found = one_rank(Path(name) / "sources", flags.ranks, shuffle, flags.steps)
            step = statistics.median(found["steps"])
            rows += [
                (
                    f"{shuffle}: open {flags.sources} sources",
                    f"{found['opened']:.2f} s",
                    "manifests, batch tables",
                ),
                (f"{shuffle}: first step planned", f"{1e3 * found['first']:.0f} ms", ""),
                (
                    f"{shuffle}: a step of {flags.ranks * ROWS_A_RANK:,} rows",
                    f"{1e3 * step:.1f} ms",
                    f"{flags.ranks * ROWS_A_RANK * SLOTS / step / 1e9:.1f} G tokens/s",
                ),
                (f"{shuffle}: memory", f"{found['megabytes']:.0f} MB", "of this process"),
                (f"{shuffle}: state", f"{found['state']:,} B", ""),
            ]
    table(f"one rank of {flags.ranks:,}, {flags.sources} sources", rows)
    lines = []
    for shuffle, runs in (("full", 512), ("block", 512), ("block", 4096)):
        found = fetching(shuffle, runs, flags.nodes, flags.ranks, 256 * 65_536)
        label = shuffle if shuffle == "full" else f"{shuffle}, windows of {runs} runs"
        lines += [
            (
                f"{label}: nodes that need a run",
                f"{found['nodes']:.0f}" if found["nodes"] > 0 else "-",
                f"of {flags.nodes}; - if no run is used up in the steps that are looked at",
            ),
            (f"{label}: bytes of whole runs / used", f"{found['runs']:.0f}", ""),
            (
                f"{label}: requests / document",
                f"{found['requests']:.2f}",
                "if each node fetches each run once",
            ),
        ]
    table(f"fetching, {flags.nodes} nodes, one source", lines)


if __name__ == "__main__":
    main()
