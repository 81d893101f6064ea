"""Training keys in every spelling, ranges and their checks, parts, and thinking that moves with its
ranges.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.chat.records.conversation import (
    DEFAULT_WEIGHTS,
    Conversation,
    MessageWeights,
    Range,
    will_train,
)
from penstock.chat.records.layout_settings import LayoutSettings
from penstock.chat.records.layouts import read_conversation
from penstock.chat.records.messages import TAGS, move_ranges, split_thinking
from penstock.chat.render.forms import normalise
from penstock.core.errors import ConversationError


def read(message, **options):
    conversation = read_conversation(
        {"messages": [message]}, LayoutSettings(**options), "c.jsonl:1"
    )
    assert isinstance(conversation, Conversation)
    return conversation.messages[0], conversation.message_weights[0]


def normal(message, **options):
    """With all changed that may be changed for a template."""
    conversation = normalise(
        read_conversation({"messages": [message]}, LayoutSettings(**options), "c.jsonl:1")
    )
    return conversation.messages[0], conversation.message_weights[0]


def spans(weights):
    return [(one.field, one.begin, one.end, one.weight) for one in weights.ranges]


@pytest.mark.parametrize(
    ("keys", "weights"),
    [
        ({}, DEFAULT_WEIGHTS),
        ({"train": None, "weight": None}, DEFAULT_WEIGHTS),
        ({"train": True}, MessageWeights(train=True)),
        ({"train": 0}, MessageWeights(train=False)),
        ({"training": False}, MessageWeights(train=False)),
        ({"loss": True}, MessageWeights(train=True)),
        ({"weight": 1}, MessageWeights(weight=1.0)),
        ({"weight": 0.25}, MessageWeights(weight=0.25)),
        ({"loss_weight": 0.0}, MessageWeights(weight=0.0)),
        ({"train": True, "weight": 2}, MessageWeights(train=True, weight=2.0)),
    ],
)
def test_flags_and_weights(keys, weights):
    message, found = read({"role": "assistant", "content": "abc", **keys})
    assert message == {"role": "assistant", "content": "abc"}
    assert found == weights


def test_a_configured_flag_is_the_only_one():
    message, weights = read(
        {"role": "assistant", "content": "a", "learn": False, "train": True},
        message_field_training="learn",
    )
    assert message == {"role": "assistant", "content": "a"}
    assert weights == MessageWeights(train=False)


@pytest.mark.parametrize("key", ["train_detail", "training_detail", "train_ranges", "mine"])
def test_axolotl_ranges_are_inclusive_and_cover_what_they_say(key):
    detail = [
        {"begin_offset": 6, "end_offset": 6, "train": True},
        {"begin_offset": 0, "end_offset": 2, "train": True},
        {"begin_offset": 3, "end_offset": 4, "train": False},
    ]
    options = {"message_field_training_detail": "mine"} if key == "mine" else {}
    message, weights = read({"role": "assistant", "content": "abcdefgh", key: detail}, **options)
    assert message == {"role": "assistant", "content": "abcdefgh"}
    assert spans(weights) == [
        ("content", 0, 3, 1),
        ("content", 3, 5, 0),
        ("content", 5, 6, 0),
        ("content", 6, 7, 1),
        ("content", 7, 8, 0),
    ]


def test_own_ranges_are_half_open_and_weigh():
    ranges = [
        {"begin": 1, "end": 3, "weight": 0.5},
        {"field": "reasoning_content", "begin": 0, "end": 2, "train": True},
    ]
    _, weights = read(
        {
            "role": "assistant",
            "content": "abc",
            "thinking": "no",
            "weight": 3,
            "train_ranges": ranges,
        }
    )
    assert weights.weight == 3
    assert spans(weights) == [
        ("content", 0, 1, 0),
        ("content", 1, 3, 1.5),
        ("reasoning_content", 0, 2, 3),
    ]


def test_a_false_flag_beats_ranges():
    _, weights = read(
        {
            "role": "user",
            "content": "abc",
            "train": False,
            "train_ranges": [{"begin": 0, "end": 1, "train": True}],
        }
    )
    assert weights == MessageWeights(train=False)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train": "yes"}, r"""c.jsonl:1: message 0 has "train": 'yes'; expected true or false"""),
        ({"train": 0.5}, 'has "train": 0.5; .*put fractions into "weight"'),
        ({"weight": -1}, 'has "weight": -1; expected a number, 0 or more'),
        ({"weight": float("nan")}, "expected a number"),
        ({"weight": "1"}, "expected a number"),
        ({"train_detail": {}}, '"train_detail" is dict; expected a list'),
        ({"train_detail": [3]}, r'"train_detail"\[0\] is int'),
        (
            {"train_detail": [{"begin_offset": 0, "end_offset": 3, "train": True}]},
            "from 0 to 3 .inclusive.* the 3",
        ),
        (
            {"train_ranges": [{"begin": 0, "end": 4, "train": True}]},
            "from 0 to 4 .half-open.* the 3 that content has",
        ),
        ({"train_ranges": [{"begin": 1, "end": 1, "train": True}]}, "at least one character"),
        ({"train_ranges": [{"begin": -1, "end": 1, "train": True}]}, "expected 0 ≤ begin"),
        ({"train_ranges": [{"begin": 0, "end": 1}]}, "expected begin_offset, end_offset and train"),
        ({"train_ranges": [{"begin": 0.0, "end": 1, "train": True}]}, "expected begin_offset"),
        ({"train_ranges": [{"begin": True, "end": 2, "train": True}]}, "expected begin_offset"),
        (
            {"train_ranges": [{"begin": 0, "end": 1, "train": 1, "field": "name"}]},
            'names field "name"; .*has: content',
        ),
        (
            {
                "train_ranges": [
                    {"begin": 0, "end": 2, "train": True},
                    {"begin": 1, "end": 3, "train": True},
                ]
            },
            r"ranges \[0, 2\) and \[1, 3\) of content, which overlap",
        ),
    ],
)
def test_training_keys_are_checked(keys, message):
    with pytest.raises(ConversationError, match=message):
        read({"role": "assistant", "content": "abc", **keys})


def test_text_parts_become_one_text_with_their_weights():
    parts = [
        {"type": "text", "text": "ab"},
        {"text": "c", "train": False},
        {"type": "text", "value": "de", "weight": 2},
    ]
    message, weights = normal({"role": "assistant", "content": [*parts, "f"]})
    assert message == {"role": "assistant", "content": "abcdef"}
    assert spans(weights) == [("content", 2, 3, 0), ("content", 3, 5, 2)]
    for join in (True, False):
        message, weights = read({"role": "assistant", "content": parts}, join_text_parts=join)
        assert message["content"] == [{"type": "text", "text": text} for text in ("ab", "c", "de")]
        assert spans(weights) == [("content.1.text", 0, 1, 0), ("content.2.text", 0, 2, 2)]


def test_ranges_of_a_whole_content_fall_to_its_parts_and_back():
    parts = [{"type": "text", "text": text} for text in ("ab", "", "cde", "f")]
    ranges = [{"begin": 1, "end": 4, "train": True}]
    message = {"role": "assistant", "content": parts, "train_ranges": ranges}
    _, weights = read(message)
    assert spans(weights) == [
        ("content.0.text", 0, 1, 0), ("content.0.text", 1, 2, 1), ("content.2.text", 0, 2, 1),
        ("content.2.text", 2, 3, 0), ("content.3.text", 0, 1, 0),
    ]  # fmt: skip
    joined, weights = normal(message)
    assert joined["content"] == "abcdef"
    painted = [None] * 6
    for _, begin, end, weight in spans(weights):
        painted[begin:end] = [weight] * (end - begin)
    assert painted == [0, 1, 1, 1, 0, 0]


def test_media_parts_keep_the_list():
    parts = [
        {"type": "image", "image": "a.png", "text": None, "train": False},
        {"type": "text", "text": "ab", "train": 1},
    ]
    message, weights = read({"role": "user", "content": parts})
    assert message["content"] == [
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": "ab"},
    ]
    assert spans(weights) == [("content.1.text", 0, 2, 1)]


@pytest.mark.parametrize(
    "kind", ["image", "image_url", "video", "audio_url", "input_audio", "file"]
)
def test_media_types(kind):
    assert read({"role": "user", "content": [{"type": kind, kind: "x"}]})[0]["content"] == [
        {"type": kind, kind: "x"}
    ]


def test_thinking_and_calls_among_the_parts():
    parts = [
        {"type": "reasoning", "value": "Hm.", "weight": 0.5},
        {"type": "thinking", "thinking": " So."},
        {"type": "text", "value": "Well.", "train": True},
        {"type": "tool_call", "value": '{"name": "add", "arguments": {}}'},
    ]
    message, weights = read({"role": "assistant", "content": parts})
    assert message == {
        "role": "assistant",
        "content": [{"type": "text", "text": "Well."}],
        "reasoning_content": "Hm. So.",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}],
    }
    assert spans(weights) == [("content.0.text", 0, 5, 1), ("reasoning_content", 0, 3, 0.5)]
    message, weights = normal({"role": "assistant", "content": parts})
    assert message["content"] == "Well."
    assert spans(weights) == [("content", 0, 5, 1), ("reasoning_content", 0, 3, 0.5)]


def test_thinking_in_parts_of_its_own():
    thinking = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "train": False}]
    message, weights = read(
        {"role": "assistant", "content": "c", "reasoning_content": thinking},
        thinking_key="thinking",
    )
    assert message == {"role": "assistant", "content": "c", "thinking": "ab"}
    assert spans(weights) == [("thinking", 1, 2, 0)]


def test_what_a_tool_returned_may_be_anything():
    for content in ({"sum": 1}, [1, 2], [{"sum": 1}]):
        assert read({"role": "tool", "content": content})[0]["content"] == content
    assert normal({"role": "tool", "content": [{"type": "text", "text": "1"}]})[0]["content"] == "1"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (3, "message 0, part 0, is int; expected an object"),
        ({"a": 1}, r'part 0, has no "type" \(its fields: a\)'),
        (
            {"type": "tool_use", "name": "add"},
            'part 0, is of type "tool_use"; expected text, .*messages of role tool',
        ),
        ({"type": "text"}, 'part 0, is of type "text" and has no text'),
        ({"type": "text", "text": "a", "weight": -1}, 'part 0, has "weight": -1'),
        ({"type": "tool_call", "value": "add()"}, "part 0: its tool call: not JSON"),
    ],
)
def test_parts_are_checked(part, message):
    with pytest.raises(ConversationError, match=message):
        read({"role": "user", "content": [part]})


@pytest.mark.parametrize(("opening", "closing"), TAGS)
def test_thinking_is_split(opening, closing):
    content = f"\n{opening}\nHm.\n{closing}\n\nWell. "
    message, _ = read({"role": "assistant", "content": content}, split_thinking=True)
    assert message == {"role": "assistant", "content": "Well. ", "reasoning_content": "Hm."}


@pytest.mark.parametrize(
    "content", ["Say <think>a</think>", "<think>never closed", "</think>a", "", "plain"]
)
def test_nothing_else_is_split(content):
    assert (
        read({"role": "assistant", "content": content}, split_thinking=True)[0]["content"]
        == content
    )
    assert split_thinking(content) is None


def test_users_and_separate_thinking_are_not_split():
    content = "<think>a</think>b"
    assert read({"role": "user", "content": content}, split_thinking=True)[0] == {
        "role": "user",
        "content": content,
    }
    message = {"role": "assistant", "content": content, "reasoning_content": "c"}
    assert read(message, split_thinking=True)[0] == message
    assert read({"role": "assistant", "content": content})[0]["content"] == content


def test_split_ranges_stay_sorted():
    ranges = [{"begin": 7, "end": 8, "train": True}, {"begin": 16, "end": 17, "train": True}]
    message = {"role": "assistant", "content": "<think>a</think>b", "train_ranges": ranges}
    _, weights = read(message, split_thinking=True)
    assert spans(weights) == [("content", 0, 1, 1), ("reasoning_content", 0, 1, 1)]


def test_ranges_over_a_call_are_refused():
    turn = {
        "from": "tool_call",
        "value": '{"name": "a"}',
        "train_ranges": [{"begin": 0, "end": 1, "train": True}],
    }
    with pytest.raises(ConversationError, match=r"message.*0.*ranges.*written"):
        read_conversation({"conversations": [turn]})


@settings(deadline=None)
@given(data=st.data(), spaces=st.lists(st.sampled_from(["", " ", "\n"]), min_size=4, max_size=4))
def test_ranges_move_with_their_characters(data, spaces):
    opening, closing = data.draw(st.sampled_from(TAGS))
    word = st.text("abc", max_size=4)
    content = f"{spaces[0]}{opening}{spaces[1]}{data.draw(word)}{spaces[2]}{closing}{spaces[3]}{data.draw(word)}"  # noqa: E501
    weights = data.draw(
        st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=len(content), max_size=len(content))
    )
    ranges = [
        Range(field="content", begin=at, end=at + 1, weight=weight)
        for at, weight in enumerate(weights)
    ]
    split = split_thinking(content)
    assert split is not None
    thought, answer = split
    moved = move_ranges(ranges, {"content": answer, "thinking": thought})
    # The slow twin: the weight of each character that is left, looked up where it stood.
    due = {("content", at - answer[0]): weights[at] for at in range(*answer)}
    due |= {("thinking", at - thought[0]): weights[at] for at in range(*thought)}
    assert {(one.field, one.begin): one.weight for one in moved} == due


def test_who_is_trained():
    user, reply = {"role": "user"}, {"role": "assistant"}
    trained = Range(field="content", begin=0, end=1, weight=1.0)
    masked = Range(field="content", begin=0, end=1, weight=0.0)
    assert will_train(reply, DEFAULT_WEIGHTS)
    assert not will_train(user, DEFAULT_WEIGHTS)
    assert will_train(user, DEFAULT_WEIGHTS, train_on_inputs=True)
    assert will_train(user, DEFAULT_WEIGHTS, ("user",))
    assert not will_train(reply, DEFAULT_WEIGHTS, ("user",))
    assert will_train(user, MessageWeights(train=True))
    assert will_train(user, MessageWeights(weight=0.5))
    assert will_train(user, MessageWeights(ranges=(trained,)))
    assert not will_train(user, MessageWeights(ranges=(masked,)))
    assert not will_train(reply, MessageWeights(train=False), train_on_inputs=True)
    assert not will_train(reply, MessageWeights(weight=0.0))


def test_messages_and_weights_go_together():
    with pytest.raises(ValueError, match="1 messages, but 0 message_weights"):
        Conversation(messages=({"role": "user", "content": ""},), message_weights=())
