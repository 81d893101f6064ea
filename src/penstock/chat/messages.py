"""Lists of messages become messages as templates see them, with their marks; a plain one in less than a microsecond.

Values are those of the record: a content that is null stays null, arguments that are text stay text, and a list of
texts stays a list. `forms.py` changes them where a template fails on them. Other nulls, which Arrow adds to every
message, are left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.chat.conversation import UNMARKED, Marks, Range
from penstock.chat.forms import list_ranges
from penstock.chat.layout_settings import Dialect, LayoutSettings
from penstock.chat.marks import read_marks
from penstock.chat.parts import Parts, read_parts
from penstock.chat.roles import CALL, unknown_role
from penstock.chat.thinking import move_ranges, split_thinking
from penstock.chat.tools import read_calls
from penstock.errors import ConversationError

THINKING_KEYS = ("reasoning_content", "thinking", "reasoning")

Messages = tuple[list[dict[str, Any]], list[Marks]]


def read_messages(items: Any, layout: str, settings: LayoutSettings, origin: str) -> Messages:
    """Read a list of messages; indices in errors count from 0.

    Raises:
        ConversationError: the list is none, or one of its messages cannot be read.
    """
    if not isinstance(items, list | tuple):
        raise ConversationError(f"{origin}: messages are {type(items).__name__}; due a list of objects")
    dialect = settings.dialect(layout)
    role_key, content_key, roles = dialect.role_key, dialect.content_key, dialect.roles
    plain_roles = not settings.split_thinking
    messages: list[dict[str, Any]] = []
    marks: list[Marks] = []
    for index, item in enumerate(items):
        # The common message, a role and a text, takes this short way.
        if plain_roles and type(item) is dict and len(item) == 2:
            name, content = item.get(role_key), item.get(content_key)
            if type(name) is str and type(content) is str:
                role = roles.get(name, CALL)
                if role != CALL:
                    messages.append({"role": role, "content": content})
                    marks.append(UNMARKED)
                    continue
        message, mark = _read_message(item, dialect, settings, f"{origin}: message {index}")
        messages.append(message)
        marks.append(mark)
    return messages, marks


def _read_message(item: Any, dialect: Dialect, settings: LayoutSettings, where: str) -> tuple[dict[str, Any], Marks]:
    """One message of any kind: texts first, then their marks, then thinking and calls apart."""
    if not isinstance(item, Mapping):
        raise ConversationError(f"{where} is {type(item).__name__}; due an object with a role and a content")
    properties = _properties(item, dialect)
    name = _role(properties, item, dialect, where)
    role = "assistant" if name == CALL else name
    calls = _calls(properties, where, settings)
    parts = properties.get("content")
    content, thinking, ranges, part_calls = _texts(properties, role, where, settings)
    calls += part_calls
    if content is None and not calls and thinking is None:
        raise ConversationError(_no_content(item, role, dialect, where))
    if part_calls and not content:
        content = None
    marks = _marks(item, content, thinking, ranges, where, settings)
    if settings.split_thinking and role == "assistant" and thinking is None and isinstance(content, str):
        content, thinking, marks = _split(content, marks, settings.thinking_key)
    elif content and isinstance(content, str) and isinstance(parts, list | tuple) and name != CALL:
        content = _parts(parts, where, settings, join=False).content
        marks = list_ranges(marks, content) if marks.ranges and isinstance(content, list) else marks
    if name == CALL:
        calls += read_calls(content, where)
        if any(one.field == "content" for one in marks.ranges):
            raise ConversationError(f"{where} has ranges over a tool call written as text; due train or weight alone")
        content = None if calls else ""
    message = {"role": role, "content": content, **properties}
    if thinking is not None:
        message[settings.thinking_key] = thinking
    if calls:
        message["tool_calls"] = calls
    return message, marks


def _properties(item: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """The message by the names that templates use: what is mapped from its source alone, the rest as it is."""
    properties = {key: value for key, value in item.items() if value is not None and key not in dialect.consumed}
    for target, source in dialect.mapping.items():
        if item.get(source) is not None:
            properties[target] = item[source]
    return properties


def _role(properties: dict[str, Any], item: Mapping[str, Any], dialect: Dialect, where: str) -> str:
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


def _no_content(item: Mapping[str, Any], role: str, dialect: Dialect, where: str) -> str:
    due = "due a text, a list of parts, or tool calls"
    if dialect.content_key in item:
        return f'{where} ({role}): "{dialect.content_key}" is null; {due}; repair the record, or skip such records'
    return (
        f'{where} ({role}): "{dialect.content_key}" is missing (its fields: {", ".join(map(str, item))}); {due}; '
        "name its field: message_property_mappings: {content: …}"
    )


def _calls(properties: dict[str, Any], where: str, settings: LayoutSettings) -> list[dict[str, Any]]:
    """Calls of `tool_calls`, or of `function_call`, as OpenAI's messages had it before."""
    calls: list[dict[str, Any]] = []
    for key in ("tool_calls", "function_call"):
        value = properties.pop(key, None)
        if value:
            calls += read_calls(value, where)
    return calls


def _texts(
    properties: dict[str, Any], role: str, where: str, settings: LayoutSettings
) -> tuple[Any, str | None, list[Range], list[dict[str, Any]]]:
    """Content, thinking, the ranges that their parts gave, and the calls among the parts."""
    key = settings.thinking_key
    content, thinking = properties.pop("content", None), _thinking(properties, key)
    ranges: list[Range] = []
    calls: list[dict[str, Any]] = []
    if isinstance(thinking, list | tuple):
        parts = _parts(thinking, where, settings, join=True)
        if not isinstance(parts.content, str):
            raise ConversationError(f"{where} has thinking with parts that are no text; expected texts")
        ranges += [Range(field=key, begin=one.begin, end=one.end, weight=one.weight) for one in parts.ranges]
        thinking = parts.content
    if _is_parts(content, role):
        parts = _parts(content, where, settings, join=settings.join_text_parts)
        content, calls = parts.content, parts.calls
        ranges += parts.ranges
        if parts.thinking is not None:
            if thinking is not None:
                raise ConversationError(f"{where} has thinking in its parts and beside them; due one of the two")
            thinking, ranges = parts.thinking, ranges + parts.thinking_ranges
    elif not (content is None or isinstance(content, str) or (role == "tool" and isinstance(content, dict | list))):
        raise ConversationError(f"{where} ({role}): content is {content!r:.60}; due a text or a list of parts")
    return content, thinking, ranges, calls


def _thinking(properties: dict[str, Any], key: str) -> Any:
    """The thinking, whatever its field is called; one that is neither text nor parts stays where it is."""
    names = [
        name for name in dict.fromkeys((key, *THINKING_KEYS)) if isinstance(properties.get(name), str | list | tuple)
    ]
    if not names:
        return None
    thinking = properties.pop(names[0])
    for name in names[1:]:  # servers write the same text under two names
        if properties[name] == thinking:
            del properties[name]
    return thinking


def _is_parts(content: Any, role: str) -> bool:
    """Whether a content is a list of parts; what a tool returned may be a list of anything else."""
    if not isinstance(content, list | tuple):
        return False
    return role != "tool" or all(isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in content)


def _parts(parts: Sequence[Any], where: str, settings: LayoutSettings, join: bool) -> Parts:
    key = settings.thinking_key
    return read_parts(parts, where, thinking_key=key, join=join)


def _marks(
    item: Mapping[str, Any],
    content: Any,
    thinking: str | None,
    ranges: list[Range],
    where: str,
    settings: LayoutSettings,
) -> Marks:
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
    return read_marks(item, texts, ranges, where, flag, detail)


def _split(content: str, marks: Marks, key: str) -> tuple[str, str | None, Marks]:
    """Content and thinking apart, and the ranges with them."""
    split = split_thinking(content)
    if split is None:
        return content, None, marks
    thought, answer = split
    moved = move_ranges(marks.ranges, {"content": answer, key: thought})
    ranges = tuple(sorted(moved, key=lambda one: (one.field, one.begin)))
    marks = Marks(train=marks.train, weight=marks.weight, ranges=ranges) if marks.ranges else marks
    return content[slice(*answer)], content[slice(*thought)], marks
