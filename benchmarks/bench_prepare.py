"""Prepare against `datasets.map`: CPU seconds from JSONL to shards, with the same byte-level BPE.

The text is what text files this machine has (code, documentation, licences), each once: text that
repeats would flatter the encoder, which keeps the words that it has seen. Both sides get two
processes. `datasets` is timed on the first `--peer-mb` of it, less what an almost empty file costs
it, and scaled to the whole; penstock is timed on the whole, start-up included. What is not encoding
is measured in one warm process with the memory settings of a worker, in turns with the encoding,
medians of each. Prints JSON.

With `--files`, the same lines lie in N files, and in one: whole processes in turns, medians.
With `--lines`, the memory for N short lines, and for a tenth of them, in one process.

    python benchmarks/bench_prepare.py --mb 1000 --tokenizer tokenizer.json
    python benchmarks/bench_prepare.py --mb 30 --files 2000 --tokenizer tokenizer.json
    python benchmarks/bench_prepare.py --mb 30 --lines 1000000 --tokenizer tokenizer.json
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from common import against, take_turns, with_json
from penstock import train_tokenizer
from penstock.data.prepare.pool import WORKER_MEMORY
from penstock.data.sources import open_sources, read_texts
from penstock.data.sources.parsing import is_utf8

LONGEST = 500_000
"""Bytes of a file that still counts as a document, not as a table of data."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--mb", type=float, default=32, help="size of the JSONL; less where there is less text"
    )
    options.add_argument(
        "--source", action="append", help="folder with text files; by default Python's, then /usr"
    )
    options.add_argument(
        "--peer-mb", type=float, default=8, help="how much of it datasets.map gets"
    )
    options.add_argument(
        "--tokenizer", help="tokenizer.json; by default a small one is trained on the same text"
    )
    options.add_argument("--processes", type=int, default=2)
    options.add_argument(
        "--repeats", type=int, default=5, help="turns of what is not encoding and what is"
    )
    options.add_argument("--files", type=int, help="compare this number of small files with one")
    options.add_argument(
        "--lines", type=int, help="measure the memory for this number of short lines"
    )
    chosen = with_json(options).parse_args()
    measure = compare_files if chosen.files else measure_memory if chosen.lines else run
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), chosen), indent=1))


def run(folder: Path, chosen: argparse.Namespace) -> dict[str, float]:
    whole, piece, tiny = (folder / f"{name}.jsonl" for name in ("whole", "piece", "tiny"))
    texts = find_texts(chosen.source or [sys.prefix, sys.base_prefix, "/usr"], chosen.mb * 1e6)
    write_jsonl(whole, texts, chosen.mb * 1e6)
    write_jsonl(piece, texts, chosen.peer_mb * 1e6)
    write_jsonl(tiny, texts, 1e4)
    tokenizer = chosen.tokenizer or train(folder, tiny)
    ours, wall = cpu_seconds(OURS, whole, tokenizer, folder / "shards", chosen.processes)
    start, _ = cpu_seconds(OURS, tiny, tokenizer, folder / "tiny", chosen.processes)
    turns = []
    for _ in range(chosen.repeats):
        warm, _ = cpu_seconds(WARM, whole, tokenizer, folder / "warm", 1)
        shutil.rmtree(folder / "warm")
        shutil.rmtree(folder / "warm0")
        turns.append((warm, cpu_seconds(ENCODE, whole, tokenizer, folder / "none", 1)[0]))
    warm, encoding = (statistics.median(seconds) for seconds in zip(*turns, strict=True))
    peer, _ = cpu_seconds(PEER, piece, tokenizer, folder / "cache", chosen.processes)
    peer_start, _ = cpu_seconds(PEER, tiny, tokenizer, folder / "cache2", chosen.processes)
    scale = whole.stat().st_size / piece.stat().st_size
    peer_whole = peer_start + (peer - peer_start) * scale
    work = f"prepare {whole.stat().st_size / 1e6:,.0f} MB of JSON lines"
    against("Data", work, "datasets.map with tokenizers", ours=ours, theirs=peer_whole)
    return {
        "mb": whole.stat().st_size / 1e6,
        "penstock_cpu_s": ours,
        "penstock_start_cpu_s": start,
        "penstock_wall_s": wall,
        "encode_batch_alone_s": encoding,
        "warm_one_process_s": warm,
        "not_encoding_over_encoding": (warm - encoding) / encoding,
        "datasets_cpu_s_measured": peer,
        "datasets_cpu_s_scaled": peer_whole,
        "ratio": peer_whole / ours,
        "ratio_without_start": (peer_whole - peer_start) / (ours - start),
    }


def compare_files(folder: Path, chosen: argparse.Namespace) -> dict[str, float]:
    """The same records in many files and in one."""
    whole, many = folder / "whole.jsonl", folder / "many"
    texts = find_texts(chosen.source or [sys.prefix, sys.base_prefix, "/usr"], chosen.mb * 1e6)
    write_jsonl(whole, texts, chosen.mb * 1e6)
    tokenizer = chosen.tokenizer or train(folder, whole)
    records = in_pieces(whole, chosen.files)
    for number, record in enumerate(records):
        place = many / f"{number // 1000:04}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:07}.jsonl").write_bytes(record)
    whole.write_bytes(b"".join(records))

    def spent(source: Path) -> float:
        shutil.rmtree(folder / "shards", ignore_errors=True)
        return cpu_seconds(OURS, source, tokenizer, folder / "shards", chosen.processes)[0]

    rivals = {"many": lambda: spent(many), "one": lambda: spent(whole)}
    seconds = take_turns(rivals, chosen.repeats)
    spent(many)
    manifest = json.loads((folder / "shards" / "manifest.json").read_bytes())
    return {
        "files": len(records),
        "mb": whole.stat().st_size / 1e6,
        "many_files_cpu_s": seconds["many"],
        "one_file_cpu_s": seconds["one"],
        "ratio": seconds["many"] / seconds["one"],
        "shards": len(manifest["shards"]),
    }


def in_pieces(whole: Path, count: int) -> list[bytes]:
    """The records of a file, as equal as may be in `count` files; cut where there are too few."""
    lines = whole.read_bytes().splitlines(keepends=True)
    if len(lines) < count:
        text = "".join(json.loads(line)["text"] for line in lines)
        size = len(text) // count
        lines = [
            json.dumps({"text": text[at : at + size]}).encode() + b"\n"
            for at in range(0, size * count, size)
        ]
    ends = [number * len(lines) // count for number in range(count + 1)]
    return [b"".join(lines[begin:end]) for begin, end in pairwise(ends)]


def measure_memory(folder: Path, chosen: argparse.Namespace) -> dict[str, float]:
    """Bytes of memory that each further line takes, at the most."""
    source = folder / "texts.jsonl"
    texts = find_texts(chosen.source or [sys.prefix, sys.base_prefix, "/usr"], chosen.mb * 1e6)
    write_jsonl(source, texts, chosen.mb * 1e6)
    tokenizer = chosen.tokenizer or train(folder, source)
    text = "".join(json.loads(line)["text"] for line in source.read_bytes().splitlines())
    peaks = []
    for count in (chosen.lines // 10, chosen.lines):
        with open(source, "w") as stream:
            for number in range(count):
                at = number * 293 % (len(text) - 60)
                stream.write(json.dumps({"id": number, "text": text[at : at + 60]}) + "\n")
        for _ in range(2):  # kernels are compiled in the first
            shutil.rmtree(folder / "shards", ignore_errors=True)
            peak, _ = cpu_seconds(PEAK, source, tokenizer, folder / "shards", 1)
        peaks.append(peak)
    added = chosen.lines - chosen.lines // 10
    return {
        "lines": chosen.lines,
        "mb_of_a_tenth": peaks[0] / 1e6,
        "mb": peaks[1] / 1e6,
        "bytes_a_line": (peaks[1] - peaks[0]) / added,
    }


def find_texts(folders: list[str], size: float) -> list[Path]:
    """Text files of at least `size` bytes together, no two equal, in an order by content: any
    beginning is a sample.
    """
    found: dict[bytes, Path] = {}
    total = 0
    for path in (
        Path(place) / name
        for folder in folders
        for place, _, names in os.walk(folder)
        for name in names
    ):
        if path.is_symlink() or not path.is_file() or not os.access(path, os.R_OK):
            continue
        if not 0 < path.stat().st_size <= LONGEST:
            continue
        data = path.read_bytes()
        digest = hashlib.blake2b(data).digest()
        if digest in found or b"\0" in data or not is_utf8(data):
            continue
        found[digest] = path
        total += len(data)
        if total >= size:
            break
    return [found[digest] for digest in sorted(found)]


def write_jsonl(path: Path, texts: list[Path], size: float) -> None:
    """Records of the files in order, until there are `size` bytes."""
    written = 0
    with open(path, "wb") as stream:
        for number, source in enumerate(texts):
            record = {"id": number, "text": source.read_bytes().decode()}
            written += stream.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            if written >= size:
                return


def train(folder: Path, texts: Path) -> str:
    train_tokenizer(read_texts(open_sources(texts)), vocab_size=2000, output=folder / "tokenizer")
    return str(folder / "tokenizer")


def cpu_seconds(
    code: str, source: Path, tokenizer: str, output: Path, processes: int
) -> tuple[float, float]:
    """CPU and wall seconds of a child process and its children; what it prints replaces the CPU
    time.
    """
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    arguments = [str(source), str(tokenizer), str(output), str(processes)]
    environment = {
        **os.environ,
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    if processes == 1:
        environment |= WORKER_MEMORY
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE)
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (float(done.stdout) if done.stdout.strip() else cpu), wall


OURS = """
import sys
from penstock import prepare
source, tokenizer, output, processes = sys.argv[1:]
prepare(source, tokenizer=tokenizer, output=output, processes=int(processes), progress=False)
"""

PEAK = (
    OURS
    + """
import resource
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
)

WARM = """
import sys, time
from penstock import prepare
from penstock import load_tokenizer
source, tokenizer, output, _ = sys.argv[1:]
loaded = load_tokenizer(tokenizer)
prepare(iter(["warm"]), tokenizer=loaded, output=output + "0", processes=1, progress=False)
started = time.process_time()
prepare(source, tokenizer=loaded, output=output, processes=1, progress=False)
print(time.process_time() - started)
"""

ENCODE = """
import sys, time
from penstock.data.sources import open_sources
from penstock import load_tokenizer
source, tokenizer, _, _ = sys.argv[1:]
loaded = load_tokenizer(tokenizer)
total = 0.0
loaded.encode("warm")
for part in open_sources(source):
    for block in part.blocks():
        started = time.process_time()
        loaded.encode_batch(block.texts)
        total += time.process_time() - started
print(total)
"""

PEER = """
import os, sys
source, tokenizer, cache, processes = sys.argv[1:]
import datasets
from tokenizers import Tokenizer
from penstock import load_tokenizer
encoder = Tokenizer.from_str(load_tokenizer(tokenizer).source_bytes["tokenizer.json"].decode())
os.environ["TOKENIZERS_PARALLELISM"] = "false"

def encode(batch):
    return {"input_ids": [encoding.ids for encoding in encoder.encode_batch(batch["text"], add_special_tokens=False)]}

if __name__ == "__main__":
    data = datasets.load_dataset("json", data_files=source, split="train", cache_dir=cache)
    data.map(encode, batched=True, num_proc=int(processes), remove_columns=["id", "text"])
"""  # noqa: E501

if __name__ == "__main__":
    main()
