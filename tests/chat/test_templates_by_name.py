"""The templates that come with penstock: each is of its family, and its masks agree with the
family's boundaries.
"""

import pytest
from chat_makers import make_tokenizer

import penstock as ps
from penstock.chat import (
    Boundary,
    ChatEncoder,
    detect_family,
    family,
    load_template,
    read_conversation,
    template_names,
)
from penstock.core.errors import ConfigError

CHAT = [
    {"role": "user", "content": "how many?"},
    {"role": "assistant", "content": "three of them"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]


@pytest.mark.parametrize("name", template_names())
def test_a_named_template_is_of_its_family(name, tmp_path):
    template = load_template(name)
    found = detect_family(template.source)
    assert found is not None
    assert found.name == name
    named = [text for text in (*family(name).control, *family(name).stop) if text != "eos_token"]
    tokenizer = make_tokenizer(
        tmp_path / "t", sorted({"<s>", "</s>", *named}), eos="</s>", pad="<s>"
    )
    template = load_template(name, tokenizer=tokenizer, bos_token="<s>", eos_token="</s>")
    [chat] = ChatEncoder(tokenizer, template).encode(read_conversation({"messages": CHAT}))
    assert chat.certificate.checks == (f"boundaries of {name} agree",)
    assert chat.certificate.ok
    words = [text for _, text in chat.trained_text]
    assert [message for message, _ in chat.trained_text] == [1, 3]
    assert "three of them" in words[0]
    assert "yes" in words[1]


def test_a_name_that_is_none_lists_those_that_are():
    with pytest.raises(ConfigError, match=r"there.*chatml.*llama3"):
        load_template("chatlm")


def test_declared_boundaries_replace_those_of_the_family(tmp_path):
    tokenizer = make_tokenizer(
        tmp_path / "t", ["<s>", "<|im_start|>", "<|im_end|>"], eos="<|im_end|>", pad="<s>"
    )
    template = load_template("chatml", tokenizer=tokenizer)
    wrong = [Boundary("assistant", "<|im_start|>user\n", "<|im_end|>")]
    [chat] = ChatEncoder(tokenizer, template, boundaries=wrong).encode(
        read_conversation({"messages": CHAT})
    )
    assert chat.certificate.checks == ("boundaries of the settings disagree",)
    assert ps.chat.encode(CHAT, tokenizer=tokenizer, template=template).certificate.checks == (
        "boundaries of chatml agree",
    )
