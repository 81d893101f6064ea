"""Whole records from lines, JSON arrays, Parquet, Python: every value once, with its line, the bad
with reasons.
"""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.data.sources import Fields, open_records, open_sources
from penstock.data.sources.json_files import number_lines

WHOLE = Fields(whole=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(alphabet='ab"\\ \n,]}ö🙂', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


def read(parts):
    """(objects, lines, rejects) of all parts."""
    blocks = [block for part in number_lines(list(parts)) for block in part.objects()]
    return (
        [value for block in blocks for value in block.objects],
        [line for block in blocks for line in block.lines.tolist()],
        [reject for block in blocks for reject in block.rejects],
    )


@settings(deadline=None, max_examples=60)
@given(
    records=st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), max_size=12),
    indent=st.sampled_from([None, 1]),
    part_bytes=st.integers(1, 200),
    form=st.sampled_from(["array.json", "lines.jsonl", "array.json.gz"]),
)
def test_every_record_comes_once_in_order(tmp_path_factory, records, indent, part_bytes, form):
    folder = tmp_path_factory.mktemp("raw")
    path = folder / form
    text = json.dumps(records, indent=indent)
    if form == "lines.jsonl":
        text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if form.endswith(".gz") else text.encode())
    objects, lines, rejects = read(open_sources(path, fields=WHOLE, part_bytes=part_bytes))
    assert objects == records
    assert rejects == []
    assert lines == sorted(lines)
    if form == "lines.jsonl":
        assert lines == list(range(1, len(records) + 1))


def test_an_object_over_several_lines_is_one_record(tmp_path):
    (tmp_path / "one.json").write_text(
        json.dumps({"a": [1, 2]}, indent=2) + "\n\n" + json.dumps({"b": 1}, indent=2)
    )
    objects, lines, _ = read(open_sources(tmp_path / "one.json", fields=WHOLE))
    assert objects == [{"a": [1, 2]}, {"b": 1}]
    assert lines == [1, 8]


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b'[{"a": 1},\n3]', 2, "the record is a number"),
        (b'[{"a": 1},\n{"b": "\\ud83d"}]', 2, "lone surrogate U+D83D at character 0"),
    ],
)
def test_what_is_wrong_in_an_array_is_told(tmp_path, content, line, reason):
    (tmp_path / "a.json").write_bytes(content)
    for part_bytes in (None, 4):
        _, _, rejects = read(open_sources(tmp_path / "a.json", fields=WHOLE, part_bytes=part_bytes))
        assert [reject.line for reject in rejects] == [line]
        assert reason in rejects[0].reason


def test_what_is_wrong_in_lines_is_told(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'{"a": 1}\n\n[1]\n{"a": "\xff"}\n{"a": 1} {}\n{"b": "\\udc00"}\n'
    )
    objects, lines, rejects = read(open_sources(tmp_path / "a.jsonl", fields=WHOLE))
    assert (objects, lines) == ([{"a": 1}], [1])
    assert [reject.line for reject in rejects] == [3, 4, 5, 6]
    for reject, due in zip(
        rejects, ["list", "not UTF-8", "second value", "lone surrogate"], strict=True
    ):
        assert due in reject.reason


def test_rows_and_python(tmp_path):
    records = [{"a": [{"b": f"{number}"}], "c": number} for number in range(50)]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet", row_group_size=7)
    objects, lines, _ = read(open_sources(tmp_path / "a.parquet", fields=WHOLE, part_bytes=1))
    assert (objects, lines) == (records, list(range(50)))
    objects, lines, _ = read(open_records(iter(records), fields=WHOLE, part_bytes=100))
    assert (objects, lines) == (records, list(range(50)))


def test_plain_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match="plain text holds no conversations"):
        open_sources(tmp_path / "a.txt", fields=WHOLE)
