"""Checkpoints that are written beside the training: those of a standstill, waited for where a run
ends, and a failure of one ends the run.
"""

import errno
import os
import signal
import threading

import pytest
import torch
from python_makers import KillAfter, KilledError, make_model, start
from training_makers import losses

import penstock as ps
from makers.models import tiny_huggingface
from penstock.core.errors import ConfigError, OutputError
from penstock.learn.training import run_state
from penstock.learn.training import saving as saving_module
from penstock.learn.training.checkpoints import newest_complete, save_checkpoint
from penstock.learn.training.saving import Saving
from penstock.learn.training.settings import CheckpointSettings

pytestmark = pytest.mark.usefixtures("plain_torch")
BESIDE = {"every": 2, "keep": 9, "asynchronous": True}


def files(folder) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def newest(output) -> int:
    return newest_complete(output / "checkpoints").step


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_same_bytes_as_at_a_standstill(data, tmp_path, optimizer):
    for name, beside in (("beside", True), ("still", False)):
        start(
            data,
            tmp_path / name,
            steps=6,
            optimizer=optimizer,
            checkpoints={**BESIDE, "asynchronous": beside},
        )
    for step in (2, 4, 6):
        beside, still = (
            files(tmp_path / name / "checkpoints" / f"step-{step:08d}")
            for name in ("beside", "still")
        )
        differ = {name for name in still if still[name] != beside.get(name)}
        # Times, and the setting.
        assert differ <= {"manifest.json", "state.json", "run.yaml"}
        assert beside.keys() == still.keys()


@pytest.mark.parametrize("tied", [True, False])
def test_models_of_transformers(data, tmp_path, tied):
    """A weight with two names is written once, as transformers does."""
    vocabulary = ps.open_dataset(data / "data" / "train").tokenizer.vocab_size
    tiny_huggingface(vocab_size=vocabulary, tie_word_embeddings=tied).save_pretrained(
        tmp_path / "base"
    )
    for beside in (True, False):
        start(
            data,
            tmp_path / str(beside),
            model=f"hf:{tmp_path / 'base'}",
            steps=2,
            warmup_steps=1,
            checkpoints={**BESIDE, "asynchronous": beside},
        )
    written = [
        files(tmp_path / name / "checkpoints" / "step-00000002" / "model")
        for name in ("True", "False")
    ]
    assert written[0] == written[1]


def test_a_killed_run_goes_on(data, tmp_path):
    whole = start(data, tmp_path / "whole", steps=8)
    with pytest.raises(KilledError, match="after step"):
        start(data, tmp_path / "run", steps=8, checkpoints=BESIDE, on_step=KillAfter(5))
    assert newest(tmp_path / "run") == 4
    run = start(data, tmp_path / "run", steps=8, checkpoints=BESIDE, resume=True)
    assert losses(run.metrics) == losses(whole.metrics)


class Held:
    """`save_checkpoint`, of which each call waits until it may go on."""

    def __init__(self, monkeypatch, fails_at=0):
        self.may, self.begun, self.over = threading.Event(), [], []
        self.fails_at = fails_at
        monkeypatch.setattr(run_state, "save_checkpoint", self)

    def __call__(self, folder, step, parts, **more):
        self.begun.append(step)
        assert self.may.wait(60)
        if step == self.fails_at:
            reason = os.strerror(errno.ENOSPC)
            raise OutputError(f"{folder}: the checkpoint cannot be written: {reason}")
        save_checkpoint(folder, step, parts, **more)
        self.over.append(step)


class Steps:
    """An `on_step` that does something at a step, and notes which were done."""

    def __init__(self, at=0, do=lambda: None):
        self.at, self.do, self.done = at, do, []

    def __call__(self, model, step, record):
        self.done.append(record["step"])
        if record["step"] == self.at:
            self.do()


def test_steps_go_on_and_what_is_written_is_as_it_was(data, tmp_path, monkeypatch):
    """While the checkpoint of step 2 is held, step 3 is done; its weights are not in the file."""
    held = Held(monkeypatch)
    steps = Steps(3, held.may.set)
    start(data, tmp_path / "run", steps=4, checkpoints=BESIDE, on_step=steps)
    assert held.over == [2, 4]
    start(data, tmp_path / "still", steps=4)
    for step in (2, 4):
        for part in ("optimizer.safetensors", "model/model.safetensors"):
            there = [
                (tmp_path / name / "checkpoints" / f"step-{step:08d}" / part).read_bytes()
                for name in ("run", "still")
            ]
            assert there[0] == there[1]


def test_a_failure_ends_the_run_at_the_next_step(data, tmp_path, monkeypatch):
    held = Held(monkeypatch, fails_at=4)
    held.may.set()
    monkeypatch.setattr(
        Saving, "start", _then_join(Saving.start)
    )  # so that it has failed when step 5 ends
    steps = Steps()
    with pytest.raises(OutputError, match="No space left"):
        start(data, tmp_path / "run", steps=8, checkpoints=BESIDE, on_step=steps)
    assert steps.done == [1, 2, 3, 4, 5]
    assert newest(tmp_path / "run") == 2


def _then_join(plain):
    def begin(self, write):
        plain(self, write)
        self._thread.join()

    return begin


def test_a_failure_at_the_end_is_an_error(data, tmp_path, monkeypatch):
    held = Held(monkeypatch, fails_at=4)
    held.may.set()
    with pytest.raises(OutputError, match="No space left"):
        start(data, tmp_path / "run", steps=4, checkpoints=BESIDE)
    assert newest(tmp_path / "run") == 2


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_waits_for_the_save(data, tmp_path, monkeypatch, name):
    held = Held(monkeypatch)
    timer = threading.Timer(0.3, held.may.set)
    steps = Steps(3, lambda: (os.kill(os.getpid(), getattr(signal, name)), timer.start()))
    run = start(data, tmp_path / "run", steps=9, checkpoints=BESIDE, on_step=steps)
    assert (held.over, run.step) == ([2, 3], 3)


def test_a_second_ctrl_c_waits_for_nothing(data, tmp_path, monkeypatch):
    held = Held(monkeypatch)
    ctrl_c = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    steps = Steps(3, lambda: (os.kill(os.getpid(), signal.SIGINT), ctrl_c.start()))
    with pytest.raises(KeyboardInterrupt):  # noqa: PT011
        start(data, tmp_path / "run", steps=9, checkpoints=BESIDE, on_step=steps)
    assert (held.begun, held.over) == ([2], [])
    held.may.set()


def test_an_error_in_a_step_waits_for_the_save(data, tmp_path, monkeypatch):
    held = Held(monkeypatch)

    def fail():
        threading.Timer(0.3, held.may.set).start()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        start(data, tmp_path / "run", steps=9, checkpoints=BESIDE, on_step=Steps(3, fail))
    assert newest(tmp_path / "run") == 2


def test_tied_weights_stay_one(tmp_path):
    saving = Saving(beside=True, say=print)
    weight, other = torch.randn(3, 4), torch.randn(5)
    found = saving.copied("model", {"a": weight, "b": other, "c": weight, "d": torch.tensor(2.0)})
    assert found["a"].data_ptr() == found["c"].data_ptr() != weight.data_ptr()
    weight += 1
    assert torch.equal(found["a"] + 1, weight)
    place = found["a"].data_ptr()
    assert (
        saving.copied("model", {"a": weight, "b": other, "d": torch.tensor(2.0)})["a"].data_ptr()
        == place
    )


@pytest.mark.parametrize(
    ("asked", "device", "due"),
    [("auto", "cpu", False), ("auto", "cuda", True), (True, "cpu", True), (False, "cuda", False)],
)
def test_what_is_chosen(asked, device, due):
    settings = CheckpointSettings(asynchronous=asked)
    assert Saving.of(settings, torch.device(device), print).beside is due


def test_a_copy_that_does_not_fit(data, tmp_path, monkeypatch):
    """By default it is not taken, with a line; asked for, it is refused at the start."""
    model = make_model(data)
    weights = sum(one.numel() for one in model.parameters())
    assert saving_module.copy_size(model, sharded=False, only_trained=False) == 12 * weights
    model.requires_grad_(False)
    assert saving_module.copy_size(model, sharded=False, only_trained=False) == 4 * weights
    assert saving_module.copy_size(model, sharded=False, only_trained=True) == 0
    monkeypatch.setattr(saving_module, "device_memory", lambda device: 10_000)
    said = []
    cuda = torch.device("cuda")
    found = Saving.of(CheckpointSettings(), cuda, said.append, copies=7_000)
    assert not found.beside
    assert "at a standstill: a copy" in said[0]
    assert Saving.of(CheckpointSettings(), cuda, said.append, copies=5_000).beside
    with pytest.raises(ConfigError, match=r"asynchronous: a copy .* set it to false"):
        start(data, tmp_path / "run", checkpoints=BESIDE)


def test_other_values_are_refused(data, tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoints\.asynchronous"):
        start(data, tmp_path / "run", checkpoints={"asynchronous": "sometimes"})
    start(data, tmp_path / "run", steps=1, warmup_steps=0, checkpoints={"asynchronous": "auto"})


def test_lora_beside(data, tmp_path):
    pytest.importorskip("peft", reason="LoRA needs peft: pip install 'penstock[lora]'")
    lora = {"lora": {"rank": 2, "alpha": 4}, "steps": 4}
    found = [
        start(data, tmp_path / str(beside), model=make_model(data), **lora, checkpoints=one)
        for beside in (True, False)
        for one in [{**BESIDE, "asynchronous": beside}]
    ]
    first, second = (ps.load_model(run.path).state_dict() for run in found)
    assert all(torch.equal(one, second[name]) for name, one in first.items())
    assert (found[0].path / "base" / "manifest.json").is_file()
