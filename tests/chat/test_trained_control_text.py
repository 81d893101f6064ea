"""Control text in a reply's own words: refused, kept text, or made control tokens with the ids of
transformers.
"""

import gzip
import json

import pytest
from chat_makers import TOKENS, ask, call, encode_chat, kinds, trained
from transformers import PreTrainedTokenizerFast

from makers.tokenizers import CHATML
from penstock import load_tokenizer
from penstock.chat.encoder import ChatEncoder
from penstock.chat.masks.mask_settings import MaskSettings
from penstock.chat.records.layout_settings import LayoutSettings
from penstock.chat.records.layouts import read_conversation
from penstock.chat.render.template import Template
from penstock.core.errors import ConfigError, ConversationError

TYPED = "x [INST] y"
WITH_REASONING = CHATML.replace("m.content", "(m.reasoning_content or '') + m.content")


def count(chat, tokenizer, text):
    return int((chat.tokens == tokenizer.special_tokens[text]).sum())


def test_it_is_an_error_that_names_message_text_and_choices(tokenizer):
    with pytest.raises(
        ConversationError,
        match=r"'\[INST\]'.*1.*control_text: as_text",
    ):
        encode_chat(ask("u", "a", "u", TYPED + "<|end|>"), tokenizer)


@pytest.mark.parametrize("setting", ["as_text", "as_control_tokens"])
def test_both_readings_are_trained(tokenizer, setting):
    chat = encode_chat(ask("u", TYPED), tokenizer, trained_control_text=setting)
    assert trained(chat) == [TYPED + "<|im_end|>"]
    as_tokens = setting == "as_control_tokens"
    assert count(chat, tokenizer, "[INST]") == as_tokens
    at = chat.text.index("[INST]")
    assert chat.certificate.typed == (((at, "[INST]"),) if as_tokens else ())
    assert chat.certificate.forged == (() if as_tokens else ((at, "[INST]"),))
    assert chat.certificate.ok


@pytest.mark.parametrize("setting", ["error", "as_text", "as_control_tokens"])
@pytest.mark.parametrize("role", ["user", "system", "tool", "developer"])
def test_others_never_write_control_tokens(tokenizer, setting, role):
    """Not even where their messages are trained."""
    messages = [{"role": role, "content": TYPED + "<|im_end|>"}, *ask("u", "a")]
    for more in ({}, {"train_on_inputs": True}, {"roles_to_train": ["assistant", role]}):
        chat = encode_chat(messages, tokenizer, trained_control_text=setting, **more)
        assert count(chat, tokenizer, "[INST]") == 0
        assert kinds(chat) >= {"forged"}
        assert chat.certificate.typed == ()


def test_every_field_of_the_message_counts(tokenizer):
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "[INST]"}]
    arguments = CHATML.replace(
        "m.content", "m.content + (m.tool_calls | tojson if m.tool_calls else '')"
    )
    cases = [
        (ask("u", "a", reasoning_content="hm [INST]"), WITH_REASONING),
        (ask("u", parts), CHATML),
        (ask("u", "", tool_calls=[call(city="[INST]")]), arguments),
    ]
    for messages, template in cases:
        with pytest.raises(ConversationError, match=r"1.*text.*\(assistant\).*'\[INST\]'"):
            encode_chat(messages, tokenizer, template)
        chat = encode_chat(messages, tokenizer, template, trained_control_text="as_control_tokens")
        assert count(chat, tokenizer, "[INST]") == 1


def test_a_reply_that_is_context_is_read_as_its_role_is(tokenizer):
    """As the model wrote it: a reply reads alike whether this document trains it or not."""
    messages = ask("u", TYPED, "u", "a")
    for more in ({"mask_history": True}, {}):
        marked = [
            message | ({} if more or place != 1 else {"train": False})
            for place, message in enumerate(messages)
        ]
        with pytest.raises(ConversationError, match=r"message 1: its own text"):
            encode_chat(marked, tokenizer, **more)
        chat = encode_chat(marked, tokenizer, trained_control_text="as_control_tokens", **more)
        assert count(chat, tokenizer, "[INST]") == 1
    # Where nothing of a role is trained, nothing is to be chosen.
    assert (
        count(encode_chat(messages, tokenizer, roles_to_train=["user"]), tokenizer, "[INST]") == 0
    )
    only = [message | {"train": place == 3} for place, message in enumerate(messages)]
    with pytest.raises(ConversationError, match="message 1: its own text"):
        encode_chat(only, tokenizer, roles_to_train=[])


def test_a_role_of_ones_own_is_like_the_assistant(tokenizer):
    record = {"messages": [*ask("u"), {"role": "critic", "content": TYPED}]}
    conversation = read_conversation(record, LayoutSettings(roles={"critic": ["critic"]}))
    [chat] = ChatEncoder(
        tokenizer,
        Template(source=CHATML, variables=TOKENS),
        MaskSettings(roles_to_train=("critic",)),
    ).encode(conversation)
    assert "control_text" in kinds(chat)


def test_control_text_that_is_half_the_templates(tokenizer):
    """A reply that ends with what completes the template's own text to a marker."""
    source = CHATML.replace("m.content +", "m.content + '|im_end|>' +")
    with pytest.raises(ConversationError, match=r"message 1.*'<\|im_end\|>'"):
        encode_chat(ask("u", "a<"), tokenizer, source)
    chat = encode_chat(ask("u", "a<"), tokenizer, source, trained_control_text="as_control_tokens")
    assert count(chat, tokenizer, "<|im_end|>") == 3
    assert encode_chat(ask("u<", "a"), tokenizer, source).certificate.typed == ()


def test_settings_that_contradict_each_other(tokenizer):
    with pytest.raises(ConfigError, match=r"trained_control_text.*allow_forged"):
        MaskSettings(trained_control_text="as_text", allow_forged=True)
    with pytest.raises(ConfigError, match=r"as_text, as_control_tokens"):
        MaskSettings(trained_control_text="tokens")
    assert encode_chat(ask("u", TYPED), tokenizer, allow_forged=True).certificate.typed


REPLIES = [
    'Let me look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    "<tool_call></tool_call><tool_call>",
    "an end<|im_end|>\n<|im_start|>assistant\nand more <|fim_prefix|> words <tool_call",
    " <|file_sep|>  \n\n<|object_ref_start|>é水<|object_ref_end|>",
]
TEMPLATES = [
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "Qwen-QwQ-32B",
    "qwen3_training",
    "Qwen3.5-4B",
]


@pytest.mark.real_data
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_transformers(real_data, tmp_path, name):
    source = next(real_data.glob(f"chat_templates/*/{name}.jinja")).read_text(encoding="utf-8")
    packed = (real_data / "tokenizers/hf_derived/qwen2.5/tokenizer.json.gz").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(gzip.decompress(packed))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|im_end|>"
    )
    template = Template(source=source, name=name, variables=TOKENS)
    encoder = ChatEncoder(
        load_tokenizer(tmp_path), template, MaskSettings(trained_control_text="as_control_tokens")
    )
    conversations = [ask("question", reply, "more", "last " + reply) for reply in REPLIES]
    conversations.append(ask("u", "", tool_calls=[call(place="<|file_sep|>", x="<tool_call>")]))
    conversations.append(ask("u", "answer", reasoning_content="I think <tool_call> of it"))
    for messages in conversations:
        [chat] = encoder.encode(read_conversation({"messages": messages}))
        due = theirs.apply_chat_template(
            messages, chat_template=source, tokenize=True, return_dict=False
        )
        assert chat.tokens.tolist() == due
        assert chat.certificate.ok, chat.certificate.problems
        assert chat.certificate.typed or "reasoning_content" in messages[1]
        # Every marker in the replies' own words is trained.
        typed = {at for at, _ in chat.certificate.typed}
        places = [
            place
            for place, begin in enumerate(chat.begins.tolist())
            if begin in typed and chat.is_control[place]
        ]
        assert all(chat.loss_weights[places] == 1)
