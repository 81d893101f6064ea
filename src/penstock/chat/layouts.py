"""Records of any layout become conversations; which layout it is can be seen from a record's fields.

`read_conversation` reads one record or says what is wrong with it; `detect_layout` and `describe_layout` say what it
was taken for, and why. Costs a microsecond a plain message, a few for one with flags, nulls or parts.

| layout | fields |
|---|---|
| `messages` | `messages` (or `conversations`) of `role` and `content`; OpenAI's, with parts, tool calls, reasoning |
| `sharegpt` | `conversations` (or `messages`) of `from` and `value`; `system`, `tools` |
| `alpaca` | `instruction`, `input`, `output`; `system`, `history` |
| `prompt_completion` | `prompt` and `completion` or `response`: texts or lists of messages |
| `preference` | `chosen`, beside a prompt or with it inside; `rejected` is not read |
| `oasst` | a tree under `prompt`, or a message with its `replies` |
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.chat.call_ids import shorten_ids
from penstock.chat.conversation import UNMARKED, Conversation
from penstock.chat.forms import forms_of
from penstock.chat.layout_settings import LayoutSettings
from penstock.chat.media import drop_media, media_fields
from penstock.chat.messages import Messages, read_messages
from penstock.chat.pairs import RESPONSES, read_alpaca, read_preference, read_prompt_completion
from penstock.chat.tools import read_tools
from penstock.chat.trees import read_paths, root_of
from penstock.errors import ConversationError

__all__ = ["LayoutSettings", "describe_layout", "detect_layout", "read_conversation"]

MESSAGE_FIELDS = ("messages", "conversations", "conversation")
TOOL_FIELDS = ("tools", "functions")
_ANSWERS = {"chosen": "preference", "completion": "prompt_completion", "output": "alpaca"}
_DEFAULT = LayoutSettings()


def detect_layout(record: Mapping[str, Any], settings: LayoutSettings = _DEFAULT, origin: str = "record") -> str:
    """Name of the record's layout.

    Raises:
        ConversationError: its fields fit no layout.
    """
    return _detect(record, settings, origin)[0]


def describe_layout(record: Mapping[str, Any], settings: LayoutSettings = _DEFAULT, origin: str = "record") -> str:
    """One line on what layout was detected and why, to be printed once a dataset."""
    layout, field = _detect(record, settings, origin)
    why = {
        "alpaca": "it has an instruction and an output",
        "prompt_completion": "it has a prompt and a completion",
        "preference": 'it has "chosen": the chosen answers are trained, the rejected ones are not read',
        "oasst": f"it is a tree of messages: {settings.oasst_paths} path" + "s" * (settings.oasst_paths == "all"),
    }
    if settings.layout != "auto":
        return f"layout {layout}, as configured"
    if layout in why:
        return f"layout {layout}, because {why[layout]}"
    dialect = settings.dialect(layout)
    chosen = "as configured, " if settings.field_messages else ""
    return (
        f'layout {layout}, {chosen}because "{field}" holds messages with "{dialect.role_key}", "{dialect.content_key}"'
    )


def read_conversation(
    record: Mapping[str, Any], settings: LayoutSettings = _DEFAULT, origin: str = "record"
) -> Conversation | list[Conversation]:
    """Read one record.

    Args:
        record: One decoded line, row or object.
        settings: Layout, field mapping, roles.
        origin: `file:line`, for errors.

    Returns:
        A conversation; or, for a tree whose every path was asked for, a list of them.

    Raises:
        ConversationError: the layout is not known, or a message cannot be read; names file, line, message, and what
            was due.
    """
    if not isinstance(record, Mapping):
        raise ConversationError(f"{origin}: the record is {type(record).__name__}; due an object with messages")
    layout, field = _detect(record, settings, origin)
    if layout == "oasst":
        root = root_of(record)
        if root is None:
            raise ConversationError(f'{origin}: no tree under "prompt", and no message with replies')
        paths = read_paths(root, settings.oasst_paths, origin)
        read = [_finish(record, read_messages(path, layout, settings, origin), settings, origin) for path in paths]
        return read if settings.oasst_paths == "all" else read[0]
    return _finish(record, _read(record, layout, field, settings, origin), settings, origin)


def _read(record: Mapping[str, Any], layout: str, field: str, settings: LayoutSettings, origin: str) -> Messages:
    if layout == "alpaca":
        return read_alpaca(record, settings, origin)
    if layout == "prompt_completion":
        return read_prompt_completion(record, settings, origin)
    if layout == "preference":
        found = _message_field(record, settings)
        before = read_messages(record[found[1]], found[0], settings, origin) if found else None
        return read_preference(record, before, settings, origin)
    if field not in record:
        raise ConversationError(f'{origin}: no field "{field}" (it has: {_names(record)}); name it: field_messages')
    return read_messages(record[field], layout, settings, origin)


def _finish(record: Mapping[str, Any], read: Messages, settings: LayoutSettings, origin: str) -> Conversation:
    messages, marks = read
    system_field = settings.field_system or "system"
    system = record.get(system_field)
    if system is not None:
        if not isinstance(system, str):
            raise ConversationError(f'{origin}: "{system_field}" is {system!r:.60}; due the text of a system message')
        if settings.field_system is not None and messages and messages[0]["role"] == "system":
            messages, marks = messages[1:], marks[1:]
        if system and not (messages and messages[0]["role"] in ("system", "developer")):
            messages, marks = [{"role": "system", "content": system}, *messages], [UNMARKED, *marks]
    if settings.drop_system_message:
        kept = [index for index, message in enumerate(messages) if message["role"] != "system"]
        messages, marks = [messages[index] for index in kept], [marks[index] for index in kept]
    if settings.call_ids == "short":
        messages = shorten_ids(messages)
    names = (settings.field_tools,) if settings.field_tools else TOOL_FIELDS
    tools = next((record[name] for name in names if record.get(name) is not None), None)
    variables = record.get("chat_template_kwargs")
    if variables is not None and not isinstance(variables, Mapping):
        raise ConversationError(f'{origin}: "chat_template_kwargs" is {variables!r:.60}; due an object')
    conversation = Conversation(
        messages=tuple(messages),
        marks=tuple(marks),
        tools=None if tools is None else read_tools(tools, origin),
        variables=variables or {},
        attachments=media_fields(record),
        origin=origin,
    )
    if settings.media == "drop":
        conversation = drop_media(conversation, join=settings.join_text_parts)
    forms = forms_of(conversation.messages, settings.decode_arguments, settings.join_text_parts)
    return replace(conversation, forms=forms) if forms else conversation


def _detect(record: Mapping[str, Any], settings: LayoutSettings, origin: str) -> tuple[str, str]:
    """The layout, and the field of its messages where it has one; the first that fits, most telling first."""
    if settings.layout != "auto":
        found = _message_field(record, settings)
        default = "conversations" if settings.layout == "sharegpt" else "messages"
        return settings.layout, settings.field_messages or (found[1] if found else default)
    for name in ("chosen", "completion", "output"):
        if name in settings.fields:
            return _ANSWERS[name], ""
    if settings.field_messages is None and record.get("chosen") is not None:
        return "preference", ""
    found = _message_field(record, settings)
    if found is not None:
        return found
    if settings.field_messages is not None:
        raise ConversationError(_no_messages(record, settings.field_messages, origin))
    if root_of(record) is not None:
        return "oasst", ""
    if _has(record, settings.name("instruction")) and _has(record, settings.name("output", *RESPONSES)):
        return "alpaca", ""
    if _has(record, settings.name("prompt")) and _has(record, settings.name("completion", *RESPONSES)):
        return "prompt_completion", ""
    raise ConversationError(_no_layout(record, origin))


def _message_field(record: Mapping[str, Any], settings: LayoutSettings) -> tuple[str, str] | None:
    """Layout and name of the field that holds messages: the configured one alone, or the first that does."""
    for field in (settings.field_messages,) if settings.field_messages else MESSAGE_FIELDS:
        items = record.get(field)
        if not isinstance(items, list | tuple):
            continue
        if not items:
            return "messages", field
        if not isinstance(items[0], Mapping):
            continue
        if "role" in settings.message_property_mappings:
            return ("sharegpt" if settings.message_property_mappings["role"] == "from" else "messages"), field
        if "role" in items[0]:
            return "messages", field
        if "from" in items[0] and "value" in items[0]:
            return "sharegpt", field
        if settings.field_messages is not None:
            return "messages", field
    return None


def _has(record: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    return any(record.get(name) is not None for name in names)


def _no_messages(record: Mapping[str, Any], name: str, origin: str) -> str:
    value = record.get(name)
    found = f"is {value!r:.60}" if name in record else f"is not there (it has: {_names(record)})"
    return f'{origin}: "{name}" {found}; due a list of messages; field_messages names it'


def _no_layout(record: Mapping[str, Any], origin: str) -> str:
    if "input_ids" in record:
        return (
            f"{origin}: holds token ids (its fields: {_names(record)}), not messages; "
            "due a conversation; ids that are ready are masked by role boundaries: penstock.chat.scan"
        )
    named = next((name for name in MESSAGE_FIELDS if record.get(name) is not None), None)
    if named is not None and not isinstance(record[named], list | tuple):
        return _no_messages(record, named, origin)
    if named is not None:
        first = record[named][0]
        held = f"has fields {_names(first)}" if isinstance(first, Mapping) else f"is {type(first).__name__}"
        return (
            f'{origin}: message 0 of "{named}" {held}; due role and content, or from and value; '
            "name them: message_property_mappings: {role: …, content: …}"
        )
    return (
        f"{origin}: no known layout (its fields: {_names(record)}); due messages, conversations, "
        "instruction and output, prompt and completion, chosen, or an OASST tree; "
        "name the fields: field_messages: …, or fields: {prompt: …, completion: …}"
    )


def _names(record: Mapping[str, Any]) -> str:
    return ", ".join(map(str, record)) or "none"
