"""MB/s of `Tokenizer.encode_batch`, with and without gigatoken, against the `tokenizers` package;
CPU time of training.

One thread, one process, the same blocks in turn. Encoding is done by gigatoken, so its figure is
gigatoken's, with what we add to it.

The text is Python's standard library (sources and documentation strings), cut in documents of 3 kB,
shuffled; the vocabulary is trained on a part of it. Every block of a megabyte is new to both, for
gigatoken keeps the words it has seen: encoding the same text again would be twice as fast. Figures
are medians over the blocks after the first two, of CPU time; the first block is shown apart.

Training is timed as a whole, from an iterator of texts to the finished tokenizer: ours, the trainer
of the `tokenizers` package, which learns the same merges, and rustbpe, with our pattern. rustbpe
breaks ties between pairs differently. Our kernels are compiled before.

    python benchmarks/bench_tokenizers.py [--blocks 10] [--tokenizer PATH] [--json FILE]
    python benchmarks/bench_tokenizers.py --table FOLDER [--blocks 10]   # every vocabulary there, and families
    python benchmarks/bench_tokenizers.py --train [--megabytes 22] [--repeats 3] [--peers PYTHON]   # with rustbpe
"""  # noqa: E501

import os

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import argparse
import json
import random
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import common
from common import Peer, against, cpu_seconds, table, take_turns, with_json
from penstock import load_tokenizer, train_tokenizer
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.split_patterns import (
    LLAMA3_PATTERN,
    O200K_PATTERN,
    QWEN2_PATTERN,
    TEKKEN_PATTERN,
)
from penstock.tokenizers.training import SPLIT_PATTERN, _train_small

DOCUMENT_CHARACTERS = 3000


def standard_library(num_blocks: int) -> list[list[str]]:
    """Blocks of a megabyte of documents, the same on every run of a machine."""
    documents: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts:
            text = path.read_text(encoding="utf-8", errors="ignore")
            documents += [
                text[at : at + DOCUMENT_CHARACTERS]
                for at in range(0, len(text), DOCUMENT_CHARACTERS)
            ]
    random.Random(1).shuffle(documents)
    per_block = 1_000_000 * len(documents) // sum(map(len, documents))
    return [documents[at : at + per_block] for at in range(0, len(documents), per_block)][
        :num_blocks
    ]


def seconds(work: Callable[[], Any]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def measure(tokenizer: Tokenizer, blocks: list[list[str]]) -> dict[str, Any]:
    """Rates in MB/s: ours from Arrow to flat arrays, theirs from str to encodings."""
    from tokenizers import Tokenizer as Theirs

    theirs = Theirs.from_str(tokenizer.source_bytes["tokenizer.json"].decode())
    slow = Tokenizer(
        tokenizer.name, tokenizer.source_bytes, fallback_reason="to measure what it costs"
    )
    for one in (tokenizer, slow):
        one.encode("load it")
    rates: dict[str, list[float]] = {
        name: []
        for name in ("penstock", "penstock, without gigatoken", "tokenizers", "tokenizers, fast")
    }
    for documents in blocks:
        megabytes = sum(len(document.encode()) for document in documents) / 1e6
        array = pa.array(documents, pa.large_string())
        ways: list[Callable[[], Any]] = [
            partial(tokenizer.encode_batch, array),
            partial(slow.encode_batch, array),
            partial(theirs.encode_batch, documents, add_special_tokens=False),
            partial(theirs.encode_batch_fast, documents, add_special_tokens=False),
        ]
        for name, work in zip(rates, ways, strict=True):
            rates[name].append(megabytes / seconds(work))
    medians = {name: statistics.median(values[2:]) for name, values in rates.items()}
    return {
        "tokenizer": (
            f"{tokenizer.name}, {tokenizer.kind}, {tokenizer.vocab_size} ids, by "
            f"{tokenizer.encoder}"
        ),
        "blocks": len(blocks),
        "mb_per_s": {name: round(rate, 1) for name, rate in medians.items()},
        "first_mb_per_s": round(rates["penstock"][0], 1),
        "ratio_without_gigatoken": round(
            medians["penstock"] / medians["penstock, without gigatoken"], 1
        ),
        "ratio": round(medians["penstock"] / medians["tokenizers"], 1),
        "ratio_fast": round(medians["penstock"] / medians["tokenizers, fast"], 1),
    }


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+".replace(r"\r\n", "\r\n"),
)


def _splits(*patterns: str) -> dict[str, Any]:
    steps = [
        {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False}
        for one in patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*steps, {**LEVEL, "use_regex": False}]}


def _digits_first(each: bool) -> dict[str, Any]:
    steps = [{"type": "Digits", "individual_digits": each}, LEVEL]
    return {"type": "Sequence", "pretokenizers": steps}


NFC = {"type": "NFC"}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama 3": {"pre_tokenizer": _splits(LLAMA3_PATTERN)},
    "Qwen 2, Qwen 3": {"pre_tokenizer": _splits(QWEN2_PATTERN), "normalizer": NFC},
    "GPT-4o (o200k)": {"pre_tokenizer": _splits(O200K_PATTERN)},
    "Mistral NeMo (tekken)": {"pre_tokenizer": _splits(TEKKEN_PATTERN)},
    "DeepSeek V3": {"pre_tokenizer": _splits(*DEEPSEEK)},
    "Phi-4, OLMo 2": {"pre_tokenizer": _splits(LLAMA3_PATTERN)},
    "GPT-NeoX": {"pre_tokenizer": LEVEL, "normalizer": NFC},
    "StarCoder 2, SmolLM": {"pre_tokenizer": _digits_first(True)},
    "Command R": {"pre_tokenizer": _digits_first(True), "normalizer": NFC},
    "Bloom": {"pre_tokenizer": _splits(r" ?[^(\s|[.,!?…。，、।۔،])]+")},
}
"""How families split and normalise, as their files were when this was written, on a vocabulary
trained here.
"""


def every_vocabulary(folder: Path, made: Path) -> list[Tokenizer]:
    """Those in a folder, and one of each family."""
    names = ("tokenizer.json", "tokenizer.json.gz", "*.model", "*.tiktoken*", "tekken*.json*")
    paths = sorted({path for name in names for path in folder.rglob(name)})
    found = [load_tokenizer(path) for path in paths]
    content = json.loads((made / "tokenizer.json").read_text())
    for name, changes in FAMILIES.items():
        files = {"tokenizer.json": json.dumps({**content, **changes}).encode()}
        found.append(Tokenizer(f"{name} (rebuilt)", files))
    return found


def measure_all(tokenizers: list[Tokenizer], blocks: list[list[str]]) -> None:
    """Print a table: who encodes, how fast, and whether the ids are the own encoder's."""
    arrays = [pa.array(block, pa.large_string()) for block in blocks]
    megabytes = sum(len(text.encode()) for block in blocks for text in block) / 1e6
    print("| vocabulary | encoder | MB/s | own encoder | the same ids |\n|---|---|---|---|---|")
    for one in tokenizers:
        slow = Tokenizer(one.name, one.source_bytes, fallback_reason="to compare")
        for each in (one, slow):
            each.encode("load it 1")
        spent, exact = {one: 0.0, slow: 0.0}, True
        for array in arrays:
            rows = {}
            for each in spent:
                begun = time.process_time()
                rows[each] = each.encode_batch(array)
                spent[each] += time.process_time() - begun
            exact &= np.array_equal(rows[one].values, rows[slow].values)
            exact &= np.array_equal(rows[one].offsets, rows[slow].offsets)
        rates = [f"{megabytes / seconds:.1f}" for seconds in spent.values()]
        who = (
            one.encoder if one.fallback_reason is None else f"{one.encoder}: {one.fallback_reason}"
        )
        print(f"| {one.name} | {who} | {rates[0]} | {rates[1]} | {'yes' if exact else 'NO'} |")


def measure_training(megabytes: int, repeats: int, peers: str | None) -> None:
    """Print CPU seconds of training on the standard library."""
    texts = common.standard_library(megabytes * 1_000_000)
    size = sum(len(text.encode()) for text in texts) / 1e6
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "texts.json").write_text(json.dumps(texts))
        for vocab_size in (4096, 32768):

            def ours(ids: int = vocab_size) -> None:
                train_tokenizer(
                    iter(texts),
                    vocab_size=ids,
                    output=f"{folder}/ours",
                    overwrite=True,
                    progress=False,
                )

            def theirs(ids: int = vocab_size) -> None:
                _train_small(
                    [text.encode() for text in texts], ["<|bos|>", "<|eos|>", "<|pad|>"], ids
                )

            rivals = {
                "penstock": partial(cpu_seconds, ours),
                "tokenizers": partial(cpu_seconds, theirs),
            }
            if peers:
                rivals["rustbpe"] = Peer(
                    peers,
                    "rustbpe_train.py",
                    f"{folder}/texts.json",
                    str(vocab_size),
                    SPLIT_PATTERN,
                )
            seconds = take_turns(rivals, repeats)
            for name, spent in seconds.items():
                if name != "penstock":
                    work = f"training a byte-level BPE of {vocab_size:,} ids"
                    against(
                        "Chats and tokenizers", work, name, ours=seconds["penstock"], theirs=spent
                    )
                ratio = f"{spent / seconds['penstock']:.2f} x penstock"
                rows.append((f"{vocab_size} ids, {name}", f"{spent:.2f} s", ratio))
    table(f"training on {size:.1f} MB of the standard library, CPU seconds", rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=10, help="megabytes of text")
    parser.add_argument(
        "--tokenizer", help="a tokenizer.json or its folder; trained here if not given"
    )
    with_json(parser)
    parser.add_argument("--table", metavar="FOLDER", help="measure every vocabulary in a folder")
    parser.add_argument("--train", action="store_true", help="measure training instead")
    parser.add_argument("--megabytes", type=int, default=22, help="text to train on")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", metavar="PYTHON", help="a Python in which rustbpe is installed")
    options = parser.parse_args()
    if options.train:
        measure_training(options.megabytes, options.repeats, options.peers)
        return
    blocks = standard_library(options.blocks)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = (
            load_tokenizer(options.tokenizer)
            if options.tokenizer
            else train_tokenizer(
                blocks[0] + blocks[1], vocab_size=16000, output=f"{folder}/trained", progress=False
            )
        )
        if options.table:
            measure_all(every_vocabulary(Path(options.table), Path(folder, "trained")), blocks)
            return
        found = measure(tokenizer, blocks)
    for name in ("tokenizers", "tokenizers, fast"):
        ours, theirs = (1 / found["mb_per_s"][who] for who in ("penstock", name))
        against(
            "Chats and tokenizers", "encoding new text, one thread", name, ours=ours, theirs=theirs
        )
    print(f"{found['tokenizer']}; {found['blocks']} MB of the standard library, one thread")
    for name, rate in found["mb_per_s"].items():
        print(f"  {name:27} {rate:8.1f} MB/s")
    print(f"  penstock, first MB {found['first_mb_per_s']:16.1f} MB/s")
    print(f"  without gigatoken {found['ratio_without_gigatoken']} times slower")
    print(f"  ratio: {found['ratio']} x encode_batch, {found['ratio_fast']} x encode_batch_fast")


if __name__ == "__main__":
    main()
