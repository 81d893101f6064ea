"""Prompts and chats: conversations that fit the context, and replies that stream.

A conversation is rendered by the model's own template and encoded as in training: control tokens
come only from the template's text, so a user's text cannot begin a turn. If the conversation is too
long, whole turns are left out, the oldest first; a turn is a user message with everything up to the
next one. Messages before the first turn (the system message) stay, and so does what the template
writes at the beginning (BOS).

Guarantees: the prompt is exactly the template's text for the system message and the newest turns,
all complete. The number of tokens left out is reported. An empty reply leaves the conversation
unchanged.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, final

import numpy as np

from penstock.chat import Rendered, Template
from penstock.chat.records.conversation import DEFAULT_WEIGHTS, Conversation
from penstock.chat.render.choosing import render_form
from penstock.chat.render.forms import forms_of
from penstock.chat.render.traced_text import LITERAL
from penstock.chat.tokens.encoding import encode_rendered
from penstock.chat.tokens.images import restore
from penstock.core.arrays import Bool
from penstock.core.errors import ConfigError, ConversationError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.core.notebook import card
from penstock.learn.generation.engine import Engine
from penstock.learn.generation.images import ImageReader
from penstock.learn.generation.settings import Event, FinishReason, Sampling
from penstock.learn.generation.unmasking import Unmasker
from penstock.media.expansion import expand
from penstock.media.layout import NOUNS
from penstock.media.placement import images_of
from penstock.media.prompts import PromptImages
from penstock.media.records import refuse_media
from penstock.tokenizers import Tokenizer

SYSTEM_ROLES = ("system", "developer")

Messages = Sequence[Mapping[str, Any]]
Ending = Literal["reply", "message", "continue"]
"""What a prompt ends with: the beginning of the assistant's reply; the end of the last message; or
the last message's text, which the model continues.
"""
NO_VARIABLES: JsonMapping = MappingProxyType({})


class DoesNotFitError(ConversationError):
    """The last turn alone is longer than the room for a prompt."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A conversation as ids."""

    ids: tuple[int, ...]
    images: PromptImages | None = None
    """None: it has none."""
    messages_dropped: int = 0
    tokens_dropped: int = 0
    """Length of the whole conversation's prompt minus that of this one."""


def begin_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids before a text as the tokenizer's own encoding has them; a model's data may have
    others (`ModelFacts`).
    """
    return list(tokenizer.begin_ids)


def first_id(tokenizer: Tokenizer, begins: Iterable[int]) -> int | None:
    """The token before what has no text before it: BOS, else EOS; None if there is neither.

    EOS, too, if the tokenizer's own encoding adds BOS, but the model's texts begin without it
    (`begins`).
    """
    named = [token for token in (tokenizer.bos_id, tokenizer.eos_id) if token is not None]
    if not named:
        return None
    return named[-1] if named[0] in tokenizer.begin_ids and named[0] not in begins else named[0]


def end_ids(tokenizer: Tokenizer, stop_ids: Iterable[int] = ()) -> tuple[int, ...]:
    """The ids that end a text: the stop ids of its chats, and EOS if the tokenizer has one;
    ascending.
    """
    return tuple(sorted({*stop_ids, *([] if tokenizer.eos_id is None else [tokenizer.eos_id])}))


def encode_chat(
    messages: Messages,
    template: Template,
    tokenizer: Tokenizer,
    *,
    tools: Sequence[object] | None = None,
    add_generation_prompt: bool = True,
) -> tuple[int, ...]:
    """Ids of a conversation, with the beginning of the assistant's reply if
    `add_generation_prompt`.

    Raises:
        RecordError: The template refuses the conversation, or loses a call or a result of it; or it
            holds images, audio or video.
    """
    refuse_media(messages, {})
    return _encode(messages, template, tokenizer, tools, add_generation_prompt, None)[0]


def _encode(
    messages: Messages,
    template: Template,
    tokenizer: Tokenizer,
    tools: Sequence[object] | None,
    add_generation_prompt: bool,
    images: ImageReader | None,
) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """Ids of a conversation whose images are loaded, and the tokens of each image."""
    return _encode_rendered(
        _render(messages, template, tools, add_generation_prompt), messages, tokenizer, images
    )


def _encode_rendered(
    rendered: Rendered, messages: Messages, tokenizer: Tokenizer, images: ImageReader | None
) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    literal = _literal(rendered)
    loaded = images_of(messages)
    if images is None or not loaded:
        return tuple(encode_rendered(tokenizer, rendered.text, literal).ids.tolist()), []
    layouts = [images.processor.layout(image.size) for image in loaded]
    expanded = expand(
        rendered.text,
        literal,
        images.processor.placeholder,
        layouts,
        NOUNS[images.processor.medium],
    )
    encoded, places = restore(
        encode_rendered(tokenizer, expanded.text, expanded.literal), expanded, images.processor
    )
    return tuple(encoded.ids.tolist()), [(place.begin, place.end) for place in places]


def _render(
    messages: Messages,
    template: Template,
    tools: Sequence[Any] | None,
    add_generation_prompt: bool,
    variables: JsonMapping = NO_VARIABLES,
) -> Rendered:
    """A conversation as text, in the form that the template accepts, as in training."""
    plain = tuple({"content": None, **message} for message in messages)
    conversation = Conversation(
        messages=plain,
        message_weights=(DEFAULT_WEIGHTS,) * len(plain),
        forms=forms_of(plain, True, True),
        variables=variables,
    )
    if (
        conversation.forms
        or template.reads_parts
        or any(message["role"] == "tool" for message in plain)
    ):
        conversation = replace(conversation, tools=None if tools is None else tuple(tools))
        form, rendered = render_form(conversation, template)
        if lost := next(
            (one for one in rendered.lost if one.where in ("arguments", "result")), None
        ):
            raise ConversationError(
                f"message {lost.message}: {lost.text}, so the model would answer without it"
            )
        messages = form.messages
    return template.render(
        messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
    )


def cut_to_continue(rendered: Rendered, number: int, said: str) -> Rendered:
    """A conversation up to the end of a message's text, which the model then continues.

    Args:
        rendered: The conversation, without the beginning of another reply.
        number: Of the last message.
        said: Its text. If the template strips white space from it, the prompt has none there, as in
            transformers.

    Raises:
        ConversationError: There is no text, or the template does not write it as it is.
    """
    at, end, written = 0, 0, ""
    for length, message, field, *_ in rendered.runs:
        if message == number and (field == "content" or field.startswith("content.")):
            end, written = at + length, written + rendered.text[at : at + length]
        at += length
    if not said.strip():
        raise ConversationError(
            "the last message has no text that could be continued; give some, or leave it out"
        )
    if written not in (said, said.strip(), said.lstrip(), said.rstrip()):
        raise ConversationError(
            "the chat template does not write the last message's text as it is, but "
            f"{written[-60:]!r} at its end, so it cannot be continued"
        )
    runs, left = [], end
    for run in rendered.runs:
        if left > 0:
            runs.append((min(run[0], left), *run[1:]))
        left -= run[0]
    return replace(rendered, text=rendered.text[:end], runs=tuple(runs))


def fit_chat(
    messages: Messages,
    template: Template,
    tokenizer: Tokenizer,
    *,
    room: int,
    tools: Sequence[object] | None = None,
    images: ImageReader | None = None,
    ending: Ending = "reply",
    variables: Mapping[str, object] = NO_VARIABLES,
) -> Prompt:
    """The prompt of a conversation with as many of the newest turns as fit.

    Args:
        messages: The whole conversation; the last turn is the one to answer.
        template: The model's chat template.
        tokenizer: The model's tokenizer.
        room: Maximum tokens of the prompt.
        tools: JSON schemas of functions.
        images: Reads the images of messages; None: they are refused.
        ending: See `Ending`.
        variables: Of the template, for this conversation, such as `enable_thinking`.

    Raises:
        DoesNotFitError: The last turn alone does not fit.
        ConversationError: There is no message, an image is refused, or the last message cannot be
            continued.
        RecordError: The template refuses the conversation.
    """
    if not messages:
        raise ConversationError("the conversation is empty; give at least one message")
    if images is None:
        refuse_media(messages, {})
    else:
        messages = images.place(messages)
    head = next(
        (i for i, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES),
        len(messages),
    )
    starts = [i for i, message in enumerate(messages) if i > head and message["role"] == "user"]
    cuts = [head, *starts]

    def kept(turns: int) -> Messages:
        return [*messages[:head], *messages[cuts[turns] :]]

    def encode(turns: int) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        rest = kept(turns)
        rendered = _render(rest, template, tools, ending == "reply", variables)
        if ending == "continue":
            rendered = cut_to_continue(rendered, len(rest) - 1, _text_of(rest[-1]))
        return _encode_rendered(rendered, rest, tokenizer, images)

    def prompt(turns: int) -> Prompt:
        ids, places = encode(turns)
        read = (
            images.read(ids, places, images_of(kept(turns)))
            if images is not None and places
            else None
        )
        return Prompt(ids=ids, images=read)

    whole = len(encode(0)[0])
    if whole <= room:
        return prompt(0)
    dropped = bisect_left(
        range(len(cuts)), True, lo=1, key=lambda turns: len(encode(turns)[0]) <= room
    )
    if dropped == len(cuts):
        least = len(encode(len(cuts) - 1)[0])
        raise DoesNotFitError(
            f"the last message{' with the system message' if head else ''} takes {least} "
            f"tokens, but there is room for {room}; shorten it"
        )
    found = prompt(dropped)
    return replace(
        found, messages_dropped=cuts[dropped] - head, tokens_dropped=whole - len(found.ids)
    )


def _text_of(message: JsonMapping) -> str:
    content = message.get("content") or ""
    return (
        content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)
    )


def _literal(rendered: Rendered) -> Bool:
    """Which characters come from the template, bool [characters]; as in training, roles count as
    the template's.
    """
    flags = [run[1] == LITERAL or run[2] == "role" for run in rendered.runs]
    return np.repeat(np.array(flags, np.bool_), [run[0] for run in rendered.runs])


def room_for(engine: Engine | Unmasker, sampling: Sampling) -> int:
    """Maximum tokens of a prompt that leaves a quarter of the context, or `max_tokens` if less, for
    the reply.
    """
    quarter = max(1, engine.context_length // 4)
    return engine.context_length - min(sampling.max_tokens or quarter, quarter)


@final
class Reply:
    """A reply while it is generated: iterate over it for pieces of its text; `stop` ends it early.

    Attributes:
        prompt: The model's prompt, and how much was left out of it.
        text: The text so far.
        num_tokens: The number of tokens so far.
        finish_reason: None until the reply is complete, and if it was stopped.
    """

    def __init__(
        self,
        session: "ChatSession",
        asked: dict[str, object],
        prompt: Prompt,
        events: Iterator[Event],
    ) -> None:
        self.prompt = prompt
        self.text = ""
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._session, self._asked, self._events = session, asked, events

    def __iter__(self) -> Iterator[str]:
        for event in self._events:
            self.num_tokens += 1
            self.text += event.text
            self.finish_reason = event.finish_reason
            if event.text:
                yield event.text
        self._end()

    def stop(self) -> None:
        """End the reply with the text so far; nothing happens if it has ended."""
        self._end()

    def _end(self) -> None:
        self._events.close()  # type: ignore[attr-defined]
        self._session._keep(self, self._asked)


@final
class ChatSession:
    """A conversation, with an engine that nothing else uses at the same time.

    Attributes:
        messages: User messages and replies so far, without the system message.
        system: The system message, or None.
    """

    def __init__(
        self,
        engine: Engine,
        template: Template,
        *,
        sampling: Sampling | None = None,
        system: str | None = None,
        tools: Sequence[object] | None = None,
        images: ImageReader | None = None,
    ) -> None:
        self.messages: list[JsonObject] = []
        self.system = system
        self._engine, self._template, self._tools, self._images = engine, template, tools, images
        self._sampling = sampling or Sampling(min_tokens=1)
        self._current: Reply | None = None
        self._number = 0

    def __repr__(self) -> str:
        return f"ChatSession({len(self.messages)} messages)"

    def _repr_html_(self) -> str:
        """What a notebook shows: the conversation so far."""
        said = [(str(message["role"]), _text_of(message)) for message in self.whole()]
        return card("Chat", said or [("messages", "none yet")])

    @property
    def context_length(self) -> int:
        """Tokens that the model reads."""
        return self._engine.context_length

    @property
    def reads_images(self) -> bool:
        """Whether messages may have images, or sounds if the model reads those."""
        return self._images is not None

    def reply(self, text: str, images: Sequence[object] = ()) -> Reply:
        """Send a message; the reply is generated while it is iterated over.

        `images`, or sounds if the model reads those, come before the text.

        Each reply of a session has other draws: they depend on the seed and the reply's number.

        Raises:
            ConfigError: The previous reply was neither read to its end nor stopped.
            ConversationError: The message does not fit the context.
            RecordError: The template refuses the conversation.
        """
        if self._current is not None:
            raise ConfigError(
                "the last reply is still being generated; read it to its end, or stop() it"
            )
        asked: JsonObject = {"role": "user", "content": text}
        if images:
            medium = "image" if self._images is None else self._images.processor.medium
            parts = [{"type": medium, medium: image} for image in images]
            asked["content"] = [*parts, {"type": "text", "text": text}]
        prompt = fit_chat(
            [*self.whole(), asked],
            self._template,
            self._engine.tokenizer,
            room=room_for(self._engine, self._sampling),
            tools=self._tools,
            images=self._images,
        )
        events = self._engine.generate(
            [prompt.ids], self._sampling, first_choice=self._number, images=[prompt.images]
        )
        self._current, self._number = Reply(self, asked, prompt, events), self._number + 1
        return self._current

    def whole(self) -> list[JsonObject]:
        """The conversation, including the system message."""
        return [
            *([{"role": "system", "content": self.system}] if self.system else []),
            *self.messages,
        ]

    def clear(self) -> None:
        """Remove all turns; the system message stays."""
        self.messages, self._number = [], 0

    def _keep(self, reply: Reply, asked: dict[str, object]) -> None:
        """Add an ended turn to the conversation, unless the reply is empty."""
        if self._current is reply:
            self._current = None
            if reply.text.strip():
                self.messages += [asked, {"role": "assistant", "content": reply.text}]
