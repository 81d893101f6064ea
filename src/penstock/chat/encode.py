"""Conversations to tokens with loss weights and a certificate: the chat room's main door.

Render once with provenance, encode, weigh, check. A conversation that something stands against is an error: nothing is
trained of which it is not known whose words they are.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np

from penstock.chat.boundaries import ResolvedBoundary
from penstock.chat.certificate import Certificate
from penstock.chat.checking import Evidence, certify
from penstock.chat.conversation import Conversation
from penstock.chat.encoded_text import EncodedText
from penstock.chat.encoding import encode_rendered_batch
from penstock.chat.families import Family, detect_family
from penstock.chat.knobs import Knobs
from penstock.chat.layouts import read_conversation
from penstock.chat.masks import Mask, weigh
from penstock.chat.template import Rendered, Template, load_template
from penstock.chat.turns import Turn, find_turns
from penstock.errors import ConfigError, ConversationError
from penstock.tokenizers import Tokenizer, load_tokenizer

IntArray = np.ndarray[Any, np.dtype[np.int64]]
_log = logging.getLogger("penstock.chat")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedChat:
    """A conversation as it will be trained."""

    tokens: np.ndarray[Any, np.dtype[np.uint32]]
    """uint32 [tokens]."""
    loss_weights: np.ndarray[Any, np.dtype[np.float32]]
    """How much each token counts as a target, float32 [tokens]."""
    text: str
    """What the template rendered."""
    begins: IntArray
    """First character of each token in `text`, int64 [tokens]."""
    ends: IntArray
    """One after its last character."""
    is_control: np.ndarray[Any, np.dtype[np.bool_]]
    """Which tokens are control tokens, bool [tokens]."""
    messages: IntArray
    """In whose turn each token is, int64 [tokens]; −1: in none."""
    roles: tuple[str, ...]
    """Role of each message."""
    certificate: Certificate


@final
class ChatEncoder:
    """Encodes conversations with one tokenizer, template and settings; make it once, use it for all.

    Args:
        tokenizer: The tokenizer.
        template: The chat template.
        knobs: What is trained.
    """

    def __init__(self, tokenizer: Tokenizer, template: Template, knobs: Knobs | None = None) -> None:
        self.tokenizer, self.template, self.knobs = tokenizer, template, knobs or Knobs()
        names = {token_id: text for text, token_id in tokenizer.special_tokens.items()}
        self._eos_text = None if tokenizer.eos_id is None else names.get(tokenizer.eos_id)

    def encode(self, conversation: Conversation) -> list[EncodedChat]:
        """One conversation as one document, or with on_rewrite "split" and a rewriting template, one for each reply."""
        return self.encode_batch([conversation])[0]

    def encode_batch(self, conversations: Sequence[Conversation]) -> list[list[EncodedChat]]:
        """Conversations, each as one document or several; certificates may hold errors.

        Raises:
            RecordError: The template refuses a conversation; names its origin.
            TokenizerError: A text cannot be encoded.
        """
        drafts = [self._render(conversation) for conversation in conversations]
        literals = [_literal(rendered) for rendered, _ in drafts]
        encoded = encode_rendered_batch(
            self.tokenizer,
            [rendered.text for rendered, _ in drafts],
            literals,
            allow_forged=self.knobs.allow_forged,
        )
        done = []
        for conversation, (rendered, turns), tokens in zip(conversations, drafts, encoded, strict=True):
            chat = self._finish(conversation, rendered, turns, tokens, self.knobs)
            done.append(self._split(conversation, chat))
        return done

    def _render(self, conversation: Conversation) -> tuple[Rendered, dict[int, Turn]]:
        messages, variables = conversation.messages, dict(conversation.variables)
        prompted = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        try:
            rendered = self.template.render(messages, tools=conversation.tools, **variables)
            turns = find_turns(self.template, rendered, messages, prompted, tools=conversation.tools, **variables)
        except ValueError as error:
            raise ConversationError(f"{conversation.origin or 'conversation'}: {error}") from error
        return rendered, turns

    def _finish(
        self,
        conversation: Conversation,
        rendered: Rendered,
        turns: Mapping[int, Turn],
        encoded: EncodedText,
        knobs: Knobs,
    ) -> EncodedChat:
        mask = weigh(conversation, rendered, turns, encoded, knobs, self._eos_text, self._stops)
        evidence = Evidence(
            conversation=conversation, rendered=rendered, turns=turns, encoded=encoded, mask=mask, knobs=knobs
        )
        certificate = certify(evidence, self.template, self._boundaries)
        tokens, weights, begins, ends = encoded.ids, mask.tokens, encoded.begins, encoded.ends
        control, owners = encoded.is_control, _owners(turns, encoded)
        if self._must_append(mask, turns):
            at = np.array([len(rendered.text)])
            tokens = np.append(tokens, np.uint32(self.tokenizer.eos_id or 0))
            weights, control = np.append(weights, np.float32(1)), np.append(control, True)
            begins, ends, owners = np.append(begins, at), np.append(ends, at), np.append(owners, mask.trained[-1])
        return EncodedChat(
            tokens=tokens,
            loss_weights=weights,
            text=rendered.text,
            begins=begins,
            ends=ends,
            is_control=control,
            messages=owners,
            roles=tuple(message["role"] for message in conversation.messages),
            certificate=certificate,
        )

    def _must_append(self, mask: Mask, turns: Mapping[int, Turn]) -> bool:
        if self.knobs.on_missing_terminator != "append" or not mask.trained or not turns:
            return False
        last = mask.trained[-1]
        if self.tokenizer.eos_id is None:
            raise ConfigError(f"on_missing_terminator is append, but the tokenizer {self.tokenizer.name} has no EOS")
        return last == max(turns) and last not in mask.terminators

    def _split(self, conversation: Conversation, chat: EncodedChat) -> list[EncodedChat]:
        rewritten = [problem for problem in chat.certificate.problems if problem.kind == "rewritten"]
        if not rewritten or self.knobs.on_rewrite == "report":
            return [chat]
        if self.knobs.on_rewrite == "error":
            raise ConversationError(f"{conversation.origin or 'conversation'}: {rewritten[0]}")
        alone = ChatEncoder(self.tokenizer, self.template, replace(self.knobs, mask_history=True, on_rewrite="report"))
        parts = []
        for message, content in enumerate(conversation.messages):
            if content["role"] == "assistant":
                [part] = alone.encode(conversation.head(message + 1))
                if part.certificate.ok:
                    parts.append(part)
        return parts

    @cached_property
    def _family(self) -> Family | None:
        return detect_family(self.template.source)

    @cached_property
    def _stops(self) -> frozenset[str]:
        """Control text that ends a generation."""
        stops = self._family.stop if self._family else ()
        return frozenset(text for text in (*stops, self._eos_text) if text)

    @cached_property
    def _boundaries(self) -> tuple[str, tuple[ResolvedBoundary, ...]] | None:
        """The template's family, where it is one that we know and the tokenizer has its markers."""
        if self._family is None:
            return None
        try:
            return self._family.name, self._family.resolve(self.tokenizer)
        except ConfigError as error:
            _log.info("no cross-check by role boundaries: %s", error)
            return None


def encode(
    conversation: Conversation | Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    tokenizer: Tokenizer | str | Path,
    template: Template | str | Path | None = None,
    strict: bool = True,
    **knobs: Any,
) -> EncodedChat:
    """Encode one conversation.

    Args:
        conversation: A list of messages, a record of any layout, or a `Conversation`.
        tokenizer: A tokenizer, or where to load it from.
        template: A chat template, or where to load it from; by default that of the tokenizer's folder.
        strict: Raise where the certificate holds an error; otherwise give it to be looked at.
        knobs: See `Knobs`.

    Raises:
        ConversationError: The conversation cannot be read or rendered, or something stands against training it.
        ConfigError: A setting is unknown or out of range.
    """
    loaded = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
    if not isinstance(template, Template):
        if template is None and isinstance(tokenizer, Tokenizer):
            raise ConfigError("give a chat template: a .jinja file, a tokenizer folder, or the text of one")
        template = load_template(template if template is not None else str(tokenizer), tokenizer=loaded)
    try:
        chosen = Knobs(**knobs)
    except TypeError as error:
        raise ConfigError(f"{error}; there are {', '.join(Knobs().describe())}") from error
    if not isinstance(conversation, Conversation):
        record = conversation if isinstance(conversation, Mapping) else {"messages": list(conversation)}
        read = read_conversation(record)
        if isinstance(read, list):
            raise ConversationError(f"the record holds {len(read)} conversations; encode them one by one")
        conversation = read
    chats = ChatEncoder(loaded, template, chosen).encode(conversation)
    if len(chats) != 1:
        raise ConversationError(f"the conversation became {len(chats)} documents; use ChatEncoder for them")
    errors = [problem for problem in chats[0].certificate.problems if problem.is_error]
    if strict and errors:
        raise ConversationError(f"{conversation.origin or 'conversation'}: {'; '.join(map(str, errors))}")
    return chats[0]


def _literal(rendered: Rendered) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which characters the template wrote; the role of a message counts as the template's."""
    lengths = [run[0] for run in rendered.runs]
    flags = [run[1] < 0 or run[2] == "role" for run in rendered.runs]
    return np.repeat(np.array(flags, np.bool_), np.array(lengths, np.int64))


def _owners(turns: Mapping[int, Turn], encoded: EncodedText) -> IntArray:
    """In whose turn each token begins."""
    owners = np.full(len(encoded.ids), -1, np.int64)
    for message, turn in turns.items():
        for begin, end in turn.pieces:
            first, last = np.searchsorted(encoded.begins, [begin, end], "left")
            owners[first:last] = message
    return owners
