"""Records that hold a request and its answer in fields: Alpaca, prompt and completion, preference
pairs.

A prompt is never trained as an answer: if it is a list of messages, its assistant turns get
`train=False`. Only the chosen answer of a preference pair is read.
"""

import re
from collections.abc import Mapping
from typing import Any

from penstock.chat.records.conversation import MessageWeights
from penstock.chat.records.layout_settings import LayoutSettings
from penstock.chat.records.messages import Messages, read_messages
from penstock.core.errors import ConversationError
from penstock.core.json_values import JsonMapping, JsonObject

RESPONSES = ("response",)
PROMPTS = ("query",)
INPUTS = ("context",)
"""As Dolly calls what an instruction is about."""
STEPS, LABELS = "completions", "labels"
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):[ ]?")
"""Beginning of a turn in the texts of Anthropic's HH-RLHF."""


def read_alpaca(record: JsonMapping, settings: LayoutSettings, origin: str) -> Messages:
    """`instruction`, `input` or `context`, `output` or `response`, and `history` of [request,
    answer] pairs.
    """
    instruction = _text(record, settings.name("instruction"), origin)
    more = _text(record, settings.name("input", *INPUTS), origin, "")
    output = _text(record, settings.name("output", *RESPONSES), origin)
    items = _history(record, settings, origin)
    request = f"{instruction}\n{more}" if more else instruction
    items += [{"role": "user", "content": request}, {"role": "assistant", "content": output}]
    return _read_own(items, settings, origin)


def _history(record: JsonMapping, settings: LayoutSettings, origin: str) -> list[JsonObject]:
    """Earlier requests and answers, as messages."""
    items = []
    pairs = _first(record, settings.name("history")) or ()
    if not isinstance(pairs, list | tuple):
        raise ConversationError(
            f"{origin}: history is {pairs!r:.60}; expected a list of [request, answer]"
        )
    for index, pair in enumerate(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ConversationError(
                f"{origin}: history {index} is {pair!r:.60}; expected [request, answer]"
            )
        items += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return items


def read_steps(record: JsonMapping, settings: LayoutSettings, origin: str) -> Messages:
    """`prompt` and `completions`, the steps of one answer, a line each, with `labels`: wrong steps
    are only read.
    """
    steps, labels = record.get(STEPS), record.get(LABELS)
    if (
        not isinstance(steps, list | tuple)
        or not steps
        or not all(isinstance(step, str) for step in steps)
    ):
        raise ConversationError(
            f'{origin}: "{STEPS}" is {steps!r:.60}; expected a list of texts, the steps of an '
            "answer"
        )
    if (
        not isinstance(labels, list | tuple)
        or len(labels) != len(steps)
        or any(label not in (0, 1) or isinstance(label, str) for label in labels)
    ):
        raise ConversationError(
            f'{origin}: "{LABELS}" is {labels!r:.60}; expected true or false for each of '
            f"{len(steps)} steps"
        )
    messages, weights = _turns(
        _first(record, settings.name("prompt", *PROMPTS)), "user", "prompt", settings, origin
    )
    parts = [
        {"type": "text", "text": step + "\n" * (place < len(steps) - 1), "train": bool(label)}
        for place, (step, label) in enumerate(zip(steps, labels, strict=True))
    ]
    reply, own = _read_own([{"role": "assistant", "content": parts}], settings, origin)
    return messages + reply, _asked(messages, weights) + own


def read_prompt_completion(record: JsonMapping, settings: LayoutSettings, origin: str) -> Messages:
    """`prompt` (or `query`) and `completion` (or `response`): texts, messages, or lists of
    messages; `history`.
    """
    if record.get("label") is False:
        raise ConversationError(
            f'{origin}: "label" is false, so a completion that was judged bad would be '
            "trained; remove such records"
        )
    before, earlier = _read_own(_history(record, settings, origin), settings, origin)
    messages, weights = _turns(
        _first(record, settings.name("prompt", *PROMPTS)), "user", "prompt", settings, origin
    )
    reply, reply_weights = _turns(
        _first(record, settings.name("completion", *RESPONSES)),
        "assistant",
        "completion",
        settings,
        origin,
    )
    return before + messages + reply, earlier + _asked(messages, weights) + reply_weights


def read_preference(
    record: JsonMapping, before: Messages | None, settings: LayoutSettings, origin: str
) -> Messages:
    """The prompt and the `chosen` answer; `before`: the record's list of messages, if it has
    one.
    """
    chosen = _first(record, settings.name("chosen"))
    prompt = _first(record, settings.name("prompt", "instruction", "question"))
    if before is None and prompt is None:
        if isinstance(chosen, str):
            chosen = _human_and_assistant(chosen, origin)
        return _turns(chosen, "assistant", "chosen", settings, origin)
    messages, weights = _turns(chosen, "assistant", "chosen", settings, origin)
    if any(message["role"] == "user" for message in messages):
        return messages, weights  # the chosen side holds the whole conversation, prompt included
    if before is None:
        more = _text(record, settings.name("input"), origin, "")
        before = _turns(f"{prompt}\n{more}" if more else prompt, "user", "prompt", settings, origin)
    return before[0] + messages, _asked(*before) + weights


def _human_and_assistant(text: str, origin: str) -> list[dict[str, str]]:
    """Split a text such as "\\n\\nHuman: …\\n\\nAssistant: …" into messages."""
    starts = list(_TURN.finditer(text))
    if not starts or text[: starts[0].start()].strip():
        raise ConversationError(
            f'{origin}: "chosen" is a text, and there is no prompt; '
            'expected a prompt, a list of messages, or a text that begins with "\\n\\nHuman: "'
        )
    ends = [match.start() for match in starts[1:]] + [len(text)]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[match[1]], "content": text[match.end() : end]}
        for match, end in zip(starts, ends, strict=True)
    ]


def _turns(value: object, role: str, name: str, settings: LayoutSettings, origin: str) -> Messages:
    """One side of a pair as messages; a text becomes one message of `role`."""
    if isinstance(value, str):
        return _read_own([{"role": role, "content": value}], settings, origin)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple) or not value:
        raise ConversationError(
            f'{origin}: "{name}" is {value!r:.60}; expected a text, or a list of messages'
        )
    layout = "sharegpt" if isinstance(value[0], Mapping) and "from" in value[0] else "messages"
    return read_messages(value, layout, settings, f'{origin}, "{name}"')


def _read_own(items: list[JsonObject], settings: LayoutSettings, origin: str) -> Messages:
    """Read messages that were built here: no mapping of the settings applies to their names."""
    return read_messages(items, "own", settings, origin)


def _asked(messages: list[JsonObject], weights: list[MessageWeights]) -> list[MessageWeights]:
    """Weights of a prompt: its assistant turns are not trained unless the record says so."""
    return [
        MessageWeights(train=False)
        if message["role"] == "assistant" and own.verdict is None
        else own
        for message, own in zip(messages, weights, strict=True)
    ]


def _first(record: JsonMapping, names: tuple[str, ...]) -> Any:
    given = [record[name] for name in names if record.get(name) is not None]
    # A cell may be empty where another column has the value.
    return next((value for value in given if value != ""), given[0] if given else None)


def _text(
    record: JsonMapping, names: tuple[str, ...], origin: str, default: str | None = None
) -> str:
    value = _first(record, names)
    value = default if value is None else value
    if not isinstance(value, str):
        raise ConversationError(f'{origin}: "{names[0]}" is {value!r:.60}; expected a text')
    return value
