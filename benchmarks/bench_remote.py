"""A dataset in an object store against the same on the disk, and against other libraries that
stream from stores.

The store is a server with S3's protocol on the loopback interface (`tests/makers/object_store.py`),
in a process of its own on the same cores. Documents have lognormal lengths (mean 500 tokens, two
bytes each); rows have 4,096 tokens; one epoch. Epochs are whole: the arrays of each step are made,
and the tokens and targets in them are added up. Figures are medians of runs in turn; the first turn
is not counted.

Over a line on which every request takes `--latency` seconds, and all bodies together `--rate` bytes
a second: round trips to the tables and to the first step; the share of the line while an epoch is
read with an empty cache; the time to resume in the middle; and bytes fetched over bytes used with a
cache of a tenth of the data.

Over a line without limits: an epoch with an empty cache, and one with all of it here, over the
local epoch; the same over a local epoch whose pages the system had dropped; and requests for the
same bytes alone, one run at a time, with nothing done to them.

Then a dataset of `--documents` documents (one shard under many names): requests, bytes and seconds
to the tables and to the first step, and trips, the most requests that had to wait for one another;
with the lengths in ranges, and as a whole, as datasets without checksums of ranges have them. Last,
resumed in the middle.

    python benchmarks/bench_remote.py [--megabytes 200] [--peers PYTHON]  # a Python with
    mosaicml-streaming and litdata

With `--peers`, MosaicML streaming and litdata read rows of 4,097 of the same tokens over both
lines, in shards of 8 MB, shuffled, with 0 and with 2 worker processes, of which the better counts;
batches and steps have 32 rows. `whole` is from construction with an empty cache to the last batch,
`steady` what comes after the first batch.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

import penstock as ps
from bench_opening import repeated
from common import Peer, arguments, lognormal_lengths, table
from penstock.data.shards.remote.unit_fetcher import GAP, THREADS
from penstock.data.shards.remote.units import joined_requests
from penstock.data.stores.store import Store

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
SETTINGS: dict[str, Any] = {
    "sequence_length": 4096,
    "rows_per_step": 8,
    "seed": 1,
    "window_rows": 64,
}
BATCH_ROWS = 32
SCRIPTS = {"MosaicML streaming": "mosaicml_streaming.py", "litdata": "litdata_streaming.py"}
WORKERS = (0, 2)


class Server:
    """A store in a process of its own."""

    def __init__(self, folder: Path, latency: float, rate: float) -> None:
        tests = Path(__file__).parents[1] / "tests"
        words = [sys.executable, "-c", SERVER, str(tests), str(folder), str(latency), str(rate)]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.endpoint = self.process.stdout.readline().strip()

    def figures(self, until: float = float("inf")) -> tuple[int, int, int]:
        """Requests and bytes since the last call; of those up to a time, how many waited for one
        another at most.
        """
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
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One epoch, from construction."""

    seconds: float
    tokens: float
    first: float
    """Seconds to the first batch."""
    rest: float
    """Tokens after the first batch."""
    cpu: float
    """CPU seconds of this process and of the workers that it started; not of the server."""

    @property
    def steady(self) -> float:
        """Tokens a second after the first batch."""
        return self.rest / (self.seconds - self.first)


Rivals = dict[str, Callable[[], Run]]


class Bench:
    """The data, and loaders of it."""

    def __init__(self, root: Path, megabytes: float, runs: int) -> None:
        self.root, self.runs, self.bucket = root, runs, root / "store" / "bucket"
        lengths = lognormal_lengths(max(int(megabytes * 1e6 / 1000), 2000), mean=500.0)
        tokens = np.random.default_rng(0).integers(0, 50_000, int(lengths.sum()), dtype=np.uint32)
        documents = np.split(tokens, np.cumsum(lengths)[:-1])
        self.dataset = ps.write_dataset(self.bucket / "web", documents, documents_per_shard=12_288)
        self.bytes = sum(shard.bytes for shard in self.dataset.manifest.shards)
        self.stream = root / "tokens"
        tokens.astype(np.uint16).tofile(self.stream)
        self.cache = root / "cache"

    def loader(self, path: Any, runs: int | None = None, **options: Any) -> ps.Loader:
        """Of one epoch."""
        source = ps.Source(
            path, name="web", shuffle="block", shuffle_runs=runs or self.runs, max_epochs=1
        )
        return ps.Loader(source, **(SETTINGS | {"cache": self.cache} | options))

    def local(self, **options: Any) -> ps.Loader:
        """Of the folder itself."""
        return self.loader(self.bucket / "web", **options)

    def here(self, **options: Any) -> ps.Loader:
        """With what is in the cache."""
        return self.loader("s3://bucket/web", **options)

    def cold(self, **options: Any) -> ps.Loader:
        """With an empty cache."""
        shutil.rmtree(self.cache, ignore_errors=True)
        return self.here(**options)

    def dropped(self, **options: Any) -> ps.Loader:
        """Local, with no page of the shards in memory."""
        for file in (self.bucket / "web").glob("*.arrow"):
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)
        return self.local(**options)


def epoch(make: Callable[[], ps.Loader]) -> Run:
    """Make a loader, and read all of its rows."""
    begun, cpu = time.monotonic(), time.process_time()
    first, early, tokens, check = 0.0, 0, 0, 0
    for step in make():
        arrays = step.arrays()
        check += int(arrays["tokens"].sum()) + int(arrays["targets"].sum())
        tokens += step.num_tokens
        if not first:
            first, early = time.monotonic() - begun, tokens
    seconds, cpu = time.monotonic() - begun, time.process_time() - cpu
    return Run(seconds=seconds, tokens=tokens, first=first, rest=tokens - early, cpu=cpu)


def in_turn(rivals: Rivals, repeats: int) -> dict[str, Run]:
    """Medians of runs in turn; the first turn is not counted."""
    turns = [{name: run() for name, run in rivals.items()} for _ in range(repeats + 1)][1:]
    return {name: Run(**_medians([turn[name] for turn in turns])) for name in rivals}


def _medians(runs: Sequence[Run]) -> dict[str, float]:
    return dict(
        zip(
            Run.__slots__,
            map(statistics.median, zip(*map(astuple, runs), strict=True)),
            strict=True,
        )
    )


def first_step(loader: ps.Loader) -> float:
    begun = time.monotonic()
    next(iter(loader))
    return time.monotonic() - begun


def bare_reads(bench: Bench) -> float:
    """Seconds of requests for the bytes of an epoch alone, one run at a time, by as many threads as
    ours.
    """
    holder, store = bench.here().datasets[0].table.holder, Store("s3://bucket/web")
    units = map(holder.units.unit, np.random.default_rng(0).permutation(holder.units.runs).tolist())
    ranges = [whole for unit in units for whole, _ in joined_requests(unit.fetched, GAP)]
    files = [shard.file for shard in bench.dataset.manifest.shards]
    begun = time.monotonic()
    with ThreadPoolExecutor(THREADS) as pool:
        list(
            pool.map(
                lambda one: len(store.read_range(files[one.shard], one.begin, one.end)), ranges
            )
        )
    return time.monotonic() - begun


def with_limits(
    bench: Bench, server: Server, latency: float, rate: float, repeats: int
) -> list[tuple[str, str, str]]:
    """What users wait for over a line with limits."""
    # What a process does once: imports, clients, compiled kernels.
    fsspec.filesystem("s3").ls("bucket")
    first_step(bench.cold())
    time.sleep(1.0)  # what was fetched ahead for it has come
    shutil.rmtree(bench.cache)
    server.figures()
    begun = time.monotonic()
    loader = bench.cold()
    opened = time.monotonic() - begun
    requests, _, trips = server.figures()
    note = f"{requests} requests in {trips} trips, {opened:.2f} s"
    rows = [("tables", f"{opened / latency:.1f} latencies", note)]
    first = first_step(loader)
    rows.append(("first step after that", f"{first / latency:.1f} latencies", f"{first:.2f} s"))
    fetched: list[tuple[int, int, int]] = []

    def cold() -> Run:
        server.figures()
        run = epoch(bench.cold)
        fetched.append(server.figures())
        return run

    run = in_turn({"ours": cold}, repeats)["ours"]
    requests, size, _ = fetched[-1]
    rows.append(
        (
            "epoch, empty cache",
            _line(size, run.seconds, rate),
            f"{requests} requests, {run.seconds:.2f} s",
        )
    )
    bare = statistics.median(bare_reads(bench) for _ in range(repeats))
    rows.append(("the same requests alone", _line(size, bare, rate), f"{bare:.2f} s"))
    middle = next(islice(bench.local(), int(run.tokens) // 32768 // 2, None))
    loader = bench.cold()
    loader.load_state_dict(middle.resume_state)
    rows.append(
        ("resume in the middle, empty cache", f"{first_step(loader):.2f} s", "to the next step")
    )
    loader = bench.cold(cache_bytes=max(bench.bytes // 10, 1))
    run = epoch(lambda: loader)
    (traffic,) = loader.traffic.values()
    ratio = traffic.fetched_bytes / traffic.used_bytes
    rows.append(
        ("cache of a tenth", f"{ratio:.3f} x", f"bytes fetched over used; {run.seconds:.1f} s")
    )
    return rows


def _line(size: float, seconds: float, rate: float) -> str:
    return f"{size / seconds / rate:.2f} of the line"


def without_limits(bench: Bench, repeats: int) -> list[tuple[str, str, str]]:
    """The local epoch, and what a store adds to it where the line is not the limit."""
    ways = {
        "local epoch": bench.local,
        "local epoch, its pages not in memory": bench.dropped,
        "epoch, empty cache": bench.cold,
        "epoch, all of it here": bench.here,
    }
    runs = in_turn({name: lambda make=make: epoch(make) for name, make in ways.items()}, repeats)
    bare = statistics.median(bare_reads(bench) for _ in range(repeats))
    whole = runs["local epoch"].seconds
    return [
        *(
            (
                name,
                f"{whole / run.seconds:.2f} of local",
                (
                    f"{run.seconds:.2f} s, {run.tokens / run.seconds / 1e6:.0f} M tok/s, "
                    f"{run.cpu:.2f} CPU s"
                ),
            )
            for name, run in runs.items()
        ),
        (
            "the same bytes, by requests for single runs, alone",
            f"{bare:.2f} s",
            f"{bench.bytes / bare / 1e6:.0f} MB/s",
        ),
    ]


def with_peers(
    bench: Bench, server: Server, python: str, repeats: int, rate: float
) -> list[tuple[str, str, str]]:
    """Ours and theirs, from an empty cache."""
    peers: dict[str, Peer] = {}
    words = [
        str(bench.bucket),
        server.endpoint,
        str(bench.stream),
        str(SETTINGS["sequence_length"] + 1),
    ]

    def theirs(library: str, workers: int) -> Run:
        # Made in its turn, since the first of each library writes the data. Two processes of
        # MosaicML streaming disturb each other's shared memory; litdata reads more slowly in
        # workers of a process that has read itself.
        name = f"{library} {workers}" if library == "litdata" else library
        if name not in peers:
            peers[name] = Peer(python, SCRIPTS[library], *words, str(BATCH_ROWS))
        peers[name](str(workers))
        return Run(**{key: peers[name].last[key] for key in Run.__slots__})

    rivals: Rivals = {
        "penstock": lambda: epoch(lambda: bench.cold(runs=512, rows_per_step=BATCH_ROWS))
    }
    for library in SCRIPTS:
        for workers in WORKERS:
            rivals[f"{library}, {workers} workers"] = partial(theirs, library, workers)
    runs = in_turn(rivals, repeats)
    for peer in peers.values():
        peer.close()
    ours, rows = runs["penstock"], []
    for name, run in runs.items():
        figure = f"{run.tokens / run.seconds / 1e6:.1f} M tok/s"
        note = (
            f"whole; steady {run.steady / 1e6:.1f}, first batch {run.first:.2f} s, {run.cpu:.2f} "
            "CPU s"
        )
        if rate:
            note += f"; {_line(2 * run.tokens, run.seconds, rate)}"
        rows.append((name, figure, note))
    for library in SCRIPTS:
        best = [run for name, run in runs.items() if name.startswith(library)]
        whole, steady = (
            max(run.tokens / run.seconds for run in best),
            max(run.steady for run in best),
        )
        figure = f"{ours.tokens / ours.seconds / whole:.2f} x"
        cpu = min(run.cpu for run in best) / ours.cpu
        note = f"whole; steady {ours.steady / steady:.2f} x, tokens a CPU second {cpu:.2f} x"
        rows.append((f"penstock over {library}", figure, note))
    return rows


def small(root: Path, given: Any) -> None:
    """Print what a dataset of some megabytes costs, up to an epoch, over both lines."""
    bench = Bench(root, given.megabytes, given.runs)
    print(f"{bench.bytes / 1e6:.0f} MB of shards")
    for latency, rate in ((given.latency, given.rate), (0.0, 0.0))[given.no_limits :]:
        with serve(root / "store", latency, rate) as server:
            title = "A line without limits"
            if rate:
                title = f"A line with {latency * 1000:.0f} ms a request and {rate / 1e6:.0f} MB/s"
                table(title, with_limits(bench, server, latency, rate, given.repeats))
            else:
                table(title, without_limits(bench, given.repeats))
            if given.peers:
                rows = with_peers(bench, server, given.peers, given.repeats, rate)
                table(f"{title}: rows from an empty cache", rows)


def large(root: Path, documents: int, latency: float, rate: float) -> list[tuple[str, str, str]]:
    """What a dataset of many documents costs up to its first step."""
    lengths = np.maximum(lognormal_lengths(102_400), 2)
    tokens = np.arange(lengths.max()) % 50
    ps.write_dataset(root / "one", [tokens[:length] for length in lengths], vocab_size=50)
    rows: list[tuple[str, str, str]] = []
    for name in ("ranges", "whole"):
        repeated(
            root / "one",
            root / "many" / "bucket" / name,
            max(documents // 102_400, 1),
            name == "ranges",
        )

    def loader(name: str) -> ps.Loader:
        shutil.rmtree(root / "cache", ignore_errors=True)
        return ps.Loader(
            ps.Source(f"s3://bucket/{name}", name="web", shuffle="block"),
            **SETTINGS,
            cache=root / "cache",
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
            note = (
                f"{trips} trips; with those for steps ahead {requests:,} requests, "
                f"{size / 1e6:,.1f} MB"
            )
            rows.append((f"{name}: first step after that", f"{seconds:.2f} s", note))
            held = opened.datasets[0].path.parent.parent
            blocks = sum(
                512 * file.stat().st_blocks for file in held.rglob("*") if "lengths" in str(file)
            )
            rows.append((f"{name}: lengths on the disk", f"{blocks / 1e6:,.1f} MB", ""))
    local = ps.Loader(
        ps.Source(root / "many" / "bucket" / "ranges", name="web", shuffle="block"), **SETTINGS
    )
    state = next(iter(local.seek(20_000))).resume_state
    with serve(root / "many", latency, rate) as server:
        resumed = loader("ranges")
        resumed.load_state_dict(state)
        rows.append(
            (
                "ranges: resumed at step 20,000",
                f"{first_step(resumed):.2f} s",
                "to the next step, empty cache",
            )
        )
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(repeats=3)
    parser.add_argument(
        "--megabytes", type=float, default=200.0, help="of tokens, at least 100; 0: none"
    )
    parser.add_argument("--latency", type=float, default=0.03, help="seconds of a request")
    parser.add_argument("--rate", type=float, default=50e6, help="bytes a second")
    parser.add_argument(
        "--documents", type=int, default=100_000_000, help="of the large dataset; 0: none"
    )
    parser.add_argument("--runs", type=int, default=16, help="runs of a window of the shuffle")
    parser.add_argument("--no-limits", action="store_true", help="only the line without limits")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if given.megabytes:
            small(Path(name), given)
        if given.documents:
            line = f"{given.latency * 1000:.0f} ms a request and {given.rate / 1e6:.0f} MB/s"
            table(
                f"{given.documents:,} documents, {line}",
                large(Path(name), given.documents, given.latency, given.rate),
            )


if __name__ == "__main__":
    main()
