"""Fields of records that nothing reads, and what to do about those whose names mean something
elsewhere.

A field without effect may be harmless (`id`, `source`), or say what should be trained. So all are
counted, and those with a meaning come with a cure.
"""

from collections.abc import Collection, Mapping

from penstock.chat.records.conversation import RECORD_MASK
from penstock.chat.records.layout_settings import LayoutSettings
from penstock.chat.records.preference_records import INPUTS, LABELS, PROMPTS, RESPONSES, STEPS
from penstock.core.json_values import JsonMapping
from penstock.media.records import is_media_field

KNOWN = frozenset(
    (
        "role",
        "content",
        "tool_calls",
        "reasoning_content",
        "thinking",
        "reasoning",
        "name",
        "tool_call_id",
    )
)
"""Fields of messages that templates read in ways of their own."""
_SAY_WHERE = (
    "say in each message what is trained, with train or weight; a transform can move it there"
)
_MEANT: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "train",
            "training",
            "trainable",
            "loss",
            "loss_mask",
            "mask",
            "masked",
            "masks",
            "weight",
            "weights",
            "loss_weight",
            "loss_weights",
            "loss_scale",
            "sample_weight",
            "labels",
            "label_mask",
            "assistant_mask",
            "assistant_masks",
            "train_on_turn",
            "response_mask",
            "completion_mask",
            "prompt_mask",
        ),
        _SAY_WHERE,
    ),
    **dict.fromkeys(
        (
            "context",
            "input",
            "inputs",
            "passage",
            "document",
            "documents",
            "background",
            "knowledge",
            "evidence",
        ),
        "name it as input (fields: {input: …}), or put it into a message with a transform",
    ),
    **dict.fromkeys(
        ("system_prompt", "system_message", "system", "instructions", "persona"),
        "name it with field_system",
    ),
    **dict.fromkeys(
        (
            "reasoning",
            "thinking",
            "reasoning_content",
            "thought",
            "thoughts",
            "cot",
            "chain_of_thought",
            "rationale",
        ),
        "put it into the answer's message as reasoning_content, with a transform",
    ),
    **dict.fromkeys(
        ("history", "previous_messages", "past_messages"),
        "put it before the messages with a transform",
    ),
    **dict.fromkeys(
        (
            "rejected",
            "rejected_response",
            "rejected_responses",
            "rejected_messages",
            "score",
            "scores",
            "rank",
            "ranks",
            "reward",
            "rewards",
            "label",
            "labels_per_step",
            "winner",
        ),
        "answers: tree keeps answers that are compared",
    ),
    **dict.fromkeys(
        ("tools", "functions", "available_tools", "tool_schemas"), "name it with field_tools"
    ),
    **dict.fromkeys(
        ("response_format", "chat_template_kwargs", "enable_thinking", "documents_for_rag"),
        "give it to the template in chat_template_kwargs, with a transform",
    ),
    **dict.fromkeys(("input_schema", "inputSchema"), "put it into function as parameters"),
}
"""Name → what to do about a field that nothing reads."""
REJECTED = ("rejected_response", "rejected_messages")
"""Answers that are read where answers are kept."""
MESSAGE = "messages[]."
"""Prefix of the names of messages' fields."""


def cure_of(name: str) -> str | None:
    """Cure for an unread field; None: its name has no meaning elsewhere."""
    return _MEANT.get(name.removeprefix(MESSAGE))


def unread_fields(
    record: JsonMapping, layout: str, field: str, settings: LayoutSettings
) -> tuple[str, ...]:
    """Names of fields of a record that its layout does not read, in order; those without a value do
    not count.

    Args:
        record: The record.
        layout: Its layout.
        field: Its field of messages, if it has one.
        settings: How it is read.
    """
    if layout == "oasst" or (len(record) == 1 and field in record):
        return ()
    found = {"chat_template_kwargs", *_layout_fields(record, layout, field, settings)}
    return tuple(
        str(name)
        for name, value in record.items()
        if name not in found and not is_media_field(str(name)) and _says_something(value)
    )


def _layout_fields(
    record: JsonMapping, layout: str, field: str, settings: LayoutSettings
) -> list[str]:
    """The fields that a layout reads in this record."""

    def first(name: str, *others: str) -> list[str]:
        return [one for one in settings.name(name, *others) if _says_something(record.get(one))][:1]

    rejected = () if settings.answers == "best" else REJECTED
    if layout == "alpaca":
        asked = [*first("instruction"), *first("input", *INPUTS), *first("history")]
        return [*asked, *first("output", *RESPONSES), *rejected]
    if layout == "prompt_completion":
        asked = [*first("prompt", *PROMPTS), *first("completion", *RESPONSES)]
        return [*asked, *first("history"), *first("label"), *rejected]
    if layout == "steps":
        return [*first("prompt", *PROMPTS), STEPS, LABELS]
    if layout == "preference":
        asked = first("prompt", "instruction", "question")
        return [*first("chosen"), *settings.name("rejected"), *asked, *first("input"), field]
    if layout == "segments":
        return ["segments"]
    if layout == "tokens":
        return ["input_ids", "labels", "loss_mask", "attention_mask"]
    mask = [RECORD_MASK] if isinstance(record.get(RECORD_MASK), list | tuple) else []
    return [field, *rejected, *mask]


def _says_something(value: object) -> bool:
    return value is not None and not (isinstance(value, str | list | tuple | dict) and not value)


def unread_of_messages(
    messages: Collection[JsonMapping], words: Collection[str]
) -> tuple[str, ...]:
    """Fields of messages whose name the template does not have, each once.

    Args:
        messages: As read.
        words: All words of the template.
    """
    names = {
        str(name) for message in messages if len(message) > 2 for name in message.keys() - KNOWN
    }
    return tuple(
        f"{MESSAGE}{name}"
        for name in sorted(names)
        if name not in words and not is_media_field(name)
    )
