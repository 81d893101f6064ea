"""Clean-up of conversations, with counts that add up: nothing is shortened or dropped unless a number says so.

Two steps, because lengths are known only once a conversation is encoded:

1. `clean`: trailing turns that no reply follows are trimmed; then a conversation that is empty, or with nothing in it
   to train, is dropped.
2. `fit`: one that is too long is an error, dropped, or truncated at a turn, so that no turn is ever cut in two.

Each gives a `Counts` of one conversation; their sum is the report. `read = kept + dropped`, always.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Literal, final

from penstock.chat.conversation import Conversation, will_train
from penstock.errors import ConfigError, ConversationError

DROPPING = ("empty", "untrained", "too_long")
"""The rules that drop a conversation, by the field of `Counts` that counts them."""
TooLong = Literal["error", "drop", "truncate"]
TOO_LONG: tuple[TooLong, ...] = ("error", "drop", "truncate")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What became of some conversations."""

    read: int = 0
    empty: int = 0
    """Dropped: no messages, or no reply to any of them."""

    untrained: int = 0
    """Dropped: no message that the settings or its own marks train."""

    too_long: int = 0
    """Dropped: longer than allowed, also when cut at the earliest turn."""

    trimmed: int = 0
    """Kept or dropped, but first freed of trailing turns without a reply."""

    trimmed_messages: int = 0
    truncated: int = 0
    """Kept, without the turns that were too much."""

    truncated_messages: int = 0
    media: int = 0
    """Images, audio and video that were left out of conversations, kept or dropped."""

    @property
    def dropped(self) -> int:
        """Conversations that are gone."""
        return sum(getattr(self, rule) for rule in DROPPING)

    @property
    def kept(self) -> int:
        """Conversations that go on."""
        return self.read - self.dropped

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(Counts)})

    def lines(self, examples: Mapping[str, str] = MappingProxyType({})) -> list[str]:
        """The report, one line a rule that did something; `examples`: rule that dropped some → where the first was."""
        such = {rule: f", such as {origin}" for rule, origin in examples.items()}
        told = [
            (self.trimmed, f"trimmed: {self.trimmed_messages:,} trailing messages that no reply follows"),
            (self.empty, f"dropped: empty, or without any reply{such.get('empty', '')}"),
            (self.untrained, f"dropped: nothing to train{such.get('untrained', '')}"),
            (self.too_long, f"dropped: too long{such.get('too_long', '')}"),
            (self.truncated, f"truncated at a turn: {self.truncated_messages:,} messages left out"),
            (self.media, "images, audio or video files left out of conversations (media: drop)"),
        ]
        head = f"{self.kept:,} of {self.read:,} conversations kept"
        return [head, *(f"{count:,} {what}" for count, what in told if count)]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CleaningSettings:
    """Which conversations go on, and in what length."""

    trim_trailing: bool = True
    """Leave out trailing turns that no trained role answers; False keeps them, as context that trains nothing."""

    drop_untrained: bool = True
    """Drop conversations with nothing to train; False makes them an error."""

    max_tokens: int | None = None
    """The longest conversation, in tokens; None: any length."""

    too_long: TooLong = "error"
    """What becomes of a longer one: `error`, `drop`, or `truncate`, which keeps the turns from the first that fit."""

    def __post_init__(self) -> None:
        if self.too_long not in TOO_LONG:
            raise ConfigError(f'too_long is "{self.too_long}"; due one of: {", ".join(TOO_LONG)}')
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ConfigError(f"max_tokens must be >= 2, for a token and its target; got {self.max_tokens}")


_DEFAULT = CleaningSettings()
_READ, _EMPTY, _UNTRAINED = Counts(read=1), Counts(read=1, empty=1), Counts(read=1, untrained=1)


def clean(
    conversation: Conversation,
    settings: CleaningSettings = _DEFAULT,
    *,
    roles_to_train: tuple[str, ...] = ("assistant",),
    train_on_inputs: bool = False,
) -> tuple[Conversation | None, Counts]:
    """Trim, then drop what is empty or trains nothing.

    Args:
        conversation: As read.
        settings: Which rules hold.
        roles_to_train: Roles after mapping; a turn of one of them, or of the assistant, is a reply.
        train_on_inputs: Whether every role is trained; then nothing is a trailing turn.

    Returns:
        The conversation, None where it is dropped; and the counts of this one conversation.

    Raises:
        ConversationError: nothing to train, and `drop_untrained` is off.
    """
    end = _end_of_replies(conversation, roles_to_train, train_on_inputs) if settings.trim_trailing else None
    counts = replace(_READ, media=conversation.dropped_media) if conversation.dropped_media else _READ
    if end is not None and end < len(conversation.messages):
        counts += Counts(trimmed=1, trimmed_messages=len(conversation.messages) - end)
        conversation = conversation.head(end)
    if not conversation.messages:
        return None, _EMPTY if counts is _READ else counts + Counts(empty=1)
    if _trains(conversation, roles_to_train, train_on_inputs):
        return conversation, counts
    if not settings.drop_untrained:
        raise ConversationError(
            f"{conversation.origin}: nothing to train: roles {', '.join(_roles(conversation))}, of which "
            f"roles_to_train has {', '.join(roles_to_train) or 'none'}; check roles_to_train and the record's flags"
        )
    return None, _UNTRAINED if counts is _READ else counts + Counts(untrained=1)


def fit(
    conversation: Conversation,
    settings: CleaningSettings,
    length_of: Callable[[Conversation], int],
    *,
    roles_to_train: tuple[str, ...] = ("assistant",),
    train_on_inputs: bool = False,
) -> tuple[Conversation | None, Counts]:
    """Hold a cleaned conversation to `max_tokens`; its counts have `read=0`, since `clean` counted it.

    Args:
        conversation: As `clean` gave it.
        settings: The length, and what becomes of a longer one.
        length_of: Tokens of a conversation. Where the ends of the turns are known, a look at them is enough:
            `lambda head: ends[len(head.messages) - 1]`. Truncating calls it once a turn, from the longest down, since
            templates that rewrite earlier turns make lengths that need not fall in step.
        roles_to_train: As for `clean`.
        train_on_inputs: As for `clean`.

    Raises:
        ConversationError: it is too long, and `too_long` is `error`.
    """
    limit = settings.max_tokens
    if limit is None or (length := length_of(conversation)) <= limit:
        return conversation, Counts()
    if settings.too_long == "error":
        raise ConversationError(
            f"{conversation.origin}: {length:,} tokens in {len(conversation.messages)} messages; "
            f"due at most {limit:,}; raise the limit, or set too_long: drop or truncate"
        )
    if settings.too_long == "truncate":
        for end in range(len(conversation.messages) - 1, 0, -1):
            if not _is_reply(conversation, end - 1, roles_to_train, train_on_inputs):
                continue
            head = conversation.head(end)
            if _trains(head, roles_to_train, train_on_inputs) and length_of(head) <= limit:
                return head, Counts(truncated=1, truncated_messages=len(conversation.messages) - end)
    return None, Counts(too_long=1)


def _is_reply(conversation: Conversation, index: int, roles_to_train: tuple[str, ...], train_on_inputs: bool) -> bool:
    """Whether a conversation may end here: the assistant has spoken, or this turn is trained."""
    message = conversation.messages[index]
    return message["role"] == "assistant" or will_train(
        message, conversation.marks[index], roles_to_train, train_on_inputs
    )


def _end_of_replies(conversation: Conversation, roles_to_train: tuple[str, ...], train_on_inputs: bool) -> int:
    """Messages up to and with the last reply."""
    end = len(conversation.messages)
    while end and not _is_reply(conversation, end - 1, roles_to_train, train_on_inputs):
        end -= 1
    return end


def _trains(conversation: Conversation, roles_to_train: tuple[str, ...], train_on_inputs: bool) -> bool:
    return any(
        will_train(message, marks, roles_to_train, train_on_inputs)
        for message, marks in zip(conversation.messages, conversation.marks, strict=True)
    )


def _roles(conversation: Conversation) -> list[str]:
    return list(dict.fromkeys(message["role"] for message in conversation.messages))
