"""Calls and results that are trained hold every name, key and value, in every template, however
records write them.
"""

import json
from collections import Counter
from typing import Any

import pytest
from chat_makers import TOKENS, make_tokenizer, markers_of
from hypothesis import given, settings
from hypothesis import strategies as st
from parsed_calls import is_same, parsed_calls

from penstock.chat.encoder import ChatEncoder
from penstock.chat.masks.mask_settings import MaskSettings
from penstock.chat.records.layouts import read_conversation
from penstock.chat.render.structure import find_lost
from penstock.chat.render.template import Template
from penstock.core.errors import ConversationError

VALUES: dict[str, dict[str, Any]] = {
    "text": {"city": "Oslo", "unit": "C"},
    "numbers": {
        "n": 3,
        "x": 0.5,
        "big": 12345678901234567890,
        "minus": -7,
        "small": 1e-07,
        "zero": 0,
    },
    "words": {"yes": True, "no": False, "nothing": None, "last": "z"},
    "word last": {"city": "Oslo", "hot": True},
    "null alone": {"zone": None},
    "nested": {
        "where": {"city": "Oslo", "at": [1, 2.5, "three", True, None]},
        "deep": {"a": {"b": {"c": [{}, []]}}},
    },
    "unicode": {"stadt": "Zürich 東京 😀", "größe": "e\u0301"},
    "quotes": {"said": 'He said "no" & left\\', "code": "if a < b:\n\treturn '{x}'\n"},
    "looks like json": {
        "one": "true",
        "two": "3",
        "three": '{"a": 1}',
        "four": "null",
        "five": "None",
    },
    "names": {
        "name": "Ann",
        "type": "t",
        "role": "user",
        "arguments": "x",
        "thinking": "hm",
        "reasoning": "so",
    },
    "dots": {"a.b": "one", "a": {"b": "two"}},
    "none": {},
}
RESULTS: dict[str, Any] = {
    "text": "rainy at 3", "object": {"temp": 37, "ok": True, "who": "Ann", "none": None},
    "list": [1, "two", {"a": None}], "number": "7", "json": '{"temp": 37, "ok": true}',
    "parts": [{"type": "text", "text": "rainy at 3"}],
}  # fmt: skip
FORMS = ("object", "text", "tight text")


def as_form(arguments, form):
    if form == "object":
        return arguments
    return json.dumps(
        arguments, ensure_ascii=False, separators=(",", ":") if form == "tight text" else None
    )


def calling(*calls, result: Any = "rainy at 3", content: Any = None):
    names = list(dict.fromkeys(name for name, _ in calls))
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "d",
                "parameters": {"type": "object", "properties": {}},
            },
        }
        for name in names
    ]
    made = [
        {"type": "function", "id": f"callno{i:03}", "function": {"name": name, "arguments": given}}
        for i, (name, given) in enumerate(calls)
    ]
    results = [
        {"role": "tool", "name": name, "tool_call_id": f"callno{i:03}", "content": result}
        for i, (name, _) in enumerate(calls)
    ]
    return {
        "tools": tools,
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": content, "tool_calls": made},
            *results,
            {"role": "assistant", "content": "done"},
        ],
    }


def encoder(source, folder):
    tokenizer = make_tokenizer(folder, markers_of(source))
    mask = MaskSettings(on_missing_terminator="allow", trained_control_text="as_text")
    return ChatEncoder(tokenizer, Template(source=source, variables=TOKENS), mask)


def judge(own, record, calls, result="rainy at 3"):
    """right, refused, or wrong: from the text alone."""
    try:
        [chat] = own.encode(read_conversation(record))
    except ConversationError:
        return "refused"
    if any(problem.is_error for problem in chat.certificate.problems):
        return "refused"
    trained = "".join(text for message, text in chat.trained_text if message == 1)
    found = parsed_calls(trained)
    names = [name for name, _ in found] == [name for name, _ in calls]
    if not names or not all(
        is_same(*pair) for pair in zip((a for _, a in found), (a for _, a in calls), strict=True)
    ):
        return f"wrong: {trained}"
    if "None" in trained and "None" not in json.dumps(calls) and "[weather(" not in trained:
        return f"None: {trained}"
    return "right" if has_result(chat.text, result) else f"wrong result: {chat.text}"


def has_result(text, result):
    if isinstance(result, list) and isinstance(result[0], dict):
        result = result[0]["text"]
    if isinstance(result, str):
        spellings = [result, json.dumps(result)[1:-1]]
        return any(spelling in text for spelling in spellings)
    spellings = [
        json.dumps(result, ensure_ascii=False),
        json.dumps(result, indent=4),
        json.dumps(result, separators=(",", ":")),
    ]
    return any(
        spelling in text or json.dumps(spelling)[1:-1] in text for spelling in spellings
    ) or is_gemma(text, result)


def is_gemma(text, result):
    """response:name{temp:37,…}."""
    return "<|tool_response>" in text and all(
        f"{key}:" in text for key in (result if isinstance(result, dict) else ())
    )


def sources(real_data):
    paths = sorted(real_data.joinpath("chat_templates").glob("*/*.jinja"))
    texts = {path.stem: path.read_text(encoding="utf-8") for path in paths}
    return {name: text for name, text in texts.items() if "tool_calls" in text}


# Small templates: those that write all of a call, and what breaks each of them.
HEAD = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in "
    "m.tool_calls or [] %}"
)
END = (
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% "
    "endif %}"
)
ITEMS = "{% for k, v in c.function.arguments.items() %}"
WRITTEN = "{{ v if v is string else v | tojson }}"
BODIES = {
    "json": (
        '<call>{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | '
        "tojson }}}</call>"
    ),
    "indented": "<call>{{ c.function | tojson(indent=2) }}</call>",
    "sorted": (
        "<call>{{ c.function.name }} {{ c.function.arguments | tojson(sort_keys=true) }}</call>"
    ),
    "ascii": (
        "<call>{{ c.function.name }} {{ c.function.arguments | tojson(ensure_ascii=true) }}</call>"
    ),
    "tags": "<call={{ c.function.name }}>"
    + ITEMS
    + "<p={{ k }}>\n"
    + WRITTEN
    + "\n</p>{% endfor %}</call>",
    "sorted tags": (
        "<call={{ c.function.name }}>{% for k, v in c.function.arguments | dictsort %}<p={{ k }}>"
    )
    + WRITTEN
    + "</p>{% endfor %}</call>",
    "joined": "{{ '<call>' ~ c.function.name ~ (c.function.arguments | tojson) ~ '</call>' }}",
}
BROKEN = {
    "python": "<call>{{ c.function.name }} {{ c.function.arguments }}</call>",
    "keys": "<call>{{ c.function.name }}" + ITEMS + "<p={{ k }}></p>{% endfor %}</call>",
    "values": "<call>{{ c.function.name }}" + ITEMS + "<p>" + WRITTEN + "</p>{% endfor %}</call>",
    "no name": "<call>{{ c.function.arguments | tojson }}</call>",
    "first call": "{% if loop.first %}<call>{{ c.function | tojson }}</call>{% endif %}",
    "a key less": "<call>{{ c.function.name }}"
    + ITEMS
    + "{% if not loop.last %}<p={{ k }}>"
    + WRITTEN
    + "</p>{% endif %}{% endfor %}</call>",
    "values in python": "<call>{{ c.function.name }}"
    + ITEMS
    + "<p={{ k }}>{{ v }}</p>{% endfor %}</call>",
    "shifted": "<call>{{ c.function.name }}{% set ns = namespace(v='') %}"
    + ITEMS
    + "<p={{ k }}>{{ ns.v }}</p>{% set ns.v = v if v is string else v | tojson %}{% endfor "
    "%}</call>",
    "cut": "<call>{{ c.function.name }}"
    + ITEMS
    + "<p={{ k }}>{{ (v if v is string else v | tojson)[:4] }}</p>{% endfor %}</call>",
}
BACKWARDS = BODIES["json"].replace("c.function", "m.tool_calls[loop.revindex0].function")

TEXTS = st.text(st.sampled_from("ab \"\\\n{}'é水&<"), max_size=6)
NAMES = st.text(st.sampled_from("abn_. é"), min_size=1, max_size=4).filter(str.strip)
NUMBERS = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.one_of(TEXTS, NUMBERS, st.booleans(), st.none())
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(NAMES, TREES, max_size=4)


def lost_in(body, *calls, **more):
    record = calling(*calls, **more)
    template = Template(source=HEAD + body + END, variables=TOKENS)
    return list(
        find_lost(
            record["messages"], template.render(record["messages"], tools=record["tools"]), ["</s>"]
        )
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(ARGUMENTS, min_size=1, max_size=3), st.sampled_from(sorted(BODIES)))
def test_nothing_is_lost_in_a_template_that_writes_all(arguments, body):
    assert not lost_in(BODIES[body], *[("weather", one) for one in arguments])


def shown(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def survives(kind, arguments):
    """Whether a broken template writes these arguments right all the same."""
    values = list(arguments.values())
    return {
        "python": not arguments,
        "keys": all(isinstance(value, str) and not value.strip() for value in values),
        "values": not arguments,
        "no name": False,
        "first call": False,
        "a key less": not arguments,
        "values in python": all(shown(value) == str(value) for value in values),
        "shifted": all(not str(shown(value)).strip() for value in values),
        # Closing brackets and quotes are not looked for: they are the same text for every value.
        "cut": all(len(shown(value).rstrip(' ]}"')) <= 4 for value in values),
    }[kind]


@settings(max_examples=300, deadline=None)
@given(ARGUMENTS, st.sampled_from(sorted(BROKEN)))
def test_what_a_template_loses_is_found(arguments, kind):
    calls = [("weather", arguments)] * (2 if kind == "first call" else 1)
    if not survives(kind, arguments):
        assert lost_in(BROKEN[kind], *calls)


def test_calls_in_another_order_are_found():
    [lost] = lost_in(BACKWARDS, ("weather", {"city": "Oslo"}), ("time", {"zone": "CET"}))
    assert lost.text == "the template writes call 1 (time) before the call that it follows"


def test_results_in_another_order_are_reported(folder):
    source = HEAD + BODIES["json"] + END
    for swapped, told in ((False, []), (True, ["result_order"])):
        record = calling(("weather", {"city": "Oslo"}), ("time", {"zone": "CET"}))
        if swapped:
            record["messages"][2:4] = record["messages"][3], record["messages"][2]
        [chat] = encoder(source, folder).encode(read_conversation(record))
        assert [
            problem.kind for problem in chat.certificate.problems if problem.kind == "result_order"
        ] == told
        with_ids = source.replace(
            "{{ m.content or '' }}", "{{ (m.tool_call_id or '') + (m.content or '') }}"
        )
        [chat] = encoder(with_ids, folder).encode(read_conversation(record))
        assert not [
            problem for problem in chat.certificate.problems if problem.kind == "result_order"
        ]


@pytest.mark.real_data
def test_no_template_trains_a_call_that_is_not_the_records(real_data, folder):
    found, wrong = Counter(), []
    for name, source in sources(real_data).items():
        own = encoder(source, folder)
        for case, values in VALUES.items():
            for form in FORMS:
                calls = [("weather", values)]
                verdict = judge(own, calling(("weather", as_form(values, form))), calls)
                found[verdict.partition(":")[0]] += 1
                wrong += [(name, case, form, verdict)] if ":" in verdict else []
    assert not wrong, wrong[:5]
    assert found["right"] >= 1065, found


@pytest.mark.real_data
def test_parallel_calls_and_contents(real_data, folder):
    found, wrong = Counter(), []
    calls = [
        ("weather", {"city": "Oslo"}),
        ("time", {"zone": "CET", "n": 2}),
        ("weather", {"city": "Rome", "hot": True}),
    ]
    for name, source in sources(real_data).items():
        own = encoder(source, folder)
        for form in FORMS:
            for content in (None, "", "Let me look."):
                for count in (1, 2, 3):
                    given_calls = [(one, as_form(values, form)) for one, values in calls[:count]]
                    verdict = judge(own, calling(*given_calls, content=content), calls[:count])
                    found[verdict.partition(":")[0]] += 1
                    wrong += [(name, form, content, count, verdict)] if ":" in verdict else []
    assert not wrong, wrong[:5]
    assert found["right"] >= 606, found


@pytest.mark.real_data
def test_results_are_written_in_full(real_data, folder):
    found, wrong = Counter(), []
    for name, source in sources(real_data).items():
        own = encoder(source, folder)
        for case, result in RESULTS.items():
            verdict = judge(
                own,
                calling(("weather", {"city": "Oslo"}), result=result),
                [("weather", {"city": "Oslo"})],
                result,
            )
            found[verdict.partition(":")[0]] += 1
            wrong += [(name, case, verdict)] if ":" in verdict else []
    assert not wrong, wrong[:5]
    assert found["right"] >= 180, found
