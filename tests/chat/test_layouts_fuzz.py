"""Whatever a record holds, it is read or refused with its origin: never another exception, never a
message too few.
"""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.chat.records.conversation import Conversation
from penstock.chat.records.layout_settings import LAYOUTS, LayoutSettings
from penstock.chat.records.layouts import describe_layout, read_conversation
from penstock.core.errors import ConversationError

KEYS = re.findall(
    r"\w+",
    """messages conversations prompt completion chosen instruction input output history system tools role from value
    content type text name function arguments parameters tool_calls function_call reasoning_content thinking train
    weight train_detail train_ranges begin end begin_offset end_offset replies rank message_id parent_id label
    chat_template_kwargs deleted""",  # noqa: E501
)
WORDS = [
    "user",
    "assistant",
    "gpt",
    "human",
    "function_call",
    "tool",
    "text",
    "image",
    "tool_call",
    "reasoning",
]
TEXTS = [
    *WORDS,
    "",
    "{",
    "[]",
    '{"name": "f"}',
    '[{"name": "f", "arguments": "{}"}]',
    "<think>a</think>b",
]
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-1, 3), st.floats(), st.sampled_from(TEXTS)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
    ),
    max_leaves=12,
)
NAMES = st.sampled_from(["user", "assistant", "tool", "system", "gpt"])
MESSAGES = st.fixed_dictionaries(
    {"role": NAMES, "content": st.one_of(st.text("ab"), VALUES)},
    optional=dict.fromkeys(
        ("tool_calls", "thinking", "train", "weight", "train_ranges", "train_detail"), VALUES
    ),
)
TURNS = st.fixed_dictionaries(
    {"from": st.sampled_from(WORDS), "value": st.one_of(st.text("ab"), VALUES)}
)
RECORDS = st.one_of(
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6),
    st.fixed_dictionaries(
        {"messages": st.lists(MESSAGES, max_size=4)}, optional={"tools": VALUES, "chosen": VALUES}
    ),
    st.fixed_dictionaries(
        {"conversations": st.lists(TURNS, max_size=4)}, optional={"tools": VALUES, "system": VALUES}
    ),
)
SETTINGS = st.builds(
    LayoutSettings,
    layout=st.sampled_from(["auto", *LAYOUTS]),
    split_thinking=st.booleans(),
    join_text_parts=st.booleans(),
    decode_arguments=st.booleans(),
    call_ids=st.sampled_from(["keep", "short"]),
    oasst_paths=st.sampled_from(["best", "all"]),
    field_messages=st.sampled_from([None, "prompt"]),
    message_property_mappings=st.sampled_from([{}, {"role": "from", "content": "value"}]),
)


@settings(deadline=None, max_examples=400)
@given(record=RECORDS, options=SETTINGS)
def test_read_or_refused(record, options):
    before = json.dumps(record)
    found, refusal = read_or_refuse(record, options)
    assert refusal is None or refusal.startswith("c.jsonl:3")
    if refusal is None:
        assert describe_layout(record, options).startswith("layout ")
    assert json.dumps(record) == before
    for conversation in found:
        for message, weights in zip(
            conversation.messages, conversation.message_weights, strict=True
        ):
            assert isinstance(message["role"], str)
            silent = message["content"] is None and (message.get("tool_calls") or len(message) > 2)
            assert isinstance(message["content"], str | list) or message["role"] == "tool" or silent
            for one in weights.ranges:
                assert one.end <= len(text_of(message, one.field))
                assert 0 <= one.begin < one.end
                assert one.weight >= 0


def read_or_refuse(record, options):
    try:
        found = read_conversation(record, options, "c.jsonl:3")
    except ConversationError as error:
        return [], str(error)
    return [found] if isinstance(found, Conversation) else found, None


def text_of(message, field):
    key, *place = field.split(".")
    value = message[key]
    return value[int(place[0])][place[1]] if place else value


@settings(deadline=None)
@given(
    turns=st.lists(
        st.tuples(NAMES.filter(lambda name: name != "gpt"), st.text(max_size=5)),
        min_size=1,
        max_size=5,
    )
)
def test_plain_messages_go_through_unchanged(turns):
    items = [{"role": role, "content": text} for role, text in turns]
    short = read_conversation({"messages": items})
    # A key that is null takes each message the long way, which must come to the same.
    long = read_conversation({"messages": [{**item, "name": None} for item in items]})
    assert isinstance(short, Conversation)
    assert isinstance(long, Conversation)
    assert list(short.messages) == list(long.messages) == items
    assert short.message_weights == long.message_weights


def test_a_history_that_is_no_list_is_refused() -> None:
    record = {"prompt": [], "completion": [], "history": True}
    with pytest.raises(ConversationError, match=r"history is True.*expected a list"):
        read_conversation(record, LayoutSettings(), "c.jsonl:3")
