"""`tojson` does what `json.dumps` does and filters what Jinja's own do, and words stay their
message's throughout.
"""

import json

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.chat.render.environment import (
    ChatEnvironment,
    TracingEnvironment,
    compile_template,
    to_json,
)
from penstock.chat.render.traced_text import LITERAL, Traced, runs_of, trace

WORDS = st.text(alphabet=" \n\t\x0b\x85\u2028\x1fabAB,%sß水İ<|\"'\\", max_size=12)
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
        | st.dictionaries(
            st.none() | st.booleans() | st.integers() | st.floats(), inner, max_size=2
        )
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
    arguments = {
        "ensure_ascii": ascii_only,
        "indent": indent,
        "separators": separators,
        "sort_keys": sort_keys,
    }
    try:
        expected = json.dumps(value, **arguments)
    except TypeError:
        # Names of several types cannot be sorted.
        with pytest.raises(TypeError, match="not supported between"):
            to_json(trace(value, 0, "content"), **arguments)
        return
    traced = Traced(to_json(trace(value, 4, "content"), **arguments))
    assert str.__str__(traced) == expected == str.__str__(to_json(value, **arguments))
    assert sum(run[0] for run in runs_of(traced)) == len(traced)
    if value != "" and isinstance(value, (str, list, tuple, dict)):
        assert {run[1] for run in runs_of(traced)} == {4}


def test_json_refuses_what_json_refuses():
    for odd in ({(1, 2): 3}, {"a": {1, 2}}, jinja2.Undefined(), b"x"):
        with pytest.raises(TypeError, match=r"."):
            to_json(odd)


def test_characters_of_json_keep_their_offsets_unless_escaped():
    text = 'ab"c\né'
    made = to_json(trace({"k": [text]}, 1, "tool_calls"))
    at = 0
    exact = {}
    for length, message, field, offset, _, _ in runs_of(made):
        assert message == 1
        if field == "tool_calls.k.0" and offset >= 0:
            assert made[at : at + length] == text[offset : offset + length]
            exact |= dict.fromkeys(range(offset, offset + length))
        at += length
    assert sorted(exact) == [0, 1, 3, 5]


FILTERED = [
    "{{ v | upper }}",
    "{{ v | trim }}",
    "{{ v | trim('a ') }}",
    "{{ v | title }}",
    "{{ v | capitalize }}",
    "{{ v | replace('a', w) }}",
    "{{ v | replace(w, 'a', 1) }}",
    "{{ v | indent }}",
    "{{ v | indent(2, true) }}",
    "{{ v | indent('> ', blank=true) }}",
    "{{ v | indent(w, first=true, blank=true) }}",
    "{{ v | truncate(6) }}",
    "{{ v | truncate(5, true, w) }}",
    "{{ v | wordwrap(5) }}",
    "{{ v | center(20) }}",
    "{{ v | reverse }}",
    "{{ v | first }}",
    "{{ v | last }}",
    "{{ v | length }}",
    "{{ v | list | join }}",
    "{{ [v, w, 1] | join(', ') }}",
    "{{ [v, w] | join(v) }}",
    "{{ [{'a': v}, {'a': w}] | join('-', attribute='a') }}",
    "{{ v | string }}",
    "{{ [v, w] | string }}",
    "{{ '%s|%s' | format(v, w) }}",
    "{{ '%(a)s' | format(a=v) }}",
    "{{ v | default(w) }}",
    "{{ v | tojson }}",
    "{{ [v, {'k': w}] | tojson(indent=2) }}",
    "{{ v | striptags }}",
    "{{ v | urlencode }}",
    "{{ v | wordcount }}",
    "{{ v ~ w ~ 1 ~ none ~ [v] }}",
    "{{ v + '\n' + w }}",
    "{{ v * 2 }}",
    "{{ v[1:3] + v[-1:] }}",
    "{{ v.split('a') | join('-') }}",
    "{{ v.split() | last }}",
    "{{ v.strip().splitlines() | join('|') }}",
    "{{ '{}-{}'.format(v, w) }}",
    "{{ '{1:>5}{0!r}'.format(v, w) }}",
    "{{ '{a}{{}}'.format(a=v) }}",
    "{{ '{a}'.format_map({'a': v}) }}",
    "{{ '%s and %s' % (v, w) }}",
    "{{ v is string }}{{ v is sequence }}",
    "{% for c in v %}{{ c }}.{% endfor %}",
    "{% filter upper %}{{ v }}x{% endfilter %}",
    "{{ v in w }}{{ v == w }}",
    "{% set x %}{{ v }}!{% endset %}{{ x | trim }}",
    "{% macro m(a) %}[{{ a }}]{% endmacro %}{{ m(v) + m(w) }}",
    "{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}{{ v }}{% endcall %}",
    "{{ (v, w) | sort | join }}",
    "{{ [v, w] | map('upper') | join }}",
    "{{ [v, w] | map('trim') | select | list }}",
    "{{ v | unique | join }}",
    "{{ v | batch(2) | list }}",
    "{{ {'a': v} | dictsort }}",
    "{{ {'a': v} | items | list }}",
    "{{ v | groupby(0) | list }}",
    "{{ {'a': v} | xmlattr }}",
    "{{ v | int }}{{ v | float }}",
    "{{ v | min }}",
    "{{ v | slice(2) | list }}",
    "{{ v | e }}",
    "{{ v | forceescape }}",
    "{{ v | safe }}",
    "{{ v | pprint }}",
    (
        "{% set ns = namespace(t='') %}{% for c in [v, w] %}{% set ns.t = ns.t + c %}{% endfor "
        "%}{{ ns.t }}"
    ),
]
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
        assert sum(run[0] for run in runs_of(made)) == len(expected)


_COMPILED = {}


def _environments(source):
    if source not in _COMPILED:
        kinds = (ChatEnvironment(), TracingEnvironment())
        _COMPILED[source] = [compile_template(source, environment) for environment in kinds]
    return _COMPILED[source]


FORGED = [
    source
    for source in FILTERED
    if not any(
        word in source
        for word in ("length", "wordcount", "is string", "v in w", "| int", "groupby")
    )
]


@pytest.mark.parametrize("source", FORGED)
def test_words_never_become_literal(source):
    """Whatever a filter makes of a message's words, they are not the template's own text
    afterwards.
    """
    v, w = Traced.of("QZQZ", 0, "content"), Traced.of("QZZQ", 1, "content")
    made = _environments(source)[1].render(v=v, w=w)
    at = 0
    for length, message, *_ in runs_of(made):
        if message == LITERAL:
            assert not {"q", "z"} & set(str.__getitem__(made, slice(at, at + length)).lower()), (
                runs_of(made)
            )
        at += length
    assert {run[1] for run in runs_of(made)} >= {0} or "last" in source


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
        assert {run[1] for run in runs_of(made)} - {LITERAL} == {2}, source
        assert runs_of(made)[-1][0] >= len(str(value))


def test_names_of_arguments_belong_to_their_message():
    value = trace({"<|e|>": 1}, 2, "tool_calls.0.function.arguments")
    for source in (
        "{{ dict(v) | tojson }}",
        "{{ {'a': dict(v)} | tojson }}",
        "{{ v | tojson }}",
        "{{ v | list | tojson }}",
    ):
        rendered = _environments(source)[1].render(v=value)
        literal = "".join(
            " " if message >= 0 else rendered[at : at + n] for at, n, message in _places(rendered)
        )
        assert "<|e|>" not in literal, source
    made = _environments("{% for k, w in v.items() %}{{ k }}={{ w }};{% endfor %}")[1].render(
        v=trace({"<|e|>": 1}, 2, "tool_calls.0.function.arguments")
    )
    assert made == "<|e|>=1;"
    assert runs_of(made)[0][:2] == (5, 2)


def _places(text):
    at = 0
    for length, message, *_ in runs_of(text):
        yield at, length, message
        at += length


def test_words_go_before_roles_where_one_name_must_do():
    """A role counts as the template's text, so words must never pass for one."""
    role, words = Traced.of("user", 1, "role"), Traced.of("<|e|>", 1, "content")
    for source in (
        "{{ '%5s|%s' % (r, w) }}",
        "{{ [r, w] }}",
        "{{ {'r': r, 'w': w} }}",
        "{{ '{:>5}{}'.format(r, w) }}",
    ):
        made = _environments(source)[1].render(r=role, w=words)
        assert {run[1:3] for run in runs_of(made)} == {(1, "content")}, source


def test_words_that_are_a_format_stay_words():
    made = _environments("{{ v.format('x') }}{{ v.format_map({}) if 0 else '' }}")[1].render(
        v=Traced.of("<|e|>{}", 1, "content")
    )
    assert made == "<|e|>x"
    assert runs_of(made)[0][:2] == (6, 1)
