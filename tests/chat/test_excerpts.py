"""Turns of long conversations, found in excerpts, are those that are found in the whole, at a cost
that is linear.
"""

from itertools import pairwise

import pytest
from chat_makers import TOKENS, TOOLS, call, result

from makers.tokenizers import CHATML
from penstock.chat.render import excerpts
from penstock.chat.render.excerpts import find_turns
from penstock.chat.render.template import Template
from penstock.chat.render.turns import RenderedConversation, cut_turns
from penstock.core.errors import RecordError

END = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TURN = "{{ '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}"
TEMPLATES = {
    "plain": CHATML,
    "counts": "{% for m in messages %}{{ loop.index }}. " + TURN + "{% endfor %}" + END,
    "counts backwards": "{% for m in messages %}{{ loop.revindex }}. "
    + TURN
    + "{% endfor %}"
    + END,
    "last reply": "{% for m in messages %}{{ '<last>' if loop.last }}"
    + TURN
    + "{% endfor %}"
    + END,
    "after the last question": (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% "
        "set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if "
        "m.role == 'assistant' and loop.index0 > ns.last %}{{ "
        "'<|im_start|>assistant\n<think>' + (m.reasoning_content or '') + '</think>' + "
        "(m.content or '') }}{{ '<|im_end|>\n' }}{% else %}"
        + TURN
        + "{% endif %}{% endfor %}"
        + END
    ),
    "an answer later": (
        "{% for m in messages %}{% set ns = namespace(answered=false) %}{% for n in "
        "messages[loop.index:] %}{% if n.role == 'assistant' and not n.tool_calls %}{% set "
        "ns.answered = true %}{% endif %}{% endfor %}{% if m.tool_calls and not ns.answered %}"
        "{{ '<|im_start|>assistant\nthinks<|im_end|>\n' }}{% endif %}" + TURN + "{% endfor %}" + END
    ),
    "in turn": (
        "{% set ns = namespace(said=0, last=0) %}{% for m in messages %}{% if m.role in ['user', "
        "'assistant'] and not m.tool_calls %}{% if (m.role == 'user') != (ns.said % 2 == 0) %}{{ "
        "raise_exception('not in turn') }}{% endif %}{% set ns.said = ns.said + 1 %}{% endif %}"
        "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for "
        "m in messages %}{{ '[TOOLS]' if loop.index0 == ns.last }}" + TURN + "{% endfor %}" + END
    ),
    "every third": "{% for m in messages %}{{ '***' if loop.index % 3 == 0 }}"
    + TURN
    + "{% endfor %}"
    + END,
    "length": "{{ messages | length }}\n{% for m in messages %}{{ messages | length }}"
    + TURN
    + "{% endfor %}"
    + END,
    "first words": "{% for m in messages %}{{ messages[-1].content[:1] }}"
    + TURN
    + "{% endfor %}"
    + END,
}


def calls(count):
    """One question, then calls and their results."""
    messages = [{"role": "system", "content": "sys"}, {"role": "user", "content": "go"}]
    for number in range(count):
        messages += [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [call(place=number, city=f"a{number}")],
            },
            result(f"t{number} is 3", number),
        ]
    return [*messages, {"role": "assistant", "content": "adone"}]


def talk(count):
    """Questions and answers with thinking."""
    messages = []
    for number in range(count):
        reply = {"role": "assistant", "content": f"a{number}.", "reasoning_content": f"hm {number}"}
        messages += [{"role": "user", "content": f"u{number}?"}, reply]
    return messages


def both(count):
    """Questions, each with calls."""
    messages = []
    for number in range(count // 3):
        messages.append({"role": "user", "content": f"u{number}?"})
        messages += calls(3)[2:-1]
        messages.append({"role": "assistant", "content": f"a{number}", "reasoning_content": "so"})
    return messages


KINDS = {"calls": calls, "talk": talk, "both": both}


@pytest.fixture
def short(monkeypatch):
    """Excerpts from four replies on."""
    for name, value in (("LONG", 4), ("_REPLIES", 3), ("_BEFORE", 2)):
        monkeypatch.setattr(excerpts, name, value)


def rendered(source, messages):
    template = Template(source=source, variables=TOKENS)
    tools = TOOLS if any(message.get("tool_calls") for message in messages) else None
    whole = RenderedConversation(
        template, template.render(messages, tools=tools), messages, tools, {}
    )
    return whole, [
        number for number, message in enumerate(messages) if message["role"] == "assistant"
    ]


def are_same(found, expected):
    assert list(found) == list(expected)
    for number, turn in expected.items():
        assert excerpts._is_same(found[number], turn), (found[number], turn)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_in_excerpts_are_those_of_the_whole(short, name, kind):
    whole, replies = rendered(TEMPLATES[name], KINDS[kind](14))
    are_same(find_turns(whole, replies), cut_turns(whole, replies))
    are_same(find_turns(whole, replies[3:-4]), cut_turns(whole, replies[3:-4]))


@pytest.mark.real_data
@pytest.mark.parametrize("kind", KINDS)
def test_turns_in_excerpts_of_real_templates(short, real_data, kind):
    found = used = 0
    for path in sorted(real_data.joinpath("chat_templates").glob("*/*.jinja")):
        try:
            whole, replies = rendered(path.read_text(encoding="utf-8"), KINDS[kind](14))
        except RecordError:
            continue
        found += 1
        used += excerpts._in_excerpts(whole, replies) is not None
        are_same(find_turns(whole, replies), cut_turns(whole, replies))
    assert found >= {"calls": 33, "talk": 56, "both": 31}[kind], found
    assert used >= 0.9 * found, (used, found)


def long_both(count):
    """Questions with calls, of which the last has many."""
    return [*both(count // 2), {"role": "user", "content": "last?"}, *calls(count // 2)[2:]]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("plain", calls),
        ("counts", calls),
        ("after the last question", calls),
        ("an answer later", calls),
        ("in turn", both),
        ("in turn", long_both),
    ],
)
def test_the_cost_is_linear(monkeypatch, name, kind):
    """Messages that are rendered for twice the calls."""
    counted = []
    run = Template._run
    monkeypatch.setattr(
        Template, "_run", lambda self, t, m, *more: counted.append(len(m)) or run(self, t, m, *more)
    )
    costs = []
    for count in (60, 120, 240):
        whole, replies = rendered(TEMPLATES[name], kind(count))
        counted.clear()
        find_turns(whole, replies)
        costs.append(sum(counted))
    assert all(later < 2.3 * earlier for earlier, later in pairwise(costs)), costs
