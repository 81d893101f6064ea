"""System text counts as written where its words are, also where a template writes it outside its
loop of messages.
"""

from functools import cache

import pytest
from chat_makers import ALL_CONTROLS, CONVERSATIONS, TOKENS, kinds, make_tokenizer, markers_of

from penstock.chat.encoder import ChatEncoder
from penstock.chat.masks.mask_settings import MaskSettings
from penstock.chat.records.layouts import read_conversation
from penstock.chat.render.template import Template
from penstock.core.errors import ConversationError, RecordError

TURNS = (
    "{% for m in messages if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\n' + "
    "m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}"
)
SYSTEM = (
    "{% if messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\nYou: ' + messages[0].content + '<|im_end|>\n' }}{% endif %}"
)
OWN = {
    "before the loop": SYSTEM + TURNS,
    "by a namespace": (
        "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set "
        "ns.s = ns.s + m.content %}{% endfor %}{{ '<|im_start|>system\n' + ns.s + "
        "'<|im_end|>\n' }}" + TURNS
    ),
    "in the question": TURNS.replace(
        "+ m.content",
        "+ (messages[0].content + '\n\n' if loop.first and messages[0].role == 'system' else "
        "'') + m.content",
    ),
    "behind all": TURNS.replace(
        "{% if add", "{{ messages[0].content if messages[0].role == 'system' else '' }}{% if add"
    ),
}
LEFT_OUT = {
    "mistral_v2v3", "pixtral", "mistralai-Mistral-Nemo-Instruct-2407", "template_chatglm2",
    "tool_chat_template_mistral_parallel", "tool_chat_template_phi4_mini",
}  # fmt: skip
"""Templates that write no system text at all (Nemo and the like: only where the last message is a
question).
"""
WITHOUT_END = {
    "llava",
    "llama-cpp-rwkv-world",
    "template_chatglm2",
    "template_falcon_180b",
    "GLM-4.6",
    "template_baichuan",
}
"""Templates that end a reply, or the last one, without a terminator, which is an error of its
own.
"""


@cache
def template(source):
    return Template(source=source, variables=TOKENS)


def encode(source, tokenizer, case, **mask_settings):
    encoder = ChatEncoder(tokenizer, template(source), MaskSettings(**mask_settings))
    [chat] = encoder.encode(read_conversation({"messages": CONVERSATIONS[case]}))
    return chat


def errors(chat):
    return sorted({problem.kind for problem in chat.certificate.problems if problem.is_error})


@pytest.mark.parametrize("name", OWN)
def test_settings_hold_wherever_system_text_is_written(name, folder):
    tokenizer = make_tokenizer(folder, ALL_CONTROLS)
    for case in ("system", "plain"):
        chat = encode(OWN[name], tokenizer, case)
        assert [text for _, text in chat.trained_text] == [
            "Say abeta<|im_end|>",
            "Say adelta<|im_end|>",
        ]
        assert errors(chat) == []
        chat = encode(OWN[name], tokenizer, case, train_on_inputs=True)
        assert (chat.loss_weights == 1).all()
        assert errors(chat) == []
    chat = encode(OWN[name], tokenizer, "system", roles_to_train=("system",))
    assert chat.trained_text == ((0, "Be snice"),)
    assert errors(chat) == []
    assert errors(encode(OWN[name], tokenizer, "plain", roles_to_train=("system",))) == [
        "nothing_trained"
    ]


@pytest.mark.parametrize("name", OWN)
def test_what_a_record_says_of_its_system_message_holds(name, folder):
    tokenizer = make_tokenizer(folder, ALL_CONTROLS)
    encoder = ChatEncoder(
        tokenizer, Template(source=OWN[name], variables=TOKENS), MaskSettings(train_on_inputs=True)
    )
    system, *others = CONVERSATIONS["system"]
    [chat] = encoder.encode(read_conversation({"messages": [system | {"train": False}, *others]}))
    assert "Be snice" not in "".join(text for _, text in chat.trained_text)
    assert "Ask ualpha" in "".join(text for _, text in chat.trained_text)
    usual = ChatEncoder(tokenizer, encoder.template)
    [chat] = usual.encode(read_conversation({"messages": [system | {"weight": 0.25}, *others]}))
    assert {float(weight) for weight in chat.loss_weights[chat.messages == 0]} == {0.25}


def test_text_that_no_template_writes_is_an_error_with_a_cure(folder):
    tokenizer = make_tokenizer(folder, ALL_CONTROLS)
    chat = encode(TURNS, tokenizer, "system", roles_to_train=("system", "assistant"))
    [problem] = [problem for problem in chat.certificate.problems if problem.is_error]
    assert str(problem) == (
        "message 0: the template writes nothing of this message; drop_system_message: true "
        "removes it"
    )
    assert "dropped" in kinds(encode(TURNS, tokenizer, "system"))


@pytest.mark.real_data
def test_every_template_with_every_setting(real_data, folder):
    paths = sorted(real_data.joinpath("chat_templates").glob("*/*.jinja"))
    assert len(paths) == 58
    encoded = 0
    for path in paths:
        source = path.read_text(encoding="utf-8")
        tokenizer = make_tokenizer(folder, markers_of(source))
        for case in ("system", "plain"):
            try:
                chat = encode(source, tokenizer, case)
            except ConversationError:
                with pytest.raises(RecordError, match=r"refuses|fails"):
                    template(source).render_plain(CONVERSATIONS[case])
                continue
            encoded += 1
            unended = ["missing_terminator"] if path.stem in WITHOUT_END else []
            assert errors(chat) == unended, path.stem
            left_out = ["not_written"] if case == "system" and path.stem in LEFT_OUT else []
            chat = encode(source, tokenizer, case, train_on_inputs=True)
            assert errors(chat) == left_out, path.stem
            assert chat.loss_weights.all(), path.stem
            chat = encode(source, tokenizer, case, roles_to_train=("system",))
            if case == "plain" or left_out:
                assert errors(chat) == sorted(["nothing_trained", *left_out]), path.stem
                continue
            assert errors(chat) == [], path.stem
            [(message, text)] = chat.trained_text
            assert message == 0, path.stem
            assert text.startswith("Be snice"), path.stem
            control = text.removeprefix("Be snice")
            assert control in ("", "<|im_end|>", "<|eot_id|>", "<|end|>", "</s>"), path.stem
    assert encoded == 113
