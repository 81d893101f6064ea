"""Distillation works: a student with another tokenizer than its teacher's, against plain cross
entropy.

A small teacher learns the whole corpus with a vocabulary of its own. Students, smaller and with
another vocabulary, learn with and without it: on the whole corpus, and on a tenth of it. What
counts is bits per byte of held-out text at equal steps; beside it stands cross entropy for as much
CPU time as distillation took. All of it goes through run files and `penstock train`. A run that the
folder --work holds already is not done again, so the teacher is trained once.

    python benchmarks/bench_distillation.py python benchmarks/bench_distillation.py --work
    /tmp/wikitext --corpus wikitext-2/valid.txt wikitext-2/test.txt
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

import penstock as ps
from common import standard_library
from penstock import train_tokenizer

DOCUMENT_CHARACTERS = 2000
"""A corpus is cut at line ends into documents of about so many."""
CORPUS_BYTES = 2_400_000
"""Of the standard library, as of WikiText-2's validation and test parts."""
VOCABULARIES = {"student": 3072, "teacher": 2048}
MODELS = {
    "student": {"layers": 4, "width": 64, "heads": 2},
    "teacher": {"layers": 4, "width": 128, "heads": 4},
}
SETTINGS = {
    "student": {"steps": 250, "rows": 4, "rate": 6e-3},
    "teacher": {"steps": 700, "rows": 8, "rate": 6e-3},
}
"""Rows of 256 slots a step; the rate is where the cosine begins, and suits cross entropy alone:
after 110 steps of it Muon at 6e-3 is at 5.12 nats a target, AdamW at 1.5e-3, 3e-3, 6e-3 and 1.2e-2
at 5.64, 5.37, 5.71 and 5.88.
"""
LOSSES = {"p_kl": {"kind": "p_kl", "chunk": "first"}, "alm": {"kind": "alm"}}
"""The teacher's vocabulary is the finer one: of a chunk it predicts its first token where the
student predicts all.
"""
DUE = {"all": 0.01, "tenth": 0.03}
"""Least share by which distillation must be below cross entropy at equal steps."""
Run = dict[str, float]
"""`bits` per byte of the held-out text, `cpu` seconds of the whole command, `steps`."""
Pair = tuple[list[Run], list[Run]]
"""By cross entropy and distilled, a run a seed."""


def corpus(files: Sequence[Path]) -> str:
    """The files, one after another; or sources of Python's standard library, shuffled."""
    if files:
        return "\n".join(file.read_text(encoding="utf-8") for file in files)
    texts = standard_library(CORPUS_BYTES)
    random.Random(0).shuffle(texts)
    return "\n".join(texts)


def documents(text: str) -> list[str]:
    """The text cut at line ends."""
    found: list[str] = []
    taken: list[str] = []
    for line in text.splitlines(keepends=True):
        taken.append(line)
        if sum(map(len, taken)) >= DOCUMENT_CHARACTERS:
            found.append("".join(taken))
            taken = []
    return [*found, "".join(taken)] if taken else found


def prepare(work: Path, files: Sequence[Path]) -> None:
    """Tokenizers and datasets of both sides: all of the training text, every tenth document of it,
    and the held-out text, which is the last tenth of the corpus. The student's tokenizer has read
    the tenth alone.
    """
    made_of = json.dumps([DOCUMENT_CHARACTERS, VOCABULARIES, [str(file) for file in files]])
    done = work / "data.json"
    if done.is_file() and done.read_text() == made_of:
        return
    if work.is_dir() and any(work.iterdir()) and not done.is_file():
        raise SystemExit(f"{work}: holds something else; give --work a new folder")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    done.touch()
    whole = documents(corpus(files))
    cut = len(whole) * 9 // 10
    parts = {"all": whole[:cut], "tenth": whole[:cut:10], "held": whole[cut:]}
    for part, texts in parts.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (work / f"{part}.jsonl").write_text(lines, encoding="utf-8")
    for side, size in VOCABULARIES.items():
        tokenizer = work / f"{side}-tokenizer"
        train_tokenizer(
            parts["tenth" if side == "student" else "all"],
            vocab_size=size,
            output=tokenizer,
            progress=False,
        )
        for part in parts:
            output = work / f"{side}-{part}"
            ps.prepare(
                work / f"{part}.jsonl",
                tokenizer=tokenizer,
                output=output,
                processes=1,
                progress=False,
            )
    for part, texts in parts.items():
        print(
            f"{part:6} {len(texts):5} documents, "
            f"{sum(len(text.encode()) for text in texts) / 1e6:.2f} MB"
        )
    done.write_text(made_of)


def run_file(work: Path, part: str, side: str, seed: int, steps: int, more: dict[str, Any]) -> str:
    """The text of a run file."""
    asked = SETTINGS[side]
    training = {
        "steps": steps,
        "threads": 1,
        "device": "cpu",
        "seed": seed,
        "optimizer": {"kind": "muon", "learning_rate": asked["rate"]},
        "schedule": {"shape": "cosine", "warmup_steps": steps // 10},
        "checkpoints": {"every": steps, "keep": 1},
        "evaluators": {"held": {"data": str(work / f"{side}-held"), "every": steps}},
    }
    loader = {"sequence_length": 256, "rows_per_step": asked["rows"], "seed": seed}
    data = {"sources": [{"path": str(work / f"{side}-{part}")}], "loader": loader}
    text: str = yaml.safe_dump(
        {"data": data, "model": MODELS[side], **more, "training": training}, sort_keys=False
    )
    return text


def train(
    work: Path,
    name: str,
    part: str,
    *,
    side: str = "student",
    seed: int = 0,
    steps: int | None = None,
    **more: Any,
) -> Run:
    """One `penstock train`, unless it is there already."""
    steps = steps or int(SETTINGS[side]["steps"])
    run, file, done = work / "runs" / name, work / f"{name}.yaml", work / "runs" / f"{name}.json"
    text = run_file(work, part, side, seed, steps, more)
    if not done.is_file() or file.read_text(encoding="utf-8") != text:
        shutil.rmtree(run, ignore_errors=True)
        file.write_text(text, encoding="utf-8")
        before = os.times()
        command = [sys.executable, "-m", "penstock", "train", str(file), "--output", str(run)]
        ended = subprocess.run(
            command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if ended.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{ended.stderr}")
        after = os.times()
        cpu = (
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
        last = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        found: Run = {"bits": last["held/bits_per_byte"], "cpu": cpu, "steps": steps}
        done.write_text(json.dumps(found))
        print(
            f"  {name:22} {steps:5} steps {cpu:6.0f} s of CPU   {found['bits']:.4f} bits a byte",
            flush=True,
        )
    read: Run = json.loads(done.read_text())
    return read


def at_equal_steps(work: Path, part: str, seeds: Sequence[int], loss: str, weight: float) -> Pair:
    """Both kinds of students of a part of the corpus."""
    teacher = {
        "teachers": [{"model": str(work / "runs" / "teacher"), "loss": LOSSES[loss]}],
        "distillation": weight,
    }
    plain = [train(work, f"plain-{part}-{seed}", part, seed=seed) for seed in seeds]
    taught = [
        train(work, f"{loss}-{part}-{seed}", part, seed=seed, teacher=teacher) for seed in seeds
    ]
    return plain, taught


def at_equal_time(work: Path, part: str, seeds: Sequence[int], pair: Pair) -> list[Run]:
    """Students that learn by cross entropy for as long as the distilled ones took."""
    plain, taught = pair
    # What every command spends besides steps: starting, the held-out text.
    fixed = train(work, "one-step", "tenth", steps=1)["cpu"]
    longer = sum(run["cpu"] - fixed for run in taught) / sum(run["cpu"] - fixed for run in plain)
    steps = round(longer * plain[0]["steps"])
    return [train(work, f"patient-{part}-{seed}", part, seed=seed, steps=steps) for seed in seeds]


def report(part: str, seeds: Sequence[int], pair: Pair, patient: Sequence[Run]) -> bool:
    """Print the table of one part; whether distillation is as far below cross entropy as is due."""
    plain, taught = pair
    print(f"\n{part} of the text: bits a byte of held-out text after {plain[0]['steps']:.0f} steps")
    print(f"{'seed':>6} {'cross entropy':>15} {'distilled':>11} {'below':>9}", end="")
    print(f"   {patient[0]['steps']:.0f} steps of cross entropy, the same CPU time")
    rows = zip((*map(str, seeds), "mean"), *map(with_mean, (plain, taught, patient)), strict=True)
    for name, one, other, longer in rows:
        print(f"{name:>6} {one:15.4f} {other:11.4f} {100 * (1 - other / one):7.2f} %", end="")
        print(f" {longer:11.4f}, distilled {100 * (1 - other / longer):+.2f} % below")
    least = min(1 - other["bits"] / one["bits"] for one, other in zip(plain, taught, strict=True))
    print(
        f"least of the seeds {100 * least:.2f} %, due {100 * DUE[part]:.0f} %: "
        f"{'yes' if least >= DUE[part] else 'NO'}"
    )
    return least >= DUE[part]


def with_mean(runs: Sequence[Run]) -> list[float]:
    """Bits per byte, and their mean."""
    bits = [run["bits"] for run in runs]
    return [*bits, fmean(bits)]


def main() -> None:
    """Run it from the command line; exit code 1 where distillation is not as far below as is
    due.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/penstock-distillation"), help="kept between calls"
    )
    parser.add_argument(
        "--corpus", type=Path, nargs="*", default=[], help="text files; default: Python's library"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--loss", choices=LOSSES, default="p_kl")
    parser.add_argument(
        "--weight", type=float, default=3.0, help="of distillation beside cross entropy"
    )
    parser.add_argument(
        "--steps", type=int, help="of a student and of the teacher, to try the script itself"
    )
    flags = parser.parse_args()
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for side in SETTINGS:
        SETTINGS[side]["steps"] = flags.steps or SETTINGS[side]["steps"]
    prepare(flags.work, flags.corpus)
    teacher = train(flags.work, "teacher", "all", side="teacher")
    print(f"teacher: {teacher['bits']:.4f} bits a byte, {teacher['cpu']:.0f} s of CPU")
    pairs = {
        part: at_equal_steps(flags.work, part, flags.seeds, flags.loss, flags.weight)
        for part in DUE
    }
    patient = {part: at_equal_time(flags.work, part, flags.seeds, pairs[part]) for part in DUE}
    reached = [report(part, flags.seeds, pairs[part], patient[part]) for part in DUE]
    sys.exit(0 if all(reached) else 1)


if __name__ == "__main__":
    main()
