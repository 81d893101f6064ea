"""A preparation from which nothing comes out is an error that says why; limits on rejects count as documented."""

import json

import pytest

from penstock.errors import ConfigError, RecordError
from penstock.prepare import PrepareSettings, prepare
from penstock.shards import verify


def run(source, tokenizer, output, **options):
    return prepare(source, tokenizer=tokenizer, output=output, progress=False, processes=1, **options)


def drop(record):
    return None


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_no_record(tmp_path, tokenizer):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("\n")
    with pytest.raises(RecordError, match=r"no document came out.*: no record in .*a.jsonl and 1 more file;"):
        run(str(tmp_path / "*.jsonl"), tokenizer, tmp_path / "out")
    with pytest.raises(RecordError, match=r"no record in .*a.jsonl;"):
        run(tmp_path / "a.jsonl", tokenizer, tmp_path / "one", validation=0.1)


def test_all_rejected_or_dropped(tmp_path, tokenizer):
    source = write(tmp_path / "a.jsonl", [{"body": "a"}, {"body": "b"}])
    for options in ({}, {"max_rejects": "100%"}):
        with pytest.raises(RecordError, match=r"2 of 2 records were rejected; the first: .*a.jsonl:1: no field 'text'"):
            run(source, tokenizer, tmp_path / "rejected", on_error="skip", **options)
    with pytest.raises(RecordError, match="the transform dropped all of the 2 records"):
        run(source, tokenizer, tmp_path / "dropped", transform=drop, text_field="body")
    mixed = write(tmp_path / "b.jsonl", [{"body": "a"}, {"body": ""}])
    with pytest.raises(RecordError, match="1 of 2 records were rejected and the transform dropped 1; the first"):
        run(mixed, tokenizer, tmp_path / "b", transform=drop, text_field="body", on_error="skip")
    with pytest.raises(RecordError, match="the transform dropped all of the 3 records"):
        run(iter(["a", "b", "c"]), tokenizer, tmp_path / "python", transform=drop)


def test_an_empty_try_does_not_stand_in_the_way(tmp_path, tokenizer):
    source = write(tmp_path / "a.jsonl", [{"body": "a"}, {"body": "b"}])
    with pytest.raises(RecordError, match="no document came out"):
        run(source, tokenizer, tmp_path / "out", on_error="skip")
    assert run(source, tokenizer, tmp_path / "out", text_field="body").documents == 2
    assert not (tmp_path / "out" / "rejected.jsonl").exists()


def test_one_is_one(tmp_path, tokenizer):
    lines = run(iter(["a"]), tokenizer, tmp_path / "out", add_bos="no", add_eos="no").as_text().splitlines()
    assert lines[:2] == ["1 document, 1 token, 1.00 bytes a token", "1 record: 1 good, 0 rejected, 0 filtered"]


def test_an_empty_split_is_told(tmp_path, tokenizer):
    report = run(iter(["a", "b"]), tokenizer, tmp_path / "out", validation=0.001)
    assert report.splits["validation"].documents == 0
    assert "warning: validation is empty: there are too few documents" in report.as_text()
    assert verify(tmp_path / "out" / "validation").sound
    assert "warning" not in run(iter(["a", "b"]), tokenizer, tmp_path / "whole").as_text()


@pytest.mark.parametrize(
    ("given", "count", "of_99", "of_100_000"),
    [
        (None, None, 100, 1000),
        (0, 0, 0, 0),
        (5, 5, 5, 5),
        ("5", 5, 5, 5),
        ("1", 1, 1, 1),
        ("2%", None, 1, 2000),
        (0.02, None, 1, 2000),
        ("0.02", None, 1, 2000),
        ("0.00029", None, 0, 29),
        ("0%", None, 0, 0),
        ("100%", None, 99, 100_000),
    ],
)
def test_a_limit_on_rejects_is_a_number_or_a_share(given, count, of_99, of_100_000):
    settings = PrepareSettings(max_rejects=given)
    assert settings.reject_count == count
    assert [settings.reject_limit(99), settings.reject_limit(100_000)] == [of_99, of_100_000]


@pytest.mark.parametrize("given", ["1.0", 1.0, "1.5", "101%", "-1%", -0.5, "nan", "nan%", "%", "", "1 %%"])
def test_other_limits_are_refused(given):
    with pytest.raises(ConfigError, match=r"max_rejects must be a number of records \(1000\), or a share"):
        PrepareSettings(max_rejects=given)


def test_a_share_allows_no_more_than_it_says(tmp_path, tokenizer):
    source = write(tmp_path / "a.jsonl", [{"text": "a"}] * 9 + [{"text": ""}])
    with pytest.raises(RecordError, match=r"1 of 10 records were rejected, more than 9%; .*raise --max-rejects"):
        run(source, tokenizer, tmp_path / "out", on_error="skip", max_rejects="9%")
    assert run(source, tokenizer, tmp_path / "out", on_error="skip", max_rejects=0.1).rejects == 1
    assert run(source, tokenizer, tmp_path / "default", on_error="skip").rejects == 1
