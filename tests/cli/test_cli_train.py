"""`penstock train` as a command: what it prints, writes and refuses."""

import json

import pytest

from makers.datasets import prepare_here
from makers.forked import run_penstock
from makers.texts import make_texts
from makers.tokenizers import tiny_tokenizer

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
    texts = make_texts(60, words=["one", "two", "three"], shortest=2, longest=12, end="")
    tiny_tokenizer(folder / "tokenizer", texts, 270)
    prepare_here(iter(texts), folder / "tokenizer", folder / "data")
    (folder / "run.yaml").write_text(RUN_FILE)
    return folder


def train(folder, *words):
    return run_penstock("train", "run.yaml", *words, cwd=folder)


def test_a_run_and_going_on_with_it(folder):
    first = train(folder, "-o", "first", "--json")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["step"] == 3
    assert sorted(path.name for path in (folder / "first").iterdir()) == [
        "checkpoints", "facts.json", "lock", "metrics.jsonl", "run.yaml", "tokenizer",
    ]  # fmt: skip
    again = train(folder, "-o", "first")
    assert again.returncode == 1
    assert again.stderr.endswith(
        "penstock: first: a run is there already; resume it (--resume, or resume=True), or "
        "choose another folder\n"
    )
    more = train(folder, "-o", "first", "--resume", "--set", "training.steps=5")
    assert more.returncode == 0
    assert "penstock: resumed with training.steps: 5; it was 3" in more.stderr
    assert "penstock: goes on after step 3" in more.stderr
    steps = [
        json.loads(line)["step"]
        for line in (folder / "first" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 2, 3, 4, 5]
    assert "steps: 5" in (folder / "first" / "run.yaml").read_text()


def test_a_dry_run_writes_nothing(folder):
    before = sorted(folder.iterdir())
    told = train(folder, "--dry-run", "--json")
    assert told.returncode == 0, told.stderr
    facts = json.loads(told.stdout)
    assert facts["model"] == "1 layers of 16"
    assert int(facts["parameters"].replace(",", "")) > 270 * 16
    assert facts["steps"].startswith("3, ")
    assert sorted(folder.iterdir()) == before


def test_no_folder(folder):
    told = train(folder)
    assert told.returncode == 1
    assert told.stderr == "penstock: --output is missing: give the folder of the run\n"
