"""Run again after its input changed, prepare redoes the parts that changed, and ends with the bytes
of a fresh run.
"""

import gzip
import json
import os
import random
import shutil
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_cases import Killed, contents, dying

from makers.datasets import prepare_here
from penstock import Dataset
from penstock.core.errors import DamagedFileError, OutputError, RecordError
from penstock.data.prepare import part as part_module
from penstock.data.prepare import work
from penstock.data.shards import verify
from penstock.data.sources import small_files

OPTIONS = {"part_bytes": 12_000, "on_error": "skip"}


@pytest.fixture
def ten(tmp_path):
    """Ten files of JSONL, of about three parts each; some records are bad."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for number in range(10):
        write(folder / f"{number}.jsonl", 110, number)
    return folder


def write(path, count, seed, opening="w"):
    noise = random.Random(seed)
    lines = [json.dumps({"text": noise.randbytes(130).hex()}) for _ in range(count)]
    lines[3] = '{"text": ""}'
    with open(path, opening) as file:
        file.write("\n".join(lines) + "\n")


@pytest.fixture
def redone(monkeypatch):
    """Names of the parts that are prepared."""
    names = []
    prepare_part = part_module.prepare_part

    def watched(shop, task, report):
        names.append(os.path.basename(task.part.name))
        return prepare_part(shop, task, report)

    monkeypatch.setattr(work, "prepare_part", watched)
    return names


prepare_parts = partial(prepare_here, **OPTIONS)


def change(folder, what):
    """Change the input; the files of which parts are to be prepared again."""
    if what == "replaced":
        write(folder / "4.jsonl", 110, 99)
        return {"4.jsonl"}
    if what == "appended":
        write(folder / "4.jsonl", 20, 99, "a")
        return {"4.jsonl"}
    if what == "removed":
        (folder / "4.jsonl").unlink()
    elif what == "renamed":
        (folder / "4.jsonl").rename(folder / "44.jsonl")
        return {"44.jsonl"}
    elif what == "added":
        write(folder / "00.jsonl", 110, 99)
        return {"00.jsonl"}
    elif what == "emptied":
        (folder / "4.jsonl").write_text("")
        return {"4.jsonl"}
    return set()


CHANGES = ["replaced", "appended", "removed", "renamed", "added", "emptied"]


@pytest.mark.parametrize("validation", [0.0, 0.2])
@pytest.mark.parametrize("what", CHANGES)
def test_only_what_changed_is_prepared_again(tmp_path, ten, tokenizer, redone, what, validation):
    prepare_parts(ten, tokenizer, tmp_path / "out", validation=validation)
    assert len(redone) == 30
    redone.clear()
    expected = change(ten, what)
    report = prepare_parts(ten, tokenizer, tmp_path / "out", validation=validation)
    again = list(redone)
    assert {name.split(" ")[0] for name in again} == expected
    assert len(again) <= (1 if what in ("appended", "emptied") else 3)
    assert report.parts_resumed == report.parts - len(again)
    whole = prepare_parts(ten, tokenizer, tmp_path / "whole", validation=validation)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert report.as_json(lasting=True) == whole.as_json(lasting=True)
    for split in ("train", "validation") if validation else ("",):
        assert verify(tmp_path / "out" / split).sound
    redone.clear()
    assert prepare_parts(ten, tokenizer, tmp_path / "out", validation=validation).seconds is None
    assert not redone


@pytest.mark.parametrize("what", CHANGES)
def test_the_same_for_a_run_that_was_killed(tmp_path, ten, tokenizer, redone, monkeypatch, what):
    steps = [0, 22]
    with monkeypatch.context() as patch:
        patch.setattr(work, "_prepare_one", dying(work._prepare_one, steps))
        with pytest.raises(Killed, match=r"^$"):
            prepare_parts(ten, tokenizer, tmp_path / "out")
    assert len(redone) == 21
    redone.clear()
    change(ten, what)
    report = prepare_parts(ten, tokenizer, tmp_path / "out")
    assert report.parts_resumed == report.parts - len(redone) >= 18
    prepare_parts(ten, tokenizer, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_what_was_only_touched_is_not_prepared_again(tmp_path, ten, tokenizer, redone):
    prepare_parts(ten, tokenizer, tmp_path / "out")
    redone.clear()
    for path in ten.iterdir():
        os.utime(path, ns=(1, 1))
    shards = {path.name: path.stat().st_ino for path in (tmp_path / "out").glob("*.arrow")}
    report = prepare_parts(ten, tokenizer, tmp_path / "out")
    assert not redone
    assert report.seconds is None
    assert set(report.input_changes.values()) == {"changed"}
    assert {path.name: path.stat().st_ino for path in (tmp_path / "out").glob("*.arrow")} == shards
    prepare_parts(ten, tokenizer, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert prepare_parts(ten, tokenizer, tmp_path / "out").input_changes == {}


def test_killed_at_every_step_of_an_update(tmp_path, ten, tokenizer, monkeypatch):
    for number in range(2, 10):
        (ten / f"{number}.jsonl").unlink()
    prepare_parts(ten, tokenizer, tmp_path / "out")
    finished = contents(tmp_path / "out")
    (ten / "0.jsonl").write_text("")
    write(ten / "00.jsonl", 40, 5)
    prepare_parts(ten, tokenizer, tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    steps, usable = [0, -1], 0
    for name in ("replace", "fsync", "link", "unlink"):
        monkeypatch.setattr(os, name, dying(getattr(os, name), steps))
    for die_at in range(1, 2000, 4):
        output = tmp_path / f"killed {die_at}"
        steps[0], steps[1] = 0, -1
        shutil.copytree(tmp_path / "out", output)
        steps[0], steps[1] = 0, die_at
        try:
            prepare_parts(ten, tokenizer, output)
        except Killed:
            if (output / "manifest.json").exists():
                Dataset.open(output)
                usable += (output / "manifest.json").read_bytes() == finished["manifest.json"]
            steps[1] = -1
            prepare_parts(ten, tokenizer, output)
        assert contents(output) == whole
        if steps[1] == die_at:
            break
    assert die_at > 60
    assert usable > 10, "until the new one is complete, the old one stays"


def test_an_update_that_fails_leaves_what_is_there(tmp_path, ten, tokenizer):
    prepare_parts(ten, tokenizer, tmp_path / "out", on_error="skip")
    before = contents(tmp_path / "out")
    (ten / "4.jsonl").write_text("{broken\n")
    with pytest.raises(RecordError, match=r"0.jsonl:4: field 'text' is empty"):
        prepare_parts(ten, tokenizer, tmp_path / "out", on_error="stop")
    (ten / "3.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n')[:-4])
    with pytest.raises(DamagedFileError, match=r"3.jsonl.gz:2: "):
        prepare_parts(ten, tokenizer, tmp_path / "out")
    after = contents(tmp_path / "out")
    assert {name: after.get(name) for name in before} == before
    assert verify(tmp_path / "out").sound
    (ten / "3.jsonl.gz").unlink()
    report = prepare_parts(ten, tokenizer, tmp_path / "out")
    prepare_parts(ten, tokenizer, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert report.rejects == 10


def test_skipping_after_a_stop_keeps_the_parts(tmp_path, ten, tokenizer, redone):
    for number in range(9):
        path = ten / f"{number}.jsonl"
        path.write_text(path.read_text().replace('{"text": ""}', '{"text": "a"}'))
    with pytest.raises(RecordError, match=r"9.jsonl:4.*'text'.*set on_error"):
        prepare_parts(ten, tokenizer, tmp_path / "out", on_error="stop")
    redone.clear()
    assert prepare_parts(ten, tokenizer, tmp_path / "out", on_error="skip").parts_resumed == 27
    assert len(redone) == 3


def test_text_and_parquet_and_lines_that_move(tmp_path, tokenizer, redone):
    raw = tmp_path / "raw"
    raw.mkdir()
    for number in range(3):
        rows = [f"{number} {row} " * 20 for row in range(300)]
        pq.write_table(pa.table({"text": rows}), raw / f"{number}.parquet", row_group_size=100)
        (raw / f"{number}.txt").write_text("\n".join(rows))
    write(raw / "lines.jsonl", 110, 1)
    options = {"part_bytes": 2000, "separator": "\n"}
    prepare_parts(raw, tokenizer, tmp_path / "out", **options)
    redone.clear()
    for path in raw.iterdir():
        os.utime(path, ns=(5, 5))
    pq.write_table(pa.table({"text": ["new"] * 100}), raw / "1.parquet")
    (raw / "2.txt").write_text("new")
    # The same length, other line ends: what follows has other numbers, and the same bytes.
    lines = (raw / "lines.jsonl").read_text()
    (raw / "lines.jsonl").write_text(lines.replace('{"text": ""}', "{\n\n\n\n\n\n\n\n\n\n }"))
    prepare_parts(raw, tokenizer, tmp_path / "out", **options)
    assert {name.split(" ")[0] for name in redone} == {"1.parquet", "2.txt", "lines.jsonl"}
    prepare_parts(raw, tokenizer, tmp_path / "whole", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_damaged_shard_is_not_used_again(tmp_path, ten, tokenizer, redone):
    prepare_parts(ten, tokenizer, tmp_path / "out")
    redone.clear()
    with open(tmp_path / "out/part-000020.arrow", "r+b") as shard:
        shard.seek(3000)
        shard.write(b"\xff" * 8)
    (tmp_path / "out/part-000022.arrow").unlink()
    change(ten, "added")  # other numbers of files, so shards are looked at
    prepare_parts(ten, tokenizer, tmp_path / "out")
    assert len(redone) == 3 + 2
    assert verify(tmp_path / "out").sound


def test_records_from_python(tmp_path, tokenizer, redone):
    texts = [f"text {number}" for number in range(40)]
    options = {"part_bytes": 60}
    parts = prepare_parts(iter(texts), tokenizer, tmp_path / "out", **options).parts
    redone.clear()
    report = prepare_parts(iter([*texts[:-1], "other"]), tokenizer, tmp_path / "out", **options)
    assert (len(redone), report.parts_resumed) == (1, parts - 1)
    prepare_parts(iter([*texts[:-1], "other"]), tokenizer, tmp_path / "whole", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert (
        prepare_parts(iter([*texts[:-1], "other"]), tokenizer, tmp_path / "out", **options).seconds
        is None
    )
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_the_command_says_what_changed(tmp_path, ten, tokenizer, capsys):
    from penstock.use.cli import build_app

    tokenizer.save(tmp_path / "tokenizer")
    arguments = [
        "prepare",
        ten,
        "-t",
        tmp_path / "tokenizer",
        "-o",
        tmp_path / "out",
        "--on-error",
        "skip",
    ]
    arguments = [*map(str, arguments), "--processes", "1", "--part-bytes", "12000"]

    def penstock(*more):
        build_app(arguments)(args=[*arguments, *more], standalone_mode=False)
        return capsys.readouterr()

    penstock()
    write(ten / "3.jsonl", 110, 77)
    (ten / "8.jsonl").unlink()
    write(ten / "9a.jsonl", 110, 78)
    said = penstock()
    changes = (
        f"since the last run {ten}/3.jsonl changed, {ten}/9a.jsonl is new, {ten}/8.jsonl is gone"
    )
    assert f"penstock: {changes}; only changed parts are prepared again" in said.err
    assert changes in said.out
    assert "24 of 30 parts from an earlier run" in said.out
    change(ten, "added")
    found = json.loads(penstock("--json", "-q").out)
    assert found["input_changes"] == {f"{ten}/00.jsonl": "new"}
    assert (found["parts"], found["parts_resumed"]) == (33, 30)


def test_a_refused_preparation_leaves_nothing(tmp_path, ten, tokenizer):
    with pytest.raises(RecordError, match="no field 'body'"):
        prepare_parts(
            ten, tokenizer, tmp_path / "out", text_field="body", on_error="stop", validation=0.1
        )
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(RecordError, match="no field 'body'"):
        prepare_parts(ten, tokenizer, tmp_path / "mine", text_field="body", on_error="stop")
    assert list((tmp_path / "mine").iterdir()) == []
    prepare_parts(ten, tokenizer, tmp_path / "out")
    with pytest.raises(OutputError, match="add_bos was 'auto', is 'no'"):
        prepare_parts(ten, tokenizer, tmp_path / "out", add_bos="no")
    assert not (tmp_path / "out/.prepare").exists()


def test_input_that_changes_or_goes_away_meanwhile(tmp_path, ten, tokenizer):
    def remove(record):
        (ten / "9.jsonl").unlink(missing_ok=True)
        return record

    def append(record):
        with open(ten / "8.jsonl", "a") as file:
            file.write('{"text": "late"}\n')
        return record

    with pytest.raises(RecordError, match=r"9.jsonl.*finished"):
        prepare_parts(ten, tokenizer, tmp_path / "out", transform=remove)
    with pytest.raises(
        RecordError,
        match=(r"input changed.*8.jsonl.*run it again"),
    ):
        prepare_parts(ten, tokenizer, tmp_path / "other", transform=append)
    assert (ten / "8.jsonl").exists()


def test_small_files_that_are_one_part_are_redone_together(
    tmp_path, redone, monkeypatch, chat_tokenizer
):
    monkeypatch.setattr(small_files, "FEW_FILES", 4)
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.jsonl").write_text(json.dumps({"text": f"text {number}"}) + "\n")
    first = prepare_here(folder, chat_tokenizer, tmp_path / "out")
    assert (first.documents, redone) == (6, ["0.jsonl and 5 more"])
    prepare_here(folder, chat_tokenizer, tmp_path / "out")
    assert len(redone) == 1
    (folder / "3.jsonl").write_text(json.dumps({"text": "changed"}) + "\n")
    prepare_here(folder, chat_tokenizer, tmp_path / "out")
    assert len(redone) == 2
    dataset = Dataset.open(tmp_path / "out")
    texts = [chat_tokenizer.decode(one.tokens.tolist()) for one in dataset]
    assert [number for number, text in enumerate(texts) if "changed" in text] == [3]
    assert [os.path.basename(str(one.origin)).partition(":")[0] for one in dataset] == [
        f"{n}.jsonl" for n in range(6)
    ]
