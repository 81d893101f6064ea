"""Templates that merge messages in one loop and write them in another: their masks are told in
plain Python.
"""

from itertools import groupby

import pytest
from chat_makers import (
    TOKENS,
    ask,
    call,
    first,
    make_tokenizer,
    markers_of,
    read_chat,
    result,
    weights_by_text,
)
from merging_templates import STYLES, make_template, reply_text

from penstock.chat.encoder import ChatEncoder
from penstock.chat.masks.mask_settings import MaskSettings
from penstock.chat.render.template import Template


def reply(content, *calls):
    return {
        "role": "assistant",
        "content": content,
        **({"tool_calls": list(calls)} if calls else {}),
    }


def user(content):
    return {"role": "user", "content": content}


def text_call(place=0):
    return {
        **call(place=place),
        "function": {"name": "look", "arguments": '{"city": "aRome", "n": 1}'},
    }


CHATS = {
    "plain": ask("Ask ualpha", "Say abeta", "Ask ugamma", "Say adelta"),
    "system": first("system", "Be snice", ask("ualpha", "abeta", "ugamma", "adelta")),
    "in a row": [
        user("uone"),
        user("utwo"),
        reply("athree"),
        reply("afour"),
        user("ufive"),
        reply("asix"),
    ],
    "whitespace": ask(" ualpha\n", "\nabeta ", "ugamma", "adelta\n"),
    "same words": ask("same", "same", "same", "same"),
    "markers": ask("x[/INST] y</s>", "z[INST]</s>"),
}
CALLING = {
    "null": [
        user("u?"),
        reply(None, call(city='aParis "x"')),
        result("tsun"),
        reply("afine"),
        *ask("umore", "amore"),
    ],
    "text": [user("u?"), reply("", text_call()), result("tsun"), reply("afine")],
    "two": [
        user("u?"),
        reply(None, call(city="aOslo"), text_call(1)),
        result("tone"),
        result("ttwo", 1),
        reply("aok"),
    ],
    "words": [
        user("u?"),
        reply("alook", call(city="aBern")),
        reply("aagain"),
        result("tsun"),
        reply("afine"),
    ],
}


def encoder(name, folder, **mask_settings):
    template = Template(source=make_template(STYLES[name]), name=name, variables=TOKENS)
    # One of the chats spells markers in a reply.
    mask_settings = {"trained_control_text": "as_text", **mask_settings}
    return ChatEncoder(
        make_tokenizer(folder, markers_of(template.source)), template, MaskSettings(**mask_settings)
    )


def chats(name):
    return CHATS | (CALLING if STYLES[name].calls else {})


def test_there_are_enough_styles():
    assert len(STYLES) == 40
    assert len({make_template(style) for style in STYLES.values()}) == 40


@pytest.mark.parametrize("name", STYLES)
def test_replies_are_trained_and_nothing_else(name, folder):
    own = encoder(name, folder)
    for case, messages in chats(name).items():
        [chat] = own.encode(read_chat(messages))
        groups = [
            list(group)
            for role, group in groupby(messages, key=lambda m: m["role"])
            if role == "assistant"
        ]
        assert [text for _, text in chat.trained_text] == [
            reply_text(STYLES[name], group) for group in groups
        ], case
        assert chat.certificate.ok, (case, chat.certificate.problems)
        assert chat.certificate.changed == ()
        told = {problem.kind for problem in chat.certificate.problems}
        moves = STYLES[name].system == "last" and case in ("system", "null")
        assert told <= {"rewritten", "forged", "escaped", "disagreement"}, (
            case,
            chat.certificate.problems,
        )
        assert ("rewritten" in told) >= moves, (case, told)
        escapes = STYLES[name].joint == "+" and STYLES[name].calls == "json"
        assert ("escaped" in told) == (escapes and case in ("null", "two", "words")), (case, told)


@pytest.mark.parametrize("name", STYLES)
def test_the_text_is_that_of_transformers(name, folder):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    own = encoder(name, folder)
    for messages in chats(name).values():
        conversation = read_chat(messages)
        expected = utils.render_jinja_template(
            [messages], tools=conversation.tools, chat_template=own.template.source, **TOKENS
        )[0][0]
        assert own.encode(conversation)[0].text == expected


@pytest.mark.parametrize("name", STYLES)
def test_system_text_is_trained_by_its_words(name, folder):
    [chat] = encoder(name, folder, roles_to_train=("system",)).encode(read_chat(CHATS["system"]))
    marker = "[/SYSTEM_PROMPT]" if STYLES[name].system == "own" else ""
    assert chat.trained_text == ((0, f"Be snice{marker}"),)
    assert chat.certificate.ok
    [chat] = encoder(name, folder, train_on_inputs=True).encode(read_chat(CHATS["system"]))
    assert (chat.loss_weights == 1).all()
    assert chat.certificate.ok


@pytest.mark.parametrize("name", [name for name in STYLES if name.startswith("v3")])
def test_what_a_record_says_of_merged_replies_holds_for_each(name, folder):
    space = " " if STYLES[name].spaces else ""
    messages = [dict(message) for message in CHATS["in a row"]]

    def weights(**marks):
        told = [
            messages[0],
            messages[1],
            messages[2] | marks["first"],
            messages[3] | marks["second"],
            *messages[4:],
        ]
        [chat] = encoder(name, folder).encode(read_chat(told))
        assert chat.certificate.ok
        return [(text, weight) for text, weight in weights_by_text(chat) if weight]

    last = (space + "asix</s>", 1.0)
    assert weights(first={"train": False}, second={}) == [("afour</s>", 1.0), last]
    assert weights(first={}, second={"train": False}) == [(space + "athree\n\n", 1.0), last]
    half = weights(first={}, second={"weight": 0.5})
    assert half == [(space + "athree\n\n", 1.0), ("afour</s>", 0.5), last]


BY_TEXTS = (
    "{% set ns = namespace(done=[]) %}{% for m in messages %}{% set ns.done = ns.done + "
    "[[m.role, m.content]] %}{% endfor %}{{ bos_token }}{% for role, text in ns.done %}{{ "
    "'[INST]' + text + '[/INST]' if role == 'user' else text + '</s>' }}{% endfor %}"
)
"""A template whose second loop goes over pairs of texts."""
LAST_APART = (
    "{% for m in messages[:-1] %}{{ '<|im_start|>' + m.role + '\n' + m.content + "
    "'<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>' + messages[-1].role + '\n' + "
    "messages[-1].content + '<|im_end|>\n' }}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}"
)
"""A template that writes the last message outside its loop."""
LATE = (
    "{% set ns = namespace(last='', done=[]) %}{% for m in messages + [{'content': ''}] %}{% "
    "if ns.last %}{% set ns.done = ns.done + [ns.last] %}{% endif %}{% set ns.last = "
    "'<|im_start|>' + (m.role or '') + '\n' + m.content + '<|im_end|>\n' %}{% endfor %}{{ "
    "ns.done | join }}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template that keeps each text one round later than it is made."""


@pytest.mark.parametrize(
    "source", [BY_TEXTS, LAST_APART, LATE], ids=["by texts", "last apart", "late"]
)
@pytest.mark.parametrize("mask_settings", [{}, {"mask_history": True}], ids=["all", "last"])
def test_replies_are_cut_by_prompts_where_no_loop_holds_them(source, mask_settings, folder):
    template = Template(source=source, variables=TOKENS)
    own = ChatEncoder(
        make_tokenizer(folder, markers_of(CHATML_MARKERS)), template, MaskSettings(**mask_settings)
    )
    [chat] = own.encode(read_chat(CHATS["plain"]))
    end = "</s>" if source is BY_TEXTS else "<|im_end|>"
    wanted = [(1, f"Say abeta{end}"), (3, f"Say adelta{end}")]
    assert list(chat.trained_text) == (wanted[1:] if mask_settings else wanted)
    assert chat.certificate.ok, chat.certificate.problems
    users = MaskSettings(roles_to_train=("user",), on_missing_terminator="allow")
    [chat] = ChatEncoder(own.tokenizer, template, users).encode(read_chat(CHATS["plain"]))
    assert [text.replace(end, "") for _, text in chat.trained_text] == ["Ask ualpha", "Ask ugamma"]


CHATML_MARKERS = "<|im_start|><|im_end|>[INST][/INST]"


def test_an_error_names_the_template_and_not_the_data(folder):
    """Replies that stand before their questions can be cut by nothing."""
    source = (
        "{% for m in messages if m.role == 'assistant' %}{% endfor %}{{ messages | "
        "selectattr('role', 'equalto', 'assistant') | map(attribute='content') | join('</s>') "
        "}}{% for m in messages if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' "
        "}}{% endfor %}"
    )
    tokenizer = make_tokenizer(folder, markers_of(CHATML_MARKERS))
    [chat] = ChatEncoder(tokenizer, Template(source=source, variables=TOKENS)).encode(
        read_chat(CHATS["plain"])
    )
    [first, second] = [
        problem for problem in chat.certificate.problems if problem.kind == "untraced"
    ]
    assert first.text == second.text
    assert first.text.startswith(
        "the template writes its text outside any turn that can be followed, either by the "
        "loop over"
    )
    assert first.text.endswith("use a template that writes each reply after its prompt")
    assert chat.trained_text == ()
