"""Turns of long conversations, found in excerpts, are those that are found in the whole, at a cost
that is linear.
"""

import sys
from collections import Counter
from itertools import pairwise

import pytest
from chat_makers import TOKENS, TOOLS, call, read_chat, result

from makers.tokenizers import CHATML
from penstock.chat.encoder import ChatEncoder
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


OF_TEMPLATES = ("template_output.py", "traced_text.py", "environment.py", "template.py")
"""Modules that run as often as a template asks for something. Some look at all messages for each
of them (Gemma 4, gpt-oss), so one render of theirs already costs the square.
"""


def counted_steps(encoder, messages):
    """(module, line, function) → how often it was entered, or went on as a generator, while a
    conversation was encoded; and the characters of all renders.
    """
    conversation = read_chat(messages)
    steps = Counter()

    def count(frame, event, argument):
        code = frame.f_code
        folder, _, module = code.co_filename.rpartition("/penstock/")
        if event == "call" and folder and not module.endswith(OF_TEMPLATES):
            steps[module, code.co_firstlineno, code.co_name] += 1
        elif event == "return" and code is Template._run.__code__:
            steps["characters"] += len(argument or "")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        encoder.encode(conversation)
    finally:
        sys.setprofile(before)
    return steps


@pytest.mark.real_data
@pytest.mark.parametrize("kind", ["calls", "talk"])
def test_renders_of_real_templates_are_linear(monkeypatch, short, real_data, kind):
    """Renders, their messages and their characters for twice the replies, of all templates."""
    counted = Counter()
    run = Template._run

    def count(self, compiled, messages, *more):
        text = run(self, compiled, messages, *more)
        counted.update(renders=1, messages=len(messages), characters=len(text))
        return text

    monkeypatch.setattr(Template, "_run", count)
    found, steeper = 0, []
    for path in sorted(real_data.joinpath("chat_templates").glob("*/*.jinja")):
        costs = []
        try:
            for replies in (12, 24):
                whole, prompted = rendered(path.read_text(encoding="utf-8"), KINDS[kind](replies))
                counted.clear()
                find_turns(whole, prompted)
                costs.append(dict(counted))
        except RecordError:
            continue
        found += 1
        few, many = costs
        steeper += [(path.name, few, many) for name in few if many[name] > 2.3 * few[name]]
    assert found >= {"calls": 33, "talk": 56}[kind], found
    # Where templates write nothing alike in an excerpt, turns are found in the whole.
    assert len({name for name, *_ in steeper}) <= 0.1 * found, steeper


@pytest.mark.real_data
@pytest.mark.parametrize("kind", ["calls", "talk"])
@pytest.mark.parametrize(
    "name",
    [
        "Qwen-Qwen2.5-7B-Instruct",
        "Qwen-Qwen3-0.6B",
        "openai-gpt-oss-120b",
        "Mistral-Small-3.2-24B-Instruct-2506",
        "meta-llama-Llama-3.1-8B-Instruct",
        "HuggingFaceTB-SmolLM3-3B",
    ],
)
def test_all_steps_are_linear(short, real_data, tokenizer, name, kind):
    """For twice the replies, nothing that encoding does happens more than about twice as often:
    turns, masks, checks.
    """
    source = real_data / "chat_templates/llama.cpp" / f"{name}.jinja"
    template = Template(source=source.read_text(encoding="utf-8"), variables=TOKENS)
    encoder = ChatEncoder(tokenizer, template)
    encoder.encode(read_chat(KINDS[kind](5)))  # the first time compiles and imports
    few, many = (counted_steps(encoder, KINDS[kind](count)) for count in (16, 32))
    assert few["characters"]
    steeper = {
        step: (few[step], count)
        for step, count in many.items()
        if count > 100 and count > 2.3 * few[step]
    }
    assert not steeper, steeper
