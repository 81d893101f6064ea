"""What tests and solutions send each other: plain values come back as they were, and nothing else
can.
"""

import collections
import json
import math
import re
from decimal import Decimal
from fractions import Fraction
from itertools import combinations_with_replacement, count, islice
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from penstock.learn.evaluation.sandbox.values import decode, encode

SCALARS = strategies.one_of(
    strategies.none(),
    strategies.booleans(),
    strategies.integers(),
    strategies.floats(allow_nan=False),
    strategies.text(),
    strategies.binary(),
    strategies.complex_numbers(allow_nan=False),
    strategies.fractions(),
    strategies.integers(1, 1 << 300),
    strategies.builds(range, strategies.integers(-9, 9)),
)
VALUES = strategies.recursive(
    SCALARS,
    lambda parts: strategies.one_of(
        strategies.lists(parts), strategies.lists(parts).map(tuple), strategies.sets(SCALARS),
        strategies.frozensets(SCALARS), strategies.dictionaries(SCALARS, parts),
    ),
)  # fmt: skip


def _refuse(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} is not plain")


def there_and_back(value: Any) -> Any:
    return decode(iter(list(encode(value, _refuse))))


def _types(value: Any) -> Any:
    if isinstance(value, dict):
        return [(_types(key), _types(part)) for key, part in value.items()]
    return (
        (type(value), [_types(part) for part in value])
        if isinstance(value, list | tuple)
        else type(value)
    )


@hypothesis.given(VALUES)
def test_plain_values_come_back(value: Any) -> None:
    found = there_and_back(value)
    assert found == value
    assert _types(found) == _types(value)


@hypothesis.given(
    strategies.sampled_from([list, tuple]),
    strategies.lists(
        strategies.lists(
            strategies.sampled_from(["a", "b", "", 0, 1, True, 1.0, 1 << 70]), max_size=40
        ).map(tuple),
        min_size=3,
    ),
    strategies.sampled_from([str, int, object]),
)
def test_rows_of_few_parts_come_back(kind: type, rows: Any, only: type) -> None:
    value = kind(
        [tuple(part for part in row if only is object or type(part) is only) for row in rows * 9]
    )
    found = there_and_back(value)
    assert found == value
    assert _types(found) == _types(value)
    assert there_and_back(set(value)) == set(value)
    lists = [list(row) for row in value]
    assert _types(there_and_back(lists)) == _types(lists)


@pytest.mark.parametrize("kind", [list, tuple])
def test_long_answers_go_in_pieces(kind: type) -> None:
    rows = kind(combinations_with_replacement(["Red", "Green", "Blue", "\\"], 70))
    texts = list(encode(rows[:30_000], _refuse))
    assert len(texts) > 3
    assert decode(iter(texts)) == rows[:30_000]
    mixed = kind([True, 1, 1.0, "1", None, [2]] * 20_000)
    assert _types(there_and_back(mixed)) == _types(mixed)
    assert there_and_back(["a", "b"] * 100 + [1]) == ["a", "b"] * 100 + [1]
    assert there_and_back([[str(number) for number in range(100)]]) == [
        [str(number) for number in range(100)]
    ]


def test_other_types_of_the_standard_library() -> None:
    assert math.isnan(there_and_back(math.nan))
    assert there_and_back([math.inf, -math.inf, -0.0])[2].hex() == "-0x0.0p+0"
    assert there_and_back([Decimal("1.10"), Fraction(1, 3)]) == [Decimal("1.10"), Fraction(1, 3)]
    for mapping in (
        collections.Counter("aab"),
        collections.OrderedDict(a=1),
        collections.defaultdict(int, a=1),
    ):
        assert type(there_and_back(mapping)) is dict
        assert there_and_back(mapping) == mapping
    pair = there_and_back(collections.namedtuple("Pair", "a b")(1, {2}))
    assert (type(pair), pair) == (tuple, (1, {2}))
    named = {"a": (1,), "b": (2,)}
    assert there_and_back(named.keys()) == named.keys() == {"a", "b"}
    assert there_and_back(named.items()) == named.items()
    assert list(there_and_back(named.values())) == [(1,), (2,)]
    assert there_and_back(collections.deque([1, (2,)])) == collections.deque([1, (2,)])
    assert list(there_and_back(islice(count(), 3))) == [0, 1, 2]
    assert list(there_and_back(part for part in (1, 2))) == [1, 2]
    assert there_and_back([int, dict, 1 << 9999, "\ud800", bytearray(b"\xff")]) == [
        int,
        dict,
        1 << 9999,
        "\ud800",
        b"\xff",
    ]


@pytest.mark.parametrize(
    "value",
    [np.float64(0.1), np.int32(4), np.bool_(True), np.arange(6.0).reshape(2, 3), np.array(["a"])],
)
def test_numpy_keeps_its_types(value: Any) -> None:
    found = there_and_back(value)
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    assert np.array_equal(found, value)


class Everything(dict[str, int]):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Everything(),
        type("int", (int,), {"__module__": "builtins"})(3),
        lambda: 3,
        Everything,
        type("Own", (tuple,), {})((1, 2)),
        np.array([object()]),
        math,
    ],
)
def test_all_else_is_for_the_caller_to_name(value: Any) -> None:
    with pytest.raises(TypeError, match="is not plain"):
        there_and_back([value])
    seen = []
    (text,) = encode([value], lambda other: seen.append(other) or 7)
    assert text == '[{"object": 7}]'
    assert seen[0] is value
    assert decode(iter([text]), object=lambda content: content + 1) == [8]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (['{"object": 7}'], "KeyError: 'object'"),
        (['{"os.system": "true"}'], "KeyError: 'os.system'"),
        (['{"__class__": []}'], "KeyError: '__class__'"),
        (['{"tuple": [], "list": []}'], "ValueError: too many values"),
        (["{}"], "ValueError: not enough values"),
        (['{"type": "object"}'], "KeyError: 'object'"),
        (['{"type": "eval"}'], "KeyError: 'eval'"),
        (['{"numpy": ["O", [], false, [0]]}'], "ValueError: an array of type O is not plain"),
        (['{"numpy": ["<f8", [9], true, [0]]}'], "ValueError: cannot reshape"),
        (['{"set": [[1]]}'], "TypeError: unhashable"),
        (['{"dict": [1]}'], "TypeError: cannot convert"),
        (['{"int": "import os"}'], "ValueError: invalid literal"),
        (['{"parts": "eval"}', "[1]"], "KeyError: 'eval'"),
        (['{"parts": "set"}', "1"], "TypeError: 'int' object is not iterable"),
        (['{"rows": ["tuple", [2], ["a"], "AB"]}'], "KeyError: 'B'"),
        (['{"rows": ["eval", [1], ["a"], "A"]}'], "KeyError: 'eval'"),
        (['{"rows": ["tuple", [-1], ["a"], "A"]}'], "ValueError: Stop argument"),
        (["[" * 100_000], "RecursionError: maximum recursion depth"),
        (["1", "2"], "ValueError: more texts than one value has"),
        (["no JSON"], "JSONDecodeError: Expecting value"),
    ],
)
def test_forged_texts_are_refused(texts: list[str], words: str) -> None:
    kind, _, message = words.partition(": ")
    with pytest.raises(
        (LookupError, ValueError, TypeError, RecursionError), match=re.escape(message)
    ) as caught:
        decode(iter(texts))
    assert caught.type.__name__ == kind


def test_what_is_made_is_of_known_types() -> None:
    text = json.dumps({"tuple": [{"dict": [["a", {"set": [1]}]]}, {"match": "anything"}]})
    mapping, match = decode(iter([text]))
    assert mapping == {"a": {1}}
    assert match is not None
    assert bool(match)
