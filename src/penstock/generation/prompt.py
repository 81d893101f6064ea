"""What a model is given before it writes: the beginning of a text, or a conversation that fits the context.

A conversation is rendered by the model's own template and encoded as in training: control tokens come only from what
the template wrote, so no text of a user begins a turn. Where it is too long, whole turns are left out, oldest first; a
turn is a user's message with all that answers it. What stands before the first of them, the system's message, stays,
and so does whatever the template writes at the beginning (BOS).
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from penstock.chat import Rendered, Template
from penstock.chat.encoding import encode_rendered
from penstock.chat.media import refuse_media
from penstock.chat.traced import LITERAL
from penstock.errors import ConversationError
from penstock.tokenizers import Tokenizer

SYSTEM_ROLES = ("system", "developer")

Messages = Sequence[Mapping[str, Any]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A conversation as ids."""

    ids: tuple[int, ...]
    messages_dropped: int = 0
    tokens_dropped: int = 0
    """How much shorter the prompt is than that of the whole conversation."""


def begin_ids(tokenizer: Tokenizer) -> list[int]:
    """What stands before a text: BOS where the tokenizer has one that is not its EOS too, as `prepare` has it."""
    bos = tokenizer.bos_id
    return [] if bos is None or bos == tokenizer.eos_id else [bos]


def end_ids(tokenizer: Tokenizer, told: Iterable[int] = ()) -> tuple[int, ...]:
    """What ends a text: what chats tell of their turns, and EOS where the tokenizer has one; ascending."""
    return tuple(sorted({*told, *([] if tokenizer.eos_id is None else [tokenizer.eos_id])}))


def encode_chat(
    messages: Messages,
    template: Template,
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Any] | None = None,
    reply_due: bool = True,
) -> tuple[int, ...]:
    """Ids of a conversation, up to where the assistant's reply begins; `reply_due` False: as it stands.

    Raises:
        RecordError: The template refuses the conversation, or it holds images, audio or video.
    """
    refuse_media(messages, {})
    rendered = template.render(messages, tools=tools, add_generation_prompt=reply_due)
    return tuple(encode_rendered(tokenizer, rendered.text, _literal(rendered)).ids.tolist())


def fit_chat(
    messages: Messages,
    template: Template,
    tokenizer: Tokenizer,
    *,
    room: int,
    tools: Sequence[Any] | None = None,
) -> Prompt:
    """The prompt of a conversation with the most turns that fit.

    Args:
        messages: All of them; the last turn is the one to answer.
        template: The model's.
        tokenizer: The model's.
        room: Tokens that the prompt may have.
        tools: JSON schemas of functions.

    Raises:
        ConversationError: The last turn alone does not fit, or there is no message.
        RecordError: The template refuses the conversation.
    """
    if not messages:
        raise ConversationError("the conversation is empty: give at least one message")
    head = next((i for i, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), len(messages))
    starts = [i for i, message in enumerate(messages) if i > head and message["role"] == "user"]
    cuts = [head, *starts]

    def encode(turns: int) -> tuple[int, ...]:
        return encode_chat([*messages[:head], *messages[cuts[turns] :]], template, tokenizer, tools=tools)

    whole = encode(0)
    if len(whole) <= room:
        return Prompt(ids=whole)
    dropped = bisect_left(range(len(cuts)), True, lo=1, key=lambda turns: len(encode(turns)) <= room)
    if dropped == len(cuts):
        least = len(encode(len(cuts) - 1))
        raise ConversationError(
            f"the last message{' with the system message' if head else ''} takes {least} tokens, and there is room for "
            f"{room}; shorten it"
        )
    ids = encode(dropped)
    return Prompt(ids=ids, messages_dropped=cuts[dropped] - head, tokens_dropped=len(whole) - len(ids))


def _literal(rendered: Rendered) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which characters the template wrote, bool [characters]; roles count as the template's, as in training."""
    flags = [run[1] == LITERAL or run[2] == "role" for run in rendered.runs]
    return np.repeat(np.array(flags, np.bool_), [run[0] for run in rendered.runs])
