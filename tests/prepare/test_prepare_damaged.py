"""What could not be read of a damaged file is part of the account: of the error, the report, the
manifest.
"""

import gzip
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from makers.datasets import prepare_here
from makers.texts import json_lines
from penstock import Dataset
from penstock.core.errors import ConfigError, DamagedFileError, RecordError
from penstock.data.prepare import PrepareSettings
from penstock.data.shards import Manifest, verify
from penstock.use.cli import build_app


@pytest.fixture
def half_copied(tmp_path):
    """2,000 records, of which some thousand arrived; and a file beside that is whole."""
    noise = random.Random(1)
    whole = gzip.compress(
        json_lines({"text": noise.randbytes(60).hex()} for _ in range(2000)).encode()
    )
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "raw" / "b.jsonl").write_text('{"text": "whole"}\n{broken\n')
    return tmp_path / "raw"


@pytest.mark.parametrize("processes", [1, 2])
def test_it_stops_whatever_is_said_of_bad_records(tmp_path, half_copied, tokenizer, processes):
    due = (
        r"a.jsonl.gz:\d{3,4}: the file cannot be read further: its compressed stream ends "
        r"before its end mark.*\([\d,]+ of [\d,]+ bytes were read\); .*set on_damaged_file to "
        r"skip"
    )
    with pytest.raises(DamagedFileError, match=due):
        prepare_here(half_copied, tokenizer, tmp_path / "out", on_error="skip", processes=processes)
    assert not (tmp_path / "out/manifest.json").exists()


def test_what_was_not_read_is_in_the_account(tmp_path, half_copied, tokenizer):
    with pytest.raises(DamagedFileError, match="cannot be read further"):
        prepare_here(half_copied, tokenizer, tmp_path / "out", on_error="skip")
    options = {"on_error": "skip", "on_damaged_file": "skip"}
    report = prepare_here(half_copied, tokenizer, tmp_path / "out", **options)
    size = (half_copied / "a.jsonl.gz").stat().st_size
    (damage,) = report.damaged
    assert 800 < report.documents < 1200
    assert (report.rejects, report.records) == (1, report.documents + 1), "a lost end is no record"
    assert damage["line"] == report.documents
    assert (damage["file"], damage["size_bytes"]) == (str(half_copied / "a.jsonl.gz"), size)
    assert report.raw_bytes + report.unread_bytes == size + (half_copied / "b.jsonl").stat().st_size
    assert "WARNING: 1 file could not be read completely" in report.as_text()
    assert "a.jsonl.gz" in report.as_text()
    (kept,) = Manifest.load(tmp_path / "out").damaged
    assert (kept.file, kept.line, kept.size_bytes) == (damage["file"], damage["line"], size)
    assert json.loads((tmp_path / "out/report.json").read_text())["damaged"] == [damage]
    assert verify(tmp_path / "out").sound
    assert len(Dataset.open(tmp_path / "out")) == report.documents
    again = prepare_here(half_copied, tokenizer, tmp_path / "out", **options)
    assert (again.seconds, again.damaged) == (None, report.damaged)
    with pytest.raises(DamagedFileError, match="cannot be read further"):
        prepare_here(half_copied, tokenizer, tmp_path / "out", on_error="skip")


def test_a_sound_dataset_says_nothing_of_it(tmp_path, tokenizer):
    prepare_here(iter(["a"]), tokenizer, tmp_path / "out")
    assert "damaged" not in json.loads((tmp_path / "out/manifest.json").read_text())
    assert "WARNING" not in prepare_here(iter(["a"]), tokenizer, tmp_path / "out").as_text()


def test_wrong_bytes_of_parts_of_one_file_are_added_up(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 100)

    def cut(record):
        path.write_text('{"text": "a"}\n' * 50)
        return record

    options = {"part_bytes": 300, "on_damaged_file": "skip", "transform": cut}
    with pytest.raises(RecordError, match=r"changed while.*a.jsonl changed"):
        prepare_here(path, tokenizer, tmp_path / "out", **options)
    records = [
        json.loads(one.read_bytes()) for one in (tmp_path / "out/.prepare").glob("part-*.json")
    ]
    assert sum(one["unread_bytes"] for record in records for one in record["damaged"]) == 700


def test_a_file_of_which_nothing_can_be_read(tmp_path, tokenizer):
    pq.write_table(pa.table({"text": ["a"] * 100}), tmp_path / "a.parquet")
    size = (tmp_path / "a.parquet").stat().st_size - 9
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    (tmp_path / "b.jsonl").write_text('{"text": "whole"}\n')
    with pytest.raises(DamagedFileError, match=r"a.parquet:0: .*not a whole Parquet file"):
        prepare_here([tmp_path / "a.parquet", tmp_path / "b.jsonl"], tokenizer, tmp_path / "out")
    report = prepare_here(
        [tmp_path / "a.parquet", tmp_path / "b.jsonl"],
        tokenizer,
        tmp_path / "out",
        on_damaged_file="skip",
    )
    assert (report.documents, report.unread_bytes) == (1, size)
    with pytest.raises(RecordError, match=r"document.*a.parquet:0"):
        prepare_here(tmp_path / "a.parquet", tokenizer, tmp_path / "none", on_damaged_file="skip")


def test_the_command_line_says_it_loudly(tmp_path, half_copied, tokenizer, capsys):
    tokenizer.save(tmp_path / "tokenizer")
    arguments = [
        "prepare",
        half_copied,
        "-t",
        tmp_path / "tokenizer",
        "-o",
        tmp_path / "out",
        "--processes",
        "1",
        "-q",
    ]
    arguments += ["--on-error", "skip", "--on-damaged-file", "skip"]
    arguments = [*map(str, arguments)]
    build_app(arguments)(args=[*arguments, "--json"], standalone_mode=False)
    said = capsys.readouterr()
    assert json.loads(said.out)["damaged"][0]["file"].endswith("a.jsonl.gz")
    assert "penstock: WARNING: 1 file could not be read completely" in said.err
    build_app(arguments)(args=arguments, standalone_mode=False)
    assert "WARNING: 1 file could not be read completely" in capsys.readouterr().out
    train = [
        "tokenizer",
        "train",
        str(half_copied),
        "--vocab-size",
        "300",
        "-o",
        str(tmp_path / "new"),
    ]
    with pytest.raises(DamagedFileError, match="cannot be read further"):
        build_app(train)(args=[*train, "--on-error", "skip"], standalone_mode=False)
    build_app(train)(args=[*train, *arguments[-4:]], standalone_mode=False)
    assert "penstock: WARNING: " in capsys.readouterr().err


def test_the_setting_is_checked():
    with pytest.raises(ConfigError, match=r"on_damaged_file.*'ignore'"):
        PrepareSettings(on_damaged_file="ignore")


@pytest.mark.parametrize("separator", ["\n\n", "a"])
def test_texts_before_the_cut_are_read(tmp_path, tokenizer, separator):
    """All documents that end before the cut, as of lines; the last one was perhaps longer."""
    noise = random.Random(1)
    texts = [f"{number}" + noise.randbytes(60).hex().replace("a", "") for number in range(2000)]
    whole = gzip.compress(separator.join(texts).encode())
    (tmp_path / "a.txt.gz").write_bytes(whole[: len(whole) // 2])
    options = {"separator": separator, "on_damaged_file": "skip", "keep_text": True}
    report = prepare_here(tmp_path / "a.txt.gz", tokenizer, tmp_path / "out", **options)
    data = Dataset.open(tmp_path / "out")
    assert 800 < len(data) < 1200
    assert [data[number].text for number in range(len(data))] == texts[: len(data)]
    (damage,) = report.damaged
    assert damage["line"] == len(data) * separator.count("\n") + 1


def test_a_long_text_without_separators_that_was_cut(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("penstock.data.sources.lines.BLOCK_BYTES", 100)
    noise = random.Random(1).randbytes(4000).hex()
    whole = gzip.compress(f"one|two|{noise}|three|four".encode())
    (tmp_path / "a.txt.gz").write_bytes(whole)
    report = prepare_here(
        tmp_path / "a.txt.gz", tokenizer, tmp_path / "whole", separator="|", keep_text=True
    )
    assert report.documents == 5
    (tmp_path / "a.txt.gz").write_bytes(whole[:-12])
    prepare_here(
        tmp_path / "a.txt.gz",
        tokenizer,
        tmp_path / "cut",
        separator="|",
        on_damaged_file="skip",
        keep_text=True,
    )
    data = Dataset.open(tmp_path / "cut")
    assert [data[number].text for number in range(len(data))][:3] == ["one", "two", noise]
