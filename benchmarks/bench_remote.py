"""A dataset in an object store against the same on the disk, over a line of stated latency and rate.

The store is a server with S3's protocol on the loopback interface (`tests/makers/object_store.py`), in a process of its
own. Every request takes `--latency` seconds, and all bodies together `--rate` bytes a second. Documents have lognormal
lengths (mean 500 tokens, two bytes each); steps are 8 rows of 4,096 tokens; one epoch with shuffle `block`.

Printed: round trips to the tables and to the first step; the share of the line's rate while an epoch is read with an
empty cache; the time of that epoch against the local one, where the line is not the limit; the time to resume in the
middle with an empty cache; and bytes fetched over bytes used with a cache of a tenth of the data.

Then a dataset of `--documents` documents (one shard under many names): requests, bytes and seconds to the tables and to
the first step, and trips, the most requests that had to wait for one another; with the lengths in ranges, and as a
whole, as datasets without checksums of ranges have them. Last, resumed in the middle.

    python benchmarks/bench_remote.py [--megabytes 60] [--peers PYTHON]   # a Python with mosaicml-streaming

With `--peers`, MosaicML streaming reads rows of 4,097 tokens of the same tokens over the same line.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

import penstock as ps
from bench_opening import repeated
from common import Peer, arguments, lognormal_lengths, table
from penstock.shards.residency import THREADS

SERVER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from makers.object_store import ObjectStore
store = ObjectStore(Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]) or None)
begin, waits = store.begin, []

def noted(*request):
    came, found = time.monotonic(), begin(*request)
    waits.append((time.monotonic(), came))
    return found

store.begin = noted
print(store.endpoint, flush=True)
for line in sys.stdin:
    trips, last, until = 0, 0.0, float(line)
    for went, came in sorted(waits):
        if came >= last and went <= until:
            trips, last = trips + 1, went
    print(len(store.log), store.bytes, trips, flush=True)
    store.forget()
    waits.clear()
"""
SETTINGS: dict[str, Any] = {"sequence_length": 4096, "rows_per_step": 8, "seed": 1, "window_rows": 64}


class Server:
    """A store in a process of its own."""

    def __init__(self, folder: Path, latency: float, rate: float) -> None:
        tests = Path(__file__).parents[1] / "tests"
        words = [sys.executable, "-c", SERVER, str(tests), str(folder), str(latency), str(rate)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.endpoint = self.process.stdout.readline().strip()

    def figures(self, until: float = float("inf")) -> tuple[int, int, int]:
        """Requests and bytes since the last call; of those up to a time, how many waited for one another at most."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{until}\n")
        self.process.stdin.flush()
        requests, size, trips = map(int, self.process.stdout.readline().split())
        return requests, size, trips


@contextmanager
def serve(folder: Path, latency: float, rate: float) -> Iterator[Server]:
    """Run a store that is the S3 of this process."""
    import s3fs

    server = Server(folder, latency, rate)
    os.environ |= {
        "AWS_ENDPOINT_URL": server.endpoint, "AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def make_data(folder: Path, megabytes: float) -> ps.Dataset:
    """Documents of random tokens; runs of 12,288 a shard."""
    lengths = lognormal_lengths(max(int(megabytes * 1e6 / 1000), 2000), mean=500.0)
    tokens = np.random.default_rng(0).integers(0, 50_000, int(lengths.sum()), dtype=np.uint32)
    documents = np.split(tokens, np.cumsum(lengths)[:-1])
    return ps.write_dataset(folder, documents, documents_per_shard=12_288)


def source(path: Any, runs: int) -> ps.Source:
    return ps.Source(path, name="web", shuffle="block", shuffle_runs=runs, max_epochs=1)


def epoch(loader: ps.Loader) -> tuple[float, int]:
    """Seconds of an iteration, and tokens of its rows."""
    begun, tokens = time.monotonic(), 0
    for step in loader:
        tokens += step.num_tokens
    return time.monotonic() - begun, tokens


def first_step(loader: ps.Loader) -> float:
    begun = time.monotonic()
    next(iter(loader))
    return time.monotonic() - begun


def bare_reads(dataset: ps.Dataset, requests: int, size: int) -> float:
    """Seconds of s3fs for so many ranges of so many bytes together, by as many threads as ours."""
    files, each = fsspec.filesystem("s3"), size // requests
    shards = [(f"bucket/web/{shard.file}", shard.bytes) for shard in dataset.manifest.shards]
    ranges = [(name, begin) for name, whole in shards for begin in range(0, whole - each, each)][:requests]
    begun = time.monotonic()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda one: files.cat_file(one[0], start=one[1], end=one[1] + each), ranges))
    return (time.monotonic() - begun) * requests / len(ranges)


def small(root: Path, given: Any) -> list[tuple[str, str, str]]:
    """What a dataset of some megabytes costs, up to an epoch."""
    rows: list[tuple[str, str, str]] = []
    local = make_data(root / "store" / "bucket" / "web", given.megabytes)
    size = sum(shard.bytes for shard in local.manifest.shards)
    whole, tokens = min(epoch(ps.Loader(source(local, given.runs), **SETTINGS)) for _ in range(2))
    rows.append(("local epoch", f"{tokens / whole / 1e6:.1f} M tok/s", f"{size / 1e6:.0f} MB of shards"))

    def cold(**options: Any) -> ps.Loader:
        cache = root / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        return ps.Loader(source("s3://bucket/web", given.runs), **SETTINGS, cache=cache, **options)

    with serve(root / "store", given.latency, given.rate) as server:
        # What a process does once: imports, clients, compiled kernels.
        fsspec.filesystem("s3").ls("bucket")
        first_step(cold())
        time.sleep(1.0)  # what was fetched ahead for it has come
        shutil.rmtree(root / "cache")
        server.figures()
        begun = time.monotonic()
        loader = cold()
        opened = time.monotonic() - begun
        requests, _, trips = server.figures()
        note = f"{requests} requests in {trips} trips, {opened:.2f} s"
        rows.append(("tables", f"{opened / given.latency:.1f} latencies", note))
        first = first_step(loader)
        rows.append(("first step after that", f"{first / given.latency:.1f} latencies", f"{first:.2f} s"))
        loader = cold()
        server.figures()
        spent, _ = epoch(loader)
        requests, fetched, _ = server.figures()
        share = fetched / spent / given.rate
        rows.append(("epoch, empty cache", f"{share:.2f} of the line", f"{requests} requests, {spent:.1f} s"))
        bare = bare_reads(local, requests, fetched)
        rows.append(
            ("the same requests by s3fs alone", f"{fetched / bare / given.rate:.2f} of the line", f"{bare:.1f} s")
        )
        middle = next(islice(ps.Loader(source(local, given.runs), **SETTINGS), tokens // 32768 // 2, None))
        loader = cold()
        loader.load_state_dict(middle.resume_state)
        rows.append(("resume in the middle, empty cache", f"{first_step(loader):.2f} s", "to the next step"))
        loader = cold(cache_bytes=max(size // 10, 1))
        spent, _ = epoch(loader)
        (traffic,) = loader.traffic.values()
        ratio = traffic.fetched_bytes / traffic.used_bytes
        rows.append(("cache of a tenth", f"{ratio:.3f} x", f"bytes fetched over used; {spent:.1f} s"))
        if given.peers:
            streaming = Peer(given.peers, "mosaicml_streaming.py", str(root / "store" / "bucket"), server.endpoint)
            seconds = streaming()
            rate = streaming.last["tokens"] / seconds
            rows.append(
                (
                    "MosaicML streaming, py1e",
                    f"{rate / 1e6:.1f} M tok/s",
                    f"first batch {streaming.last['first']:.2f} s",
                )
            )
    with serve(root / "store", 0.0, 0.0):
        spent, _ = epoch(cold())
        rows.append(("epoch, a line without limits", f"{whole / spent:.2f} of local", f"{spent:.1f} s, empty cache"))
        warm = ps.Loader(source("s3://bucket/web", given.runs), **SETTINGS, cache=root / "cache")
        spent, _ = epoch(warm)
        rows.append(("epoch, all of it here", f"{whole / spent:.2f} of local", f"{spent:.1f} s"))
    return rows


def large(root: Path, documents: int, latency: float, rate: float) -> list[tuple[str, str, str]]:
    """What a dataset of many documents costs up to its first step."""
    lengths = np.maximum(lognormal_lengths(102_400), 2)
    tokens = np.arange(lengths.max()) % 50
    ps.write_dataset(root / "one", [tokens[:length] for length in lengths], vocab_size=50)
    rows: list[tuple[str, str, str]] = []
    for name in ("ranges", "whole"):
        repeated(root / "one", root / "many" / "bucket" / name, max(documents // 102_400, 1), name == "ranges")

    def loader(name: str) -> ps.Loader:
        shutil.rmtree(root / "cache", ignore_errors=True)
        return ps.Loader(
            ps.Source(f"s3://bucket/{name}", name="web", shuffle="block"), **SETTINGS, cache=root / "cache"
        )

    for name in ("ranges", "whole"):
        with serve(root / "many", latency, rate) as server:
            fsspec.filesystem("s3").ls("bucket")
            server.figures()
            begun = time.monotonic()
            opened = loader(name)
            seconds = time.monotonic() - begun
            requests, size, trips = server.figures()
            note = f"{requests:,} requests in {trips} trips, {size / 1e6:,.1f} MB"
            rows.append((f"{name}: tables", f"{seconds:.2f} s", note))
            seconds = first_step(opened)
            requests, size, trips = server.figures(time.monotonic())
            note = f"{trips} trips; with those for steps ahead {requests:,} requests, {size / 1e6:,.1f} MB"
            rows.append((f"{name}: first step after that", f"{seconds:.2f} s", note))
            held = opened.datasets[0].path.parent.parent
            blocks = sum(512 * file.stat().st_blocks for file in held.rglob("*") if "lengths" in str(file))
            rows.append((f"{name}: lengths on the disk", f"{blocks / 1e6:,.1f} MB", ""))
    local = ps.Loader(ps.Source(root / "many" / "bucket" / "ranges", name="web", shuffle="block"), **SETTINGS)
    state = next(iter(local.seek(20_000))).resume_state
    with serve(root / "many", latency, rate) as server:
        resumed = loader("ranges")
        resumed.load_state_dict(state)
        rows.append(("ranges: resumed at step 20,000", f"{first_step(resumed):.2f} s", "to the next step, empty cache"))
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--megabytes", type=float, default=200.0, help="of the small dataset; 0: none")
    parser.add_argument("--latency", type=float, default=0.03, help="seconds of a request")
    parser.add_argument("--rate", type=float, default=50e6, help="bytes a second")
    parser.add_argument("--documents", type=int, default=100_000_000, help="of the large dataset; 0: none")
    parser.add_argument("--runs", type=int, default=16, help="runs of a window of the shuffle")
    given = parser.parse_args()
    rows: list[tuple[str, str, str]] = []
    with tempfile.TemporaryDirectory() as name:
        if given.megabytes:
            rows += small(Path(name), given)
        if given.documents:
            rows += large(Path(name), given.documents, given.latency, given.rate)
    table(f"A store with {given.latency * 1000:.0f} ms a request and {given.rate / 1e6:.0f} MB/s", rows)


if __name__ == "__main__":
    main()
