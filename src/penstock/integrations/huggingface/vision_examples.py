"""Examples of a batch as conversations, with their media where processors look for them: in parts of the messages."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.chat.conversation import UNMARKED, Conversation
from penstock.chat.layouts import LayoutSettings, read_conversation
from penstock.chat.media import media_fields
from penstock.chat.tools import read_tools
from penstock.errors import RecordError

_LAYOUT = LayoutSettings(join_text_parts=False)


def read_example(example: Any, where: str, tools: Any = None) -> Conversation:
    """The conversation of an example, its media as parts of the messages.

    Args:
        example: A record, or a list of messages.
        where: Which row it is, for errors.
        tools: Those of a record that has none of its own.

    Raises:
        RecordError: It cannot be read, or has media next to the contents of its messages.
    """
    record = example if isinstance(example, Mapping) else {"messages": example}
    if not record:
        raise RecordError(
            f"{where} has no fields: the Trainer of transformers takes away columns that the model's forward does not "
            "name; give TrainingArguments(remove_unused_columns=False)"
        )
    read = read_conversation(record, _LAYOUT, where)
    if isinstance(read, list):
        raise RecordError(f"{where} holds {len(read)} conversations; expected: one")
    beside = {"the record": read.attachments} | {
        f"message {number}": media_fields(message) for number, message in enumerate(read.messages)
    }
    for holder, fields in beside.items():
        if fields:
            raise RecordError(
                f'{where}: {holder} has media in its field "{next(iter(fields))}"; expected: as parts of a content, '
                '{"type": "image", "image": …}, where the processor finds them'
            )
    return replace(read, tools=read_tools(tools, where)) if read.tools is None else read


def refuse_marks(conversations: Sequence[Conversation]) -> None:
    """Refuse messages that say themselves how they are trained."""
    for conversation in conversations:
        for number, marks in enumerate(conversation.marks):
            if marks != UNMARKED:
                raise RecordError(
                    f"{conversation.origin}, message {number}: it says itself how it is trained (train, weight or "
                    "ranges), which role boundaries cannot honour; leave boundaries out"
                )


def shared_variables(conversations: Sequence[Conversation]) -> dict[str, Any]:
    """Tools and variables of the conversations, which a processor takes for a whole batch."""
    own: list[dict[str, Any]] = [
        {**conversation.variables, **({"tools": list(conversation.tools)} if conversation.tools else {})}
        for conversation in conversations
    ]
    different = next((row for row, one in enumerate(own) if one != own[0]), None)
    if different is not None:
        raise RecordError(
            f"row {different} of the batch has other tools or chat_template_kwargs than row 0, and a processor takes "
            "them for a whole batch; batch alike examples, or give template_arguments"
        )
    return own[0] if own else {}
