"""Error text for a conversation that a template refuses in every form: at which message, what was
tried, what may help.

Templates say in their own words what they want, and nobody's settings. The words of many are known:
for those the setting that helps is named.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.chat.records.conversation import Conversation, Form
from penstock.chat.render.forms import arguments_of, is_text_parts
from penstock.chat.render.template import Template
from penstock.core.errors import RecordError
from penstock.core.json_values import JsonMapping

_NAMES: Mapping[Form, str] = {
    "empty_content": "an empty content for null",
    "null_content": "a null content for an empty one",
    "encode_arguments": "arguments as JSON text",
    "encode_values": "values as JSON text",
    "encode_results": "results as JSON text",
    "wrap_text": "texts as parts",
}
_KNOWN: Sequence[tuple[str, str]] = (
    (
        r"tool call ids?\b.*(?:9|nine|alphanumeric)|length 9",
        "call_ids: short gives calls and results such ids",
    ),
    (
        r"single tool.?calls?",
        "a transform can make a message of each call, with its result behind it",
    ),
    (
        r"system (?:role|message)s?\b.*not supported|not support system",
        "drop_system_message: true removes them",
    ),
    (
        r"\broles must alternate|alternate (?:between )?user",
        (
            "a transform can join messages of one role in a row; for calls of tools take a "
            "template that writes them"
        ),
    ),
    (r"only user.*roles|unknown role|unexpected role", "roles maps the names of roles"),
    (
        r"unexpected content type|invalid content type|unknown content type",
        "contents are texts, or lists of parts",
    ),
)
"""Pattern of a template's own words → what to do."""


def refusal(conversation: Conversation, template: Template, failures: Sequence[RecordError]) -> str:
    """The message about a conversation that a template refuses in all forms.

    Args:
        conversation: As read.
        template: The template.
        failures: Its errors, the first of the conversation as it is.
    """
    if not template.reads_parts and (media := _first_media(conversation)) is not None:
        number, kind = media
        return (
            f"chat template {template.name} writes contents as one text, and message {number} "
            f"({conversation.messages[number]['role']}) has a part of type {kind}; take a "
            "template that writes such parts, as that of the model's processor does "
            f"(template: auto); {failures[0]}"
        )
    where = _first_refused(conversation, template, failures)
    at = (
        ""
        if where is None
        else f"; it refuses message {where} ({conversation.messages[where]['role']})"
    )
    cures = "".join(f"; {cure}" for cure in _cures(conversation, template, failures))
    return f"{failures[0]}{_tried(conversation, failures)}{cures}{at}"


def _first_media(conversation: Conversation) -> tuple[int, str] | None:
    """The first message with a part that is no text, and the type of that part."""
    for number, message in enumerate(conversation.messages):
        for part in message["content"] if isinstance(message["content"], list) else ():
            if isinstance(part, Mapping) and part.get("type") != "text":
                return number, str(part.get("type"))
    return None


def _first_refused(
    conversation: Conversation, template: Template, failures: Sequence[RecordError]
) -> int | None:
    """The message up to which the template still says the same; None: it refuses even the first
    ones.
    """

    def refuses(count: int) -> bool:
        try:
            template.render_plain(
                conversation.messages[:count], tools=conversation.tools, **conversation.variables
            )
        except RecordError as error:
            return str(error) == str(failures[0])
        return False

    taken, refused = 0, len(conversation.messages)
    while refused - taken > 1:
        middle = (taken + refused) // 2
        taken, refused = (taken, middle) if refuses(middle) else (middle, refused)
    return None if refuses(0) else refused - 1


def _tried(conversation: Conversation, failures: Sequence[RecordError]) -> str:
    """Error text about the other forms; the last failure is the form with all changes."""
    if not conversation.forms:
        return ""
    names = " and ".join(_NAMES.get(form, form) for form in conversation.forms)
    if str(failures[0]) == str(failures[-1]):
        return f"; with {names} as well"
    return f"; with {names}: {str(failures[-1]).partition(': ')[2]}"


def _cures(
    conversation: Conversation, template: Template, failures: Sequence[RecordError]
) -> list[str]:
    """Possible cures."""
    said = f"{failures[0]} {failures[-1]}"
    cures = [
        cure for pattern, cure in _KNOWN if re.search(pattern, said, re.IGNORECASE | re.DOTALL)
    ]
    if any(isinstance(one, str) for one in arguments_of(conversation.messages)) and (
        "decode_arguments" not in conversation.forms
    ):
        cures.append("decode_arguments: true gives it the arguments of tool calls as objects")
    parts = any(is_text_parts(message.get("content")) for message in conversation.messages)
    if parts and "join_text_parts" not in conversation.forms:
        cures.append("join_text_parts: true gives it one text for the parts of a content")
    if conversation.tools is None and _takes(template, replace(conversation, tools=())):
        cures.append(
            "it reads tools, and the record has none; take another template for such records"
        )
    return cures


def _takes(template: Template, conversation: Conversation) -> bool:
    messages: Sequence[JsonMapping] = conversation.messages
    try:
        template.render_plain(messages, tools=conversation.tools, **conversation.variables)
    except RecordError:
        return False
    return True
