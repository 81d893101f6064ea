"""Prepare against `datasets.map`: CPU seconds from JSONL to shards, with the same byte-level BPE.

The text is the Python source of this environment, each file once, as far as it reaches. Both sides get two processes.
`datasets` is timed on the first `--peer-mb` of it, less what an almost empty file costs it, and scaled to the whole;
penstock is timed on the whole, start-up included. What is not encoding is measured in one warm process with the memory
settings of a worker, in turns with the encoding, medians of each. Prints JSON.

    python benchmarks/bench_prepare.py --mb 200 --tokenizer tokenizer.json
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from penstock.prepare.processes import WORKER_MEMORY
from penstock.sources import open_sources, read_texts
from penstock.tokenizers import train_tokenizer


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--mb", type=float, default=32, help="size of the JSONL")
    options.add_argument("--peer-mb", type=float, default=8, help="how much of it datasets.map gets")
    options.add_argument("--tokenizer", help="tokenizer.json; by default a small one is trained on the same text")
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--repeats", type=int, default=5, help="turns of what is not encoding and what is")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(Path(folder), chosen), indent=1))


def run(folder: Path, chosen: argparse.Namespace) -> dict[str, float]:
    whole, piece, tiny = (folder / f"{name}.jsonl" for name in ("whole", "piece", "tiny"))
    write_jsonl(whole, chosen.mb * 1e6)
    write_jsonl(piece, chosen.peer_mb * 1e6)
    write_jsonl(tiny, 1e4)
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


def write_jsonl(path: Path, size: float) -> None:
    """Each source file of this Python once; then, when `size` asks for more, all of them again with some words changed.

    Text that repeats would flatter the encoder, which keeps the words that it has seen.
    """
    texts, seen = [], set()
    for source in sorted(
        {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    ):
        texts += sorted(source.rglob("*.py"))
    written = turn = 0
    with open(path, "w", encoding="utf-8") as stream:
        while written < size:
            for source in texts:
                text = source.read_text(encoding="utf-8", errors="replace")
                if turn == 0 and (hash(text) in seen or not text):
                    continue
                seen.add(hash(text))
                words = text.split(" ")
                if turn:
                    words[turn % len(words) :: 97] = [f"{word}{turn}" for word in words[turn % len(words) :: 97]]
                written += stream.write(json.dumps({"id": turn, "text": " ".join(words)}, ensure_ascii=False) + "\n")
                if written >= size:
                    break
            turn += 1


def train(folder: Path, texts: Path) -> str:
    train_tokenizer(read_texts(open_sources(texts)), vocab_size=2000, output=folder / "tokenizer")
    return str(folder / "tokenizer")


def cpu_seconds(code: str, source: Path, tokenizer: str, output: Path, processes: int) -> tuple[float, float]:
    """CPU and wall seconds of a child process and its children; a line that it prints replaces the CPU time."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    arguments = [str(source), str(tokenizer), str(output), str(processes)]
    environment = {**os.environ, "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    if processes == 1:
        environment |= WORKER_MEMORY
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, env=environment, capture_output=True)
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (float(done.stdout) if done.stdout.strip() else cpu), wall


OURS = """
import sys
from penstock.prepare import prepare
source, tokenizer, output, processes = sys.argv[1:]
prepare(source, tokenizer=tokenizer, output=output, processes=int(processes), progress=False)
"""

WARM = """
import sys, time
from penstock.prepare import prepare
from penstock.tokenizers import load_tokenizer
source, tokenizer, output, _ = sys.argv[1:]
loaded = load_tokenizer(tokenizer)
prepare(iter(["warm"]), tokenizer=loaded, output=output + "0", processes=1, progress=False)
started = time.process_time()
prepare(source, tokenizer=loaded, output=output, processes=1, progress=False)
print(time.process_time() - started)
"""

ENCODE = """
import sys, time
from penstock.sources import open_sources
from penstock.tokenizers import load_tokenizer
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
from penstock.tokenizers import load_tokenizer
encoder = Tokenizer.from_str(load_tokenizer(tokenizer).source_bytes["tokenizer.json"].decode())
os.environ["TOKENIZERS_PARALLELISM"] = "false"

def encode(batch):
    return {"input_ids": [encoding.ids for encoding in encoder.encode_batch(batch["text"], add_special_tokens=False)]}

if __name__ == "__main__":
    data = datasets.load_dataset("json", data_files=source, split="train", cache_dir=cache)
    data.map(encode, batched=True, num_proc=int(processes), remove_columns=["id", "text"])
"""

if __name__ == "__main__":
    main()
