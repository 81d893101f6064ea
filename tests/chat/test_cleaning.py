import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.chat.records.cleaning import CleaningSettings, Counts, clean, fit
from penstock.chat.records.conversation import DEFAULT_WEIGHTS, Conversation, MessageWeights
from penstock.core.errors import ConfigError, ConversationError

LETTERS = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def chat(roles, weights=None):
    """A letter a message; every content is as long as its place, from 1."""
    messages = tuple(
        {"role": LETTERS[role], "content": "x" * (at + 1)} for at, role in enumerate(roles)
    )
    return Conversation(
        messages=messages,
        message_weights=tuple(weights or [DEFAULT_WEIGHTS] * len(roles)),
        tools=({"type": "function"},),
        origin="c:1",
    )


def letters(conversation):
    return (
        None
        if conversation is None
        else "".join(message["role"][0] for message in conversation.messages)
    )


def length(conversation):
    return sum(len(message["content"]) for message in conversation.messages)


@pytest.mark.parametrize(
    ("roles", "left", "counts"),
    [
        ("sua", "sua", Counts(read=1)),
        ("suau", "sua", Counts(read=1, trimmed=1, trimmed_messages=1)),
        ("uatuu", "ua", Counts(read=1, trimmed=1, trimmed_messages=3)),
        ("a", "a", Counts(read=1)),
        ("", None, Counts(read=1, empty=1)),
        ("suu", None, Counts(read=1, empty=1)),
    ],
)
def test_trailing_turns_are_trimmed(roles, left, counts):
    kept, found = clean(chat(roles))
    assert letters(kept) == left
    assert found == counts
    if kept is not None:
        assert kept.tools == ({"type": "function"},)
        assert kept.origin == "c:1"


def test_a_trained_turn_is_not_trailing():
    assert letters(clean(chat("uau"), roles_to_train=("user",))[0]) == "uau"
    assert letters(clean(chat("uau"), train_on_inputs=True)[0]) == "uau"
    assert (
        letters(
            clean(
                chat(
                    "uauu",
                    [DEFAULT_WEIGHTS, DEFAULT_WEIGHTS, MessageWeights(train=True), DEFAULT_WEIGHTS],
                )
            )[0]
        )
        == "uau"
    )
    assert letters(clean(chat("uau"), CleaningSettings(trim_trailing=False))[0]) == "uau"


def test_nothing_to_train():
    masked = chat("uau", [DEFAULT_WEIGHTS, MessageWeights(train=False), DEFAULT_WEIGHTS])
    assert clean(masked) == (None, Counts(read=1, untrained=1))
    assert clean(chat("ua"), roles_to_train=())[1] == Counts(read=1, untrained=1)
    assert clean(chat("u"), CleaningSettings(trim_trailing=False))[1] == Counts(read=1, untrained=1)
    with pytest.raises(ConversationError, match=r"c:1.*nothing.*assistant.*check"):
        clean(chat("ua"), CleaningSettings(drop_untrained=False), roles_to_train=("tool",))


def test_too_long_is_an_error_a_drop_or_a_cut():
    long = chat("uauaua")  # 1 + 2 + 3 + 4 + 5 + 6 tokens
    assert fit(long, CleaningSettings(), length) == (long, Counts())
    assert fit(long, CleaningSettings(max_tokens=21), length) == (long, Counts())
    with pytest.raises(ConversationError, match=r"c:1: 21.*6.*most 20.*too_long"):
        fit(long, CleaningSettings(max_tokens=20), length)
    assert fit(long, CleaningSettings(max_tokens=20, too_long="drop"), length) == (
        None,
        Counts(too_long=1),
    )
    cut, counts = fit(long, CleaningSettings(max_tokens=20, too_long="truncate"), length)
    assert (letters(cut), counts) == ("uaua", Counts(truncated=1, truncated_messages=2))
    assert (
        letters(fit(long, CleaningSettings(max_tokens=9, too_long="truncate"), length)[0]) == "ua"
    )
    assert fit(long, CleaningSettings(max_tokens=2, too_long="truncate"), length) == (
        None,
        Counts(too_long=1),
    )


def test_a_cut_never_leaves_nothing_to_train():
    long = chat(
        "uaua", [DEFAULT_WEIGHTS, MessageWeights(train=False), DEFAULT_WEIGHTS, DEFAULT_WEIGHTS]
    )
    assert fit(long, CleaningSettings(max_tokens=5, too_long="truncate"), length) == (
        None,
        Counts(too_long=1),
    )


def test_lengths_of_turns_are_enough():
    ends = [4, 9, 12, 30]
    settings = CleaningSettings(max_tokens=12, too_long="truncate")
    cut, _ = fit(chat("uaua"), settings, lambda head: ends[len(head.messages) - 1])
    assert letters(cut) == "ua"


@settings(deadline=None)
@given(
    chats=st.lists(st.text("suat", max_size=6), max_size=8),
    limit=st.integers(2, 25),
    too_long=st.sampled_from(["drop", "truncate"]),
)
def test_counts_add_up(chats, limit, too_long):
    options = CleaningSettings(max_tokens=limit, too_long=too_long)
    total, kept, left_out = Counts(), 0, 0
    for roles in chats:
        conversation, counts = clean(chat(roles))
        total += counts
        if conversation is not None:
            conversation, counts = fit(conversation, options, length)
            total += counts
        if conversation is None:
            continue
        kept += 1
        left_out += len(roles) - len(conversation.messages)
        # The slow twin: the longest beginning that ends with the assistant and is short enough.
        heads = [roles[:end] for end in range(1, len(roles) + 1) if roles[end - 1] == "a"]
        assert letters(conversation) == max(
            (head for head in heads if length(chat(head)) <= limit), key=len
        )
    assert total.read == len(chats)
    assert total.kept == kept
    assert total.read == total.kept + total.empty + total.untrained + total.too_long
    assert left_out <= total.trimmed_messages + total.truncated_messages


def test_the_report():
    counts = Counts(
        read=9, empty=1, untrained=2, too_long=1, trimmed=3, trimmed_messages=4, truncated=1
    )
    assert counts.lines() == [
        "5 of 9 conversations kept",
        "3 trimmed: 4 trailing messages that no reply follows",
        "1 dropped: empty, or without any reply",
        "2 dropped: nothing to train",
        "1 dropped: too long",
        "1 truncated at a turn: 0 messages left out",
    ]
    assert Counts(read=2).lines() == ["2 of 2 conversations kept"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"too_long": "cut"}, 'too_long is "cut"; expected one of: error'),
        ({"max_tokens": 1}, "max_tokens must be >= 2"),
    ],
)
def test_settings_check_themselves(options, message):
    with pytest.raises(ConfigError, match=message):
        CleaningSettings(**options)
