"""Checkpoints: complete or not there, checked, the last few kept."""

import errno
import json
import os
import shutil

import pytest
import torch

from penstock.core.errors import CorruptionError, FormatError, OutputError
from penstock.learn.training import checkpoints as checkpoint_files
from penstock.learn.training.checkpoints import load_checkpoint, newest_complete, save_checkpoint


def parts(step: int) -> dict:
    """All that is in it says its step."""
    return {
        "optimizer.safetensors": {
            "layer/exp_avg": torch.full((1000,), float(step)),
            "layer/step": torch.tensor(step),
        },
        "state.json": {"step": step, "loader": {"é": [1, 2.5, None]}},
        "model": lambda path: (path.mkdir(), (path / "weights.txt").write_text(str(step))),
    }


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_read(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocabulary").write_text("abc")
    (tmp_path / "run.yaml").write_text("model: {}")
    both = {"tokenizer": tmp_path / "tokenizer", "run.yaml": tmp_path / "run.yaml"}
    save_checkpoint(tmp_path / "checkpoints", 7, {**parts(7), **both})
    found = newest_complete(tmp_path / "checkpoints")
    assert found.step == 7
    assert found.folder.name == "step-00000007"
    assert found.value("state.json") == {"step": 7, "loader": {"é": [1, 2.5, None]}}
    assert found.tensors("optimizer.safetensors")["layer/step"] == 7
    assert (found.part("model") / "weights.txt").read_text() == "7"
    assert (found.part("tokenizer") / "vocabulary").read_text() == "abc"
    assert found.part("run.yaml").read_text() == "model: {}"
    with pytest.raises(FormatError, match=r"moments.*optimizer\.safetensors, run"):
        found.part("moments")


def test_the_last_few_are_kept(tmp_path):
    for step in (1, 2, 10, 300):
        save_checkpoint(tmp_path, step, parts(step), keep=2)
    assert names(tmp_path) == ["step-00000010", "step-00000300"]


def test_damaged_ones_do_not_count_among_the_kept(tmp_path):
    for step in (1, 2):
        save_checkpoint(tmp_path, step, parts(step), keep=9)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    save_checkpoint(tmp_path, 3, parts(3), keep=2)
    assert {"step-00000001", "step-00000003"} <= set(names(tmp_path))


def test_a_run_taken_back_does_not_delete_what_it_just_wrote(tmp_path):
    save_checkpoint(tmp_path, 9, parts(9), keep=1)
    save_checkpoint(tmp_path, 4, parts(4), keep=1)
    assert names(tmp_path) == ["step-00000004", "step-00000009"]


def test_the_same_step_again_replaces(tmp_path):
    save_checkpoint(tmp_path, 1, parts(1))
    save_checkpoint(tmp_path, 1, {"state.json": "new"})
    assert newest_complete(tmp_path).value("state.json") == "new"
    assert names(tmp_path) == ["step-00000001"]


def test_none_yet(tmp_path):
    assert newest_complete(tmp_path / "nothing") is None
    assert newest_complete(tmp_path) is None


@pytest.mark.parametrize("file", ["optimizer.safetensors", "state.json", "model/weights.txt"])
def test_a_flipped_byte_is_found_and_named(tmp_path, file):
    for step in (1, 2):
        save_checkpoint(tmp_path, step, parts(step))
    path = tmp_path / "step-00000002" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    said = []
    assert newest_complete(tmp_path, say=said.append).step == 1
    assert len(said) == 1
    assert f"step-00000002: skipped: the bytes of {file} differ from their checksum" in said[0]
    with pytest.raises(CorruptionError, match=f"the bytes of {file} differ"):
        load_checkpoint(tmp_path / "step-00000002")


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda p: (p / "manifest.json").unlink(), "was never complete"),
        (lambda p: (p / "manifest.json").write_text('{"files": {'), "was never complete"),
        (lambda p: (p / "state.json").unlink(), r"state\.json cannot be read"),
        (lambda p: (p / "state.json").write_text("{}"), r"state\.json has 2 bytes"),
    ],
)
def test_other_damage_is_passed_over_too(tmp_path, damage, match, capsys):
    for step in (1, 2):
        save_checkpoint(tmp_path, step, parts(step))
    damage(tmp_path / "step-00000002")
    assert newest_complete(tmp_path).step == 1
    assert "skipped:" in capsys.readouterr().err
    with pytest.raises(CorruptionError, match=match):
        load_checkpoint(tmp_path / "step-00000002")


def test_other_formats_and_names_are_refused(tmp_path):
    saved = save_checkpoint(tmp_path, 1, parts(1)).folder
    with pytest.raises(FormatError, match="is not a checkpoint"):
        load_checkpoint(tmp_path)
    shutil.copytree(saved, tmp_path / "step-00000005")
    with pytest.raises(FormatError, match="holds step 1"):
        load_checkpoint(tmp_path / "step-00000005")
    manifest = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(FormatError, match="checkpoint format version 99"):
        load_checkpoint(saved)


def test_a_full_disk_leaves_the_old_ones(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, parts(1), keep=1)

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_files.os, "fsync", full)
        with pytest.raises(OutputError, match=r"space.*device.*checkpoints"):
            save_checkpoint(tmp_path, 2, parts(2), keep=1)
    assert names(tmp_path) == ["step-00000001"]
    assert newest_complete(tmp_path).step == 1


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="the checkpoint cannot be written"):
        save_checkpoint(tmp_path / "file" / "checkpoints", 1, parts(1))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        save_checkpoint(tmp_path, 1, parts(1))


def test_a_mistake_in_a_part_stays_what_it_is_and_leaves_nothing(tmp_path):
    def wrong(path):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        save_checkpoint(tmp_path, 1, {**parts(1), "model": wrong})
    assert names(tmp_path) == []


def test_shards_that_cannot_be_written_or_read(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OutputError, match=r"No space.*earlier"):
            save_checkpoint(tmp_path, 1, {"optimizer.shards": {"a": torch.ones(3)}})
    assert names(tmp_path) == []
    saved = save_checkpoint(tmp_path, 1, {"optimizer.shards": {"a": torch.ones(3)}})
    stored = saved.stored("optimizer.shards")
    with pytest.raises(CorruptionError, match=r"optimizer\.shards.*: b is missing"):
        stored.read_into({"b": torch.ones(3)})
    with pytest.raises(CorruptionError, match=r"a is stored as \[3\], and \[2\] is needed"):
        stored.read_into({"a": torch.ones(2)})


def test_any_flipped_bit_of_the_manifest_is_passed_over_or_means_nothing(tmp_path):
    for step in (1, 2):
        save_checkpoint(tmp_path, step, parts(step))
    path = tmp_path / "step-00000002" / "manifest.json"
    good = path.read_bytes()
    for place in range(len(good)):
        for bit in range(8):
            damaged = bytearray(good)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            said = []
            found = newest_complete(tmp_path, say=said.append)
            assert (found.step, len(said)) in ((1, 1), (2, 0))
    for text in (
        '{"files": {"\\u0000": {"bytes": 1, "sha256": ""}}}',
        '{"files": []}',
        "[" * 100_000,
    ):
        path.write_text(text)
        assert newest_complete(tmp_path, say=said.append).step == 1


def test_the_older_of_two_of_the_same_step_is_only_a_reserve(tmp_path):
    """As a kill between two renames leaves them: `NAME.old` is complete too, but from before."""
    save_checkpoint(tmp_path / "before", 7, parts(1))
    save_checkpoint(tmp_path / "run", 7, parts(2))
    shutil.move(tmp_path / "before" / "step-00000007", tmp_path / "run" / "step-00000007.old")
    found = newest_complete(tmp_path / "run")
    assert found.folder.name == "step-00000007"
    assert found.value("state.json")["step"] == 2
    (tmp_path / "run" / "step-00000007" / "state.json").write_text("{}")
    found = newest_complete(tmp_path / "run")
    assert found.folder.name == "step-00000007.old"
    assert found.value("state.json")["step"] == 1
