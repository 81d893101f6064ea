"""Nothing is unread in silence: fields without a reader are counted, and those that mean something
have a cure.
"""

import pytest
from chat_makers import ask, small_tokenizer

from makers.datasets import prepare_here
from makers.tokenizers import CHATML
from penstock.chat.encoder import encode
from penstock.chat.records.layout_settings import LayoutSettings
from penstock.chat.records.layouts import read_conversation
from penstock.chat.records.unread import cure_of
from penstock.core.errors import ConfigError, ConversationError

CHAT = ask("uone", "aone", "utwo", "atwo")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory)


def trained(record, tokenizer, **settings):
    chat = encode(record, tokenizer=tokenizer, template=CHATML, **settings)
    return [text.partition("<")[0] for _, text in chat.trained_text], chat.certificate


@pytest.mark.parametrize(
    ("record", "unread"),
    [
        (
            {"messages": CHAT, "id": 1, "source": "x", "empty": "", "none": None, "list": []},
            ("id", "source"),
        ),
        (
            {
                "messages": CHAT,
                "system": "s",
                "tools": [],
                "chat_template_kwargs": {},
                "images": [],
            },
            (),
        ),
        ({"messages": [{"role": "system", "content": "t"}, *CHAT], "system": "s"}, ("system",)),
        ({"messages": [{"role": "system", "content": "s"}, *CHAT], "system": "s"}, ()),
        ({"messages": CHAT, "system": "s", "system_prompt": "t"}, ("system_prompt",)),
        (
            {"messages": CHAT, "prompt": "p", "rejected_response": "r"},
            ("prompt", "rejected_response"),
        ),
        (
            {"instruction": "q", "input": "i", "context": "c", "output": "a", "response": "b"},
            ("context", "response"),
        ),
        ({"prompt": "q", "completion": "a", "label": True, "reward": 1.0}, ("reward",)),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "score": 2}, ("score",)),
        ({"segments": [{"label": True, "text": "a"}], "loss_mask": [1]}, ("loss_mask",)),
    ],
)
def test_fields_without_a_reader(record, unread):
    assert read_conversation(record).unread == unread


def test_fields_of_messages_that_the_template_does_not_read(tokenizer):
    messages = [CHAT[0], {**CHAT[1], "mood": "glad", "quality": 3}, *CHAT[2:]]
    _, certificate = trained(messages, tokenizer)
    assert certificate.unread == ("messages[].mood", "messages[].quality")
    assert not certificate.problems
    moody = CHATML + "{# mood #}{{ messages[1].mood[:0] }}"
    chat = encode(messages, tokenizer=tokenizer, template=moody, strict=False)
    assert chat.certificate.unread == ("messages[].quality",)


@pytest.mark.parametrize(
    "name", ["weights", "label_mask", "background", "rationale", "rejected_responses", "persona"]
)
def test_a_name_with_a_meaning_has_a_cure(tokenizer, name):
    _, certificate = trained({"messages": CHAT, name: "x"}, tokenizer)
    [problem] = certificate.problems
    assert (problem.kind, problem.is_error) == ("unread", False)
    assert problem.text == f"nothing reads the field {name!r}; {cure_of(name)}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("loss_mask", 0),
        ("trainable", False),
        ("masked", True),
        ("masked", 1),
        ("loss_scale", 0),
        ("train", False),
    ],
)
def test_names_of_flags(tokenizer, key, value):
    messages = [CHAT[0], {**CHAT[1], key: value}, *CHAT[2:]]
    assert trained(messages, tokenizer)[0] == ["atwo"]
    assert trained(
        {"messages": [CHAT[0], {**CHAT[1], key: 1 if key != "masked" else 0}, *CHAT[2:]]}, tokenizer
    )[0] == [
        "aone",
        "atwo",
    ]


def test_flags_that_contradict_each_other_are_refused():
    messages = [CHAT[0], {**CHAT[1], "train": True, "masked": True}]
    with pytest.raises(ConversationError, match=r'message 1.*"train".*"masked"'):
        read_conversation({"messages": messages})
    with pytest.raises(ConversationError, match=r'"loss_mask": 0.5.*false'):
        read_conversation({"messages": [CHAT[0], {**CHAT[1], "loss_mask": 0.5}]})


def test_a_mask_of_the_record(tokenizer):
    assert trained({"messages": CHAT, "loss_mask": [0, 0, 0, 1]}, tokenizer)[0] == ["atwo"]
    assert trained({"messages": CHAT, "loss_mask": [1, 1, 1, 1]}, tokenizer)[0] == ["aone", "atwo"]
    for mask in ([1], [0, 1, 0, 2], ["1", "1", "1", "1"]):
        with pytest.raises(ConversationError, match=r'"loss_mask".*expected 1'):
            read_conversation({"messages": CHAT, "loss_mask": mask})


def test_settings_without_effect_are_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"train_on_eot.*<\|im_end\|>.*train_on_eos"):
        encode(CHAT, tokenizer=tokenizer, template=CHATML, train_on_eot="none")
    encode(CHAT, tokenizer=tokenizer, template=CHATML, train_on_eot="turn")  # what it is anyway


def test_the_report_lists_them(tmp_path, tokenizer):
    records = [{"messages": CHAT, "id": n, **({"context": "c"} if n < 3 else {})} for n in range(8)]
    records += [{"messages": [CHAT[0]], "id": 9, "other": 1}]  # dropped
    report = prepare_here(records, tokenizer, tmp_path / "out", template="chatml")
    assert report.chats["unread"] == {"id": 8, "context": 3}
    text = str(report)
    assert "fields that nothing reads: id 8, context 3\n" in text
    assert f"warning: context has no effect; {cure_of('context')}\n" in text
    assert "(unread)" not in text


def test_columns_are_read(tmp_path, tokenizer):
    records = [{"messages": CHAT, "score": 0.5}]
    report = prepare_here(
        records, tokenizer, tmp_path / "out", template="chatml", token_columns=["score"]
    )
    assert report.chats["unread"] == {}


def test_named_fields_are_read():
    settings = LayoutSettings(
        fields={"prompt": "q", "completion": "a"}, field_system="persona", field_tools="apis"
    )
    record = {"q": "x", "a": "y", "persona": "p", "apis": [{"name": "f"}], "b": 1}
    assert read_conversation(record, settings).unread == ("b",)
