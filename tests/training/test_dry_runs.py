"""A dry run refuses what starting would refuse, with the same words, and neither writes anything
before it does.
"""

import gc
import os
import shutil
from pathlib import Path

import pytest
import torch
from training_makers import make, train

from penstock.core.errors import (
    ConfigError,
    MissingExtraError,
    OutputError,
    PenstockError,
    StateError,
)
from penstock.core.folders import lock_folder
from penstock.learn.training.distributed import Ranks
from penstock.use.config import training as set_up

pytestmark = pytest.mark.usefixtures("plain_torch")

PREFIXES = "{preset: ul2r, modes: null}"
LATER = (
    (
        "data.sources=[{{path: {data}/data/train, name: web}}, "
        "{{path: {data}/data/train, name: later, share: 0, objective: %s}}]"
    ),
    "data.changes=[{{step: 4, shares: {{later: 1}}}}]",
)


def later(objective: str) -> tuple[str, ...]:
    """A source that gets its share at step 4."""
    return LATER[0] % objective.replace("{", "{{").replace("}", "}}"), LATER[1]


FAULTS = {
    "prefixes and micro-sequences": (
        (*later(PREFIXES), "training.micro_sequences=2"),
        (
            r"training.micro_sequences is 2, and the objective of source 'later' makes "
            r"prefixes.*bidirectional: false"
        ),
    ),
    "prefixes and a window": (
        (*later(PREFIXES), "model.sliding_window=8"),
        (
            r"source 'later': objective 'denoise' makes bidirectional prefixes, but .*cannot "
            r"honour them"
        ),
    ),
    "prefixes and joined documents": (
        (*later(PREFIXES), "data.attention=row"),
        r"source 'later': objective 'denoise' makes bidirectional prefixes.*attention=.row.",
    ),
    "ids of an objective": (
        later(f"{{preset: ul2r, modes: null, sentinels: {[*range(300, 338), 99999]}}}"),
        (
            r"source 'later': its objective writes token id 99999, and the model knows ids below "
            r"\d+; give the objective"
        ),
    ),
    "a source that is not there": (
        ("data.sources=[{{path: {data}/data/train}}, {{path: {data}/nowhere, share: 0}}]",),
        r"run.yaml: source 'nowhere': .*nothing there",
    ),
    "micro-sequences that divide nothing": (
        ("training.micro_sequences=7",),
        r"a row of 64 slots cannot be cut into 7",
    ),
    "micro-sequences and a window": (
        ("training.micro_sequences=2", "model.sliding_window=8"),
        r"micro-sequences do not support sliding windows; take 1 part",
    ),
    "attention without gradients": (
        ("training.attention=flex",),
        r"'flex' has no backward pass on the CPU",
    ),
    "attention of another device": (
        ("training.attention=varlen",),
        r"attention backend 'varlen' .*take per_document",
    ),
    "a model that is not there": (("model=hf:/nowhere",), r"/nowhere"),
    "weights that are not there": (("model=from:/nowhere",), r"/nowhere"),
    "a model larger than all memory": (
        ("model.layers=1000000000",),
        (
            r"model: [\d,]+ parameters need [\d,.]+ GB, and there are [\d.,]+; make layers or "
            r"width smaller"
        ),
    ),
    "a step larger than all memory": (
        ("data.loader.rows_per_step=16777216", "data.loader.sequence_length=67108864"),
        (
            r"data.loader: a step of 16,777,216 rows of 67,108,864 slots need .* GB, .*lower "
            r"rows_per_step"
        ),
    ),
    "LoRA of nothing": (
        ("training.lora={{targets: [zzz]}}",),
        r"lora.targets \['zzz'\] match no matrix of the model",
    ),
    "tensors of nothing": (
        ("training.tensor_logs.patterns=[zzz]",),
        r"tensor_logs.patterns: 'zzz' fits no tensor",
    ),
    "no end": (("training.steps=null",), r"training.steps is missing"),
    "a warm-up longer than the data": (
        (
            "training.steps=null",
            "data.sources.0.max_epochs=1",
            "training.schedule.warmup_steps=100000",
        ),
        (
            r"training.schedule.warmup_steps is 100000, and the run has \d+ steps; lower it, or "
            r"leave it out"
        ),
    ),
    "a teacher that is not there": (("teacher={{teachers: [{{model: /nowhere}}]}}",), r"/nowhere"),
    "held-out data that is not there": (
        ("training.evaluators={{a: {{data: /nowhere}}}}",),
        r"evaluator 'a': /nowhere: nothing there",
    ),
    "an evaluator's prefixes": (
        (
            "model.sliding_window=8",
            "training.evaluators={{a: {{data: '{data}/data/train', objective: %s}}}}",
        ),
        (
            r"evaluator 'a': source 'held out': objective 'denoise' makes bidirectional "
            r"prefixes.*cannot honour them"
        ),
    ),
    "an evaluator's task that is not there": (
        ("training.evaluators={{a: {{kind: task, task: {{name: mmlu, data: /nowhere}}}}}}",),
        r"/nowhere",
    ),
    "a prompt longer than a row": (
        (f"training.evaluators={{{{a: {{{{kind: samples, prompts: [{'the ' * 99}]}}}}}}}}",),
        r"evaluator 'a': prompt",
    ),
}


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Path → bytes and time of the last change, of all that is in a folder."""
    found = ((path, path.lstat()) for path in folder.rglob("*"))
    return {str(path.relative_to(folder)): (stat.st_size, stat.st_mtime_ns) for path, stat in found}


@pytest.mark.parametrize("name", FAULTS)
def test_both_refuse_with_the_same_words(data, tmp_path, name):
    assignments, message = FAULTS[name]
    filled = [
        text.replace("%s", PREFIXES.replace("{", "{{").replace("}", "}}")).format(data=data)
        for text in assignments
    ]
    told = []
    for dry_run in (True, False):
        with pytest.raises(PenstockError, match=message) as error:
            make(data, tmp_path / "run", *filled, dry_run=dry_run)
        told.append(str(error.value))
    assert told[0] == told[1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_a_package_that_is_missing(data, tmp_path, monkeypatch, name):
    monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    monkeypatch.setattr("penstock.learn.training.checks.find_spec", lambda asked: None)
    setting = f"training.log=[{name}]"
    for dry_run in (True, False):
        with pytest.raises(MissingExtraError, match=rf"{name} is not.*penstock\[{name}\]"):
            make(data, tmp_path / "run", setting, dry_run=dry_run)
    assert list(tmp_path.iterdir()) == []


def test_the_sandbox_is_asked_for_before_teachers_are_opened(data, tmp_path, monkeypatch):
    """A projection of vocabularies takes minutes."""
    (tmp_path / "problems.jsonl").write_text("{}\n")

    def refuse(*_, **__):
        raise ConfigError("there is no sandbox here")

    monkeypatch.setattr("penstock.learn.evaluation.code.Sandbox", refuse)
    monkeypatch.setattr(
        "penstock.use.config.teachers.open_teachers",
        lambda *_: pytest.fail("the teachers are opened"),
    )
    look = (
        "training.evaluators={a: {kind: task, task: {name: humaneval, data: "
        f"'{tmp_path}/problems.jsonl'}}}}}}"
    )
    with pytest.raises(ConfigError, match="there is no sandbox here"):
        make(data, tmp_path / "run", look, "teacher={teachers: [{model: big}]}", dry_run=True)


def test_folders_that_are_not_free(data, tmp_path):
    (tmp_path / "file").write_text("words")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("words")
    train(data, tmp_path / "run", until=1)
    before = files(tmp_path)
    for name, message in (
        ("file", "is a file; name a folder"),
        ("file/run", "Not a directory|cannot be written"),
        ("mine", "not empty and holds no run"),
        ("run", r"a run is there already; resume it \(--resume, or resume=True\)"),
    ):
        for dry_run in (True, False):
            with pytest.raises(OutputError, match=message):
                make(data, tmp_path / name, dry_run=dry_run)
    assert files(tmp_path) == before


def test_a_folder_that_another_process_trains_into(data, tmp_path):
    train(data, tmp_path / "run", until=3)
    lock = lock_folder(tmp_path / "run", tmp_path / "run" / "lock", doing="training")
    try:
        with pytest.raises(OutputError, match=rf"process {os.getpid()} is training"):
            make(data, tmp_path / "run", resume=True, dry_run=True)
    finally:
        os.close(lock)
    assert make(data, tmp_path / "run", resume=True, dry_run=True).loader.step == 2


def test_a_run_that_is_given_up_lets_its_folder_go_at_once(data, tmp_path):
    """Nothing of it waits for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        held, texts = f"{{data: {data}/data/validation}}", "{kind: samples, max_tokens: 2}"
        look = f"training.evaluators={{held: {held}, texts: {texts}}}"
        train(data, tmp_path / "run", look, until=3)
        assert make(data, tmp_path / "run", resume=True, dry_run=True).loader.step == 2
    finally:
        gc.enable()


def test_a_checkpoint_that_does_not_fit(data, tmp_path):
    train(data, tmp_path / "run", until=3)
    before = files(tmp_path)
    for dry_run in (True, False):
        with pytest.raises(StateError, match="is of another model: weight"):
            make(data, tmp_path / "run", "model.width=32", resume=True, dry_run=dry_run)
    assert {name: found for name, found in files(tmp_path).items() if name != "run/lock"} == {
        name: found for name, found in before.items() if name != "run/lock"
    }


def test_a_dry_run_of_what_fits_writes_nothing(data, tmp_path):
    """Neither into a new folder nor into one to resume, of which something is missing and whose
    settings change.
    """
    assert make(data, tmp_path / "new", dry_run=True).loader.step == 0
    assert list(tmp_path.iterdir()) == []
    train(data, tmp_path / "run", until=3)
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    before, said = files(tmp_path), []
    change = "training.optimizer.learning_rate=0.02"
    trainer = make(data, tmp_path / "run", change, resume=True, dry_run=True, say=said.append)
    assert (trainer.loader.step, files(tmp_path)) == (2, before)
    assert "goes on after step 2" in said


def test_a_source_with_prefixes_that_never_gets_a_share_is_refused_too(data, tmp_path):
    sources = later(PREFIXES)[0].format(data=data)
    with pytest.raises(ConfigError, match=r"objective.*'later'.*prefixes"):
        make(data, tmp_path / "run", sources, "training.micro_sequences=2")


def test_one_function_sets_up_both(data, tmp_path, monkeypatch):
    seen = []
    whole = set_up._make_parts
    monkeypatch.setattr(set_up, "_make_parts", lambda *given: seen.append(1) or whole(*given))
    for dry_run in (True, False):
        make(data, tmp_path / "run", dry_run=dry_run, ranks=Ranks(torch.device("cpu")))
    assert len(seen) == 2
