"""Records that are written out: texts with the template's own markers, or token ids. No template
sees them.

| layout | fields |
|---|---|
| `segments` | `segments`: a list of `{label, text}`, as axolotl's `input_output`; those with label true are trained |
| `tokens` | `input_ids`; `labels`: the same ids, −100 where a token is not trained; or `loss_mask`, a number a token |

Segments are encoded one by one, and control text in them becomes control tokens. Token ids are
taken as they are.
"""  # noqa: E501

from collections.abc import Mapping

from penstock.chat.records.conversation import Piece, read_flag
from penstock.core.errors import ConversationError
from penstock.core.json_values import JsonMapping

SEGMENTS, TOKENS = "segments", "input_ids"
_IGNORED = -100


def is_segments(record: JsonMapping) -> bool:
    """Whether a record has segments of text."""
    items = record.get(SEGMENTS)
    return (
        isinstance(items, list | tuple)
        and bool(items)
        and isinstance(items[0], Mapping)
        and "text" in items[0]
    )


def is_tokens(record: JsonMapping) -> bool:
    """Whether a record has token ids."""
    items = record.get(TOKENS)
    return isinstance(items, list | tuple) and bool(items) and type(items[0]) is int


def read_segments(record: JsonMapping, origin: str) -> tuple[Piece, ...]:
    """The segments of a record.

    Raises:
        ConversationError: One has no text, or a label that is neither true nor false.
    """
    pieces = []
    if not is_segments(record):
        raise ConversationError(
            f'{origin}: "{SEGMENTS}" is {record.get(SEGMENTS)!r:.60}; expected a list of objects'
        )
    for place, item in enumerate(record[SEGMENTS]):
        where = f"{origin}: segment {place}"
        if not isinstance(item, Mapping) or not isinstance(item.get("text"), str):
            raise ConversationError(
                f'{where} is {item!r:.60}; expected {{"label": true, "text": …}}'
            )
        label = read_flag(item, where, ("label",))
        pieces.append(Piece(text=item["text"], weights=(float(label is not False),)))
    return tuple(pieces)


def read_tokens(record: JsonMapping, origin: str) -> tuple[Piece, ...]:
    """The token ids of a record with their weights; all count in full where it has neither labels
    nor a mask.

    Raises:
        ConversationError: Lists differ in length, or a label is neither the id at its place nor
            −100.
    """
    ids = record.get(TOKENS)
    if (
        not isinstance(ids, list | tuple)
        or not ids
        or not all(type(one) is int and one >= 0 for one in ids)
    ):
        raise ConversationError(
            f'{origin}: "{TOKENS}" is {ids!r:.60}; expected a list of token ids'
        )
    lists = {
        name: record[name]
        for name in ("labels", "loss_mask", "attention_mask")
        if record.get(name) is not None
    }
    for name, values in lists.items():
        if not isinstance(values, list | tuple) or len(values) != len(ids):
            size = len(values) if isinstance(values, list | tuple) else repr(values)[:40]
            raise ConversationError(
                f'{origin}: "{name}" has {size}; expected one for each of {len(ids)} input_ids'
            )
    weights = [1.0] * len(ids)
    if "labels" in lists:
        weights = [
            _label_weight(*pair, place, origin)
            for place, pair in enumerate(zip(ids, lists["labels"], strict=True))
        ]
    if "loss_mask" in lists:
        weights = [
            own * _mask_weight(one, origin)
            for own, one in zip(weights, lists["loss_mask"], strict=True)
        ]
    shown = lists.get("attention_mask", [1] * len(ids))  # 0 is padding
    kept = [pair for pair, one in zip(zip(ids, weights, strict=True), shown, strict=True) if one]
    if not kept:
        raise ConversationError(f'{origin}: "attention_mask" hides all tokens')
    return (
        Piece(ids=tuple(token for token, _ in kept), weights=tuple(weight for _, weight in kept)),
    )


def _label_weight(token: int, label: object, place: int, origin: str) -> float:
    if label not in (token, _IGNORED):
        raise ConversationError(
            f"{origin}: label {place} is {label!r:.40}, and its token {token}; expected the "
            f"same id, not shifted, or {_IGNORED} where it is not trained"
        )
    return float(label != _IGNORED)


def _mask_weight(value: object, origin: str) -> float:
    if (
        isinstance(value, str)
        or not isinstance(value, int | float)
        or not value >= 0
        or value == float("inf")
    ):
        raise ConversationError(
            f'{origin}: "loss_mask" has {value!r:.40}; expected numbers, 0 or more'
        )
    return float(value)
