"""Records of any layout become conversations; the layout is detected from a record's fields.

`read_conversation` reads one record or raises an error that says what is wrong with it;
`detect_layout` and `describe_layout` report the detected layout and the reason. Costs one
microsecond for a plain message, a few for one with flags, nulls or parts.

| layout | fields |
|---|---|
| `messages` | `messages` (or `conversations`) of `role` and `content`; OpenAI's, with parts, tool calls, reasoning |
| `sharegpt` | `conversations` (or `messages`) of `from` and `value`; `system`, `tools` |
| `alpaca` | `instruction`, `input` or `context`, `output` or `response`; `system`, `history` |
| `prompt_completion` | `prompt` or `query`, and `completion` or `response`: texts or lists of messages; `history` |
| `preference` | `chosen`, with the prompt inside it or in its own field; `answers.py` reads `rejected`, too |
| `steps` | `prompt`, and `completions`, the steps of an answer, with `labels` |
| `oasst` | a tree under `prompt`, or a message with its `replies` |
| `segments`, `tokens` | texts with all markers, or token ids: `written.py` |

A path through an OASST tree is one conversation. `best` follows the best-ranked reply at every
turn. `all` gives one conversation for each assistant message that no assistant message follows, so
turns near the root are in several.
"""  # noqa: E501

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from penstock.chat.records.conversation import (
    DEFAULT_WEIGHTS,
    RECORD_MASK,
    Conversation,
    MessageWeights,
    read_record_mask,
)
from penstock.chat.records.layout_settings import LayoutSettings
from penstock.chat.records.media import drop_media
from penstock.chat.records.messages import Messages, read_messages
from penstock.chat.records.nulls import as_record
from penstock.chat.records.preference_records import (
    LABELS,
    PROMPTS,
    RESPONSES,
    STEPS,
    read_alpaca,
    read_preference,
    read_prompt_completion,
    read_steps,
)
from penstock.chat.records.tools import read_tools, shorten_ids
from penstock.chat.records.trees import Node, read_paths, root_of
from penstock.chat.records.unread import unread_fields
from penstock.chat.records.written import is_segments, is_tokens, read_segments, read_tokens
from penstock.chat.render.forms import forms_of
from penstock.core.errors import ConversationError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.media.records import media_fields

MESSAGE_FIELDS = ("messages", "conversations", "conversation")
TOOL_FIELDS = ("tools", "functions")
SYSTEM_FIELDS = ("system", "system_prompt")
_OTHER_MESSAGES = ("rejected_messages", "conversation_a", "conversation_b")
"""Fields that hold messages and nothing else, besides the conversation itself."""
_ANSWERS = {"chosen": "preference", "completion": "prompt_completion", "output": "alpaca"}
_DEFAULT = LayoutSettings()
_EMPTY = (None, "")
"""An optional field that says nothing: formats with cells have an empty text in place of a missing
value.
"""


def detect_layout(
    record: JsonMapping, settings: LayoutSettings = _DEFAULT, origin: str = "record"
) -> str:
    """Name of the record's layout.

    Raises:
        ConversationError: Its fields fit no layout.
    """
    return _detect(with_lists(record, settings), settings, origin)[0]


def describe_layout(
    record: JsonMapping, settings: LayoutSettings = _DEFAULT, origin: str = "record"
) -> str:
    """One line that names the detected layout and the reason, to print once per dataset."""
    layout, field = _detect(with_lists(record, settings), settings, origin)
    why = {
        "alpaca": "it has an instruction and an output",
        "prompt_completion": "it has a prompt and a completion",
        "preference": 'it has "chosen": '
        + (
            "the chosen answers are trained, the rejected ones are not read (answers: tree "
            "keeps both)"
            if settings.answers == "best"
            else "chosen and rejected answers are kept"
        ),
        "oasst": f"it is a tree of messages: {settings.oasst_paths} path"
        + "s" * (settings.oasst_paths == "all"),
        "steps": "it has completions with labels: the right steps of each answer are trained",
        "segments": "it has segments, which no template sees",
        "tokens": "it has input_ids, which are taken as they are",
    }
    if settings.layout != "auto":
        return f"layout {layout}, as configured"
    if layout in why:
        return f"layout {layout}, because {why[layout]}"
    dialect = settings.dialect(layout)
    chosen = "as configured, " if settings.field_messages else ""
    return (
        f'layout {layout}, {chosen}because "{field}" holds messages with "{dialect.role_key}", '
        f'"{dialect.content_key}"'
    )


def read_conversation(
    record: JsonMapping, settings: LayoutSettings = _DEFAULT, origin: str = "record"
) -> Conversation | list[Conversation]:
    """Read a Python object, which may be a row of a table: with NumPy arrays, and nulls that a
    table adds.

    Args:
        record: A record of any layout.
        settings: Layout, field mapping, roles.
        origin: `file:line`, for errors.

    Returns:
        A conversation; a list of them for a tree with `oasst_paths="all"`.

    Raises:
        ConversationError: The layout is unknown or a message cannot be read; names file, line and
            message, and what was expected.
    """
    return read_record(as_record(record), settings, origin)


def read_record(
    record: JsonMapping, settings: LayoutSettings = _DEFAULT, origin: str = "record"
) -> Conversation | list[Conversation]:
    """Read a record of a file, as `read_conversation`; it is taken as it is."""
    return read_detected(record, settings, origin)[1]


def read_detected(
    record: JsonMapping, settings: LayoutSettings, origin: str
) -> tuple[str, Conversation | list[Conversation]]:
    """The layout of a record of a file, and what `read_record` gives."""
    if not isinstance(record, Mapping):
        raise ConversationError(
            f"{origin}: the record is {type(record).__name__}; expected an object with messages"
        )
    record = with_lists(record, settings)
    layout, field = _detect(record, settings, origin)
    unread = unread_fields(record, layout, field, settings)
    if layout in ("segments", "tokens"):
        read = (
            read_segments(record, origin) if layout == "segments" else read_tokens(record, origin)
        )
        return layout, Conversation(
            messages=(), message_weights=(), written=read, unread=unread, origin=origin
        )
    if layout == "oasst":
        root = root_of(record)
        if root is None:
            raise ConversationError(
                f'{origin}: no tree under "prompt", and no message with replies'
            )
        paths = read_paths(root, settings.oasst_paths, origin)
        found = [
            _finish(record, read_messages(path, layout, settings, origin), settings, origin)
            for path in paths
        ]
        return layout, found if settings.oasst_paths == "all" else found[0]
    own = _read(record, layout, field, settings, origin)
    return layout, _finish(record, own, settings, origin, unread)


def read_nodes(
    record: JsonMapping, path: Sequence[Node], settings: LayoutSettings, origin: str
) -> Conversation:
    """A conversation of messages of an OASST tree, from its root."""
    messages = [{"role": node.get("role"), "text": node.get("text")} for node in path]
    return _finish(record, read_messages(messages, "oasst", settings, origin), settings, origin)


def with_lists(record: JsonMapping, settings: LayoutSettings) -> JsonMapping:
    """The record with lists of messages in place of their JSON text, or of lists of JSON texts."""
    names = (settings.field_messages,) if settings.field_messages else MESSAGE_FIELDS
    changed = {}
    for name in (*names, *_OTHER_MESSAGES):
        value = record.get(name)
        first = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(first, str) and first.lstrip()[:1] in ("[", "{"):
            with suppress(
                ValueError, RecursionError
            ):  # what is no list of messages is refused, or read as a text
                changed[name] = (
                    [_message_of(one) for one in value]
                    if isinstance(value, list | tuple)
                    else json.loads(first)
                )
    return {**record, **changed} if changed else record


def _message_of(text: object) -> Any:
    return json.loads(text) if isinstance(text, str) else text


def _read(
    record: JsonMapping, layout: str, field: str, settings: LayoutSettings, origin: str
) -> Messages:
    if layout == "alpaca":
        return read_alpaca(record, settings, origin)
    if layout == "prompt_completion":
        return read_prompt_completion(record, settings, origin)
    if layout == "steps":
        return read_steps(record, settings, origin)
    if layout == "preference":
        found = _message_field(record, settings)
        before = read_messages(record[found[1]], found[0], settings, origin) if found else None
        return read_preference(record, before, settings, origin)
    if field not in record:
        raise ConversationError(
            f'{origin}: no field "{field}" (it has: {_names(record)}); name it: field_messages'
        )
    messages, weights = read_messages(record[field], layout, settings, origin)
    if isinstance(record.get(RECORD_MASK), list | tuple):
        weights = read_record_mask(record[RECORD_MASK], weights, origin)
    return messages, weights


def _finish(
    record: JsonMapping,
    read: Messages,
    settings: LayoutSettings,
    origin: str,
    unread: tuple[str, ...] = (),
) -> Conversation:
    names = (settings.field_system,) if settings.field_system else SYSTEM_FIELDS
    system_field = next((name for name in names if record.get(name) is not None), names[0])
    messages, weights, used = _with_system(record, system_field, read, settings, origin)
    if settings.drop_system_message:
        kept = [index for index, message in enumerate(messages) if message["role"] != "system"]
        messages, weights = [messages[index] for index in kept], [weights[index] for index in kept]
    if settings.call_ids == "short":
        messages = shorten_ids(messages)
    names = (settings.field_tools,) if settings.field_tools else TOOL_FIELDS
    tool_field = next((name for name in names if record.get(name) not in _EMPTY), names[0])
    tools = record.get(tool_field)
    variables = record.get("chat_template_kwargs")
    if variables not in _EMPTY and not isinstance(variables, Mapping):
        raise ConversationError(
            f'{origin}: "chat_template_kwargs" is {variables!r:.60}; expected an object'
        )
    conversation = Conversation(
        messages=tuple(messages),
        message_weights=tuple(weights),
        tools=None if tools is None else read_tools(tools, origin),
        variables=variables or {},
        attachments=media_fields(record),
        unread=tuple(
            name for name in unread if name != tool_field and not (used and name == system_field)
        ),
        origin=origin,
    )
    if settings.media == "drop":
        conversation = drop_media(conversation, join=settings.join_text_parts)
    forms = forms_of(conversation.messages, settings.decode_arguments, settings.join_text_parts)
    return replace(conversation, forms=forms) if forms else conversation


def _with_system(
    record: JsonMapping, field: str, read: Messages, settings: LayoutSettings, origin: str
) -> tuple[list[JsonObject], list[MessageWeights], bool]:
    """Messages with the record's own system text, and whether it is among them."""
    messages, weights = read
    system = record.get(field)
    if system is not None and not isinstance(system, str):
        raise ConversationError(f'{origin}: "{field}" is {system!r:.60}; expected a text')
    if (
        system is not None
        and settings.field_system is not None
        and messages
        and messages[0]["role"] == "system"
    ):
        messages, weights = messages[1:], weights[1:]
    if not system:
        return messages, weights, True
    if messages and messages[0]["role"] in ("system", "developer"):
        return messages, weights, messages[0]["content"] == system
    return [{"role": "system", "content": system}, *messages], [DEFAULT_WEIGHTS, *weights], True


def _detect(record: JsonMapping, settings: LayoutSettings, origin: str) -> tuple[str, str]:
    """The layout and, if it has one, its field of messages; the most specific layouts are tried
    first.
    """
    if settings.layout != "auto":
        found = _message_field(record, settings)
        default = "conversations" if settings.layout == "sharegpt" else "messages"
        return settings.layout, settings.field_messages or (found[1] if found else default)
    for name in ("chosen", "completion", "output"):
        if record.get(settings.fields.get(name, "")) is not None:
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
    if _has(record, settings.name("instruction")) and _has(
        record, settings.name("output", *RESPONSES)
    ):
        return "alpaca", ""
    prompted = _has(record, settings.name("prompt", *PROMPTS))
    if prompted and _has(record, settings.name("completion", *RESPONSES)):
        return "prompt_completion", ""
    if (
        prompted
        and isinstance(record.get(STEPS), list | tuple)
        and isinstance(record.get(LABELS), list | tuple)
    ):
        return "steps", ""
    if is_segments(record):
        return "segments", ""
    if is_tokens(record):
        return "tokens", ""
    raise ConversationError(_no_layout(record, origin))


def _message_field(record: JsonMapping, settings: LayoutSettings) -> tuple[str, str] | None:
    """Layout and name of the field that holds messages: the configured field only, or the first
    that fits.
    """
    for field in (settings.field_messages,) if settings.field_messages else MESSAGE_FIELDS:
        items = record.get(field)
        if not isinstance(items, list | tuple):
            continue
        if not items:
            return "messages", field
        if not isinstance(items[0], Mapping):
            continue
        if "role" in settings.message_property_mappings:
            return (
                "sharegpt" if settings.message_property_mappings["role"] == "from" else "messages"
            ), field
        if "role" in items[0]:
            return "messages", field
        if "from" in items[0] and "value" in items[0]:
            return "sharegpt", field
        if settings.field_messages is not None:
            return "messages", field
    return None


def message_field(record: JsonMapping, settings: LayoutSettings) -> str | None:
    """Name of the field of a record that holds messages; None: there is none."""
    found = _message_field(record, settings)
    return None if found is None else found[1]


def _has(record: JsonMapping, names: tuple[str, ...]) -> bool:
    return any(record.get(name) is not None for name in names)


def _no_messages(record: JsonMapping, name: str, origin: str) -> str:
    value = record.get(name)
    found = f"is {value!r:.60}" if name in record else f"is not there (it has: {_names(record)})"
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        return (
            f'{origin}: "{name}" {found}, which is not JSON; expected a list of messages, or its '
            "JSON text"
        )
    return (
        f'{origin}: "{name}" {found}; expected a list of messages; name its field with '
        "field_messages"
    )


def _no_layout(record: JsonMapping, origin: str) -> str:
    named = next((name for name in MESSAGE_FIELDS if record.get(name) is not None), None)
    if named is not None and not isinstance(record[named], list | tuple):
        return _no_messages(record, named, origin)
    if named is not None:
        first = record[named][0]
        held = (
            f"has fields {_names(first)}"
            if isinstance(first, Mapping)
            else f"is {type(first).__name__}"
        )
        return (
            f'{origin}: message 0 of "{named}" {held}; expected role and content, or from and '
            f"value; "
            "name them: message_property_mappings: {role: …, content: …}"
        )
    return (
        f"{origin}: no known layout (its fields: {_names(record)}); expected messages, "
        "conversations, instruction and output, prompt and completion, chosen, segments, "
        "input_ids, or an OASST tree; name the fields: field_messages: …, or fields: "
        "{prompt: …, completion: …}; for records of other forms set transform, "
        "which changes each before it is read"
    )


def _names(record: JsonMapping) -> str:
    return ", ".join(map(str, record)) or "none"
