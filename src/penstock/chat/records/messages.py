"""Lists of messages in records become messages as templates see them, with their training weights.

Values stay as the record has them: null contents, arguments as text, lists of texts. `forms.py`
changes them only where a template fails on them. Other nulls, which Arrow adds to every message,
are removed. A plain message takes less than a microsecond.

A content may be a list of parts: texts, thinking, tool calls and media, each with its own weight.

`split_thinking` moves thinking between tags to its own field, together with its ranges. Only
thinking at the start of the content is moved: a tag in the middle of an answer may be what the
answer is about.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from penstock.chat.records.conversation import (
    DEFAULT_WEIGHTS,
    TRAINING_KEYS,
    MessageWeights,
    Range,
    part_weight,
    read_message_weights,
)
from penstock.chat.records.layout_settings import CALL, Dialect, LayoutSettings, unknown_role
from penstock.chat.records.tools import read_calls
from penstock.chat.render.forms import list_ranges
from penstock.core.errors import ConversationError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.media.records import MEDIA_TYPES, media_fields

TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)


TEXT_TYPES = frozenset(("text", "input_text", "output_text"))
THINKING_TYPES = frozenset(("reasoning", "thinking"))
CALL_TYPES = frozenset(("tool_call", "function_call"))

TEXT_KEYS = ("text", "content", "value")


THINKING_KEYS = ("reasoning_content", "thinking", "reasoning")

Messages = tuple[list[JsonObject], list[MessageWeights]]


def read_messages(items: object, layout: str, settings: LayoutSettings, origin: str) -> Messages:
    """Read a list of messages; indices in errors count from 0.

    Raises:
        ConversationError: `items` is no list, or one of the messages cannot be read.
    """
    if not isinstance(items, list | tuple):
        raise ConversationError(
            f"{origin}: messages are {type(items).__name__}; expected a list of objects"
        )
    dialect = settings.dialect(layout)
    role_key, content_key, roles = dialect.role_key, dialect.content_key, dialect.roles
    may_be_plain = not settings.split_thinking
    messages: list[JsonObject] = []
    weights: list[MessageWeights] = []
    for index, item in enumerate(items):
        # Fast path for the common message: a role and a text.
        if may_be_plain and type(item) is dict and len(item) == 2:
            name, content = item.get(role_key), item.get(content_key)
            if type(name) is str and type(content) is str:
                role = roles.get(name, CALL)
                if role != CALL:
                    messages.append({"role": role, "content": content})
                    weights.append(DEFAULT_WEIGHTS)
                    continue
        message, own = _read_message(item, dialect, settings, f"{origin}: message {index}")
        messages.append(message)
        weights.append(own)
    return messages, weights


def _read_message(
    item: object, dialect: Dialect, settings: LayoutSettings, where: str
) -> tuple[JsonObject, MessageWeights]:
    """Read any message: first its texts, then their weights, then thinking and calls."""
    if not isinstance(item, Mapping):
        raise ConversationError(
            f"{where} is {type(item).__name__}; expected an object with a role and a content"
        )
    properties = _properties(item, dialect)
    name = _role(properties, item, dialect, where)
    role = "assistant" if name == CALL else name
    calls = _calls(properties, where)
    parts = properties.get("content")
    content, thinking, ranges, part_calls = _texts(properties, role, where, settings)
    calls += part_calls
    if content is None and not calls and thinking is None:
        raise ConversationError(_no_content(item, role, dialect, where))
    if part_calls and not content:
        content = None
    weights = _message_weights(item, content, thinking, ranges, where, settings)
    if (
        settings.split_thinking
        and role == "assistant"
        and thinking is None
        and isinstance(content, str)
    ):
        content, thinking, weights = _split(content, weights, settings.thinking_key)
    elif content and isinstance(content, str) and isinstance(parts, list | tuple) and name != CALL:
        content = read_parts(parts, where, thinking_key=settings.thinking_key, join=False).content
        weights = (
            list_ranges(weights, content)
            if weights.ranges and isinstance(content, list)
            else weights
        )
    if name == CALL:
        calls += read_calls(content, where)
        if any(one.field == "content" for one in weights.ranges):
            raise ConversationError(
                f"{where} has ranges over a tool call written as text; use train or weight"
            )
        content = None if calls else ""
    message = {"role": role, "content": content, **properties}
    if thinking is not None:
        message[settings.thinking_key] = thinking
    if calls:
        message["tool_calls"] = calls
    return message, weights


def _properties(item: JsonMapping, dialect: Dialect) -> JsonObject:
    """Fields of a message under the names that templates use; a mapped one comes only from its
    configured field.
    """
    properties = {
        key: value
        for key, value in item.items()
        if value is not None and key not in dialect.consumed
    }
    for target, source in dialect.mapping.items():
        if item.get(source) is not None:
            properties[target] = item[source]
    return properties


def _role(properties: JsonObject, item: JsonMapping, dialect: Dialect, where: str) -> str:
    name = properties.pop("role", None)
    if name is None:
        raise ConversationError(
            f'{where} has no "{dialect.role_key}" (its fields: {", ".join(map(str, item))}); '
            "name its field: message_property_mappings: {role: …}"
        )
    role = dialect.roles.get(name) if isinstance(name, str) else None
    if role is None:
        raise ConversationError(f"{where} {unknown_role(name, dialect.roles)}")
    return role


def _no_content(item: JsonMapping, role: str, dialect: Dialect, where: str) -> str:
    expected = "expected a text, a list of parts, or tool calls"
    if dialect.content_key in item:
        return (
            f'{where} ({role}): "{dialect.content_key}" is null; {expected}; repair the record or '
            "skip it"
        )
    return (
        f'{where} ({role}): "{dialect.content_key}" is missing (its fields: '
        f"{', '.join(map(str, item))}); {expected}; "
        "name its field: message_property_mappings: {content: …}"
    )


def _calls(properties: JsonObject, where: str) -> list[JsonObject]:
    """Calls in `tool_calls`, or in `function_call`, its older form in OpenAI's messages."""
    calls: list[JsonObject] = []
    for key in ("tool_calls", "function_call"):
        value = properties.pop(key, None)
        if value:
            calls += read_calls(value, where)
    return calls


def _texts(
    properties: JsonObject, role: str, where: str, settings: LayoutSettings
) -> tuple[Any, str | None, list[Range], list[JsonObject]]:
    """Content, thinking, the ranges that come from their parts, and the calls among the parts."""
    key = settings.thinking_key
    content, thinking = properties.pop("content", None), _thinking(properties, key)
    ranges: list[Range] = []
    calls: list[JsonObject] = []
    if isinstance(thinking, list | tuple):
        parts = read_parts(thinking, where, thinking_key=key)
        if not isinstance(parts.content, str):
            raise ConversationError(
                f"{where} has thinking with parts that are not text; expected texts"
            )
        ranges += [
            Range(field=key, begin=one.begin, end=one.end, weight=one.weight)
            for one in parts.ranges
        ]
        thinking = parts.content
    if _is_parts(content, role):
        parts = read_parts(content, where, thinking_key=key, join=settings.join_text_parts)
        content, calls = parts.content, parts.calls
        ranges += parts.ranges
        if parts.thinking is not None:
            if thinking is not None:
                raise ConversationError(
                    f"{where} has thinking both in its parts and in a field; remove one of the two"
                )
            thinking, ranges = parts.thinking, ranges + parts.thinking_ranges
    elif not (
        content is None
        or isinstance(content, str)
        or (role == "tool" and isinstance(content, dict | list))
    ):
        raise ConversationError(
            f"{where} ({role}): content is {content!r:.60}; expected a text or a list of parts"
        )
    return content, thinking, ranges, calls


def _thinking(properties: JsonObject, key: str) -> Any:
    """Take the thinking out of any field that may hold it; a value that is neither text nor parts
    stays there.
    """
    names = [
        name
        for name in dict.fromkeys((key, *THINKING_KEYS))
        if isinstance(properties.get(name), str | list | tuple)
    ]
    if not names:
        return None
    thinking = properties.pop(names[0])
    for name in names[1:]:  # servers write the same text under two names
        if properties[name] == thinking:
            del properties[name]
    return thinking


def _is_parts(content: object, role: str) -> bool:
    """Whether a content is a list of parts; the result of a tool may be a list of anything."""
    if not isinstance(content, list | tuple):
        return False
    return role != "tool" or all(
        isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in content
    )


def _message_weights(
    item: JsonMapping,
    content: object,
    thinking: str | None,
    ranges: list[Range],
    where: str,
    settings: LayoutSettings,
) -> MessageWeights:
    texts: dict[str, str] = {}
    if isinstance(content, str):
        texts["content"] = content
    elif isinstance(content, list):
        texts |= {
            f"content.{index}.text": part["text"]
            for index, part in enumerate(content)
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        }
    if thinking is not None:
        texts[settings.thinking_key] = thinking
    flag, detail = settings.message_field_training, settings.message_field_training_detail
    return read_message_weights(item, texts, ranges, where, flag, detail)


def _split(
    content: str, weights: MessageWeights, key: str
) -> tuple[str, str | None, MessageWeights]:
    """Separate thinking from content, together with the ranges of each."""
    split = split_thinking(content)
    if split is None:
        return content, None, weights
    thought, answer = split
    moved = move_ranges(weights.ranges, {"content": answer, key: thought})
    ranges = tuple(sorted(moved, key=lambda one: (one.field, one.begin)))
    weights = replace(weights, ranges=ranges) if weights.ranges else weights
    return content[slice(*answer)], content[slice(*thought)], weights


@final
@dataclass(slots=True)
class Parts:
    """The parts of one content, sorted by kind."""

    content: str | list[JsonObject]
    ranges: list[Range] = field(default_factory=list)
    thinking: str | None = None
    thinking_ranges: list[Range] = field(default_factory=list)
    calls: list[JsonObject] = field(default_factory=list)


def read_parts(parts: Sequence[Any], where: str, *, thinking_key: str, join: bool = True) -> Parts:
    """Sort the parts of one content by kind.

    Args:
        parts: Objects with a `type`, or strings.
        where: File, line and message, for errors.
        thinking_key: Name of the thinking field in ranges.
        join: Join the texts into one string, and their weights into ranges of it, if there are no
            media.

    Raises:
        ConversationError: A part is neither text nor an object with a `type`, or its weight is out
            of bounds.
    """
    texts: list[tuple[str, float | None]] = []
    thoughts: list[tuple[str, float | None]] = []
    kept: list[JsonObject] = []
    calls: list[JsonObject] = []
    media = False
    for index, part in enumerate(parts):
        place = f"{where}, part {index},"
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind, text = _kind_and_text(part, place)
        if kind in CALL_TYPES:
            calls += read_calls(text if text is not None else part.get("tool_call", part), place)
            continue
        weight = part_weight(part, place)
        if text is None:
            media = True
            fields = {
                key: value
                for key, value in part.items()
                if value is not None and key not in TRAINING_KEYS
            }
            kept.append({"type": kind, **fields})
        elif kind in THINKING_TYPES:
            thoughts.append((text, weight))
        else:
            kept.append({"type": "text", "text": text})
            texts.append((text, weight))
    if not media and join:
        result = Parts(*_join(texts, "content"), calls=calls)
    else:
        result = Parts(kept, _ranges_of_parts(kept, texts), calls=calls)
    if thoughts:
        result.thinking, result.thinking_ranges = _join(thoughts, thinking_key)
    return result


def _kind_and_text(part: object, where: str) -> tuple[str, str | None]:
    """Type of a part, and its text if that type has one."""
    if not isinstance(part, Mapping):
        raise ConversationError(
            f'{where} is {type(part).__name__}; expected an object such as {{"type": "text", '
            '"text": …}'
        )
    kind = part.get("type")
    if kind is None and any(isinstance(part.get(key), str) for key in TEXT_KEYS):
        kind = "text"
    elif kind is None:
        kind = next(iter(media_fields(part)), None)
    if not isinstance(kind, str):
        raise ConversationError(
            f'{where} has no "type" (its fields: {", ".join(part)}); expected text, image, …'
        )
    if kind.startswith(MEDIA_TYPES):
        return kind, None
    if kind not in TEXT_TYPES | THINKING_TYPES | CALL_TYPES:
        # A template would silently leave it out.
        raise ConversationError(
            f'{where} is of type "{kind}"; expected text, reasoning, tool_call, or image, video, '
            f"audio and the like; "
            "put calls of tools into tool_calls, and their results into messages of role tool"
        )
    if media := list(media_fields(part)):
        raise ConversationError(
            f'{where} is of type "{kind}" and also holds "{media[0]}"; expected one part for each'
        )
    for key in (kind, *TEXT_KEYS):
        if isinstance(part.get(key), str):
            return kind, part[key]
    if kind in CALL_TYPES:
        return kind, None
    raise ConversationError(f'{where} is of type "{kind}" and has no text; put it under "text"')


def _join(texts: list[tuple[str, float | None]], name: str) -> tuple[str, list[Range]]:
    ranges, at = [], 0
    for text, weight in texts:
        if weight is not None and text:
            ranges.append(Range(field=name, begin=at, end=at + len(text), weight=weight))
        at += len(text)
    return "".join(text for text, _ in texts), ranges


def _ranges_of_parts(kept: list[JsonObject], texts: list[tuple[str, float | None]]) -> list[Range]:
    places = [index for index, part in enumerate(kept) if part["type"] == "text"]
    return [
        Range(field=f"content.{index}.text", begin=0, end=len(text), weight=weight)
        for index, (text, weight) in zip(places, texts, strict=True)
        if weight is not None and text
    ]


def split_thinking(content: str) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The spans [begin, end) of thinking and answer in `content`, without the whitespace around
    them.

    Returns:
        None if the content does not begin with an opening tag, or the tag is never closed.
    """
    start = len(content) - len(content.lstrip())
    for opening, closing in TAGS:
        if content.startswith(opening, start):
            close = content.find(closing, start)
            if close < 0:
                return None
            thinking = _stripped(content, start + len(opening), close)
            after = close + len(closing)
            return thinking, (
                after + len(content[after:]) - len(content[after:].lstrip()),
                len(content),
            )
    return None


def _stripped(text: str, begin: int, end: int) -> tuple[int, int]:
    inner = text[begin:end]
    begin += len(inner) - len(inner.lstrip())
    return begin, begin + len(inner.strip())


def move_ranges(ranges: Iterable[Range], pieces: dict[str, tuple[int, int]]) -> list[Range]:
    """Ranges of `content` as ranges of its pieces; ranges of other fields stay as they are.

    Ranges over characters in no piece (the tags and the whitespace around them) are dropped with
    these characters.

    Args:
        ranges: Of one message.
        pieces: Field → [begin, end) in the old content.
    """
    moved = []
    for one in ranges:
        if one.field != "content":
            moved.append(one)
            continue
        for name, (begin, end) in pieces.items():
            left, right = max(one.begin, begin), min(one.end, end)
            if left < right:
                moved.append(
                    Range(field=name, begin=left - begin, end=right - begin, weight=one.weight)
                )
    return moved
