"""What an encoder gives for a conversation depends on the conversation alone, whatever it encoded
before.
"""

import numpy as np
import pytest
from chat_makers import (
    ALL_CONTROLS,
    CONVERSATIONS,
    TOKENS,
    TOOLS,
    ask,
    first,
    kinds,
    make_tokenizer,
    markers_of,
    with_tools,
)

from makers.tokenizers import CHATML
from penstock.chat.encoder import ChatEncoder
from penstock.chat.records.layouts import read_conversation
from penstock.chat.render.template import Template
from penstock.core.errors import ConversationError

SHIFTED = (
    "{% set start = 1 if messages[0].role == 'system' else 0 %}{% if start %}{{ "
    "'<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}{% for m in "
    "messages[start:] %}{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - "
    "1].role != 'tool' %}{{ '<|im_start|>user\n' }}{% endif %}{{ '<out>' + m.content }}{% if "
    "loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif "
    "%}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif "
    "%}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template that looks up its neighbours by the wrong number once there is a system message (as
Bielik 11B v3 does): then the results of tools end in the prompt, and not in the text.
"""

BY_CONTENT = CHATML.replace(
    "+ m.content", "+ (m.content if loop.last or '!' not in m.content else 'So.')"
)
"""A template that rewrites earlier messages for what they say."""

PROMPT_BY_CONTENT = CHATML.replace(
    "assistant\n' }}{% endif",
    "assistant\n' + ('<end>' if '!' in messages[-1].content else '') }}{% endif",
)
"""A template that prompts otherwise for what the last message says."""

TOOL = {"role": "tool", "content": "tsun"}
FLOW = [*ask("u?", "acall"), TOOL, {"role": "assistant", "content": "afine"}]
OWN = {
    "shifted": (SHIFTED, [first("system", "Be snice", FLOW), FLOW]),
    "by content": (
        BY_CONTENT,
        [ask("u", "a", "v", "b")] * 20 + [ask("u", "a!", "v", "b"), ask("u!", "a")],
    ),
    "prompt by content": (PROMPT_BY_CONTENT, [ask("u", "a"), ask("u!", "a")]),
}


def seen(encoder, conversation):
    """All that comes of a conversation, or why nothing does."""
    try:
        chats = encoder.encode(conversation)
    except ConversationError as error:
        return str(error)
    return [
        (
            chat.text,
            chat.tokens.tolist(),
            chat.loss_weights.tolist(),
            chat.messages.tolist(),
            chat.certificate,
        )
        for chat in chats
    ]


def fresh(source, tokenizer):
    return ChatEncoder(tokenizer, Template(source=source, variables=TOKENS))


def check_orders(encoders, conversations, expected=None):
    """Each encoder encodes all conversations, in an order of its own: none of them makes a
    difference.
    """
    places = list(range(len(conversations)))
    orders = [places, places[::-1], np.random.default_rng(5).permutation(places).tolist()]
    for encoder, order in zip(encoders, orders, strict=False):
        found = {place: seen(encoder, conversations[place]) for place in order}
        expected = expected or found
        for place in places:
            assert found[place] == expected[place], (order, place)


@pytest.mark.parametrize("name", OWN)
def test_the_order_of_conversations_does_not_matter(name, folder):
    source, chats = OWN[name]
    conversations = [read_conversation({"messages": messages}) for messages in chats]
    tokenizer = make_tokenizer(folder, [*ALL_CONTROLS, "<out>", "<end>"])
    alone = {
        place: seen(fresh(source, tokenizer), chat) for place, chat in enumerate(conversations)
    }
    check_orders([fresh(source, tokenizer) for _ in range(3)], conversations, alone)


def test_a_prompt_that_also_ends_the_message_before_supplies_its_own_end(folder):
    tokenizer = make_tokenizer(folder, [*ALL_CONTROLS, "<out>"])
    encoder = ChatEncoder(tokenizer, Template(source=SHIFTED, variables=TOKENS))
    for messages in (FLOW, first("system", "Be snice", FLOW)):
        [chat] = encoder.encode(read_conversation({"messages": messages}))
        assert [text for _, text in chat.trained_text] == ["acall<|im_end|>", "afine<|im_end|>"]
        assert chat.certificate.ok
        assert ("context_differs" in kinds(chat)) == (messages is not FLOW)


UNSUPPLIED = {
    "another header": CHATML.replace("<|im_start|>assistant\n' }}{% endif", "' }}<|end|>{% endif"),
    "refused heads": (
        "{% if messages[-1].content == 'u' %}{{ raise_exception('no') }}{% endif %}"
        + CHATML.replace("'<|im_start|>' + m.role", "'<|end|>' + m.role")
    ),
    "no header in the prompt after tools": (
        CHATML.replace(
            "'<|im_start|>' + m.role",
            "'<|im_start|>' + ('assistant' if m.role == 'assistant' else m.role)",
        ).replace(
            "add_generation_prompt %}", "add_generation_prompt and messages[-1].role != 'tool' %}"
        )
    ),
}


@pytest.mark.parametrize("name", UNSUPPLIED)
def test_a_header_that_the_prompt_does_not_supply_is_an_error(name, folder):
    encoder = ChatEncoder(
        make_tokenizer(folder, ALL_CONTROLS), Template(source=UNSUPPLIED[name], variables=TOKENS)
    )
    [chat] = encoder.encode(
        read_conversation({"messages": [*ask("u", "a"), TOOL, ask("", "b")[1]]})
    )
    [*_, problem] = [one for one in chat.certificate.problems if one.kind == "unsupplied_header"]
    assert problem.is_error
    assert "does not supply, so the model would learn to write it" in problem.text
    assert r"assistant\n', which its generation prompt" in problem.text


@pytest.mark.real_data
@pytest.mark.parametrize("part", range(4))
def test_the_order_does_not_matter_to_any_template(real_data, folder, part):
    """With tools and without, with system messages and without: what is before a reply is of the
    same kind in many.
    """
    paths = sorted(real_data.joinpath("chat_templates").glob("*/*.jinja"))
    assert len(paths) == 58
    records = [
        {"messages": messages, **({"tools": tools} if tools else {})}
        for name, messages in CONVERSATIONS.items()
        for tools in ([TOOLS] if with_tools(name) else [None, TOOLS])
    ]
    records += [
        {"messages": first("system", "Be snice", CONVERSATIONS[name])}
        for name in ("tools", "thinking")
    ]
    conversations = [read_conversation(record) for record in records]
    for path in paths[part::4]:
        source = path.read_text(encoding="utf-8")
        tokenizer = make_tokenizer(folder, markers_of(source))
        check_orders([fresh(source, tokenizer) for _ in range(2)], conversations)
