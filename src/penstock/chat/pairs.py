"""Records that hold a request and its answer in fields: Alpaca, prompt and completion, preference pairs.

A prompt is never trained as an answer: where it is a list of messages, its assistant turns are marked `train=False`. Of
a preference pair the chosen answer is read, the rejected one is not.
"""

import re
from collections.abc import Mapping
from typing import Any

from penstock.chat.conversation import Marks
from penstock.chat.layout_settings import LayoutSettings
from penstock.chat.messages import Messages, read_messages
from penstock.errors import ConversationError

RESPONSES = ("response",)
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):[ ]?")
"""Turns as the texts of Anthropic's HH-RLHF have them."""


def read_alpaca(record: Mapping[str, Any], settings: LayoutSettings, origin: str) -> Messages:
    """`instruction`, `input`, `output` or `response`, and `history` of [request, answer] pairs."""
    instruction = _text(record, settings.name("instruction"), origin)
    more = _text(record, settings.name("input"), origin, "")
    output = _text(record, settings.name("output", *RESPONSES), origin)
    items = []
    for index, pair in enumerate(_first(record, settings.name("history")) or ()):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ConversationError(f"{origin}: history {index} is {pair!r:.60}; due [request, answer]")
        items += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    request = f"{instruction}\n{more}" if more else instruction
    items += [{"role": "user", "content": request}, {"role": "assistant", "content": output}]
    return _read_own(items, settings, origin)


def read_prompt_completion(record: Mapping[str, Any], settings: LayoutSettings, origin: str) -> Messages:
    """`prompt` and `completion` (or `response`): texts, messages, or lists of messages."""
    if record.get("label") is False:
        raise ConversationError(
            f'{origin}: "label" is false: a completion that was judged bad would be trained; leave such records out'
        )
    messages, marks = _turns(_first(record, settings.name("prompt")), "user", "prompt", settings, origin)
    reply, reply_marks = _turns(
        _first(record, settings.name("completion", *RESPONSES)), "assistant", "completion", settings, origin
    )
    return messages + reply, _asked(messages, marks) + reply_marks


def read_preference(
    record: Mapping[str, Any], before: Messages | None, settings: LayoutSettings, origin: str
) -> Messages:
    """The prompt and the `chosen` answer; `before` are the record's messages, where it has a list of them."""
    chosen = _first(record, settings.name("chosen"))
    prompt = _first(record, settings.name("prompt", "instruction", "question"))
    if before is None and prompt is None:
        if isinstance(chosen, str):
            chosen = _human_and_assistant(chosen, origin)
        return _turns(chosen, "assistant", "chosen", settings, origin)
    messages, marks = _turns(chosen, "assistant", "chosen", settings, origin)
    if any(message["role"] == "user" for message in messages):
        return messages, marks  # the chosen side holds the whole conversation, prompt included
    if before is None:
        more = _text(record, settings.name("input"), origin, "")
        before = _turns(f"{prompt}\n{more}" if more else prompt, "user", "prompt", settings, origin)
    return before[0] + messages, _asked(*before) + marks


def _human_and_assistant(text: str, origin: str) -> list[dict[str, str]]:
    """The turns of a text such as "\\n\\nHuman: …\\n\\nAssistant: …"."""
    starts = list(_TURN.finditer(text))
    if not starts or text[: starts[0].start()].strip():
        raise ConversationError(
            f'{origin}: "chosen" is a text, and there is no prompt; '
            'due a prompt, a list of messages, or a text that begins with "\\n\\nHuman: "'
        )
    ends = [match.start() for match in starts[1:]] + [len(text)]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[match[1]], "content": text[match.end() : end]} for match, end in zip(starts, ends, strict=True)
    ]


def _turns(value: Any, role: str, name: str, settings: LayoutSettings, origin: str) -> Messages:
    """One side of a pair as messages: a text is one of `role`."""
    if isinstance(value, str):
        return _read_own([{"role": role, "content": value}], settings, origin)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple) or not value:
        raise ConversationError(f'{origin}: "{name}" is {value!r:.60}; due a text, or a list of messages')
    layout = "sharegpt" if isinstance(value[0], Mapping) and "from" in value[0] else "messages"
    return read_messages(value, layout, settings, f'{origin}, "{name}"')


def _read_own(items: list[dict[str, Any]], settings: LayoutSettings, origin: str) -> Messages:
    """Messages that were built here: their names are ours, whatever mapping the settings have."""
    return read_messages(items, "own", settings, origin)


def _asked(messages: list[dict[str, Any]], marks: list[Marks]) -> list[Marks]:
    """Marks of a prompt: what an assistant says in it was not asked for."""
    return [
        Marks(train=False) if message["role"] == "assistant" and mark.verdict is None else mark
        for message, mark in zip(messages, marks, strict=True)
    ]


def _first(record: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _text(record: Mapping[str, Any], names: tuple[str, ...], origin: str, default: str | None = None) -> str:
    value = _first(record, names)
    value = default if value is None else value
    if not isinstance(value, str):
        raise ConversationError(f'{origin}: "{names[0]}" is {value!r:.60}; due a text')
    return value
