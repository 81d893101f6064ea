"""Conversations: messages as a chat template sees them, and beside them what the record says about training each.

Messages hold no training keys, so a template renders what it would render for anybody; `Marks` hold those keys in one
form, whatever the record called them. Both are read by `layouts.py`, trimmed by `cleaning.py`, and become loss weights
in `masks.py`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

Form = Literal["empty_content", "decode_arguments", "join_text_parts"]
"""What may be changed of messages for a template that fails on what the record has; see `forms.py`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Characters [begin, end) of one text of a message, and how much they count."""

    field: str
    """Which text: `content`, `reasoning_content` (or the configured thinking key), or `content.2.text` for a part."""

    begin: int
    end: int
    weight: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What a record says about training one message; all empty where it says nothing.

    `ranges` speak first, for their characters; their weights are final. For all other characters, and for what the
    template writes in this turn, `train` and `weight` speak, where given: `train=False` or `weight=0` means no,
    anything else yes, at `weight` (1 where None). Where neither is given, the role decides. With `train=False` there
    are no ranges.
    """

    train: bool | None = None
    weight: float | None = None
    ranges: tuple[Range, ...] = ()
    """Sorted by field and begin, not overlapping within a field."""

    @property
    def verdict(self) -> bool | None:
        """Whether the record wants this message trained apart from its ranges; None where it leaves it to the role."""
        if self.train is None and self.weight is None:
            return None
        return self.train is not False and self.weight != 0


UNMARKED = Marks()
"""Marks of a message about which the record says nothing; one shared object, so that plain records cost nothing."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One conversation, ready for a chat template."""

    messages: tuple[dict[str, Any], ...]
    """As the record has them: `role` (after mapping), `content` (a text, a list of parts, or None), and where present
    `reasoning_content`, `tool_calls`, `name` and whatever else the message holds, other nulls and training keys left
    out."""

    marks: tuple[Marks, ...]
    """One a message."""

    tools: tuple[dict[str, Any], ...] | None = None
    """Each `{"type": "function", "function": {"name", "description", "parameters"}}`, as templates expect them."""

    variables: Mapping[str, Any] = field(default_factory=dict)
    """More template variables of this record, from its `chat_template_kwargs`."""

    attachments: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the record, next to its messages, that hold images, audio or video, as they are."""

    dropped_media: int = 0
    """Images, audio and video that were left out, because the settings said so."""

    origin: str = ""
    """`file:line` of the record, for messages of errors."""

    forms: tuple[Form, ...] = ()
    """What may be changed of the messages where a template fails on them as they are."""

    changed: tuple[Form, ...] = ()
    """What has been changed so."""

    def __post_init__(self) -> None:
        if len(self.messages) != len(self.marks):
            raise ValueError(f"{len(self.messages)} messages need as many marks, got {len(self.marks)}")

    def head(self, length: int) -> "Conversation":
        """The conversation of the first `length` messages."""
        return replace(self, messages=self.messages[:length], marks=self.marks[:length])


def will_train(
    message: Mapping[str, Any],
    marks: Marks,
    roles_to_train: Collection[str] = ("assistant",),
    train_on_inputs: bool = False,
) -> bool:
    """Whether anything of this message is to be trained: the record's ranges and flags first, then the role."""
    if any(part.weight > 0 for part in marks.ranges):
        return True
    verdict = marks.verdict
    if verdict is not None:
        return verdict
    return train_on_inputs or message["role"] in roles_to_train
