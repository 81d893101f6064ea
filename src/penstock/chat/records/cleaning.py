"""Clean-up of conversations: whatever is shortened or dropped is counted.

Two steps, because lengths are known only after encoding:

1. `clean` trims trailing turns without a reply, then drops conversations that are empty or train
  nothing.
2. `fit` handles conversations that are too long: error, drop, or truncate between two turns, never
  inside one.

Each returns the `Counts` of one conversation; their sum is the report. Always `read = kept +
dropped`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Literal, final

from penstock.chat.records.conversation import Conversation, will_train
from penstock.core.errors import ConfigError, ConversationError

DROPPING = ("empty", "untrained", "too_long")
"""Rules that drop a conversation, named by their field of `Counts`."""
TooLong = Literal["error", "drop", "truncate"]
TOO_LONG: tuple[TooLong, ...] = ("error", "drop", "truncate")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers of conversations by what happened to them."""

    read: int = 0
    empty: int = 0
    """Dropped: no messages, or no reply to any of them."""
    untrained: int = 0
    """Dropped: neither the settings nor its own weights train any message."""
    too_long: int = 0
    """Dropped: longer than allowed, even if cut at the earliest turn."""
    trimmed: int = 0
    """Kept without trailing turns that no reply follows."""
    trimmed_messages: int = 0
    truncated: int = 0
    """Kept without their last turns."""
    truncated_messages: int = 0
    media: int = 0
    """Images, audio and video files removed from conversations that are kept."""

    @property
    def dropped(self) -> int:
        """Number of dropped conversations."""
        return sum(getattr(self, rule) for rule in DROPPING)

    @property
    def kept(self) -> int:
        """Number of kept conversations."""
        return self.read - self.dropped

    @property
    def of_dropped(self) -> "Counts":
        """Counts of a conversation that is dropped after all: only that it was read."""
        return Counts(read=self.read)

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            **{
                one.name: getattr(self, one.name) + getattr(other, one.name)
                for one in fields(Counts)
            }
        )

    def lines(self, examples: Mapping[str, str] = MappingProxyType({})) -> list[str]:
        """The report: one line for each rule that applied.

        Args:
            examples: Rule → origin of the first conversation that it dropped.
        """
        such = {rule: f", such as {origin}" for rule, origin in examples.items()}
        reported = [
            (
                self.trimmed,
                f"trimmed: {self.trimmed_messages:,} trailing messages that no reply follows",
            ),
            (self.empty, f"dropped: empty, or without any reply{such.get('empty', '')}"),
            (self.untrained, f"dropped: nothing to train{such.get('untrained', '')}"),
            (self.too_long, f"dropped: too long{such.get('too_long', '')}"),
            (self.truncated, f"truncated at a turn: {self.truncated_messages:,} messages left out"),
            (self.media, "images, audio or video files left out of conversations (media: drop)"),
        ]
        head = f"{self.kept:,} of {self.read:,} conversations kept"
        return [head, *(f"{count:,} {what}" for count, what in reported if count)]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CleaningSettings:
    """Which conversations are kept, and up to which length."""

    trim_trailing: bool = True
    """Remove trailing turns that no trained role answers; False keeps them as untrained context."""
    drop_untrained: bool = True
    """Drop conversations with nothing to train; False makes them an error."""
    max_tokens: int | None = None
    """Maximum length of a conversation in tokens; None: any length."""
    too_long: TooLong = "error"
    """Policy for longer ones: `error`, `drop`, or `truncate`, which keeps as many of the first
    turns as fit.
    """

    def __post_init__(self) -> None:
        if self.too_long not in TOO_LONG:
            raise ConfigError(
                f'too_long is "{self.too_long}"; expected one of: {", ".join(TOO_LONG)}'
            )
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ConfigError(
                f"max_tokens must be >= 2, for a token and its target; got {self.max_tokens}"
            )


_DEFAULT = CleaningSettings()
_READ, _EMPTY, _UNTRAINED = Counts(read=1), Counts(read=1, empty=1), Counts(read=1, untrained=1)


def clean(
    conversation: Conversation,
    settings: CleaningSettings = _DEFAULT,
    *,
    roles_to_train: tuple[str, ...] = ("assistant",),
    train_on_inputs: bool = False,
) -> tuple[Conversation | None, Counts]:
    """Trim a conversation, then drop it if it is empty or trains nothing.

    Args:
        conversation: As read.
        settings: Rules to apply.
        roles_to_train: Roles after mapping; their turns, and those of the assistant, are replies.
        train_on_inputs: Train every role; then no turn is trimmed.

    Returns:
        The conversation, or None if it is dropped; and its counts.

    Raises:
        ConversationError: There is nothing to train and `drop_untrained` is False.
    """
    if conversation.written:
        trained = any(piece.is_trained for piece in conversation.written)
        return _whole(conversation, settings, roles_to_train, is_trained=trained)
    end = (
        _end_of_replies(conversation, roles_to_train, train_on_inputs)
        if settings.trim_trailing
        else None
    )
    cut = 0 if end is None else len(conversation.messages) - end
    conversation = conversation.head(end) if cut and end is not None else conversation
    if not conversation.messages:
        return None, _EMPTY
    if _trains(conversation, roles_to_train, train_on_inputs):
        if not cut and not conversation.dropped_media:
            return conversation, _READ
        return conversation, replace(
            _READ, media=conversation.dropped_media, trimmed=int(cut > 0), trimmed_messages=cut
        )
    return _whole(conversation, settings, roles_to_train, is_trained=False)


def _whole(
    conversation: Conversation,
    settings: CleaningSettings,
    roles_to_train: tuple[str, ...],
    *,
    is_trained: bool,
) -> tuple[Conversation | None, Counts]:
    """A conversation that is kept or dropped as it is."""
    if is_trained:
        return conversation, _READ
    if settings.drop_untrained:
        return None, _UNTRAINED
    roles = dict.fromkeys(message["role"] for message in conversation.messages)
    raise ConversationError(
        f"{conversation.origin}: nothing to train: its roles are "
        f"{', '.join(roles) or 'none'}, and roles_to_train has "
        f"{', '.join(roles_to_train) or 'none'}; check roles_to_train and the record's flags"
    )


def fit(
    conversation: Conversation,
    settings: CleaningSettings,
    length_of: Callable[[Conversation], int],
    *,
    roles_to_train: tuple[str, ...] = ("assistant",),
    train_on_inputs: bool = False,
) -> tuple[Conversation | None, Counts]:
    """Limit a cleaned conversation to `max_tokens`; its counts have `read=0`, because `clean`
    counted it.

    Args:
        conversation: As `clean` returned it.
        settings: The limit, and what happens to longer ones.
        length_of: Number of tokens of a conversation. If the ends of the turns are known, they are
            enough: `lambda head: ends[len(head.messages) - 1]`. Truncation calls it for every turn
            from the last to the first, because a template that rewrites earlier turns may make a
            shorter conversation longer.
        roles_to_train: As for `clean`.
        train_on_inputs: As for `clean`.

    Raises:
        ConversationError: It is too long and `too_long` is `error`.
    """
    limit = settings.max_tokens
    if limit is None or (length := length_of(conversation)) <= limit:
        return conversation, Counts()
    if settings.too_long == "error":
        raise ConversationError(
            f"{conversation.origin}: {length:,} tokens in {len(conversation.messages)} messages; "
            f"expected at most {limit:,}; raise max_tokens, or set too_long to drop or truncate"
        )
    if settings.too_long == "truncate":
        for end in range(len(conversation.messages) - 1, 0, -1):
            if not _is_reply(conversation, end - 1, roles_to_train, train_on_inputs):
                continue
            head = conversation.head(end)
            if _trains(head, roles_to_train, train_on_inputs) and length_of(head) <= limit:
                return head, Counts(
                    truncated=1, truncated_messages=len(conversation.messages) - end
                )
    return None, Counts(too_long=1)


def _is_reply(
    conversation: Conversation, index: int, roles_to_train: tuple[str, ...], train_on_inputs: bool
) -> bool:
    """Whether a conversation may end with this message: it is the assistant's, or it is trained."""
    message = conversation.messages[index]
    return message["role"] == "assistant" or will_train(
        message, conversation.message_weights[index], roles_to_train, train_on_inputs
    )


def _end_of_replies(
    conversation: Conversation, roles_to_train: tuple[str, ...], train_on_inputs: bool
) -> int:
    """Number of messages up to and including the last reply."""
    end = len(conversation.messages)
    while end and not _is_reply(conversation, end - 1, roles_to_train, train_on_inputs):
        end -= 1
    return end


def _trains(
    conversation: Conversation, roles_to_train: tuple[str, ...], train_on_inputs: bool
) -> bool:
    return any(
        will_train(message, weights, roles_to_train, train_on_inputs)
        for message, weights in zip(
            conversation.messages, conversation.message_weights, strict=True
        )
    )
