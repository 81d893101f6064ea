"""Runs, models in the Hugging Face layout, and what is neither, opened; runs begun where one was
cut short.
"""

import json
import os
import shutil

import pytest
import torch
from training_makers import SENTINELS, make, train, write_run_file

from makers.datasets import prepare_here
from makers.texts import make_chat
from makers.tokenizers import CHAT_CONTROLS, tiny_tokenizer
from penstock import load_tokenizer
from penstock.core import folders as locks
from penstock.core.errors import ConfigError, CorruptionError, FormatError, OutputError
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.run_folder import RUN_FILE, RunFolder, begin_run
from penstock.models.exporting import export
from penstock.models.saving import load_model

pytestmark = pytest.mark.usefixtures("plain_torch")


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(data, folder, "training.steps=5")
    return folder


def test_a_run(data, run):
    found = RunFolder.open(run)
    tokenizer = load_tokenizer(found.tokenizer)
    assert found.step == 5
    assert tokenizer.fingerprint == load_tokenizer(data / "tokenizer").fingerprint
    assert found.template is None
    assert found.stop_ids == (tokenizer.eos_id,)
    assert load_model(found.model).vocab_size >= tokenizer.vocab_size
    assert RunFolder.open(str(run)) == found


def test_the_newest_complete_checkpoint_is_taken(data, tmp_path, capsys):
    train(data, tmp_path / "run", "training.steps=5")
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    weights = newest / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert RunFolder.open(tmp_path / "run").step == 4
    assert "step-00000005: skipped" in capsys.readouterr().err


def test_an_exported_model(data, run, tmp_path):
    tokenizer = load_tokenizer(data / "tokenizer")
    stop = tokenizer.special_tokens[SENTINELS[0]]
    export(
        load_model(RunFolder.open(run).model),
        tmp_path / "out",
        tokenizer=tokenizer,
        stop_ids=[stop],
    )
    found = RunFolder.open(tmp_path / "out")
    assert (found.model, found.tokenizer, found.step) == (tmp_path / "out", tmp_path / "out", None)
    assert stop in found.stop_ids
    assert tokenizer.eos_id in found.stop_ids
    assert found.template is None


def test_a_model_of_the_hub(data, run, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    tokenizer, asked = load_tokenizer(data / "tokenizer"), []
    export(load_model(RunFolder.open(run).model), tmp_path / "out", tokenizer=tokenizer)

    def give(name, *, revision, allow_patterns):
        asked.append(
            (name, [pattern for pattern in allow_patterns if pattern in ("*.safetensors", "*.bin")])
        )
        return str(tmp_path / "out")

    monkeypatch.setattr(hub, "snapshot_download", give)
    monkeypatch.chdir(tmp_path)
    assert RunFolder.open("some/model") == RunFolder.open(tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").rename(tmp_path / "out" / "pytorch_model.bin")
    RunFolder.open("some/model")
    assert asked == [("some/model", ["*.safetensors"])] * 2 + [("some/model", ["*.bin"])]
    snapshot = tmp_path / "models--some--model-1" / "snapshots" / "0123abc"
    shutil.copytree(tmp_path / "out", snapshot)
    assert [RunFolder.open(one).name for one in (snapshot, tmp_path / "out")] == ["model-1", "out"]
    (tmp_path / "out" / "config.json").unlink()
    with pytest.raises(FormatError, match=r"some/model.*folder.*model"):
        RunFolder.open("some/model")

    def refuse(*arguments, **options):
        raise OSError("no network")

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with pytest.raises(FormatError, match=r"some/model.*nothing.*no.*network"):
        RunFolder.open("some/model")


def test_the_chat_template_of_a_model_wherever_it_is(data, run, tmp_path):
    export(
        load_model(RunFolder.open(run).model),
        tmp_path / "out",
        tokenizer=load_tokenizer(data / "tokenizer"),
    )
    settings = tmp_path / "out" / "tokenizer_config.json"
    settings.write_text(
        json.dumps({**json.loads(settings.read_text()), "chat_template": "{{ old }}"})
    )
    assert RunFolder.open(tmp_path / "out").template == "{{ old }}"
    (tmp_path / "out" / "chat_template.jinja").write_text("{{ new }}")
    assert RunFolder.open(tmp_path / "out").template == "{{ new }}"


def test_chats_leave_their_template_in_the_run(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer", ["some words"], 270, CHAT_CONTROLS)
    chats = (make_chat("a b", f"c {n}") for n in range(50))
    prepare_here(chats, tokenizer, tmp_path / "data" / "train", template="chatml")
    train(
        write_run_file(tmp_path),
        tmp_path / "run",
        "training.steps=2",
        "training.schedule.warmup_steps=2",
    )
    found = RunFolder.open(tmp_path / "run")
    assert "<|im_start|>" in found.template
    assert load_tokenizer(found.tokenizer).special_tokens["<|im_end|>"] in found.stop_ids


def test_a_run_without_a_checkpoint(data, tmp_path):
    make(data, tmp_path / "run")
    with pytest.raises(FormatError, match=r"complete.*checkpoint.*train"):
        RunFolder.open(tmp_path / "run")


def test_rubbish(tmp_path):
    (tmp_path / "file").write_text("words")
    missing = r"\(run\.yaml.*missing\).*Hugging"
    for path, fault in (
        (tmp_path, missing),
        (tmp_path / "file", missing),
        (tmp_path / "nothing", "no such folder; give the folder of a run"),
    ):
        with pytest.raises(FormatError, match=fault):
            RunFolder.open(path)


def test_a_folder_that_a_kill_left_half_made(data, tmp_path):
    """The run file comes last: without it the folder is begun again, with a tokenizer that is
    whole.
    """
    make(data, tmp_path / "run")
    (tmp_path / "run" / RUN_FILE).unlink()
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").write_text("{")
    make(data, tmp_path / "run")
    assert (tmp_path / "run" / "tokenizer" / "tokenizer.json").read_bytes() == (
        data / "tokenizer" / "tokenizer.json"
    ).read_bytes()


def test_two_trainings_into_one_folder_are_refused(data, tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.1)
    run, ranks = tmp_path / "run", Ranks(torch.device("cpu"))
    with ranks:
        make(data, run, ranks=ranks)
        with pytest.raises(OutputError, match=rf"process {os.getpid()}.*training.*wait"):
            make(data, run, "training.steps=7", resume=True)
        assert "steps: 7" not in (run / RUN_FILE).read_text()
        make(data, run, resume=True, ranks=ranks)
    make(data, run, resume=True)


def test_a_changed_run_file_is_there_whole_or_as_it_was(tmp_path, monkeypatch):
    from penstock.learn.training.run_folder import change_run

    (tmp_path / RUN_FILE).write_text("training: {steps: 1}")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OutputError, match=r"cannot be written: No space left"):
            change_run(tmp_path, "training: {steps: 2}", print)
    assert (tmp_path / RUN_FILE).read_text() == "training: {steps: 1}"
    change_run(tmp_path, "training: {steps: 2}", print)
    assert (tmp_path / RUN_FILE).read_text() == "training: {steps: 2}"
    assert (tmp_path / f"{RUN_FILE}.old").read_text() == "training: {steps: 1}"


def test_a_folder_that_cannot_be_written(data, tmp_path):
    from penstock import open_dataset

    (tmp_path / "file").write_text("words")
    with pytest.raises(OutputError, match="cannot be written"):
        begin_run(
            tmp_path / "file" / "run",
            "",
            [open_dataset(data / "data" / "train")],
            resume=False,
            hold=Ranks(torch.device("cpu")).hold,
        )


def test_a_run_that_never_trained_is_begun_anew(data, tmp_path):
    make(data, tmp_path / "run")
    make(data, tmp_path / "run", "training.steps=7")
    assert "steps: 7" in (tmp_path / "run" / RUN_FILE).read_text()
    train(data, tmp_path / "run", "training.steps=2", "training.schedule.warmup_steps=2")
    with pytest.raises(OutputError, match=r"run.*already.*\(--resume.*resume=True\)"):
        make(data, tmp_path / "run")


def test_a_run_that_failed_in_its_first_step_is_begun_anew(data, tmp_path):
    """Its trackers and tensor logs had begun already, or one of them refused to."""
    run = tmp_path / "run"
    make(data, run)
    for folder in ("tensorboard", "wandb", "tensors"):
        (run / folder).mkdir()
        (run / folder / "begun").write_text("")
    for file in ("trackers.json", "trackers.json.partial", "sent.jsonl", "metrics.jsonl"):
        (run / file).write_text("")
    make(data, run, "training.steps=7")
    assert "steps: 7" in (run / RUN_FILE).read_text()


def test_a_setting_that_fits_only_later_leaves_a_folder_that_is_free(data, tmp_path):
    with pytest.raises(ConfigError, match="cannot be cut into 3"):
        train(data, tmp_path / "run", "training.micro_sequences=3")
    assert (
        len(train(data, tmp_path / "run", "training.steps=2", "training.schedule.warmup_steps=2"))
        == 2
    )


def test_folders_that_are_something_else_stay_as_they_are(data, tmp_path):
    (tmp_path / "file").write_text("words")
    with pytest.raises(OutputError, match="file: is a file; name a folder"):
        make(data, tmp_path / "file")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("words")
    with pytest.raises(OutputError, match="the folder is not empty and holds no run"):
        make(data, tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["notes.txt"]


def test_the_tokenizer_is_the_one_that_the_checkpoint_vouches_for(data, run, tmp_path):
    import shutil

    mine = shutil.copytree(run, tmp_path / "run")
    (mine / "tokenizer" / "tokenizer.json").write_text("{}")
    fingerprint = load_tokenizer(data / "tokenizer").fingerprint
    assert load_tokenizer(RunFolder.open(mine).tokenizer).fingerprint == fingerprint
    shutil.rmtree(mine / "tokenizer")
    said = []
    make(data, mine, "training.steps=6", resume=True, say=said.append)
    assert any("tokenizer: is missing, taken from" in one for one in said)
    assert load_tokenizer(mine / "tokenizer").fingerprint == fingerprint


def test_a_checkpoint_is_no_run_and_a_damaged_run_file_is_told(run, tmp_path):
    import shutil

    mine = shutil.copytree(run, tmp_path / "run")
    with pytest.raises(FormatError, match=r"step-00000005.*run"):
        RunFolder.open(next((mine / "checkpoints").iterdir()))
    (mine / RUN_FILE).write_bytes(b"a: [\xff")
    with pytest.raises(CorruptionError, match=r"run.yaml:1.*UTF-8;.*checkpoint"):
        RunFolder.open(mine)
