"""Images, audio and video never become text in silence: they are refused, or dropped and counted,
in every layout.
"""

import json

import pytest
from chat_makers import ask, trained

from makers.datasets import prepare_here
from makers.texts import write_json_lines
from makers.tokenizers import CHATML
from penstock import Dataset
from penstock.chat.encoder import ChatEncoder, encode
from penstock.chat.records.conversation import Conversation, MessageWeights
from penstock.chat.records.layout_settings import LayoutSettings
from penstock.chat.records.layouts import read_conversation
from penstock.chat.render.template import Template
from penstock.core.errors import ConfigError, ConversationError
from penstock.learn.generation.session import encode_chat

PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ "
    "m.content }}{% else %}{% for p in m.content %}{{ p.text if p.type == 'text' else '<pad>' "
    "}}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt "
    "%}<|im_start|>assistant\n{% endif %}"
)
TEXT = {"type": "text", "text": "What is it?"}
IMAGE = {"type": "image", "image": "a.png"}
ANSWER = {"role": "assistant", "content": "A wheel."}
TOOL = {
    "role": "tool",
    "content": [TEXT, {"type": "image_url", "image_url": {"url": "data:image/png;base64,xx"}}],
}
LLAVA = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A wheel."}]
FACTORY = ask("<image>What is it?", "A wheel.")

RECORDS = {
    "parts": {"messages": [{"role": "user", "content": [IMAGE, TEXT]}, ANSWER]},
    "a part without a type": {
        "messages": [{"role": "user", "content": [{"image": "a.png"}, TEXT]}, ANSWER]
    },
    "image_url": {
        "messages": [
            {"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {"url": "x"}}]},
            ANSWER,
        ]
    },
    "audio": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "input_audio", "input_audio": {"data": "x"}}, TEXT],
            },
            ANSWER,
        ]
    },
    "video": {
        "messages": [
            {"role": "user", "content": [{"type": "video", "video": ["a.mp4"]}, TEXT]},
            ANSWER,
        ]
    },
    "a file": {
        "messages": [
            {"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}, TEXT]},
            ANSWER,
        ]
    },
    "images of a message": {
        "messages": [{"role": "user", "content": "What is it?", "images": ["iVBOR"]}, ANSWER]
    },
    "LLaVA": {"id": 1, "image": "a.png", "conversations": LLAVA},
    "LLaMA-Factory": {"messages": FACTORY, "images": ["a.png"]},
    "LLaMA-Factory's video": {"conversations": LLAVA, "videos": ["a.mp4"]},
    "bytes of an image": {"messages": FACTORY, "image": {"bytes": "iVBOR", "path": None}},
    "a list of objects": {"messages": FACTORY, "images": [{"bytes": None, "path": "a.png"}]},
    "Alpaca": {"instruction": "What is it?", "output": "A wheel.", "image": "a.png"},
    "prompt and completion": {
        "prompt": "What is it?",
        "completion": "A wheel.",
        "image_path": "a.png",
    },
    "preference": {
        "prompt": [{"role": "user", "content": [IMAGE, TEXT]}],
        "chosen": [ANSWER],
        "rejected": [ANSWER],
    },
    "images of a preference": {
        "images": ["a.png"],
        "prompt": "What is it?",
        "chosen": "A wheel.",
        "rejected": "x",
    },
}
WITHOUT = {"messages": ask("What is it?", "A wheel.")}
NOTHING = [
    {**WITHOUT, "image": None},
    {**WITHOUT, "images": []},
    {**WITHOUT, "images": [None], "video": ""},
    {**WITHOUT, "image": {"bytes": None, "path": None}},
    {**WITHOUT, "has_image": True, "image_id": 7, "audio": False},
    {"messages": [{"role": "user", "content": [{**TEXT, "image": None, "video": None}]}, ANSWER]},
]


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return ChatEncoder(tokenizer, Template(source=PARTS))


@pytest.mark.parametrize("name", RECORDS)
def test_every_layout_is_refused(encoder, name):
    conversation = read_conversation(RECORDS[name], origin="a.jsonl:3")
    inside = r"message 0: (part \d of its content is of type|its field)"
    beside = r"the record's field \"[a-z_]+\" holds media"
    with pytest.raises(
        ConversationError,
        match=(rf"l:3: ({inside}|{beside}).*media: drop"),
    ):
        encoder.encode(conversation)


@pytest.mark.parametrize("name", RECORDS)
def test_dropped_they_leave_the_text_and_are_counted(encoder, name):
    conversation = read_conversation(RECORDS[name], LayoutSettings(media="drop"))
    assert conversation.dropped_media == 1
    assert conversation.attachments == {}
    [chat] = encoder.encode(conversation)
    [plain] = encoder.encode(read_conversation(WITHOUT))
    assert chat.text == plain.text
    assert chat.loss_weights.tolist() == plain.loss_weights.tolist()


@pytest.mark.parametrize("record", NOTHING, ids=range(len(NOTHING)))
def test_empty_fields_hold_nothing(encoder, record):
    for media in ("error", "drop"):
        conversation = read_conversation(record, LayoutSettings(media=media))
        assert conversation.dropped_media == 0
        assert trained(encoder.encode(conversation)[0]) == ["A wheel.<|im_end|>"]


def test_the_message_is_named_wherever_it_is(encoder):
    asked = {"role": "user", "content": "u"}
    for messages, where in (
        (
            [asked, {"role": "assistant", "content": [TEXT, IMAGE]}],
            'message 1: part 1 of its content is of type "image"',
        ),
        ([asked, ANSWER, TOOL, ANSWER], 'message 2: part 1 of its content is of type "image_url"'),
        ([asked, {**ANSWER, "audio": {"id": "x"}}], 'message 1: its field "audio" holds media'),
        (
            [asked, {"role": "tool", "content": [IMAGE, {"x": 1}]}, ANSWER],
            "message 1: part 0 of its content",
        ),
    ):
        with pytest.raises(ConversationError, match=where):
            encoder.encode(read_conversation({"messages": messages}))
    with pytest.raises(ConversationError, match=r"message.*0.*thinking.*parts"):
        read_conversation(
            {"messages": [{"role": "assistant", "content": "a", "reasoning_content": [IMAGE]}]}
        )
    with pytest.raises(ConversationError, match=r'part 0.*"text".*"image"'):
        read_conversation({"messages": [{"role": "user", "content": [{**TEXT, "image": "a.png"}]}]})


def test_conversations_made_by_hand_and_prompts_are_refused(encoder):
    messages = ({"role": "user", "content": [IMAGE, TEXT]}, ANSWER)
    with pytest.raises(ConversationError, match=r'message 0: part 0.*type "image"'):
        encoder.encode(
            Conversation(messages=messages, message_weights=(MessageWeights(), MessageWeights()))
        )
    with pytest.raises(ConversationError, match=r'message 0: part 0.*"image"'):
        encode(list(messages), tokenizer=encoder.tokenizer, template=CHATML)
    with pytest.raises(ConversationError, match=r'message 0: part 0.*"image"'):
        encode_chat(messages, encoder.template, encoder.tokenizer)


def test_weights_of_parts_stay_with_their_words(encoder):
    parts = [
        IMAGE,
        {"type": "text", "text": "no", "train": False},
        IMAGE,
        {"type": "text", "text": "half", "weight": 0.5},
    ]
    record = {
        "messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": parts}]
    }
    for join in (True, False):
        conversation = read_conversation(record, LayoutSettings(media="drop", join_text_parts=join))
        assert conversation.dropped_media == 2
        assert isinstance(conversation.messages[1]["content"], str) == join
        [chat] = encoder.encode(conversation)
        weight = {
            chat.text[b:e]: w
            for b, e, w in zip(chat.begins, chat.ends, chat.loss_weights, strict=True)
        }
        spelled = "".join(text for text, w in weight.items() if w == 0.5)
        assert spelled in "half"
        assert spelled
        assert trained(chat) == ["half<|im_end|>"]
    ranged = {
        "role": "user",
        "content": "<image>\nab",
        "train_detail": [{"begin": 8, "end": 9, "train": True}],
    }
    record = {"messages": [ranged, {"role": "assistant", "content": "u"}], "images": ["a.png"]}
    with pytest.raises(ConversationError, match=r"message.*0.*placeholder.*ranges"):
        read_conversation(record, LayoutSettings(media="drop"))


def dropped(messages, **fields):
    found = read_conversation({"messages": messages, **fields}, LayoutSettings(media="drop"))
    return [message["content"] for message in found.messages], found.dropped_media


def test_words_that_look_like_placeholders_stay():
    page = "<video>\n<source></video> and <audio>"
    asked = {"role": "user", "content": [IMAGE, {"type": "text", "text": "An <image> tag"}]}
    answer = {"role": "assistant", "content": page}
    assert dropped([asked, answer]) == (["An <image> tag", page], 1), "parts have no placeholders"
    assert dropped(ask("<image>\nand <image> <video>", page), images=["a.png"]) == (
        ["and <image> <video>", page],
        1,
    )
    assert dropped(ask("<image><video>x<audio>", "y"), images=["a"], audio="b") == (
        ["<video>x", "y"],
        2,
    )
    with pytest.raises(ConversationError, match=r"message 1.*'<video>'.*placeholder"):
        dropped(ask("a", page), videos=["a.mp4"])
    later = [*ask("a", page), *ask("<video>b", "c")]
    assert dropped(later, videos=["a.mp4"])[0] == ["a", page, "b", "c"]


def test_placeholders_without_media_are_words(encoder):
    words = ask("Explain <image> to me", "It is a tag: <image>")
    for media in ("error", "drop"):
        [chat] = encoder.encode(read_conversation({"messages": words}, LayoutSettings(media=media)))
        assert "Explain <image> to me" in chat.text
    with pytest.raises(ConfigError, match='media is "keep"; expected error or drop'):
        LayoutSettings(media="keep")


def test_prepare_refuses_them_or_says_how_many_are_gone(encoder, tmp_path):
    records = [WITHOUT, RECORDS["parts"], RECORDS["LLaVA"], WITHOUT]
    given = (write_json_lines(tmp_path / "a.jsonl", records), encoder.tokenizer)
    refused = prepare_here(*given, tmp_path / "skip", template=PARTS, on_error="skip")
    assert (refused.documents, refused.rejects) == (2, 2)
    reasons = [
        json.loads(line)["reason"]
        for line in (tmp_path / "skip/rejected.jsonl").read_text().splitlines()
    ]
    assert reasons[0].startswith(
        'message 0: part 0 of its content is of type "image"; images need the processor'
    )
    assert reasons[1].startswith('the record\'s field "image" holds media; ')
    dropped = prepare_here(*given, tmp_path / "drop", template=PARTS, media="drop")
    assert (dropped.documents, dropped.rejects, dropped.chats["cleaned"]["media"]) == (4, 0, 2)
    assert (
        "2 images, audio or video files left out of conversations (media: drop)"
        in dropped.as_text()
    )
    assert Dataset.open(tmp_path / "drop").chat.settings["layout"]["media"] == "drop"
    lengths = {len(document.tokens) for document in Dataset.open(tmp_path / "drop")[:]}
    assert len(lengths) == 1
