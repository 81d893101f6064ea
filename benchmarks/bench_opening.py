"""Time to the first rows of a new process, and its private memory: 100 thousand documents against
100 million.

The large dataset is one shard of 102,400 short documents under 976 names (hard links), with lengths
and batch table as long as they would be; so planning and filling touch as many places as with real
data. Warm: files are in the page cache. Memory is what the process owns (anonymous pages); pages of
mapped files are the page cache's, and the kernel maps many around each that is touched. Figures are
medians; imports are not counted.

    python benchmarks/bench_opening.py [--documents 100000000]
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from common import arguments, table

SMALL = 102_400

CHILD = """
import json, sys, time
from itertools import islice
import penstock as ps
from penstock import Loader

def private_megabytes():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["RssAnon"].split()[0]) / 1024

need = ps.InputRequirements(positions=True, document_ids=True, cu_seqlens=True)
begun = time.perf_counter()
loader = ps.Loader(sys.argv[1], sequence_length=4096, rows_per_step=8, seed=1, threads=0, requirements=need)
step = next(iter(loader))
print(json.dumps({"seconds": time.perf_counter() - begun, "megabytes": private_megabytes(), "rows": len(step)}))
"""  # noqa: E501


def repeated(folder: Path, target: Path, copies: int, ranged: bool = True) -> None:
    """A dataset of `copies` times the documents of a dataset of one shard, by links; `ranged`: as
    new ones are made.
    """
    import penstock as ps
    from penstock.data.shards.format.manifest import LENGTHS, RANGE_CHECKSUMS, add_histograms
    from penstock.data.shards.tables.lengths import RANGE_DOCUMENTS, range_checksums
    from penstock.data.shards.writing.finish import LAZY_DOCUMENTS
    from penstock.data.stores.files import checksum, map_file

    manifest = ps.open_dataset(folder).manifest
    (shard,) = manifest.shards
    target.mkdir(parents=True)
    names = [f"{number:05}.arrow" for number in range(copies)]
    for name in names:
        os.link(folder / shard.file, target / name)
    for path in folder.iterdir():
        if path.name not in (shard.file, "manifest.json"):
            with (target / path.name).open("wb") as file:
                for _ in range(copies if path.name in ("lengths.u32", "batches.u64") else 1):
                    file.write(path.read_bytes())
    shards = tuple(replace(shard, file=name) for name in names)
    tables = list(manifest.checksums)
    if ranged and manifest.documents * copies > LAZY_DOCUMENTS:
        range_checksums([map_file(target / LENGTHS)], RANGE_DOCUMENTS).tofile(
            target / RANGE_CHECKSUMS
        )
        tables.append(RANGE_CHECKSUMS)
    replace(
        manifest,
        documents=manifest.documents * copies,
        tokens=manifest.tokens * copies,
        trained_tokens=manifest.trained_tokens * copies,
        text_bytes=manifest.text_bytes * copies,
        shards=shards,
        histogram=add_histograms(shards),
        checksums={name: checksum(map_file(target / name)) for name in tables},
    ).save(target)


def grow(folder: Path, copies: int) -> None:
    """A dataset of `copies` times the documents of one shard of short documents."""
    import penstock as ps

    lengths = np.random.default_rng(0).integers(2, 40, SMALL)
    ps.write_dataset(folder / "one", [np.arange(length) for length in lengths], vocab_size=50)
    repeated(folder / "one", folder / "all", copies)


def first_rows(folder: Path) -> dict[str, float]:
    found = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder)], capture_output=True, text=True, check=True
    )
    return dict(json.loads(found.stdout))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--documents", type=int, default=100_000_000)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        copies = {"small": 1, "large": flags.documents // SMALL}
        runs: dict[str, list[dict[str, float]]] = {}
        for label, number in copies.items():
            grow(Path(name) / label, number)
        for turn in range(flags.repeats + 1):
            for label in copies:
                found = first_rows(Path(name) / label / "all")
                if turn:
                    runs.setdefault(label, []).append(found)
    seconds, memory = (
        {label: statistics.median(run[key] for run in found) for label, found in runs.items()}
        for key in ("seconds", "megabytes")
    )
    more = memory["large"] - memory["small"]
    table(
        f"first rows, {SMALL:,} and {copies['large'] * SMALL:,} documents",
        [
            ("small", f"{seconds['small'] * 1e3:.0f} ms", f"{memory['small']:.0f} MB private"),
            ("large", f"{seconds['large'] * 1e3:.0f} ms", f"{memory['large']:.0f} MB private"),
            ("large / small", f"{seconds['large'] / seconds['small']:.2f}", "due: ≤ 1.5"),
            ("private memory more", f"{more:.0f} MB", "due: ≤ 50"),
        ],
    )


if __name__ == "__main__":
    main()
