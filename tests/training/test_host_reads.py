"""The host reads from the device once a step, whatever the number of passes and of figures, and
sends without waiting.
"""

import json

import numpy as np
import pytest
import torch
from host_reads import counted, reads_of_a_step
from test_loss_groups import MIXED
from training_makers import last_json, make, make_teacher, on_two_processes

from penstock.models.recurrent import borders
from penstock.plan.inputs.torch_tensors import on_device

pytestmark = pytest.mark.usefixtures("plain_torch")
THREE = "training.steps=3"
EXPERTS = ("model.blocks={one: {experts: 4}}", "model.pattern=[one]")
HYBRID = ("model.blocks={one: {mixer: gated_delta}, two: {}}", "model.pattern=[one, two]")


@pytest.fixture(scope="module")
def same(tmp_path_factory):
    return make_teacher(tmp_path_factory.mktemp("teacher"), 4)


CASES: dict[str, tuple[str, ...]] = {
    "one pass": ("training.rows_per_pass=4",),
    "four passes": ("training.rows_per_pass=1",),
    "further heads": ("model.prediction_heads=3", "training.rows_per_pass=2"),
    "parts of rows": ("training.micro_sequences=2",),
    "LoRA": ("training.lora={rank: 2}", "training.rows_per_pass=1"),
    "checkpoints": ("training.activation_checkpointing=selective",),
    "recurrences": (*HYBRID, "training.rows_per_pass=2"),
    "whole rows": ("data.attention=row", "training.rows_per_pass=1"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_reads_once(name, data, tmp_path, monkeypatch):
    trainer = make(data, tmp_path / "run", THREE, *CASES[name])
    found = reads_of_a_step(trainer, monkeypatch)
    assert sum(found.values()) == 1, dict(found)
    assert "step_sums.py" in next(iter(found))


def test_sources_and_tasks_are_read_with_the_loss(data, tmp_path, monkeypatch):
    sources = MIXED.replace("DATA", str(data / "data"))
    trainer = make(data, tmp_path / "run", sources, THREE, "training.rows_per_pass=1")
    found = reads_of_a_step(trainer, monkeypatch)
    assert sum(found.values()) == 1, dict(found)


def test_experts_in_one_product_are_not_counted(data, tmp_path, monkeypatch):
    more = ("model.width=32", "training.precision=bfloat16", "training.rows_per_pass=2")
    trainer = make(data, tmp_path / "run", THREE, *EXPERTS, *more)
    found = reads_of_a_step(trainer, monkeypatch)
    assert sum(found.values()) == 1, dict(found)


def test_a_loss_of_ones_own_is_read_with_its_figures(data, tmp_path, monkeypatch):
    code = tmp_path / "own.py"
    code.write_text(
        "def loss(model, row, denominators):\n"
        "    logits = model.logits(model(row)[0])\n"
        "    share = (logits.mean(-1) * row.loss_weights[0]).square().sum() / denominators[0]\n"
        "    return share, {'twice': 2 * share, 'one': 1.0}\n"
    )
    trainer = make(data, tmp_path / "run", THREE, f"training.loss={code}:loss")
    found = reads_of_a_step(trainer, monkeypatch)
    assert sum(found.values()) == 1, dict(found)


@pytest.mark.parametrize("kinds", [["p_kl"], ["alm"], ["uld"], ["p_kl", "alm", "uld"]], ids=str)
def test_a_step_with_teachers_reads_once(kinds, data, same, tmp_path, monkeypatch):
    teachers = [{"model": str(same), "loss": {"kind": kind}} for kind in kinds]
    teacher = f"teacher={json.dumps({'teachers': teachers})}"
    trainer = make(data, tmp_path / "run", teacher, THREE, "training.rows_per_pass=1")
    found = reads_of_a_step(trainer, monkeypatch)
    assert sum(found.values()) == 1, dict(found)


RANKS = """
    import json, sys
    import pytest, torch
    from host_reads import reads_of_a_step
    from training_makers import make
    from penstock.learn.training.distributed import Ranks
    from pathlib import Path

    data, run, *more = sys.argv[1:]
    parts = 2 if any("context_parallel" in one for one in more) else 1
    with pytest.MonkeyPatch.context() as patch, Ranks(torch.device("cpu"), parts) as ranks:
        trainer = make(Path(data), Path(run), "training.steps=3", *more, ranks=ranks)
        print(json.dumps(reads_of_a_step(trainer, patch)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", ["rows_per_pass=1", "context_parallel=2", "shard=true"])
def test_a_step_of_several_ranks_reads_once(more, data, tmp_path):
    out = on_two_processes(tmp_path / "ranks.py", RANKS, data, tmp_path / "run", f"training.{more}")
    for text, _ in out:
        found = last_json(text)
        assert sum(found.values()) == 1, found


def test_the_counter_counts(monkeypatch, data, tmp_path):
    trainer = make(data, tmp_path / "run", THREE, "training.rows_per_pass=2")
    add = type(trainer._gradients).add

    def reads(self, *args):
        found = add(self, *args)
        return found * float(found) / found.item()

    monkeypatch.setattr(type(trainer._gradients), "add", reads)
    assert sum(reads_of_a_step(trainer, monkeypatch).values()) == 1 + 2 * 2


def test_arrays_that_are_sent_and_waited_for_are_counted(monkeypatch):
    def waits(array, device):
        return torch.from_numpy(array).to(device)

    for send, copies in ((on_device, 0), (waits, 1)):
        monkeypatch.setattr(borders, "on_device", send)
        with counted(monkeypatch) as found:
            borders.Borders([0, 3, 5], torch.device("cpu")).place(np.arange(3))
        assert sum(found.values()) == copies
