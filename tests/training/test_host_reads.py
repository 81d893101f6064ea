"""The host reads from the device once a step, whatever the number of passes and of figures.

On the CPU nothing waits, so the calls that would make a host wait for a GPU are counted: those that
turn a tensor into numbers, and those whose result has a shape that depends on values.
"""

import json
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from training_makers import make, make_teacher

from penstock.learn.training import Trainer

pytestmark = pytest.mark.usefixtures("plain_torch")
READS = ("item", "tolist", "nonzero", "cpu", "__float__", "__int__", "__bool__", "__index__")
CPU_ALONE = ("models/attention/", "tensor_logs.py")
"""Code whose numbers are on the host on every device, or that runs when a user asks for it."""


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Places in the package that read a tensor, while the block runs."""
    found: Counter[str] = Counter()

    def watch(name: str) -> None:
        before = getattr(torch.Tensor, name)

        def call(self, *args, **given):
            own = [
                f"{frame.filename.split('/penstock/')[-1]}:{frame.lineno} {name}"
                for frame in traceback.extract_stack()[:-1]
                if "/src/penstock/" in frame.filename
            ]
            if own and not any(part in own[-1] for part in CPU_ALONE):
                found[own[-1]] += 1
            return before(self, *args, **given)

        patch.setattr(torch.Tensor, name, call)

    with monkeypatch.context() as patch:
        for name in READS:
            watch(name)
        yield found


@pytest.fixture(scope="module")
def same(tmp_path_factory):
    return make_teacher(tmp_path_factory.mktemp("teacher"), 4)


def reads_of_a_step(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of the third step: things that are made once are there."""
    step, calls, found = Trainer._step, [], Counter()

    def watched(self, *args):
        calls.append(1)
        if len(calls) != 3:
            return step(self, *args)
        with counted(monkeypatch) as mine:
            record = step(self, *args)
        found.update(mine)
        return record

    monkeypatch.setattr(Trainer, "_step", watched)
    assert len(list(trainer.train())) == 3
    return found


CASES: dict[str, tuple[str, ...]] = {
    "one pass": ("training.rows_per_pass=4",),
    "four passes": ("training.rows_per_pass=1",),
    "further heads": ("model.prediction_heads=3", "training.rows_per_pass=2"),
    "parts of rows": ("training.micro_sequences=2",),
    "LoRA": ("training.lora={rank: 2}", "training.rows_per_pass=1"),
    "checkpoints": ("training.activation_checkpointing=selective",),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_reads_once(name, data, tmp_path, monkeypatch):
    trainer = make(data, tmp_path / "run", "training.steps=3", *CASES[name])
    found = reads_of_a_step(trainer, monkeypatch)
    assert sum(found.values()) == 1, dict(found)
    assert "step_sums.py" in next(iter(found))


@pytest.mark.parametrize("kind", ["p_kl", "alm", "uld"])
def test_a_step_with_a_teacher_reads_once(kind, data, same, tmp_path, monkeypatch):
    teacher = {"teachers": [{"model": str(same), "loss": {"kind": kind}}]}
    trainer = make(data, tmp_path / "run", f"teacher={json.dumps(teacher)}", "training.steps=3")
    found = reads_of_a_step(trainer, monkeypatch)
    assert sum(found.values()) == 1, dict(found)


def test_the_counter_counts(monkeypatch, data, tmp_path):
    trainer = make(data, tmp_path / "run", "training.steps=3", "training.rows_per_pass=2")
    add = type(trainer._gradients).add

    def reads(self, *args):
        found = add(self, *args)
        return found * float(found) / found.item()

    monkeypatch.setattr(type(trainer._gradients), "add", reads)
    assert sum(reads_of_a_step(trainer, monkeypatch).values()) == 1 + 2 * 2
