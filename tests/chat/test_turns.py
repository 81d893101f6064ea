"""Where turns begin and end, and what the prompt supplies of them."""

import pytest
from chat_makers import ask, call

from makers.tokenizers import CHATML
from penstock.chat.render.template import Template
from penstock.chat.render.turns import RenderedConversation, cut_turns

HEADER_ONLY = "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '</>' }}{% endfor %}"
"""Knows no generation prompt."""


def turns(source, messages, tools=None):
    template = Template(source=source)
    rendered = template.render(messages, tools=tools)
    prompted = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    found = cut_turns(RenderedConversation(template, rendered, messages, tools, {}), prompted)
    return rendered.text, found


def produced(text, turn):
    return [text[begin:end] for begin, end in turn.produced]


def test_a_turn_is_its_opening_what_is_produced_and_whitespace():
    text, found = turns(CHATML, ask("u", "a b"))
    turn = found[1]
    assert [text[begin:end] for begin, end in turn.pieces] == [
        "<|im_start|>assistant\na b<|im_end|>\n"
    ]
    assert turn.opening == turn.supplied == "<|im_start|>assistant\n"
    assert produced(text, turn) == ["a b<|im_end|>"]
    assert text[: turn.words_end].endswith("a b")
    assert text[: turn.end].endswith("<|im_end|>")
    assert produced(text, found[0]) == ["u<|im_end|>"]


def test_templates_without_a_prompt_are_asked_what_stands_before_words():
    text, found = turns(HEADER_ONLY, ask("u", "a"))
    assert found[1].opening == found[1].supplied == "<assistant>"
    assert produced(text, found[1]) == ["a</>"]
    # Also when contents must be lists.
    parts = HEADER_ONLY.replace("m.content", "m.content[0].text")
    messages = ask([{"type": "text", "text": "u"}], [{"type": "text", "text": "a"}])
    text, found = turns(parts, messages)
    assert produced(text, found[1]) == ["a</>"]


def test_templates_that_always_prompt():
    """Command R, Phi-4 mini: the text ends as if a reply were asked for."""
    text, found = turns(HEADER_ONLY + "<assistant>", ask("u", "a"))
    assert text.endswith("a</><assistant>")
    assert produced(text, found[1]) == ["a</>"]
    # What it prompts goes on otherwise than the turn: the shared markers are supplied.
    text, found = turns(HEADER_ONLY + "<assistant><think></think>", ask("u", "a"))
    assert (found[1].opening, found[1].supplied) == ("<assistant><think></think>", "<assistant>")
    # What all texts end with is no prompt.
    text, found = turns(HEADER_ONLY + "<eos>", ask("u", "a"))
    assert found[1].opening == "<assistant>"
    assert produced(text, found[1]) == ["a</>"]


def test_no_header_at_all():
    source = (
        "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' "
        "else ' ' + m.content + '</s>' }}{% endfor %}"
    )
    text, found = turns(source, ask("u", "a"))
    assert (found[1].opening, produced(text, found[1])) == ("", [" a</s>"])


@pytest.mark.parametrize(
    ("prompt", "supplied"),
    [
        ("<|im_start|>assistant\n", "<|im_start|>assistant\n"),
        ("<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n"),
        ("<|im_start|>assistant", "<|im_start|>assistant"),
        ("<|im_start|>assistant\n\n", "<|im_start|>assistant\n"),
        ("<|im_start|>assistant<|final|>", "<|im_start|>"),
        ("<|im_start|>assis", "<|im_start|>assis"),
        ("<|other|>", ""),
    ],
)
def test_what_is_supplied_of_an_opening(prompt, supplied):
    """Whole markers and words that stand there; never half of one."""
    text, found = turns(
        CHATML.replace("<|im_start|>assistant\n' }}{% endif", prompt + "' }}{% endif"),
        ask("u", "a"),
    )
    assert found[1].supplied == supplied
    assert "".join(produced(text, found[1])) == "<|im_start|>assistant\na<|im_end|>".removeprefix(
        supplied
    )


def test_a_turn_after_tool_results_may_open_otherwise():
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ '<out>' + m.content + '</out>' "
        "}}{% elif m.role == 'user' %}{{ '<user>' + m.content }}{% else %}{% if "
        "loop.previtem.role != 'tool' %}{{ '<assistant>' }}{% endif %}{{ m.content + '</s>' "
        "}}{% endif %}{% endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' "
        "%}{{ '<assistant>' }}{% endif %}"
    )
    messages = [
        *ask("u", "call"),
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "done"},
    ]
    messages[1]["tool_calls"] = [call()]
    text, found = turns(source, messages)
    assert [found[1].opening, found[3].opening] == ["<assistant>", ""]
    assert produced(text, found[3]) == ["done</s>"]


def test_turns_in_several_pieces():
    """A template that writes the results of tools inside the turn that called."""
    source = (
        "{% for m in messages %}{% if m.role != 'tool' %}{{ '<' + m.role + '>' + m.content "
        "}}{% for r in messages if r.role == 'tool' and m.tool_calls %}{{ '{' + r.content + "
        "'}' }}{% endfor %}{{ ';' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ "
        "'<assistant>' }}{% endif %}"
    )
    messages = [*ask("u", "call"), {"role": "tool", "content": "t"}]
    messages[1]["tool_calls"] = [call()]
    text, found = turns(source, messages)
    assert text == "<user>u;<assistant>call{t};"
    assert produced(text, found[1]) == ["call", ";"]
    assert [text[begin:end] for begin, end in found[2].pieces] == ["{t}"]


def test_an_empty_reply_produces_its_terminator():
    text, found = turns(CHATML, ask("u", ""))
    assert produced(text, found[1]) == ["<|im_end|>"]
    text, found = turns(
        "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}", ask("u", "")
    )
    assert produced(text, found[1]) == []
    assert text[: found[1].end] == "user:u\nassistant:"
