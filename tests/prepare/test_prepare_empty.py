"""A preparation from which nothing comes out is an error that says why; limits on rejects count as
documented.
"""

import pytest

from makers.datasets import prepare_here
from makers.texts import write_json_lines
from penstock.core.errors import ConfigError, RecordError
from penstock.data.prepare import PrepareSettings
from penstock.data.shards import verify


def drop(record):
    return None


def test_no_record(tmp_path, tokenizer):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("\n")
    with pytest.raises(RecordError, match=r"document.*a.jsonl.*1"):
        prepare_here(str(tmp_path / "*.jsonl"), tokenizer, tmp_path / "out")
    with pytest.raises(RecordError, match=r"no record in .*a.jsonl;"):
        prepare_here(tmp_path / "a.jsonl", tokenizer, tmp_path / "one", validation=0.1)


def test_all_rejected_or_dropped(tmp_path, tokenizer):
    source = write_json_lines(tmp_path / "a.jsonl", [{"body": "a"}, {"body": "b"}])
    for options in ({}, {"max_rejects": "100%"}):
        with pytest.raises(RecordError, match=r"2 records.*rejected.*a.jsonl:1.*'text'"):
            prepare_here(source, tokenizer, tmp_path / "rejected", on_error="skip", **options)
    with pytest.raises(RecordError, match="the transform dropped all 2 records"):
        prepare_here(source, tokenizer, tmp_path / "dropped", transform=drop, text_field="body")
    mixed = write_json_lines(tmp_path / "b.jsonl", [{"body": "a"}, {"body": ""}])
    with pytest.raises(RecordError, match=r"1.*2.*dropped 1.*first"):
        prepare_here(
            mixed, tokenizer, tmp_path / "b", transform=drop, text_field="body", on_error="skip"
        )
    with pytest.raises(RecordError, match="the transform dropped all 3 records"):
        prepare_here(iter(["a", "b", "c"]), tokenizer, tmp_path / "python", transform=drop)


def test_an_empty_try_does_not_stand_in_the_way(tmp_path, tokenizer):
    source = write_json_lines(tmp_path / "a.jsonl", [{"body": "a"}, {"body": "b"}])
    with pytest.raises(RecordError, match="the input gave no document"):
        prepare_here(source, tokenizer, tmp_path / "out", on_error="skip")
    assert prepare_here(source, tokenizer, tmp_path / "out", text_field="body").documents == 2
    assert not (tmp_path / "out" / "rejected.jsonl").exists()


def test_one_is_one(tmp_path, tokenizer):
    lines = (
        prepare_here(iter(["a"]), tokenizer, tmp_path / "out", add_bos="no", add_eos="no")
        .as_text()
        .splitlines()
    )
    assert lines[:2] == [
        "1 document, 1 token, 1.00 bytes per token",
        "1 record: 1 good, 0 rejected, 0 filtered",
    ]


def test_an_empty_split_is_told(tmp_path, tokenizer):
    report = prepare_here(iter(["a", "b"]), tokenizer, tmp_path / "out", validation=0.001)
    assert report.splits["validation"].documents == 0
    assert "warning: validation is empty: too few documents" in report.as_text()
    assert verify(tmp_path / "out" / "validation").sound
    assert "warning" not in prepare_here(iter(["a", "b"]), tokenizer, tmp_path / "whole").as_text()


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


@pytest.mark.parametrize(
    "given", ["1.0", 1.0, "1.5", "101%", "-1%", -0.5, "nan", "nan%", "%", "", "1 %%"]
)
def test_other_limits_are_refused(given):
    with pytest.raises(ConfigError, match=r"max_rejects.*\(1000\)"):
        PrepareSettings(max_rejects=given)


def test_a_share_allows_no_more_than_it_says(tmp_path, tokenizer):
    source = write_json_lines(tmp_path / "a.jsonl", [{"text": "a"}] * 9 + [{"text": ""}])
    with pytest.raises(RecordError, match=r"1.*10.*9%.*set max_rejects"):
        prepare_here(source, tokenizer, tmp_path / "out", on_error="skip", max_rejects="9%")
    assert (
        prepare_here(source, tokenizer, tmp_path / "out", on_error="skip", max_rejects=0.1).rejects
        == 1
    )
    assert prepare_here(source, tokenizer, tmp_path / "default", on_error="skip").rejects == 1
