"""`Traced` does what `str` does, and knows where its characters come from."""

import copy
import pickle
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.chat.render.traced_text import LITERAL, Traced, format_percent, join, runs_of

WORDS = st.text(alphabet=" \n\t\x0b\x85\u2028\x1fabAB,%sß水İ<|\"'\\", max_size=12)
NUMBERS = st.integers(-14, 14)
FIELDS = {
    (0, "content"): "  Aa, bß\n\n水 %s a, <|b|>  ",
    (1, "content"): "a,a\r\n,aİ\x85",
    (1, "name"): "ab",
}


def fields():
    """Text of a field of a message, or a literal."""
    known = [Traced.of(text, *place) for place, text in FIELDS.items()]
    return st.one_of(st.sampled_from(known), WORDS.map(Traced))


def changes():
    """Operations that keep exact runs, as functions of (text, another text)."""
    none_or_words = st.one_of(st.none(), WORDS)
    separators = WORDS.filter(bool)
    some = st.integers(-2, 4)
    return st.one_of(
        st.just(lambda text, other: text + other),
        st.just(lambda text, other: other + text),
        st.builds(lambda plain: lambda text, other: plain + text, WORDS),
        st.builds(lambda n: lambda text, other: text * n, st.integers(-1, 3)),
        st.builds(lambda n: lambda text, other: n * text, st.integers(-1, 3)),
        st.builds(
            lambda a, b, c: lambda text, other: text[a:b:c],
            st.none() | NUMBERS,
            st.none() | NUMBERS,
            st.none() | NUMBERS.filter(bool),
        ),
        st.builds(lambda n: lambda text, other: text[n % len(text)] if text else text, NUMBERS),
        st.builds(
            lambda n: lambda text, other: text[-1 - n % len(text)] if text else text, NUMBERS
        ),
        st.builds(lambda c: lambda text, other: text.strip(c), none_or_words),
        st.builds(lambda c: lambda text, other: text.lstrip(c), none_or_words),
        st.builds(lambda c: lambda text, other: text.rstrip(c), none_or_words),
        st.builds(lambda c: lambda text, other: text.removeprefix(c), WORDS),
        st.builds(lambda c: lambda text, other: text.removesuffix(c), WORDS),
        st.builds(
            lambda n: lambda text, other: text.removeprefix(text[:n]).removesuffix(text[-1:]),
            NUMBERS,
        ),
        st.builds(
            lambda s, n: lambda text, other: other.join(text.split(s, n)),
            st.none() | separators,
            some,
        ),
        st.builds(
            lambda s, n: lambda text, other: other.join(text.rsplit(s, n)),
            st.none() | separators,
            some,
        ),
        st.builds(lambda k: lambda text, other: other.join(text.splitlines(k)), st.booleans()),
        st.builds(lambda s: lambda text, other: other.join(text.partition(s)), separators),
        st.builds(lambda s: lambda text, other: other.join(text.rpartition(s)), separators),
        st.builds(lambda s: lambda text, other: text.partition(s)[2], separators),
        st.builds(lambda s, n: lambda text, other: text.replace(s, other, n), separators, some),
        st.just(lambda text, other: text.replace("a", other)),
        st.just(lambda text, other: other.join(list(text))),
        st.just(lambda text, other: other.join(reversed(text))),
        st.just(lambda text, other: Traced(text)),
        st.just(lambda text, other: str(text)),
    )


LOOSE = [
    *(
        lambda text, other, name=name: getattr(text, name)()
        for name in ("upper", "lower", "title", "capitalize")
    ),
    *(
        lambda text, other, name=name: getattr(text, name)()
        for name in ("swapcase", "casefold", "expandtabs")
    ),
    *(
        lambda text, other, name=name: getattr(text, name)(9)
        for name in ("center", "ljust", "rjust", "zfill")
    ),
    lambda text, other: text.translate({ord("a"): "bb", ord("b"): None, ord(" "): "_"}),
    lambda text, other: text.replace("", other),
]
"""Operations that may give offsets up."""


def check_runs(text):
    """Runs cover the text, and what has an offset is there."""
    assert type(text) is Traced
    assert sum(run[0] for run in runs_of(text)) == len(text)
    at = 0
    for length, message, field, offset, _, _ in runs_of(text):
        assert length > 0
        if message == LITERAL:
            assert (field, offset) == ("", -1)
        elif offset >= 0:
            assert FIELDS[message, field][offset : offset + length] == str.__getitem__(
                text, slice(at, at + length)
            )
        at += length


@settings(max_examples=400, deadline=None)
@given(fields(), st.lists(st.tuples(changes(), fields()), max_size=5))
def test_operations_equal_those_of_str_and_keep_every_character(text, steps):
    plain, known = str.__str__(text), len(runs_of(text)) > 0
    for change, other in steps:
        changed = change(text, other)
        plain = change(plain, str.__str__(other))
        assert str.__str__(changed) == plain
        text = changed if isinstance(changed, Traced) else Traced(changed)
        check_runs(text)
        known = known or bool(other)
    # An operation of this list gives no offset up.
    assert all(run[1] == LITERAL or run[3] >= 0 for run in runs_of(text))


@settings(max_examples=300, deadline=None)
@given(
    fields(), st.sampled_from(LOOSE), st.lists(st.tuples(changes(), fields()), max_size=2), fields()
)
def test_operations_that_change_characters_equal_those_of_str_and_keep_the_message(
    text, change, steps, other
):
    for step, another in steps:
        text = Traced(step(text, another))
    changed = change(text, other)
    assert changed == change(str.__str__(text), str.__str__(other))
    changed = Traced(changed)
    assert sum(run[0] for run in runs_of(changed)) == len(changed)
    at = 0
    for length, message, field, offset, _, _ in runs_of(changed):
        if offset >= 0:
            was = FIELDS[message, field][offset : offset + length]
            now = str.__getitem__(changed, slice(at, at + length))
            assert all(
                a == b or a.upper() == b.upper() or a.lower() == b.lower()
                for a, b in zip(was, now, strict=True)
            )
        at += length


def test_a_changed_text_still_belongs_to_its_message():
    text = Traced.of("a\tb", 3, "content")
    for change in LOOSE:
        changed = change(text, Traced(""))
        assert {run[1:3] for run in runs_of(changed)} >= {(3, "content")}, changed


@settings(deadline=None)
@given(fields(), WORDS)
def test_reading_equals_that_of_str(text, other):
    plain = str.__str__(text)
    assert text == plain
    assert hash(text) == hash(plain)
    for name in (
        "startswith",
        "endswith",
        "find",
        "rfind",
        "count",
        "__contains__",
        "__lt__",
        "__eq__",
    ):
        assert getattr(text, name)(other) == getattr(plain, name)(other)
    for name in ("isspace", "isupper", "isdigit", "isalpha", "encode"):
        assert getattr(text, name)() == getattr(plain, name)()
    assert (len(text), bool(text), repr(text), list(text)) == (
        len(plain),
        bool(plain),
        repr(plain),
        list(plain),
    )
    assert sorted([text, other]) == sorted([plain, other])


@settings(deadline=None)
@given(fields())
def test_copies_keep_the_runs(text):
    for other in (
        copy.copy(text),
        copy.deepcopy(text),
        pickle.loads(pickle.dumps(text)),
        str(text),
        Traced(text),
    ):
        assert (type(other), other, runs_of(other)) == (Traced, text, runs_of(text))


def test_errors_are_those_of_str():
    text = Traced.of("abc", 0, "content")
    for wrong in (3, -4, 10):
        with pytest.raises(IndexError, match="string index out of range"):
            text[wrong]
    with pytest.raises(TypeError, match=r"concatenate str|unsupported operand"):
        text + 1
    with pytest.raises(TypeError, match="unsupported operand"):
        1 + text
    for method in ("split", "rsplit", "partition", "rpartition"):
        with pytest.raises(ValueError, match="empty separator"):
            getattr(text, method)("")
    with pytest.raises(TypeError, match=r"."):
        Traced(",").join(["a", 1])
    with pytest.raises(TypeError, match="not all arguments converted"):
        Traced("%s") % (1, 2)


PERCENTS = [
    "%s",
    "a%%b%s",
    "%s-%s",
    "%5s|%s",
    "%d: %s",
    "%-4s%s%%",
    "%r%s",
    "%.1f%s",
    "%x",
    "100%%",
]


@settings(deadline=None)
@given(st.sampled_from(PERCENTS), st.lists(fields() | NUMBERS, max_size=3), fields())
def test_percent_equals_that_of_str(template, values, own):
    arguments = tuple(str.__str__(value) if isinstance(value, str) else value for value in values)
    try:
        expected = template % arguments
    except (TypeError, ValueError) as error:
        with pytest.raises(type(error), match=r"."):
            format_percent(template, tuple(values))
        return
    made = format_percent(template, tuple(values))
    assert made == expected == Traced(template) % tuple(values)
    check_runs(made)


def test_percent_tells_words_from_the_text_around_them():
    words = Traced.of("<|e|>", 2, "content")
    made = Traced("<|s|>%d. %s<|e|>") % (7, words)
    assert [run[:4] for run in runs_of(made) if run[1] == 2] == [(5, 2, "content", 0)]
    assert runs_of("<|s|>%(x)s".__mod__({"x": words}))[0][1] == LITERAL
    assert runs_of(Traced("<|s|>%(x)s") % {"x": words})[0][1] == 2


def test_join_of_nothing():
    assert join(",", []) == ""
    assert runs_of(join(",", [])) == ()
    assert partial(join, ",")(["a", "", "b"]) == "a,,b"
