"""MB/s of `Tokenizer.encode_batch` against the `tokenizers` package, on one thread, interleaved, in one process.

The text is Python's standard library (sources and documentation strings), cut in documents of a few kB; the vocabulary
is trained on it. CPU time of the process, median of the repeats, first one apart (gigatoken fills its cache of words).

    python benchmarks/bench_tokenizers.py [--megabytes 8] [--repeats 5] [--tokenizer PATH] [--json]
"""

import os

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.tokenizers import Tokenizer, load_tokenizer, train_tokenizer

DOCUMENT_CHARACTERS = 3000


def standard_library(megabytes: float) -> list[str]:
    """Documents of Python's standard library, the same on every run of a machine."""
    documents: list[str] = []
    size = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts or size >= megabytes * 1e6:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        size += len(text)
        documents += [text[at : at + DOCUMENT_CHARACTERS] for at in range(0, len(text), DOCUMENT_CHARACTERS)]
    return documents


def seconds(work: Callable[[], Any]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def measure(tokenizer: Tokenizer, documents: list[str], repeats: int) -> dict[str, Any]:
    """Rates in MB/s: ours from Arrow to flat arrays, theirs from str to encodings."""
    from tokenizers import Tokenizer as Theirs

    theirs = Theirs.from_str(tokenizer.source_bytes["tokenizer.json"].decode())
    array = pa.array(documents, pa.large_string())
    megabytes = sum(len(document.encode()) for document in documents) / 1e6
    ways: dict[str, Callable[[], Any]] = {
        "penstock": lambda: tokenizer.encode_batch(array),
        "tokenizers": lambda: theirs.encode_batch(documents, add_special_tokens=False),
        "tokenizers, fast": lambda: theirs.encode_batch_fast(documents, add_special_tokens=False),
    }
    tokenizer.encode("load it")
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, work in ways.items():
            times[name].append(seconds(work))
    rates = {name: megabytes / statistics.median(taken[1:]) for name, taken in times.items()}
    return {
        "tokenizer": f"{tokenizer.name}, {tokenizer.kind}, {tokenizer.vocab_size} ids, by {tokenizer.encoder}",
        "megabytes": round(megabytes, 2),
        "mb_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        "first_mb_per_s": round(megabytes / times["penstock"][0], 1),
        "ratio": round(rates["penstock"] / rates["tokenizers"], 1),
        "ratio_fast": round(rates["penstock"] / rates["tokenizers, fast"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokenizer", help="a tokenizer.json or its folder; trained here if not given")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    documents = standard_library(options.megabytes)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = (
            load_tokenizer(options.tokenizer)
            if options.tokenizer
            else train_tokenizer(documents[:700], vocab_size=16000, output=f"{folder}/trained", progress=False)
        )
        found = measure(tokenizer, documents, options.repeats)
    if options.json:
        print(json.dumps(found))
        return
    print(f"{found['tokenizer']}; {found['megabytes']} MB of the standard library, one thread")
    for name, rate in found["mb_per_s"].items():
        print(f"  {name:18} {rate:8.1f} MB/s")
    print(f"  penstock, first run {found['first_mb_per_s']:7.1f} MB/s")
    print(f"  ratio: {found['ratio']} x encode_batch, {found['ratio_fast']} x encode_batch_fast")


if __name__ == "__main__":
    main()
