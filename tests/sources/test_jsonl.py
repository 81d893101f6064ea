"""JSONL: every line is either a record or a reject with its place, whatever bytes it holds."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ConfigError, RecordError
from penstock.data.sources import Fields, open_sources, read_texts
from penstock.data.sources import lines as lines_module
from penstock.data.sources.checks import diagnose
from penstock.data.sources.json_files import number_lines
from penstock.data.sources.parsing import parse_block


def read(parts: list[Any]) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    texts, rejects = [], []
    for part in parts:
        for block in part.blocks():
            texts += zip(block.lines.tolist(), block.texts.to_pylist(), strict=True)
            rejects += [(reject.line, reject.reason) for reject in block.rejects]
    return texts, rejects


def one_line(raw: bytes, fields: Fields | None = None) -> str | None:
    """The reason that one line is rejected between two good ones."""
    good = b'{"text": "good"}\n'
    block, _ = parse_block(good + raw + b"\n" + good, "f.jsonl", 1, fields or Fields(), 0)
    assert block.texts.to_pylist()[0] == "good"
    assert block.texts.to_pylist()[-1] == "good"
    assert block.lines.tolist() == [1, 2, 3][:: 1 if len(block) == 3 else 2]
    assert len(block) + len(block.rejects) == 3
    return block.rejects[0].reason if block.rejects else None


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"text": "a"', "may have been cut"),
        (
            b'{"text": "a"} {"text": "b"}',
            "a second value after the end of the object, at column 15",
        ),
        (b'{"text": "a"}, {"text": "b"}', "more text after the end"),
        (b'{"text": "a"} }', "more text after the end"),
        (b'{"text": "a"} null', "after the end"),
        (b'{"text": "a"}\r{"text": "b"}', "one object per line"),
        (b"null", "the record is null"),
        (
            b"[1]",
            "the record is a JSON array; expected: one object per line. If it holds conversations",
        ),
        (b"[", "JSON array"),
        (b'"text"', "the record is text"),
        (b'{"text": "\xff"}', "byte 11 of the line, 0xff, is not UTF-8"),
        (b'{"text": "a", "more": "\xff"}', "is not UTF-8"),
        (rb'{"text": "ab\ud800"}', "lone surrogate U[+]D800 at character 2"),
        (rb'{"text": "a", "more": "\ud800"}', "not JSON: .*surrogate"),
        (b'{"text": "a\0b"}', "a NUL byte at column 12"),
        (b'{"text": "a"}\0', "a NUL byte"),
        (b'{"text": "a", "text": "b"}', "'text' occurs twice"),
        (b'{"text": 1}', "holds a number; expected: text"),
        (b'{"text": ["a"]}', "holds a list; expected: text"),
        (b'{"text": null}', "is null"),
        (b'{"text": ""}', "is empty"),
        (
            b'{"content": "a", "id": 3}',
            "no field 'text'; the record has: 'content', 'id'; set text_field to the field",
        ),
        (b"{}", "no fields"),
        (b"\xff\xfe{", "byte order mark of UTF-16; expected: UTF-8"),
        (b"\xef\xbb\xbf" + b'{"text": "a"}', "byte order mark"),
        (b"text", "not JSON: Expecting value at column 1"),
        (b"{'text': 'a'}", "not JSON"),
    ],
)
def test_bad_lines_are_found_and_explained(raw, reason):
    found = one_line(raw)
    assert found is not None
    assert re.search(reason, found), found


@pytest.mark.parametrize(
    "raw",
    [
        b'{"text": "a"}\r',
        b'  {"text": "a"}\t',
        '{"text": "\u0085 \u2028 \u2029 \x0b \x0c"}'.encode()
        .replace(b"\x0b", b"\\u000b")
        .replace(b"\x0c", b"\\f"),
        rb'{"text": "\ud83d\ude00 \u0000"}',
        (
            b'{"text": "a", "more": {"deep": [1, null, {"x": "y"}]}, "big": '
            b"123456789012345678901234567890}"
        ),
        b'{"more": "\\"}\\n{", "text": "a"}',
        b'{"te\\u0078t": "a"}',
    ],
)
def test_unusual_but_good_lines(raw):
    assert one_line(raw) is None


def test_blank_lines_keep_the_count():
    block, _ = parse_block(b'\n \r\n{"text": "a"}\n\n\t\n{"text": "b"}', "f", 10, Fields(), 0)
    assert (block.lines.tolist(), block.rejects) == ([12, 15], [])


def test_weight_ranges():
    fields = Fields(weights="w")
    good = (
        b'{"text": "h\xc3\xa9llo", "w": [{"begin": 0, "end": 2}, {"begin": 2, "end": 5, "weight": '
        b"0.5}]}\n"
    )
    block, _ = parse_block(good + b'{"text": "a"}\n{"text": "a", "w": []}\n', "f", 1, fields, 0)
    assert block.weights is not None
    assert block.weights.offsets.tolist() == [0, 2, 2, 2]
    assert block.weights.end.tolist() == [2, 5]
    assert block.weights.weight.tolist() == [1.0, 0.5]
    assert block.weights.present.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("ranges", "reason"),
    [
        ('[{"begin": 0, "end": 6}]', "inside the text of 5 characters"),
        ('[{"begin": 2, "end": 4}, {"begin": 3, "end": 5}]', "not before character 4"),
        ('[{"begin": -1, "end": 2}]', "from character -1"),
        ('[{"begin": 2, "end": 2}]', "from character 2 to 2"),
        ('[{"begin": 0}]', "expected: two whole numbers"),
        ('[{"begin": 0, "end": 1.5}]', "expected: two whole numbers"),
        ('[{"begin": 0, "end": 2, "weight": -1}]', "has weight -1"),
        ('[{"begin": 0, "end": 2, "weight": NaN}]', "has weight nan"),
        ('[{"begin": 0, "end": 2, "weight": 1e300}]', "float32"),
        ("[null]", "is null"),
        ('"all"', "holds text"),
        ("[[0, 2, 1]]", "is a list"),
    ],
)
def test_bad_weight_ranges(ranges, reason):
    found = one_line(f'{{"text": "hello", "w": {ranges}}}'.encode(), Fields(weights="w"))
    assert found is not None
    assert reason in found


def test_nested_and_kept_fields():
    fields = Fields(text="doc.body", columns={"doc.lang": "string", "score": "float64"})
    line = (
        b'{"doc": {"body": "a", "lang": "de"}, "score": 1}\n{"doc": {"body": "b"}}\n{"doc": '
        b'null}\n{"doc": {"x": 1}}\n'
    )
    block, _ = parse_block(line + b'{"doc": {"body": "c"}, "score": "high"}\n', "f", 1, fields, 0)
    assert block.texts.to_pylist() == ["a", "b"]
    assert block.columns["doc.lang"].to_pylist() == ["de", None]
    assert block.columns["score"].to_pylist() == [1.0, None]
    assert "no field 'doc.body'; the object it leads to has: 'x'" in block.rejects[1].reason
    assert "declared" in block.rejects[2].reason


def test_fields_that_clash_are_refused():
    with pytest.raises(ConfigError, match="both as a value and as an object"):
        Fields(text="a", weights="a.b")
    with pytest.raises(ConfigError, match="type 'text'; known: string"):
        Fields(columns={"b": "text"})


RECORDS = st.fixed_dictionaries(
    {
        "text": st.one_of(
            st.text(max_size=12), st.none(), st.integers(), st.lists(st.integers(), max_size=2)
        )
    },
    optional={
        "id": st.integers(-5, 5),
        "meta": st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    },
)


@st.composite
def mutated_lines(draw: Any) -> list[bytes]:
    """Lines of JSON, most of them whole, some with a change that damages them or not."""
    result = []
    for record in draw(st.lists(RECORDS, max_size=12)):
        line = json.dumps(record, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
        change = draw(
            st.sampled_from(["no", "no", "no", "cut", "flip", "insert", "join", "blank", "spaces"])
        )
        at = draw(st.integers(0, len(line)))
        if change == "cut":
            line = line[:at]
        elif change == "flip":
            line = line[:at] + draw(st.binary(min_size=1, max_size=1)) + line[at + 1 :]
        elif change == "insert":
            line = (
                line[:at]
                + draw(
                    st.sampled_from(
                        [b"}", b"{", b'"', b",", b"null", b"\xff", b"\\", b"\0", b"\xc2\x85", b"\r"]
                    )
                )
                + line[at:]
            )
        elif change == "join":
            line = line + draw(st.sampled_from([b"", b" ", b","])) + line
        elif change == "blank":
            line = draw(st.sampled_from([b"", b" ", b"\r"]))
        elif change == "spaces":
            line = b" \t" + line + b"\r"
        result.append(line.replace(b"\n", b""))
    return result


def slow_twin(lines: list[bytes]) -> tuple[list[tuple[int, str]], list[int]]:
    """Which lines are good, by Python's own JSON, one line at a time."""
    texts, bad = [], []
    for number, raw in enumerate(lines, 1):
        if not raw.strip(b" \t\r"):
            continue
        try:
            pairs = json.loads(
                raw.decode(), object_pairs_hook=lambda pairs: pairs if twice(pairs) else dict(pairs)
            )
        except ValueError:
            bad.append(number)
            continue
        if diagnose(pairs, Fields()) or has_lone_surrogate(pairs):
            bad.append(number)
        else:
            texts.append((number, pairs["text"]))
    return texts, bad


def twice(pairs: list[tuple[str, Any]]) -> bool:
    return [name for name, _ in pairs].count("text") > 1


def has_lone_surrogate(record: Any) -> bool:
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


@settings(deadline=None, max_examples=300)
@given(mutated_lines(), st.booleans(), st.integers(5, 90))
def test_fuzzed_lines_equal_slow_twin(tmp_path_factory, lines, end_newline, part_bytes):
    path = tmp_path_factory.mktemp("fuzz") / "f.jsonl"
    path.write_bytes(b"\n".join(lines) + (b"\n" if end_newline else b""))
    texts, rejects = read(open_sources(path, part_bytes=part_bytes))
    expected, bad = slow_twin(lines)
    assert texts == expected
    assert [line for line, _ in rejects] == bad


def test_parts_and_blocks_do_not_change_what_is_read(tmp_path, monkeypatch):
    lines = [json.dumps({"text": f"{number} " + "x" * (number * 37 % 211)}) for number in range(60)]
    lines[50] = "{broken"
    path = tmp_path / "f.jsonl"
    path.write_text("\n".join(lines))
    whole = read(open_sources(path))
    for part_bytes in (61, 997, 10**6):
        for block_bytes in (7, 64, 5000):
            monkeypatch.setattr(lines_module, "BLOCK_BYTES", block_bytes)
            parts = open_sources(path, part_bytes=part_bytes)
            assert read(parts) == whole
            assert read(number_lines(parts)) == whole
            assert (
                sum(block.size_bytes for part in parts for block in part.blocks())
                == path.stat().st_size
            )
    assert sum(part.size_bytes for part in parts) == path.stat().st_size


@pytest.mark.parametrize("suffix", [".gz", ".zst", ""])
def test_compressed_and_bom(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(lines_module, "BLOCK_BYTES", 1000)
    content = b"\xef\xbb\xbf" + b"".join(b'{"text": "%d"}\n' % number for number in range(1000))
    path = tmp_path / f"f.jsonl{suffix}"
    path.write_bytes(compress(content, suffix))
    (part,) = open_sources(path)
    texts, rejects = read([part])
    assert texts == [(number + 1, str(number)) for number in range(1000)]
    assert not rejects
    assert sum(block.size_bytes for block in part.blocks()) == path.stat().st_size


def compress(content: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(content)
    return pa.compress(content, "zstd", asbytes=True) if suffix else content


def test_first_reject_stops_with_file_and_line(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"text": "a"}\n{"txt": "b"}\n')
    with pytest.raises(RecordError, match=r"chats.jsonl:2.*'text'.*'txt'"):
        list(read_texts(open_sources(path)))


@pytest.mark.real_data
def test_unicode_line_separators_do_not_cut_real_records(real_data: Path):
    path = real_data / "eval/llm-foundry/triviaqa_sm_sub.jsonl.gz"
    raw = gzip.decompress(path.read_bytes())
    assert b"\xc2\x85" in raw
    texts = list(read_texts(open_sources(path, fields=Fields(text="context"))))
    assert texts == [json.loads(line)["context"] for line in raw.split(b"\n") if line]
