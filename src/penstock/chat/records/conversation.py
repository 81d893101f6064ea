"""Conversations: messages as a chat template sees them, and what the record says about training
each.

Messages contain no training keys, so a template renders them like any others. `MessageWeights` hold
those keys in one form, whatever the record calls them. `layouts.py` reads both, `cleaning.py` trims
them, and `masks.py` turns them into loss weights.

| key | in | meaning |
|---|---|---|
| `train`, `training`, `loss`, `trainable`, `loss_mask` | message, part | true or false, 1 or 0 |
| `masked` | message, part | the opposite: true is not trained |
| `weight`, `loss_weight`, `loss_scale` | message, part | loss weight, 0 or more |
| `train_detail`, `training_detail`, `train_ranges` | message | list of ranges |

A range is `{begin_offset, end_offset, train}`, as in axolotl, with an **inclusive** end; or
`{begin, end, weight}` (or `train`), half-open. Either may name a `field` other than `content`.

In a message with such a list, characters of that text outside all ranges weigh 0. A flag that is
false overrides the list. The weight of a message multiplies those of its parts and ranges.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, final

from penstock.core.errors import ConversationError
from penstock.core.json_values import JsonMapping, JsonObject

Form = Literal[
    "empty_content",
    "null_content",
    "decode_arguments",
    "encode_arguments",
    "encode_values",
    "encode_results",
    "join_text_parts",
    "wrap_text",
]
"""Changes that messages may need before a template can render them; see `forms.py`."""

FLAG_KEYS = ("train", "training", "loss", "trainable", "loss_mask")
MASKED = "masked"
"""A flag that says the opposite."""
WEIGHT_KEYS = ("weight", "loss_weight", "loss_scale")
RECORD_MASK = "loss_mask"
"""Field of a record with 1 or 0 for each of its messages."""
DETAIL_KEYS = ("train_detail", "training_detail", "train_ranges")
TRAINING_KEYS = frozenset((*FLAG_KEYS, MASKED, *WEIGHT_KEYS, *DETAIL_KEYS))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Characters [begin, end) of one text of a message, and their loss weight."""

    field: str
    """Which text: `content`, `reasoning_content` (or the configured thinking key), or
    `content.2.text` for a part.
    """
    begin: int
    end: int
    weight: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MessageWeights:
    """Training flags of one message in its record; empty without any.

    The weights of `ranges` are final for their characters. For all other characters, and for what
    the template writes in this turn, `train` and `weight` decide: the message is trained at
    `weight` (1 where None), unless `train` is False or `weight` is 0. Where both are None, the role
    decides. With `train=False` there are no ranges.
    """

    train: bool | None = None
    weight: float | None = None
    ranges: tuple[Range, ...] = ()
    """Sorted by field and begin; ranges of a field do not overlap."""

    @property
    def verdict(self) -> bool | None:
        """Whether the record trains this message outside its ranges; None: the role decides."""
        if self.train is None and self.weight is None:
            return None
        return self.train is not False and self.weight != 0


DEFAULT_WEIGHTS = MessageWeights()
"""Of every message that has no training keys: one shared object, so that plain records cost
nothing.
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of a document that is written out."""

    text: str | None = None
    """As text; None: as ids."""
    ids: tuple[int, ...] = ()
    weights: tuple[float, ...] = (1.0,)
    """One for each id, or one for all."""

    @property
    def is_trained(self) -> bool:
        """Whether any of it is."""
        return any(self.weights)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One conversation, ready for a chat template."""

    messages: tuple[JsonObject, ...]
    """As in the record: `role` (after mapping), `content` (a text, a list of parts, or None), and
    where present `reasoning_content`, `tool_calls`, `name` and all other fields, without training
    keys and other nulls.
    """
    message_weights: tuple[MessageWeights, ...]
    """One a message."""
    tools: tuple[JsonObject, ...] | None = None
    """Each `{"type": "function", "function": {"name", "description", "parameters"}}`, as templates
    expect them.
    """
    variables: JsonMapping = field(default_factory=dict)
    """Template variables of this record, from its `chat_template_kwargs`."""
    attachments: JsonMapping = field(default_factory=dict)
    """Fields of the record, next to its messages, that hold images, audio or video; unchanged."""
    dropped_media: int = 0
    """Number of images, audio and video files that the settings removed."""
    written: tuple[Piece, ...] = ()
    """Text or tokens that are written out and need no template; then there are no messages."""
    unread: tuple[str, ...] = ()
    """Fields of the record that nothing reads."""
    origin: str = ""
    """`file:line` of the record, for error messages."""
    forms: tuple[Form, ...] = ()
    """Changes to try if the template cannot render the messages as they are."""
    changed: tuple[Form, ...] = ()
    """Changes that were made."""

    def __post_init__(self) -> None:
        if len(self.messages) != len(self.message_weights):
            raise ValueError(
                f"{len(self.messages)} messages, but {len(self.message_weights)} message_weights"
            )

    def head(self, length: int) -> "Conversation":
        """The conversation up to its first `length` messages."""
        return replace(
            self, messages=self.messages[:length], message_weights=self.message_weights[:length]
        )


def will_train(
    message: JsonMapping,
    weights: MessageWeights,
    roles_to_train: Collection[str] = ("assistant",),
    train_on_inputs: bool = False,
) -> bool:
    """Whether any part of this message is trained: the record's ranges and flags decide first, then
    the role.
    """
    if any(part.weight > 0 for part in weights.ranges):
        return True
    verdict = weights.verdict
    if verdict is not None:
        return verdict
    return train_on_inputs or message["role"] in roles_to_train


def read_flag(item: JsonMapping, where: str, keys: Iterable[str] = FLAG_KEYS) -> bool | None:
    """Flag of the item under `keys` (true, false, 1 or 0); None without any.

    Raises:
        ConversationError: A value is something else, or two of them say the opposite.
    """
    found: dict[str, bool] = {}
    for key in (*keys, MASKED) if keys is FLAG_KEYS else keys:
        value = item.get(key)
        if value is None:
            continue
        if value not in (0, 1) or isinstance(value, str):
            raise ConversationError(
                f'{where} has "{key}": {value!r}; expected true or false; put fractions into '
                '"weight"'
            )
        found[key] = bool(value) != (key == MASKED)
    if len(set(found.values())) > 1:
        said = " and ".join(f'"{key}": {item[key]!r}' for key in found)
        raise ConversationError(f"{where} has {said}, which say the opposite; remove one")
    return next(iter(found.values()), None)


def read_record_mask(
    mask: Sequence[object], weights: Sequence[MessageWeights], origin: str
) -> list[MessageWeights]:
    """Weights of messages with those that a record gives in one list, 1 or 0 for each message.

    Raises:
        ConversationError: The list has another length, or something else than 0 and 1.
    """
    if len(mask) != len(weights) or any(one not in (0, 1) or isinstance(one, str) for one in mask):
        raise ConversationError(
            f'{origin}: "{RECORD_MASK}" is {mask!r:.60}; expected 1 or 0 for each of '
            f"{len(weights)} messages"
        )
    return [
        own if one else MessageWeights(train=False, weight=own.weight)
        for own, one in zip(weights, mask, strict=True)
    ]


def read_weight(item: JsonMapping, where: str) -> float | None:
    """Weight of the item, 0 or more; None where it has none."""
    for key in WEIGHT_KEYS:
        value = item.get(key)
        if value is None:
            continue
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise ConversationError(f'{where} has "{key}": {value!r}; expected a number, 0 or more')
        return float(value)
    return None


def part_weight(part: JsonMapping, where: str) -> float | None:
    """Loss weight of a part of a content; None where it has none."""
    train, weight = read_flag(part, where), read_weight(part, where)
    if train is None:
        return weight
    return (1.0 if weight is None else weight) if train else 0.0


def read_message_weights(
    item: JsonMapping,
    texts: Mapping[str, str],
    ranges: Iterable[Range],
    where: str,
    flag_field: str | None = None,
    detail_field: str | None = None,
) -> MessageWeights:
    """Read the training keys of one message.

    Args:
        item: The message in the record.
        texts: Range field → text; ranges are checked against them.
        ranges: Ranges that come from its parts.
        where: File, line and message, for errors.
        flag_field: The only field that is read as a flag; None: any of `FLAG_KEYS`.
        detail_field: The only field that is read as a list of ranges; None: all of `DETAIL_KEYS`.

    Raises:
        ConversationError: A flag, weight or range is out of bounds, or ranges overlap.
    """
    train = read_flag(item, where, (flag_field,) if flag_field else FLAG_KEYS)
    weight = read_weight(item, where)
    found = list(ranges)
    for key in (detail_field,) if detail_field else DETAIL_KEYS:
        if item.get(key) is not None:
            found += _read_details(item[key], texts, f'{where}, "{key}"')
    if train is None and weight is None and not found:
        return DEFAULT_WEIGHTS
    if train is False:
        return MessageWeights(train=False, weight=weight)
    return MessageWeights(
        train=train,
        weight=weight,
        ranges=_in_order(found, 1.0 if weight is None else weight, where),
    )


def _read_details(details: object, texts: Mapping[str, str], where: str) -> list[Range]:
    if not isinstance(details, list | tuple):
        raise ConversationError(f"{where} is {type(details).__name__}; expected a list of ranges")
    ranges = [
        _read_detail(detail, texts, f"{where}[{index}]") for index, detail in enumerate(details)
    ]
    for name in dict.fromkeys(one.field for one in ranges):
        ranges += _gaps([one for one in ranges if one.field == name], name, len(texts[name]))
    return ranges


def _read_detail(detail: object, texts: Mapping[str, str], where: str) -> Range:
    if not isinstance(detail, Mapping):
        raise ConversationError(
            f"{where} is {type(detail).__name__}; expected an object with begin and end"
        )
    name = detail.get("field", "content")
    if name not in texts:
        raise ConversationError(
            f'{where} names field "{name}"; this message has: {", ".join(texts) or "no text"}'
        )
    inclusive = "end_offset" in detail
    begin, end = (
        detail.get(key)
        for key in (("begin_offset", "end_offset") if inclusive else ("begin", "end"))
    )
    weight = part_weight(detail, where)
    if type(begin) is not int or type(end) is not int or weight is None:
        raise ConversationError(
            f"{where} has {dict(detail)!r}; expected begin_offset, end_offset and train, or "
            "begin, end and weight"
        )
    length = len(texts[name])
    if not 0 <= begin < end + inclusive <= length:
        raise ConversationError(
            f"{where} goes from {begin} to {end} "
            f"({'inclusive' if inclusive else 'half-open'}); expected 0 ≤ begin, at least one "
            f"character, and no more than the {length} that {name} has"
        )
    return Range(field=name, begin=begin, end=end + inclusive, weight=weight)


def _gaps(ranges: list[Range], name: str, length: int) -> list[Range]:
    """The characters outside all ranges, at weight 0."""
    gaps, at = [], 0
    for one in sorted(ranges, key=lambda one: one.begin):
        if one.begin > at:
            gaps.append(Range(field=name, begin=at, end=one.begin, weight=0.0))
        at = max(at, one.end)
    return gaps if at >= length else [*gaps, Range(field=name, begin=at, end=length, weight=0.0)]


def _in_order(ranges: list[Range], factor: float, where: str) -> tuple[Range, ...]:
    ordered = sorted(ranges, key=lambda one: (one.field, one.begin))
    for left, right in pairwise(ordered):
        if left.field == right.field and right.begin < left.end:
            raise ConversationError(
                f"{where} has ranges [{left.begin}, {left.end}) and [{right.begin}, "
                f"{right.end}) of {left.field}, which overlap; correct one of them"
            )
    return tuple(
        Range(field=one.field, begin=one.begin, end=one.end, weight=one.weight * factor)
        for one in ordered
    )
