"""Training keys of messages and parts, in every spelling that records use, become `Marks`.

| key | of | meaning |
|---|---|---|
| `train`, `training`, `loss` | message, part | true or false |
| `weight`, `loss_weight` | message, part | how much it counts, 0 or more |
| `train_detail`, `training_detail`, `train_ranges` | message | list of ranges |

A range is `{begin_offset, end_offset, train}`, axolotl's, with the end **inclusive**; or `{begin, end, weight}` (or
`train`), half-open; either with a `field` where it is not `content`.

A message with such a list trains only what the list says: the characters of that text that no range covers count 0.
A flag that is false beats the list, and the weight of a message multiplies those of its parts and ranges.
"""

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from penstock.chat.conversation import UNMARKED, Marks, Range
from penstock.errors import ConversationError

FLAG_KEYS = ("train", "training", "loss")
WEIGHT_KEYS = ("weight", "loss_weight")
DETAIL_KEYS = ("train_detail", "training_detail", "train_ranges")
TRAINING_KEYS = frozenset((*FLAG_KEYS, *WEIGHT_KEYS, *DETAIL_KEYS))


def read_flag(item: Mapping[str, Any], where: str, keys: Iterable[str] = FLAG_KEYS) -> bool | None:
    """The first of `keys` that the item has: true, false, 1 or 0; None where it has none."""
    for key in keys:
        value = item.get(key)
        if value is None:
            continue
        if value not in (0, 1) or isinstance(value, str):
            raise ConversationError(f'{where} has "{key}": {value!r}; due true or false; fractions go into "weight"')
        return bool(value)
    return None


def read_weight(item: Mapping[str, Any], where: str) -> float | None:
    """The item's weight, 0 or more; None where it has none."""
    for key in WEIGHT_KEYS:
        value = item.get(key)
        if value is None:
            continue
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise ConversationError(f'{where} has "{key}": {value!r}; due a number, 0 or more')
        return float(value)
    return None


def part_weight(part: Mapping[str, Any], where: str) -> float | None:
    """How much a part of a content counts, None where it does not say."""
    train, weight = read_flag(part, where), read_weight(part, where)
    if train is None:
        return weight
    return (1.0 if weight is None else weight) if train else 0.0


def read_marks(
    item: Mapping[str, Any],
    texts: Mapping[str, str],
    ranges: Iterable[Range],
    where: str,
    flag_field: str | None = None,
    detail_field: str | None = None,
) -> Marks:
    """The marks of one message.

    Args:
        item: The message as the record has it.
        texts: Its texts by range field, for the checks of ranges.
        ranges: Those that its parts gave.
        where: File, line and message, for errors.
        flag_field: The configured flag; then no other flag is looked at.
        detail_field: The configured list of ranges; then no other is looked at.

    Raises:
        ConversationError: a flag, weight or range is out of bounds, or ranges overlap.
    """
    train = read_flag(item, where, (flag_field,) if flag_field else FLAG_KEYS)
    weight = read_weight(item, where)
    found = list(ranges)
    for key in (detail_field,) if detail_field else DETAIL_KEYS:
        if item.get(key) is not None:
            found += _read_details(item[key], texts, f'{where}, "{key}"')
    if train is None and weight is None and not found:
        return UNMARKED
    if train is False:
        return Marks(train=False, weight=weight)
    return Marks(train=train, weight=weight, ranges=_in_order(found, 1.0 if weight is None else weight, where))


def _read_details(details: Any, texts: Mapping[str, str], where: str) -> list[Range]:
    if not isinstance(details, list | tuple):
        raise ConversationError(f"{where} is {type(details).__name__}; due a list of ranges")
    ranges = [_read_detail(detail, texts, f"{where}[{index}]") for index, detail in enumerate(details)]
    for name in dict.fromkeys(one.field for one in ranges):
        ranges += _gaps([one for one in ranges if one.field == name], name, len(texts[name]))
    return ranges


def _read_detail(detail: Any, texts: Mapping[str, str], where: str) -> Range:
    if not isinstance(detail, Mapping):
        raise ConversationError(f"{where} is {type(detail).__name__}; due an object with begin and end")
    name = detail.get("field", "content")
    if name not in texts:
        raise ConversationError(f'{where} names field "{name}"; this message has: {", ".join(texts) or "no text"}')
    inclusive = "end_offset" in detail
    begin, end = (detail.get(key) for key in (("begin_offset", "end_offset") if inclusive else ("begin", "end")))
    weight = part_weight(detail, where)
    if type(begin) is not int or type(end) is not int or weight is None:
        raise ConversationError(
            f"{where} has {dict(detail)!r}; due begin_offset, end_offset and train, or begin, end and weight"
        )
    length = len(texts[name])
    if not 0 <= begin < end + inclusive <= length:
        raise ConversationError(
            f"{where} goes from {begin} to {end} ({'inclusive' if inclusive else 'half-open'}); "
            f"due 0 ≤ begin, at least one character, and no more than the {length} that {name} has"
        )
    return Range(field=name, begin=begin, end=end + inclusive, weight=weight)


def _gaps(ranges: list[Range], name: str, length: int) -> list[Range]:
    """What no range covers, at weight 0."""
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
                f"{where} has ranges [{left.begin}, {left.end}) and [{right.begin}, {right.end}) of {left.field}, "
                "which overlap; due ranges apart"
            )
    return tuple(Range(field=one.field, begin=one.begin, end=one.end, weight=one.weight * factor) for one in ordered)
