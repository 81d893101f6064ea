"""CSV as input of a preparation: the documents are those of the same records as JSON lines, however
they are cut.
"""

import csv
import json
import subprocess
import sys

import pytest

from makers.datasets import prepare_here
from penstock import open_dataset
from penstock.core.errors import ConfigError, OutputError, RecordError


def write_csv(path, rows, delimiter=","):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def words(count):
    return [f'the "water"\nnever stops, {number}' for number in range(count)]


def documents(folder):
    return [
        (document.tokens.tolist(), document.loss_weights.tolist())
        for document in open_dataset(folder)
    ]


@pytest.mark.parametrize("processes", [1, 2])
def test_texts(tmp_path, tokenizer, processes):
    """Same documents as JSON lines; several parts; rejects; and nothing is prepared twice."""
    rows = [["n", "text"], *([str(n), text] for n, text in enumerate(words(600)))]
    source = write_csv(tmp_path / "a.csv", [*rows[:300], ["alone"], *rows[300:]])
    options = {"part_bytes": 4000, "on_error": "skip", "processes": processes}
    report = prepare_here(source, tokenizer, tmp_path / "csv", **options)
    prepare_here(
        write_lines(tmp_path / "a.jsonl", [{"text": text} for text in words(600)]),
        tokenizer,
        tmp_path / "jsonl",
    )
    assert documents(tmp_path / "csv") == documents(tmp_path / "jsonl")
    assert (report.documents, report.rejects, report.parts > 3, report.raw_bytes) == (
        600,
        1,
        True,
        source.stat().st_size,
    )
    dataset = open_dataset(tmp_path / "csv")
    assert [dataset[number].origin.line for number in (0, 1, 298, 299)] == [2, 4, 598, 601]
    (reject,) = map(json.loads, (tmp_path / "csv/rejected.jsonl").read_text().splitlines())
    assert (reject["line"], reject["reason"][:21]) == (600, "the record has 1 cell")
    assert prepare_here(source, tokenizer, tmp_path / "csv", **options).seconds is None
    with open(source, "a", newline="") as file:
        csv.writer(file).writerow(["600", "one more"])
    again = prepare_here(source, tokenizer, tmp_path / "csv", **options)
    assert (again.documents, again.parts_resumed) == (601, report.parts - 1)


def test_alpaca_with_empty_cells(tmp_path, chat_tokenizer):
    """An empty input or system prompt is none."""
    records = [
        {
            "instruction": f"Say {n}",
            "input": "in English" if n % 2 else "",
            "output": f"{n}, of course",
            "history": "",
            "system": "Be kind." if n % 3 else "",
            "tools": "",
            "images": "",
            "chat_template_kwargs": "",
        }
        for n in range(12)
    ]
    rows = [list(records[0]), *(list(record.values()) for record in records)]
    options = {"template": "chatml"}
    report = prepare_here(
        write_csv(tmp_path / "a.csv", rows), chat_tokenizer, tmp_path / "csv", **options
    )
    absent = [{name: value for name, value in record.items() if value} for record in records]
    prepare_here(
        write_lines(tmp_path / "a.jsonl", absent), chat_tokenizer, tmp_path / "jsonl", **options
    )
    assert documents(tmp_path / "csv") == documents(tmp_path / "jsonl")
    assert (report.documents, report.chats["layouts"]) == (12, {"alpaca": 12})


def test_pairs_and_columns_of_either_name(tmp_path, chat_tokenizer):
    rows = [["prompt", "completion", "response"], ["a", "b", ""], ["c", "", "d"], ["e", "", ""]]
    source = write_csv(tmp_path / "a.tsv", rows, "\t")
    report = prepare_here(
        source, chat_tokenizer, tmp_path / "out", template="chatml", on_error="skip", max_rejects=1
    )
    plain = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    prepare_here(
        write_lines(tmp_path / "a.jsonl", plain),
        chat_tokenizer,
        tmp_path / "jsonl",
        template="chatml",
    )
    assert documents(tmp_path / "out")[:2] == documents(tmp_path / "jsonl")
    assert report.records == 3


def test_a_delimiter_is_a_setting(tmp_path, tokenizer):
    source = write_csv(
        tmp_path / "a.csv",
        [["n", "text"], *([str(n), text] for n, text in enumerate(words(9)))],
        ";",
    )
    with pytest.raises(RecordError, match=r"separated.*';'.*delimiter"):
        prepare_here(source, tokenizer, tmp_path / "out")
    report = prepare_here(source, tokenizer, tmp_path / "out", delimiter=";")
    assert report.documents == 9
    write_csv(tmp_path / "b.csv", [["text"], ["one"]])
    with pytest.raises(OutputError, match=r"preparation.*delimiter.*';'"):
        prepare_here(tmp_path / "b.csv", tokenizer, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"delimiter must be one ASCII character"):
        prepare_here(source, tokenizer, tmp_path / "new", delimiter="ab")


def test_the_command_line(tmp_path, tokenizer):
    write_csv(tmp_path / "a.csv", [["text"], ["one"], ["two"]], "|")
    tokenizer.save(tmp_path / "tokenizer")
    told = subprocess.run(
        [
            sys.executable,
            "-m",
            "penstock",
            "prepare",
            tmp_path / "a.csv",
            "-t",
            tmp_path / "tokenizer",
            "-o",
            tmp_path / "out",
            "--delimiter",
            "|",
            "--quiet",
        ],
        capture_output=True,
        text=True,
    )
    assert (told.returncode, told.stderr) == (0, "")
    assert "2 records: 2 good" in told.stdout
