"""`penstock train` as a command: what it prints, writes and refuses."""

import json
import os
import random
import subprocess
import sys

import pytest

from patience import PATIENCE_SECONDS
from penstock.prepare import prepare
from penstock.tokenizers import train_tokenizer

pytestmark = pytest.mark.slow

RUN_FILE = """\
data:
  sources: [{path: data}]
  loader: {sequence_length: 32, rows_per_step: 2, seed: 1}
model: {layers: 1, width: 16, heads: 2}
training: {steps: 3, threads: 1}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    chance = random.Random(0)
    texts = [" ".join(chance.choices(["one", "two", "three"], k=chance.randint(2, 12))) for _ in range(60)]
    train_tokenizer(texts, vocab_size=270, output=folder / "tokenizer", progress=False)
    prepare(iter(texts), tokenizer=folder / "tokenizer", output=folder / "data", processes=1, progress=False)
    (folder / "run.yaml").write_text(RUN_FILE)
    return folder


def run(folder, *words):
    command = [sys.executable, "-m", "penstock", "train", "run.yaml", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environment, timeout=PATIENCE_SECONDS
    )


def test_a_run_and_going_on_with_it(folder):
    first = run(folder, "-o", "first", "--json")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["step"] == 3
    assert sorted(path.name for path in (folder / "first").iterdir()) == [
        "checkpoints", "lock", "metrics.jsonl", "run.yaml", "tokenizer",
    ]  # fmt: skip
    again = run(folder, "-o", "first")
    assert again.returncode == 1
    assert (
        again.stderr == "penstock: first: a run is there already; go on with it by --resume, or take another folder\n"
    )
    more = run(folder, "-o", "first", "--resume", "--set", "training.steps=5")
    assert more.returncode == 0
    assert "penstock: resumed with training.steps: 5; it was 3" in more.stderr
    assert "penstock: goes on after step 3" in more.stderr
    steps = [json.loads(line)["step"] for line in (folder / "first" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5]
    assert "steps: 5" in (folder / "first" / "run.yaml").read_text()


def test_a_dry_run_writes_nothing(folder):
    before = sorted(folder.iterdir())
    told = run(folder, "--dry-run", "--json")
    assert told.returncode == 0, told.stderr
    facts = json.loads(told.stdout)
    assert facts["model"] == "1 layers of 16"
    assert int(facts["parameters"].replace(",", "")) > 270 * 16
    assert facts["steps"].startswith("3, ")
    assert sorted(folder.iterdir()) == before


def test_no_folder(folder):
    told = run(folder)
    assert told.returncode == 1
    assert told.stderr == "penstock: --output is missing: the folder of the run\n"
