"""Seconds that a training stands still for a checkpoint, and how much slower the steps beside one are.

    python benchmarks/bench_saving.py [--layers 30] [--width 576] [--steps 8] [--repeats 3]
    torchrun --nproc-per-node 2 benchmarks/bench_saving.py …                  # sharded (FSDP2)

A model of the size of SmolLM2-135M by default, in float32 with AdamW: 1.6 GB a checkpoint. Steps
are short, one row of 64 slots for each rank. `stands still`: from the end
of a step to the beginning of the next one, where a checkpoint is begun between them; `in all`: that,
and what the steps until the next checkpoint take longer than steps without one; the last save,
which is waited for, is not in it. Written once at a standstill and once beside the training, where
this penstock can (`checkpoints.asynchronous`). Medians over checkpoints.
"""  # noqa: E501

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

import penstock as ps
from penstock.learn.training.settings import CheckpointSettings

TEXT = "a small text about nothing in particular that fills rows and is soon forgotten"


class Watch:
    """An `on_step` that notes when each step ended, and how long it took."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []

    def __call__(self, model: Any, step: Any, record: Any) -> None:
        """Note a step."""
        self.steps.append((time.monotonic(), record["seconds"] + record["wait_seconds"]))


def make_data(folder: Path) -> Path:
    """A little dataset."""
    texts = [{"text": (TEXT[n % 70 :] + TEXT) * 3} for n in range(2000)]
    source = folder / "texts.jsonl"
    source.write_text("\n".join(map(json.dumps, texts)))
    tokenizer = ps.train_tokenizer([str(source)], output=folder / "tokenizer", vocab_size=320)
    ps.prepare(
        str(source), tokenizer=tokenizer, output=folder / "data", processes=1, progress=False
    )
    return folder / "data"


def measure(data: Path, output: Path, given: argparse.Namespace, **checkpoints: Any) -> Any:
    """Train, with a checkpoint each `given.steps` steps; seconds by name."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    model = ps.build_model(
        layers=given.layers,
        width=given.width,
        heads=given.width // 64,
        vocab_size=given.vocabulary,
        tied=True,
    )
    rank = int(os.environ.get("RANK", "0"))
    loader = ps.Loader(
        data, sequence_length=64, rows_per_step=ranks, data_parallel=(rank, ranks), seed=1
    )
    watch = Watch()
    ps.train(
        model,
        loader,
        output=output,
        steps=given.steps * (given.repeats + 1) + given.steps - 1,
        threads=max(1, (os.cpu_count() or 1) // ranks),
        warmup_steps=0,
        checkpoints={"every": given.steps, "keep": 1, **checkpoints},
        on_step=watch,
        shard=ranks > 1,
        progress=False,
    )
    ends, lasted = zip(*watch.steps, strict=True)
    gaps = [
        after - before - took
        for before, after, took in zip(ends, ends[1:], lasted[1:], strict=False)
    ]
    plain = statistics.median(lasted[given.steps // 2 : given.steps])
    stands, whole = [], []
    # The first checkpoint takes its memory.
    for first in range(2 * given.steps, len(lasted), given.steps):
        steps = lasted[first : first + given.steps]
        stands.append(gaps[first - 1])
        whole.append(gaps[first - 1] + sum(steps) - plain * len(steps))
    return {
        "a step": plain,
        "stands still": statistics.median(stands),
        "first": gaps[given.steps - 1],
        "in all": statistics.median(whole),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 30), ("width", 576), ("vocabulary", 49152), ("steps", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    ways: dict[str, dict[str, Any]] = {"at a standstill": {}}
    if "asynchronous" in {field.name for field in fields(CheckpointSettings)}:
        ways = {"at a standstill": {"asynchronous": False}, "beside": {"asynchronous": True}}
    first = int(os.environ.get("RANK", "0")) == 0
    shared = Path(os.environ.get("BENCH_FOLDER", tempfile.gettempdir())) / "penstock-saving"
    shared /= os.environ.get("TORCHELASTIC_RUN_ID", str(os.getpid()))
    if first:
        (shared / "data").mkdir(parents=True)
        make_data(shared / "data")
        (shared / "ready").touch()
    while not (shared / "ready").exists():
        time.sleep(0.1)
    try:
        for name, checkpoints in ways.items():
            output, data = shared / name, shared / "data" / "data"
            found = measure(data, output, given, **checkpoints)
            if first:
                shown = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in found.items())
                print(f"{name}: {shown}", flush=True)
    finally:
        if first:
            shutil.rmtree(shared)


if __name__ == "__main__":
    main()
    # Gloo's threads may still hold tensors, and abort an interpreter that ends.
    if torch.distributed.is_available() and "RANK" in os.environ:
        os._exit(0)
