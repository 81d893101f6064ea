"""`Traced` does what `str` does, and knows where its characters come from; `tojson` does what `json.dumps` does."""

import copy
import json
import pickle
from functools import partial

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.chat.environment import ChatEnvironment, TracingEnvironment, compile_template
from penstock.chat.filters import to_json
from penstock.chat.traced import LITERAL, Traced, format_percent, join, runs_of
from penstock.chat.writing import trace

WORDS = st.text(alphabet=" \n\t\x0b\x85\u2028\x1fabAB,%sß水İ<|\"'\\", max_size=12)
NUMBERS = st.integers(-14, 14)
FIELDS = {(0, "content"): "  Aa, bß\n\n水 %s a, <|b|>  ", (1, "content"): "a,a\r\n,aİ\x85", (1, "name"): "ab"}


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
            st.none() | NUMBERS, st.none() | NUMBERS, st.none() | NUMBERS.filter(bool),
        ),
        st.builds(lambda n: lambda text, other: text[n % len(text)] if text else text, NUMBERS),
        st.builds(lambda n: lambda text, other: text[-1 - n % len(text)] if text else text, NUMBERS),
        st.builds(lambda c: lambda text, other: text.strip(c), none_or_words),
        st.builds(lambda c: lambda text, other: text.lstrip(c), none_or_words),
        st.builds(lambda c: lambda text, other: text.rstrip(c), none_or_words),
        st.builds(lambda c: lambda text, other: text.removeprefix(c), WORDS),
        st.builds(lambda c: lambda text, other: text.removesuffix(c), WORDS),
        st.builds(lambda n: lambda text, other: text.removeprefix(text[:n]).removesuffix(text[-1:]), NUMBERS),
        st.builds(lambda s, n: lambda text, other: other.join(text.split(s, n)), st.none() | separators, some),
        st.builds(lambda s, n: lambda text, other: other.join(text.rsplit(s, n)), st.none() | separators, some),
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
    )  # fmt: skip


LOOSE = [
    *(lambda text, other, name=name: getattr(text, name)() for name in ("upper", "lower", "title", "capitalize")),
    *(lambda text, other, name=name: getattr(text, name)() for name in ("swapcase", "casefold", "expandtabs")),
    *(lambda text, other, name=name: getattr(text, name)(9) for name in ("center", "ljust", "rjust", "zfill")),
    lambda text, other: text.translate({ord("a"): "bb", ord("b"): None, ord(" "): "_"}),
    lambda text, other: text.replace("", other),
]
"""Operations that may give offsets up."""


def check_runs(text):
    """Runs cover the text, and what has an offset is there."""
    assert type(text) is Traced
    assert sum(run[0] for run in text._runs) == len(text)
    at = 0
    for length, message, field, offset, _, _ in text._runs:
        assert length > 0
        if message == LITERAL:
            assert (field, offset) == ("", -1)
        elif offset >= 0:
            assert FIELDS[message, field][offset : offset + length] == str.__getitem__(text, slice(at, at + length))
        at += length


@settings(max_examples=400, deadline=None)
@given(fields(), st.lists(st.tuples(changes(), fields()), max_size=5))
def test_operations_equal_those_of_str_and_keep_every_character(text, steps):
    plain, known = str.__str__(text), len(text._runs) > 0
    for change, other in steps:
        changed = change(text, other)
        plain = change(plain, str.__str__(other))
        assert str.__str__(changed) == plain
        text = changed if isinstance(changed, Traced) else Traced(changed)
        check_runs(text)
        known = known or bool(other)
    # An operation of this list gives no offset up.
    assert all(run[1] == LITERAL or run[3] >= 0 for run in text._runs)


@settings(max_examples=300, deadline=None)
@given(fields(), st.sampled_from(LOOSE), st.lists(st.tuples(changes(), fields()), max_size=2), fields())
def test_operations_that_change_characters_equal_those_of_str_and_keep_the_message(text, change, steps, other):
    for step, another in steps:
        text = Traced(step(text, another))
    changed = change(text, other)
    assert changed == change(str.__str__(text), str.__str__(other))
    changed = Traced(changed)
    assert sum(run[0] for run in changed._runs) == len(changed)
    at = 0
    for length, message, field, offset, _, _ in changed._runs:
        if offset >= 0:
            was = FIELDS[message, field][offset : offset + length]
            now = str.__getitem__(changed, slice(at, at + length))
            assert all(
                a == b or a.upper() == b.upper() or a.lower() == b.lower() for a, b in zip(was, now, strict=True)
            )
        at += length


def test_a_changed_text_still_belongs_to_its_message():
    text = Traced.of("a\tb", 3, "content")
    for change in LOOSE:
        changed = change(text, Traced(""))
        assert {run[1:3] for run in changed._runs} >= {(3, "content")}, changed


@settings(deadline=None)
@given(fields(), WORDS)
def test_reading_equals_that_of_str(text, other):
    plain = str.__str__(text)
    assert text == plain
    assert hash(text) == hash(plain)
    for name in ("startswith", "endswith", "find", "rfind", "count", "__contains__", "__lt__", "__eq__"):
        assert getattr(text, name)(other) == getattr(plain, name)(other)
    for name in ("isspace", "isupper", "isdigit", "isalpha", "encode"):
        assert getattr(text, name)() == getattr(plain, name)()
    assert (len(text), bool(text), repr(text), list(text)) == (len(plain), bool(plain), repr(plain), list(plain))
    assert sorted([text, other]) == sorted([plain, other])


@settings(deadline=None)
@given(fields())
def test_copies_keep_the_runs(text):
    for other in (copy.copy(text), copy.deepcopy(text), pickle.loads(pickle.dumps(text)), str(text), Traced(text)):
        assert (type(other), other, other._runs) == (Traced, text, text._runs)


def test_errors_are_those_of_str():
    text = Traced.of("abc", 0, "content")
    for wrong in (3, -4, 10):
        with pytest.raises(IndexError, match="string index out of range"):
            text[wrong]
    with pytest.raises(TypeError, match=r"can only concatenate str|unsupported operand"):
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


PERCENTS = ["%s", "a%%b%s", "%s-%s", "%5s|%s", "%d: %s", "%-4s%s%%", "%r%s", "%.1f%s", "%x", "100%%"]


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
    assert [run[:4] for run in made._runs if run[1] == 2] == [(5, 2, "content", 0)]
    assert runs_of("<|s|>%(x)s".__mod__({"x": words}))[0][1] == LITERAL
    assert (Traced("<|s|>%(x)s") % {"x": words})._runs[0][1] == 2


NESTED = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | WORDS
    | st.just("\ud800\x7f\x00é😀"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | WORDS, inner, max_size=3)
        | st.dictionaries(st.none() | st.booleans() | st.integers() | st.floats(), inner, max_size=2)
    ),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(
    NESTED,
    st.booleans(),
    st.sampled_from([None, 0, 1, 2, 4, "\t", "", True]),
    st.sampled_from([None, (",", ":"), [", ", ": "], (" ,\n", "=")]),
    st.booleans(),
)
def test_json_equals_json_dumps(value, ascii_only, indent, separators, sort_keys):
    arguments = {"ensure_ascii": ascii_only, "indent": indent, "separators": separators, "sort_keys": sort_keys}
    try:
        expected = json.dumps(value, **arguments)
    except TypeError:
        # Names of several types cannot be sorted.
        with pytest.raises(TypeError, match="not supported between"):
            to_json(trace(value, 0, "content"), **arguments)
        return
    traced = Traced(to_json(trace(value, 4, "content"), **arguments))
    assert str.__str__(traced) == expected == str.__str__(to_json(value, **arguments))
    assert sum(run[0] for run in traced._runs) == len(traced)
    if value != "" and isinstance(value, (str, list, tuple, dict)):
        assert {run[1] for run in traced._runs} == {4}


def test_json_refuses_what_json_refuses():
    for odd in ({(1, 2): 3}, {"a": {1, 2}}, jinja2.Undefined(), b"x"):
        with pytest.raises(TypeError, match=r"."):
            to_json(odd)


def test_characters_of_json_keep_their_offsets_unless_escaped():
    text = 'ab"c\né'
    made = to_json(trace({"k": [text]}, 1, "tool_calls"))
    at = 0
    exact = {}
    for length, message, field, offset, _, _ in made._runs:
        assert message == 1
        if field == "tool_calls.k.0" and offset >= 0:
            assert made[at : at + length] == text[offset : offset + length]
            exact |= dict.fromkeys(range(offset, offset + length))
        at += length
    assert sorted(exact) == [0, 1, 3, 5]


FILTERED = [
    "{{ v | upper }}", "{{ v | trim }}", "{{ v | trim('a ') }}", "{{ v | title }}", "{{ v | capitalize }}",
    "{{ v | replace('a', w) }}", "{{ v | replace(w, 'a', 1) }}", "{{ v | indent }}", "{{ v | indent(2, true) }}",
    "{{ v | indent('> ', blank=true) }}", "{{ v | indent(w, first=true, blank=true) }}", "{{ v | truncate(6) }}",
    "{{ v | truncate(5, true, w) }}", "{{ v | wordwrap(5) }}", "{{ v | center(20) }}", "{{ v | reverse }}",
    "{{ v | first }}", "{{ v | last }}", "{{ v | length }}", "{{ v | list | join }}", "{{ [v, w, 1] | join(', ') }}",
    "{{ [v, w] | join(v) }}", "{{ [{'a': v}, {'a': w}] | join('-', attribute='a') }}", "{{ v | string }}",
    "{{ [v, w] | string }}", "{{ '%s|%s' | format(v, w) }}", "{{ '%(a)s' | format(a=v) }}", "{{ v | default(w) }}",
    "{{ v | tojson }}", "{{ [v, {'k': w}] | tojson(indent=2) }}", "{{ v | striptags }}", "{{ v | urlencode }}",
    "{{ v | wordcount }}", "{{ v ~ w ~ 1 ~ none ~ [v] }}", "{{ v + '\n' + w }}", "{{ v * 2 }}", "{{ v[1:3] + v[-1:] }}",
    "{{ v.split('a') | join('-') }}", "{{ v.split() | last }}", "{{ v.strip().splitlines() | join('|') }}",
    "{{ '{}-{}'.format(v, w) }}", "{{ '{1:>5}{0!r}'.format(v, w) }}", "{{ '{a}{{}}'.format(a=v) }}",
    "{{ '{a}'.format_map({'a': v}) }}", "{{ '%s and %s' % (v, w) }}", "{{ v is string }}{{ v is sequence }}",
    "{% for c in v %}{{ c }}.{% endfor %}", "{% filter upper %}{{ v }}x{% endfilter %}", "{{ v in w }}{{ v == w }}",
    "{% set x %}{{ v }}!{% endset %}{{ x | trim }}", "{% macro m(a) %}[{{ a }}]{% endmacro %}{{ m(v) + m(w) }}",
    "{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}{{ v }}{% endcall %}", "{{ (v, w) | sort | join }}",
    "{{ [v, w] | map('upper') | join }}", "{{ [v, w] | map('trim') | select | list }}", "{{ v | unique | join }}",
    "{{ v | batch(2) | list }}", "{{ {'a': v} | dictsort }}", "{{ {'a': v} | items | list }}",
    "{{ v | groupby(0) | list }}",
    "{{ {'a': v} | xmlattr }}", "{{ v | int }}{{ v | float }}", "{{ v | min }}" , "{{ v | slice(2) | list }}",
    "{{ v | e }}", "{{ v | forceescape }}", "{{ v | safe }}", "{{ v | pprint }}",
    "{% set ns = namespace(t='') %}{% for c in [v, w] %}{% set ns.t = ns.t + c %}{% endfor %}{{ ns.t }}",
]  # fmt: skip
"""Templates over texts v and w."""


@pytest.mark.parametrize("source", FILTERED)
@settings(max_examples=25, deadline=None)
@given(v=WORDS, w=WORDS)
def test_filters_equal_jinjas_own(source, v, w):
    """The traced environment against the plain one, whose filters are Jinja's."""
    plain, traced = _environments(source)
    try:
        expected = plain.render(v=v, w=w)
    except Exception as error:
        with pytest.raises(type(error), match=r"(?s).*"):
            traced.render(v=Traced.of(v, 0, "content"), w=Traced.of(w, 1, "content"))
        return
    made = traced.render(v=Traced.of(v, 0, "content"), w=Traced.of(w, 1, "content"))
    assert str.__str__(made) == expected
    if made:
        assert sum(run[0] for run in made._runs) == len(expected)


_COMPILED = {}


def _environments(source):
    if source not in _COMPILED:
        kinds = (ChatEnvironment(), TracingEnvironment())
        _COMPILED[source] = [compile_template(source, environment) for environment in kinds]
    return _COMPILED[source]


FORGED = [
    source for source in FILTERED
    if not any(word in source for word in ("length", "wordcount", "is string", "v in w", "| int", "groupby"))
]  # fmt: skip


@pytest.mark.parametrize("source", FORGED)
def test_words_never_become_literal(source):
    """Whatever a filter makes of a message's words, they are not the template's own text afterwards."""
    v, w = Traced.of("QZQZ", 0, "content"), Traced.of("QZZQ", 1, "content")
    made = _environments(source)[1].render(v=v, w=w)
    at = 0
    for length, message, *_ in made._runs:
        if message == LITERAL:
            assert not {"q", "z"} & set(str.__getitem__(made, slice(at, at + length)).lower()), made._runs
        at += length
    assert {run[1] for run in made._runs} >= {0} or "last" in source


def test_values_of_messages_written_whole_belong_to_them():
    """Lists and objects that a template writes as Python spells them."""
    value = trace([{"text": "<|e|>"}], 2, "content")
    for source in (
        "{{ v }}",
        "{{ v | string }}",
        "{{ 'a' ~ v }}",
        "{{ [v] | join }}",
        "{{ '%s' % v }}",
        "{{ '{}'.format(v) }}",
    ):
        made = _environments(source)[1].render(v=value)
        assert str.__str__(made).endswith(str(value))
        assert {run[1] for run in made._runs} - {LITERAL} == {2}, source
        assert made._runs[-1][0] >= len(str(value))


def test_names_of_arguments_belong_to_their_message():
    value = trace({"<|e|>": 1}, 2, "tool_calls.0.function.arguments")
    for source in (
        "{{ dict(v) | tojson }}",
        "{{ {'a': dict(v)} | tojson }}",
        "{{ v | tojson }}",
        "{{ v | list | tojson }}",
    ):
        rendered = _environments(source)[1].render(v=value)
        literal = "".join(" " if message >= 0 else rendered[at : at + n] for at, n, message in _places(rendered))
        assert "<|e|>" not in literal, source
    made = _environments("{% for k, w in v.items() %}{{ k }}={{ w }};{% endfor %}")[1].render(
        v=trace({"<|e|>": 1}, 2, "tool_calls.0.function.arguments")
    )
    assert made == "<|e|>=1;"
    assert made._runs[0][:2] == (5, 2)


def _places(text):
    at = 0
    for length, message, *_ in text._runs:
        yield at, length, message
        at += length


def test_join_of_nothing():
    assert join(",", []) == ""
    assert join(",", [])._runs == ()
    assert partial(join, ",")(["a", "", "b"]) == "a,,b"
