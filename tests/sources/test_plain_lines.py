"""Lines that the kernel reads are lines that pyarrow accepts, with the same texts; ordinary lines
it does read.
"""

import ctypes
import json
import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.compiled import address_of
from penstock.data.sources import Fields
from penstock.data.sources import _kernels as k
from penstock.data.sources.parsing import most_texts, parse_plain, parse_with_arrow

Array = np.ndarray[Any, np.dtype[np.uint8]]
TEXTS = st.text(
    st.characters(exclude_categories=("Cs",)) | st.sampled_from('"\\/\n\t\0\x7f😀'), max_size=200
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False, width=32)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
# Short marks of the grammar, so that changes often give something nearly right.
MARKS = [
    *'{}[]:,"\\ \t\r\n-+.eEu0179af',
    '\\"',
    "\\u0041",
    "\\ud83d\\ude00",
    "\\udc00",
    "null",
    '"text"',
    '"text": "x", ',
]


@st.composite
def written_lines(draw: st.DrawFn) -> tuple[bytes, list[str]]:
    """Lines as several programs might write them, and their texts."""
    lines, texts = [], []
    for _ in range(draw(st.integers(0, 4))):
        others = draw(
            st.dictionaries(TEXTS.filter(lambda name: name != "text"), VALUES, max_size=3)
        )
        text = draw(TEXTS.filter(bool))
        place = draw(st.integers(0, len(others)))
        items = list(others.items())
        record = dict([*items[:place], ("text", text), *items[place:]])
        spaces = draw(st.sampled_from([(", ", ": "), (",", ":"), (" ,\t", " :  ")]))
        line = json.dumps(record, ensure_ascii=draw(st.booleans()), separators=spaces)
        lines.append(
            draw(st.sampled_from(["", " ", "\t"])) + line + draw(st.sampled_from(["", " ", "\r"]))
        )
        lines += [""] * draw(st.integers(0, 1))
        texts.append(text)
    return "\n".join(lines).encode() + draw(st.sampled_from([b"", b"\n"])), texts


def plain(data: bytes, field: str = "text") -> tuple[list[int], list[str], int] | None:
    found = parse_plain(data, 7, Fields(text=field), len(data), [])
    if found is None:
        return None
    block, newlines = found
    block.texts.validate(full=True)
    return block.lines.tolist(), block.texts.to_pylist(), newlines


def with_arrow(data: bytes) -> tuple[tuple[list[int], list[str], int], list[Any]]:
    block, newlines = parse_with_arrow(data, "f", 7, Fields(), len(data), [])
    return (block.lines.tolist(), block.texts.to_pylist(), newlines), block.rejects


@settings(deadline=None)
@given(written_lines())
def test_what_programs_write_is_read(written: tuple[bytes, list[str]]) -> None:
    data, texts = written
    found = plain(data)
    assert found is not None
    assert found[1] == texts
    assert found == with_arrow(data)[0]


@settings(deadline=None, max_examples=400)
@given(
    written_lines(),
    st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 3), st.sampled_from(MARKS)), max_size=4
    ),
)
def test_what_is_read_is_what_pyarrow_reads(
    written: tuple[bytes, list[str]], changes: list[tuple[int, int, str]]
) -> None:
    data = written[0] or b'{"text": "a"}'
    for at, removed, mark in changes:
        at %= len(data) + 1
        data = data[:at] + mark.encode() + data[at + removed :]
    found = plain(data)
    if found is not None:
        assert (found, []) == with_arrow(data)


@pytest.mark.parametrize(
    "line",
    [
        r'{"text": "\"\\\/\b\f\n\r\t\u0041\u00e9\u20AC\ud83d\uDE00\u0000"}',
        (
            '{"a": -0, "b": 10.25e-3, "c": 1E+9, "d": [1, [], {}, [{}]], "e": {"text": "other"}, '
            '"text": "x", "f": null}'
        ),
        '{"a": true, "b": false, "text": "x", "a": 1}',
        r'{"te\u0078t": "b", "\"": {"text": 1}}',
        '{"text": "' + "x" * 300 + '"}',
        "{" + '"n": ' + "[" * 65 + "]" * 65 + ', "text": "x"}',
    ],
)
def test_ordinary_lines(line: str) -> None:
    found = plain(line.encode())
    assert found == ([7], [json.loads(line)["text"]], 0)
    assert (found, []) == with_arrow(line.encode())


@pytest.mark.parametrize(
    "line",
    [
        '{"text": "a", "text": "b"}',
        '{"text": "", "text": "b"}',
        r'{"text": "a", "te\u0078t": "b"}',
        '{"text": ""}',
        '{"text": null}',
        '{"text": ["a"]}',
        '{"other": "a"}',
        '{"in": {"text": "a"}}',
        "{}",
        "{",
        '{"text"',
        '{"text":',
        '{"text": "a',
        '{"text": "a\\',
        '{"text": "a\\u12"}',
        '{"text": "\\ud83d"}',
        '{"text": "\\ude00"}',
        '{"text": "\\ud83d\\u0041"}',
        '{"text": "\\x41"}',
        '{"text": "a\tb"}',
        '{"text": "a",}',
        '{"text": "a"]',
        '{"text": "a"} x',
        '{"text": "a"}{"text": "b"}',
        '["a"]',
        "null",
        '\ufeff{"text": "a"}',
        *(
            f'{{"n": {number}, "text": "a"}}'
            for number in (
                "01",
                "1.",
                ".5",
                "+1",
                "-",
                "1e",
                "1e+",
                "1e309",
                "9" * 309,
                "NaN",
                "tru",
                "nulL",
            )
        ),
        '{"n": [1 2], "text": "a"}',
        '{"n": [1,], "text": "a"}',
        '{"n": {"a" 1}, "text": "a"}',
        "{" + '"n": ' + "[" * 66 + "]" * 66 + ', "text": "x"}',
    ],
)
def test_unusual_lines_are_left_to_pyarrow(line: str) -> None:
    assert plain(line.encode()) is None
    assert plain(b'{"text": "a"}\n' + line.encode() + b'\n{"text": "a"}') is None


def test_what_is_not_utf8_is_left_to_pyarrow() -> None:
    assert plain(b'{"text": "a\xff"}') is None
    assert plain(b'{"text": "a", "more": "\xff"}') is None


def test_names_of_fields() -> None:
    assert plain('{"text": "a", "größe": "b"}'.encode(), "größe") == ([7], ["b"], 0)
    assert plain(b'{"texts": "a", "tex": "b", "text": "c"}') == ([7], ["c"], 0)


def before_a_wall(size: int) -> Array:
    """Bytes at the end of a page, before one that may not be touched: a fault would end the
    program.
    """
    room = np.frombuffer(mmap.mmap(-1, 2 * mmap.PAGESIZE), np.uint8)
    wall = ctypes.c_void_p(address_of(room) + mmap.PAGESIZE)
    assert ctypes.CDLL(None).mprotect(wall, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return room[mmap.PAGESIZE - size : mmap.PAGESIZE]


def read_before_walls(data: bytes) -> tuple[int, int, Array, Array]:
    """(texts, newlines, ends, bytes of the texts), with every array before a wall, and none larger
    than it must be.
    """
    name = np.frombuffer(b"x", np.uint8)
    most = most_texts(len(data), len(name))
    source, out = before_a_wall(len(data)), before_a_wall(len(data))
    source[:] = np.frombuffer(data, np.uint8)
    ends, lines = (
        before_a_wall(8 * (most + 1)).view(np.int64),
        before_a_wall(8 * most).view(np.int64),
    )
    places = np.uint64(address_of(source)), np.uint64(address_of(out))
    count, newlines = k.read_texts(places[0], len(source), name, places[1], ends, lines)
    return count, newlines, ends, out


@pytest.mark.parametrize("length", [*range(1, 70), 127, 128, 129])
def test_nothing_beyond_the_arrays_is_touched(length: int) -> None:
    line = b'{"x":"' + b"y" * length + b'"}'
    for cut in range(len(line)):
        count, newlines, ends, out = read_before_walls(line[: len(line) - cut])
        assert (count, newlines) == (k.ODD if cut else 1, 0)
        assert cut or (ends[:2].tolist(), bytes(out[:length])) == ([0, length], b"y" * length)


@pytest.mark.parametrize("count", range(1, 30))
@pytest.mark.parametrize("last", [b"", b"\n"])
def test_arrays_hold_the_shortest_lines(count: int, last: bytes) -> None:
    found, newlines, ends, out = read_before_walls(b"\n".join([b'{"x":"a"}'] * count) + last)
    assert (found, newlines) == (count, count - (not last))
    assert (ends.tolist(), bytes(out[:count])) == ([*range(count + 1)], b"a" * count)
