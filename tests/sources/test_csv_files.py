"""CSV and TSV: cells, lines and rejects are those that a plain reading of RFC 4180 gives, in
however many parts.
"""

import csv
import gzip
import io
import json
from itertools import pairwise

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.compiled import address_of
from penstock.core.errors import ConfigError, DamagedFileError, RecordError
from penstock.data.sources import Fields, open_sources, read_texts
from penstock.data.sources import _csv_kernels as k
from penstock.data.sources import csv_files as csv_files_module
from penstock.data.sources.json_files import number_lines

WHOLE = Fields(whole=True)


def written(rows, delimiter=",", line_end="\n", quoting=csv.QUOTE_MINIMAL):
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter, lineterminator=line_end, quoting=quoting).writerows(rows)
    return out.getvalue()


def objects(spec, **options):
    """((line, record) …, rejects) of each part."""
    parts = []
    for part in number_lines(open_sources(spec, fields=WHOLE, **options)):
        blocks = list(part.objects())
        found = [
            pair
            for block in blocks
            for pair in zip(block.lines.tolist(), block.objects, strict=True)
        ]
        assert sum(block.size_bytes for block in blocks) == part.size_bytes
        parts.append(
            (found, [(reject.line, reject.reason) for block in blocks for reject in block.rejects])
        )
    return parts


def texts(spec, **options):
    """(line, text), and rejects, of all parts."""
    found, rejects = [], []
    for part in number_lines(open_sources(spec, **options)):
        for block in part.blocks():
            found += zip(block.lines.tolist(), block.texts.to_pylist(), strict=True)
            rejects += [(reject.line, reject.reason) for reject in block.rejects]
    return found, rejects


CELLS = st.text(
    st.sampled_from("ab\";,\t\n\r é水 0'\\") | st.characters(exclude_categories=("Cs",)),
    max_size=12,
).map(lambda text: text.replace("\0", ""))


@given(
    rows=st.lists(st.lists(CELLS, min_size=3, max_size=3), max_size=8),
    delimiter=st.sampled_from(",\t;"),
    line_end=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    mark=st.booleans(),
    ends=st.booleans(),
    part_bytes=st.integers(1, 60),
    packed=st.booleans(),
)
def test_what_python_writes_is_read(
    tmp_path_factory, rows, delimiter, line_end, quoting, mark, ends, part_bytes, packed
):
    """All cells, with the line at which each record begins, whatever the parts and the
    compression.
    """
    folder = tmp_path_factory.mktemp("csv")
    if (line_end, quoting) == ("\n", csv.QUOTE_MINIMAL):
        rows = [
            [cell.replace("\r", "") for cell in row] for row in rows
        ]  # Python 3.11 writes these without quotes
    text = written([["one", "two three", "4,\t;"], *rows], delimiter, line_end, quoting)
    text = text if ends or not rows else text.removesuffix(line_end)
    data = (b"\xef\xbb\xbf" if mark else b"") + text.encode()
    path = folder / ("a.csv.gz" if packed else "a.csv")
    path.write_bytes(gzip.compress(data) if packed else data)
    line, due = 2, []
    for row in rows:
        due.append((line, dict(zip(["one", "two three", "4,\t;"], row, strict=True))))
        line += 1 + sum(cell.count("\n") for cell in row)
    found = objects(path, delimiter=delimiter, part_bytes=part_bytes)
    assert [pair for part, _ in found for pair in part] == due
    assert not any(rejects for _, rejects in found)
    assert len(found) == (1 if packed else -(-len(data) // part_bytes))


def slow_ends(data, delimiter):
    """Where records end, by the rules one character at a time."""
    ends, quoted, fresh, at = [], False, True, 0
    while at < len(data):
        one = data[at : at + 1]
        at += 1
        if quoted:
            if one == b'"' and data[at : at + 1] == b'"':
                at += 1
            elif one == b'"':
                quoted = False
        elif one == b'"' and fresh:
            quoted, fresh = True, False
        elif one == b"\n":
            ends.append(at)
            fresh = True
        else:
            fresh = one == delimiter
    return ends


@given(st.text('a",\n\r', max_size=40).map(str.encode), st.lists(st.integers(0, 40), max_size=4))
def test_record_ends(data, cuts):
    """The kernel agrees with the slow rules, wherever the bytes are cut."""
    due, state, found, begin = slow_ends(data, b","), k.CELL, [], 0
    for end in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        piece = np.frombuffer(data[begin:end], np.uint8)
        ends = np.empty(data.count(b"\n"), np.int64)
        if len(piece):
            count, state = k.record_ends(
                np.uint64(address_of(piece)), len(piece), ord(","), state, ends
            )
            found += (begin + ends[:count]).tolist()
        begin = end
    assert found == due


@given(data=st.text('ab",\n\r é', max_size=60).map(str.encode), part_bytes=st.integers(1, 30))
def test_parts_of_any_mess_are_those_of_the_whole(tmp_path_factory, data, part_bytes):
    """Records, rejects and their lines do not depend on the cuts; nothing is lost: all lines are in
    some record.
    """
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    path.write_bytes(b"x,y\n" + data)
    (whole,) = objects(path)
    parts = objects(path, part_bytes=part_bytes)
    assert [one for found, _ in parts for one in found] == whole[0]
    assert [one for _, rejects in parts for one in rejects] == whole[1]
    lines = sorted([line for line, _ in whole[0]] + [line for line, _ in whole[1]])
    ends = [0, *slow_ends(data, b",")]
    ends += [len(data)] if ends[-1] < len(data) else []
    pairs = [(begin, data[begin:end]) for begin, end in pairwise(ends)]
    begins = [
        2 + data[:begin].count(b"\n") for begin, raw in pairs if raw not in (b"\n", b"\r\n", b"\r")
    ]
    assert lines == begins


def test_texts_columns_and_weights(tmp_path):
    rows = [
        ["id", "text", "score", "good", "w", "doc.name"],
        ["1", 'a "b",\nc', "0.5", "true", "", "x"],
        ["2", "d", "", "0", '[{"begin": 0, "end": 1, "weight": 0.25}]', ""],
        ["x", "e", "1", "", "", ""],
        ["3", "", "1", "", "", ""],
        ["4", "f", "much", "", "", ""],
        ["5", "g", "1", "maybe", "", ""],
        ["6", "h", "1", "", "{", ""],
        [str(2**63), "i", "", "", "", ""],
        ["1_0", "j", "", "", "", ""],
    ]
    (tmp_path / "a.csv").write_text(written(rows), newline="")
    fields = Fields(
        weights="w",
        columns={"id": "int64", "score": "float64", "good": "bool", "doc.name": "string"},
    )
    (part,) = open_sources(tmp_path / "a.csv", fields=fields)
    blocks = list(part.blocks())
    assert [text for block in blocks for text in block.texts.to_pylist()] == ['a "b",\nc', "d"]
    assert [line for block in blocks for line in block.lines.tolist()] == [2, 4]
    assert {name: column.to_pylist() for name, column in blocks[0].columns.items()} == {
        "id": [1, 2], "score": [0.5, None], "good": [True, False], "doc.name": ["x", ""]
    }  # fmt: skip
    assert (blocks[0].weights.present.tolist(), blocks[0].weights.weight.tolist()) == (
        [False, True],
        [0.25],
    )
    rejects = {reject.line: reject.reason for block in blocks for reject in block.rejects}
    assert rejects[5].startswith(
        "field 'id' holds text; expected: int64, as declared (to declare another type, set"
    )
    assert rejects[6] == "field 'text' is empty; expected: at least one character"
    assert "'score' holds text; expected: float64" in rejects[7]
    assert "'good' holds text; expected: bool" in rejects[8]
    assert "'w' holds text; expected: a list of {begin, end, weight}" in rejects[9]
    assert [line for line in rejects if "'id' holds text" in rejects[line]] == [5, 10, 11]


def test_other_text_fields_and_formats(tmp_path):
    (tmp_path / "a.tsv").write_text("body\tn\na,b\t1\n")
    assert list(read_texts(open_sources(tmp_path / "a.tsv", fields=Fields(text="body")))) == ["a,b"]
    (tmp_path / "b.csv").write_text("text;n\na,b;1\n")
    assert list(read_texts(open_sources(tmp_path / "b.csv", delimiter=";"))) == ["a,b"]
    (tmp_path / "c").write_text("text\tn\na,b\t1\n")
    assert list(read_texts(open_sources(tmp_path / "c", format="tsv"))) == ["a,b"]
    (tmp_path / "d.txt").write_text("text,n\nab,1\n")
    assert list(read_texts(open_sources(tmp_path / "d.txt", format="csv"))) == ["ab"]
    assert list(read_texts(open_sources(tmp_path / "d.txt"))) == ["text,n\nab,1\n"]
    (tmp_path / "e.csv").write_bytes(gzip.compress(b"text,n\nab,1\n"))
    assert list(read_texts(open_sources(tmp_path / "e.csv"))) == ["ab"]
    long = "x" * 300_000
    (tmp_path / "f.csv").write_text(written([["text", "n"], [f'"{long}"', "1"], [long, "2"]]))
    assert list(read_texts(open_sources(tmp_path / "f.csv"))) == [f'"{long}"', long], (
        "csv's own limit is 128 KiB"
    )


@pytest.mark.parametrize(
    ("content", "due"),
    [
        (
            b"",
            (
                r"a.csv: is empty; expected: a header line with the names of the columns, then the "
                r"records"
            ),
        ),
        (b"\n \r\n", r"a.csv: is empty; expected: a header line"),
        (b"text,n,text\na,1,b\n", r"a.csv:1: the header has the column 'text' twice; rename one"),
        (b"\n\n,a,,b\n", r"a.csv:3: the header has the column '' twice; rename one"),
        (
            b"1,2\n3,4\n",
            (
                r"a.csv:1: the first line holds '1', which is no name of a column; expected: a header "  # noqa: E501
                r"line"
            ),
        ),
        (
            b'1,"a text\nof two lines"\n',
            r"a.csv:1: the first line holds 'a text\\nof two lines', which is no name",
        ),
        (
            b"id," + b"word " * 99 + b"\n",
            r"a.csv:1: the first line holds 'word word .*, which is no name of a column",
        ),
        (b'[1],{"a": 1}\n', r"a.csv:1: the first line holds '\[1\]', which is no name of a column"),
        (b'text,"n\n', r"a.csv:1: the header cannot be read: a quoted cell does not end"),
        (b'text,"n"x\n', r"a.csv:1: the header cannot be read: its quotes are wrong"),
        (
            b"text,n\rab,1\r",
            r"a.csv:1: the header cannot be read: a carriage return .*; lines end in \\n or \\r\\n",
        ),
        (
            b"text,\xe9\nab,1\n",
            r"a.csv:1: the header cannot be read: byte 6 of the line, 0xe9, is not UTF-8",
        ),
        (
            b"hello,world\nab,1\n",
            r"a.csv: no column 'text'; the header has: 'hello', 'world'; .* add a header line",
        ),
        (
            b"id;text\n1;ab\n",
            r"a.csv: no column 'text'; the header has: 'id;text'; its cells .* by ';': set delim",
        ),
    ],
)
def test_headers_that_are_none(tmp_path, content, due):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(RecordError, match=due):
        open_sources(tmp_path / "a.csv")


def test_chats_need_the_right_delimiter_too(tmp_path):
    (tmp_path / "a.csv").write_text("prompt;completion\na;b\n")
    with pytest.raises(RecordError, match=r"a.csv.*'prompt;completion'"):
        open_sources(tmp_path / "a.csv", fields=WHOLE)
    assert objects(tmp_path / "a.csv", delimiter=";") == [
        ([(2, {"prompt": "a", "completion": "b"})], [])
    ]
    for wrong in ("", ",,", '"', "\n", "é"):
        with pytest.raises(ConfigError, match=r"delimiter.*ASCII.*character"):
            open_sources(tmp_path / "a.csv", delimiter=wrong)


def test_bad_records_are_rejects_with_their_lines(tmp_path):
    content = (
        b'id,text\n1,good\n2\n3,too,many\n\n4,"two\nlines"\n5,"wrong"quote\n6,5" '
        b'disk\n7,nul\0\n8,gr\xfcn\n9,a\rb\n10,"x"\r\n11,"open\n12,rest\n'
    )
    (tmp_path / "a.csv").write_bytes(content)
    found, rejects = texts(tmp_path / "a.csv")
    assert found == [(2, "good"), (6, "two\nlines"), (9, '5" disk'), (13, "x")]
    due = {
        3: "the record has 1 cell; expected: 2, as in the header ('id', 'text')",
        4: "the record has 3 cells; expected: 2",
        8: "its quotes are wrong",
        10: "a NUL byte in the record",
        11: "byte 5 of the line, 0xfc, is not UTF-8",
        12: "a carriage return in a cell without quotes",
        14: "a quoted cell does not end: a quote is missing, or the file was cut",
    }
    assert [line for line, _ in rejects] == list(due)
    assert [reason.startswith(due[line]) for line, reason in rejects] == [True] * len(due)
    for part_bytes in range(1, 60, 7):
        assert texts(tmp_path / "a.csv", part_bytes=part_bytes) == (found, rejects)


def test_damaged_files(tmp_path, monkeypatch):
    rows = [["text"], *([f"{number} word word"] for number in range(5000))]
    data = written(rows).encode()
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(data)[:-500])
    with pytest.raises(DamagedFileError, match=r"a.csv.gz:\d+: .*cannot be read.*cut"):
        list(read_texts(open_sources(tmp_path / "a.csv.gz")))
    damage = []
    kept = list(
        read_texts(
            open_sources(tmp_path / "a.csv.gz", damaged=damage.append), damaged=damage.append
        )
    )
    assert kept == [row[0] for row in rows[1 : len(kept) + 1]]
    assert (4000 < len(kept) < 5000, len(damage), damage[0].line) == (True, 1, len(kept) + 2)
    (tmp_path / "b.csv.gz").write_bytes(b"\x1f\x8b\x08" + bytes(40))
    with pytest.raises(DamagedFileError, match=r"b.csv.gz:1.*cannot.*further"):
        open_sources(tmp_path / "b.csv.gz")
    damage.clear()
    parts = open_sources(tmp_path / "b.csv.gz", damaged=damage.append)
    assert list(read_texts(parts, damaged=damage.append)) == []
    (tmp_path / "c.csv").write_bytes(data)
    parts = number_lines(open_sources(tmp_path / "c.csv", part_bytes=1000))
    (tmp_path / "c.csv").write_bytes(data[:5000])
    with pytest.raises(DamagedFileError, match=r"c.csv:\d+: .*cannot be read.*shorter"):
        list(parts[8].blocks())
    monkeypatch.setattr(csv_files_module, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(csv_files_module, "BLOCK_BYTES", 64)
    (tmp_path / "d.csv").write_bytes(b'text\n"' + b"x" * 300)
    with pytest.raises(DamagedFileError, match=r"d.csv:2:.*within 100.*quote"):
        list(read_texts(open_sources(tmp_path / "d.csv")))


def test_parts_keep_their_identity_when_records_are_added(tmp_path):
    """A part is what its header, the place of its first record, and its own bytes are."""
    rows = [["text", "n"], *([f'{number} "word",\n', str(number)] for number in range(200))]
    (tmp_path / "a.csv").write_text(written(rows), newline="")

    def seen():
        parts = number_lines(open_sources(tmp_path / "a.csv", part_bytes=1000))
        with open(tmp_path / "a.csv", "rb") as file:
            content = file.read()
        return {
            part.identity: [content[begin:end] for _, begin, end in part.extents()]
            for part in parts
        }

    before = seen()
    begins = [pieces[0] for pieces in before.values()]
    assert b"".join(begins) == written(rows[1:]).encode()
    (tmp_path / "a.csv").write_text(written([*rows, ["more", "1"]]), newline="")
    after = seen()
    assert list(before)[:-1] == list(after)[:-1]
    assert [before[one] == after[one] for one in before if one in after] == [True] * (
        len(before) - 1
    )
    (tmp_path / "a.csv").write_text(written([["text", "m"], *rows[1:]]), newline="")
    assert not set(seen()) & set(before)


def test_remote_files_are_read_as_local_ones(tmp_path, request):
    rows = [["text", "n"], *([f'{number} "größe",\n', str(number)] for number in range(400))]
    data = b"\xef\xbb\xbf" + written(rows).encode()
    (tmp_path / "a.csv").write_bytes(data)
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/csv/a.csv", data)
    try:
        for part_bytes in (50, 999, 1 << 20):
            assert objects("memory://csv/a.csv", part_bytes=part_bytes) == objects(
                tmp_path / "a.csv", part_bytes=part_bytes
            )
            local = list(read_texts(open_sources(tmp_path / "a.csv", part_bytes=part_bytes)))
            parts = open_sources("memory://csv/a.csv", part_bytes=part_bytes)
            assert list(read_texts(parts)) == local == [row[0] for row in rows[1:]]
            assert [
                text
                for part in parts
                for block in part.blocks()
                for text in block.texts.to_pylist()
            ] == local
            assert list(read_texts(parts[1:3])) == [
                text
                for part in parts[1:3]
                for block in part.blocks()
                for text in block.texts.to_pylist()
            ]
    finally:
        filesystem.rm("/csv", recursive=True)


def test_values_stay_texts(tmp_path):
    """Also those that are JSON, as messages in a cell are: who reads the layout decides."""
    messages = json.dumps([{"role": "user", "content": 'a "b"\n'}])
    (tmp_path / "a.csv").write_text(
        written([["messages", "n", "flag"], [messages, "07", "null"]]), newline=""
    )
    assert objects(tmp_path / "a.csv")[0][0] == [
        (2, {"messages": messages, "n": "07", "flag": "null"})
    ]
