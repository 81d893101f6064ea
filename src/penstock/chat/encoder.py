"""Conversations to tokens with loss weights and a certificate: the chat room's main door.

Render once with provenance, encode, weigh, check. A conversation that something stands against is an error: nothing is
trained of which it is not known whose words they are.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from penstock.chat.boundaries import Boundary, ResolvedBoundary, resolve
from penstock.chat.certificate import Certificate
from penstock.chat.checking import Evidence, certify
from penstock.chat.conversation import Conversation
from penstock.chat.encoded_text import EncodedText
from penstock.chat.encoding import encode_rendered_batch
from penstock.chat.families import Family, detect_family
from penstock.chat.forms import render_form
from penstock.chat.knobs import Knobs
from penstock.chat.layouts import read_conversation
from penstock.chat.masks import Mask, decide, trained_messages, weigh
from penstock.chat.media import refuse_media
from penstock.chat.prompting import as_prompted
from penstock.chat.scanning import scan
from penstock.chat.template import Rendered, Template, load_template, own_template
from penstock.chat.turns import Turn, find_turns
from penstock.chat.typed_control_text import find_authors
from penstock.errors import ConfigError, ConversationError
from penstock.ragged import Ragged
from penstock.tokenizers import Tokenizer, load_tokenizer

IntArray = np.ndarray[Any, np.dtype[np.int64]]
_log = logging.getLogger("penstock.chat")
_OTHERWISE = ("rewritten", "context_differs")
"""Kinds of problems for which a conversation is split."""


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
    """The message that each token belongs to, int64 [tokens]: that of the words it begins in, else that of its turn;
    −1: the template's."""
    roles: tuple[str, ...]
    """Role of each message."""
    certificate: Certificate

    @property
    def trained_text(self) -> tuple[tuple[int, str], ...]:
        """The text of each stretch of trained tokens, in order: (message that it belongs to, text)."""
        edges = np.flatnonzero(np.diff(np.concatenate([[0], self.loss_weights != 0, [0]]))).tolist()
        return tuple(
            (int(self.messages[(first + last - 1) // 2]), self.text[int(self.begins[first]) : int(self.ends[last - 1])])
            for first, last in zip(edges[::2], edges[1::2], strict=True)
        )


class _Draft(NamedTuple):
    """A conversation in the form that the template takes, as text, with its turns."""

    conversation: Conversation
    rendered: Rendered
    turns: dict[int, Turn]


@final
class ChatEncoder:
    """Encodes conversations with one tokenizer, template and settings; make it once, use it for all.

    Args:
        tokenizer: The tokenizer.
        template: The chat template.
        knobs: What is trained.
        boundaries: Role boundaries to hold the masks against; empty: those of the template's family, if it is known.
        takes_media: Whether conversations may hold images, audio or video, because the caller puts them into the rows;
            otherwise they are refused.

    Raises:
        ConfigError: A declared boundary cannot be resolved.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template,
        knobs: Knobs | None = None,
        boundaries: Sequence[Boundary] = (),
        *,
        takes_media: bool = False,
    ) -> None:
        self.tokenizer, self.template, self.knobs = tokenizer, template, knobs or Knobs()
        self._declared = resolve(boundaries, tokenizer) if boundaries else ()
        self._takes_media = takes_media
        names = {token_id: text for text, token_id in tokenizer.special_tokens.items()}
        self._eos_text = None if tokenizer.eos_id is None else names.get(tokenizer.eos_id)

    def encode(self, conversation: Conversation) -> list[EncodedChat]:
        """One conversation as one document, or with on_rewrite "split" and a rewriting template, one for each reply."""
        return self.encode_batch([conversation])[0]

    def encode_batch(self, conversations: Sequence[Conversation]) -> list[list[EncodedChat]]:
        """Conversations, each as one document or several; certificates may hold errors.

        Raises:
            RecordError: The template refuses a conversation, or it holds media; names its origin.
            TokenizerError: A text cannot be encoded.
        """
        if not conversations:
            return []
        if not self._takes_media:
            for conversation in conversations:
                refuse_media(conversation.messages, conversation.attachments, conversation.origin)
        return self._encode_drafts([self._render(conversation) for conversation in conversations])

    def _encode_drafts(self, drafts: Sequence[_Draft]) -> list[list[EncodedChat]]:
        """What was rendered, as tokens with loss weights, held to its certificates."""
        texts = [draft.rendered for draft in drafts]
        authors = [find_authors(draft.conversation, draft.rendered, self.knobs) for draft in drafts]
        encoded = encode_rendered_batch(
            self.tokenizer,
            [rendered.text for rendered in texts],
            [one.may_be_control(self.knobs) for one in authors],
            allow_forged=self.knobs.allow_forged,
        )
        decisions = [
            decide(draft.conversation, draft.rendered, draft.turns, text, self.knobs, self._eos_text, self._stops)
            for draft, text in zip(drafts, encoded, strict=True)
        ]
        masks = weigh(decisions, [draft.turns for draft in drafts], texts, encoded)
        done = []
        for draft, text, wrote, mask, scanned in zip(drafts, encoded, authors, masks, self._scan(encoded), strict=True):
            evidence = Evidence(
                conversation=draft.conversation,
                rendered=draft.rendered,
                turns=draft.turns,
                encoded=text,
                authors=wrote,
                mask=mask,
                knobs=self.knobs,
                scanned=scanned,
                family=self._family.name if self._family and not self._declared else "the settings",
                appended=(self._eos_text or "") if self._must_append(mask, draft.turns) else None,
            )
            done.append(self._split(draft.conversation, self._finish(evidence), mask.trained))
        return done

    def _scan(self, encoded: Sequence[EncodedText]) -> Sequence[np.ndarray[Any, np.dtype[np.bool_]] | None]:
        """What the role boundaries of the template's family train, of a whole batch at once."""
        roles = {boundary.role for boundary in self.boundaries} & set(self.knobs.roles_to_train)
        if not roles or not encoded:
            return [None] * len(encoded)
        rows = Ragged.from_rows([text.ids for text in encoded], np.uint32)
        weights = scan(rows, self.boundaries, roles, self.knobs.train_on_eos)
        return [weights[row] != 0 for row in range(len(encoded))]

    def _render(self, conversation: Conversation, *, prompted: bool = False) -> _Draft:
        """A conversation as text, with its turns; `prompted`: what is before its last turn as it is prompted for."""
        try:
            conversation, rendered = render_form(conversation, self.template)
            turns = self._turns(conversation, rendered)
            if prompted:
                rendered = as_prompted(conversation, rendered, turns, self.template)
                turns = self._turns(conversation, rendered)
        except ValueError as error:
            raise ConversationError(f"{conversation.origin or 'conversation'}: {error}") from error
        return _Draft(conversation, rendered, turns)

    def _turns(self, conversation: Conversation, rendered: Rendered) -> dict[int, Turn]:
        messages = conversation.messages
        trained = trained_messages(conversation, self.knobs)
        replies = [number for number in trained if messages[number]["role"] == "assistant"]
        return find_turns(
            self.template, rendered, messages, replies, tools=conversation.tools, **dict(conversation.variables)
        )

    def _finish(self, evidence: Evidence) -> EncodedChat:
        encoded, mask, text = evidence.encoded, evidence.mask, evidence.rendered.text
        tokens, weights, begins, ends = encoded.ids, mask.tokens, encoded.begins, encoded.ends
        control, owners = encoded.is_control, mask.owners
        if evidence.appended is not None:
            at = np.array([len(text)])
            own = evidence.conversation.marks[mask.trained[-1]].weight
            tokens = np.append(tokens, np.uint32(self.tokenizer.eos_id or 0))
            own_weight = np.float32(1 if own is None else own)
            # Whitespace that the template writes behind the words is what the model must write to come to EOS.
            turn = evidence.turns[mask.trained[-1]]
            weights = np.where((begins >= turn.end) & (owners == turn.message), own_weight, weights)
            weights, control = np.append(weights, own_weight), np.append(control, True)
            begins, ends, owners = np.append(begins, at), np.append(ends, at), np.append(owners, mask.trained[-1])
        return EncodedChat(
            tokens=tokens,
            loss_weights=weights,
            text=text,
            begins=begins,
            ends=ends,
            is_control=control,
            messages=owners,
            roles=tuple(message["role"] for message in evidence.conversation.messages),
            certificate=certify(evidence, self.template),
        )

    def _must_append(self, mask: Mask, turns: Mapping[int, Turn]) -> bool:
        knobs = self.knobs
        if knobs.on_missing_terminator != "append" or knobs.train_on_eos == "none" or not mask.trained or not turns:
            return False
        last = mask.trained[-1]
        if self.tokenizer.eos_id is None:
            raise ConfigError(f"on_missing_terminator is append, but the tokenizer {self.tokenizer.name} has no EOS")
        return last == max(turns) and last not in mask.terminators

    def _split(self, conversation: Conversation, chat: EncodedChat, trained: Sequence[int]) -> list[EncodedChat]:
        """The conversation as one document for each trained reply, if it has to be."""
        rewritten = [problem for problem in chat.certificate.problems if problem.kind in _OTHERWISE]
        if not rewritten or self.knobs.on_rewrite == "report":
            return [chat]
        if self.knobs.on_rewrite == "error":
            raise ConversationError(f"{conversation.origin or 'conversation'}: {rewritten[0]}")
        alone = ChatEncoder(self.tokenizer, self.template, replace(self.knobs, mask_history=True, on_rewrite="report"))
        replies = [message for message in trained if conversation.messages[message]["role"] == "assistant"]
        heads = [conversation.head(message + 1) for message in replies]
        return [chat for [chat] in alone._encode_drafts([alone._render(head, prompted=True) for head in heads])]

    @cached_property
    def _family(self) -> Family | None:
        return detect_family(self.template.source)

    @cached_property
    def _stops(self) -> frozenset[str]:
        """Control text that ends a generation."""
        stops = self._family.stop if self._family else ()
        return frozenset(text for text in (*stops, self._eos_text) if text)

    @cached_property
    def boundaries(self) -> tuple[ResolvedBoundary, ...]:
        """Role boundaries that masks are held against.

        Those that were declared; or of the template's family, where we know it and the tokenizer has its markers.
        """
        if self._declared or self._family is None:
            return self._declared
        try:
            return self._family.resolve(self.tokenizer)
        except ConfigError as error:
            _log.info("no cross-check by role boundaries: %s", error)
            return ()


def encode(
    conversation: Conversation | Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    tokenizer: Tokenizer | str | Path,
    template: Template | str | Path | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    strict: bool = True,
    **knobs: Any,
) -> EncodedChat:
    """Encode one conversation.

    Args:
        conversation: A list of messages, a record of any layout, or a `Conversation`.
        tokenizer: A tokenizer, or where to load it from.
        template: A chat template, or where to load it from; by default the one that came with the tokenizer.
        tools: JSON schemas of functions, beside a list of messages; a record has its own.
        strict: Raise where the certificate holds an error; otherwise give it to be looked at.
        knobs: See `Knobs`.

    Raises:
        ConversationError: The conversation cannot be read or rendered, or something stands against training it.
        ConfigError: A setting is unknown or out of range.
    """
    loaded = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
    if template is None:
        template = own_template(loaded)
    elif not isinstance(template, Template):
        template = load_template(template, tokenizer=loaded)
    chosen = Knobs.of(knobs)
    if not isinstance(conversation, Conversation):
        conversation = _read(conversation, tools)
    chats = ChatEncoder(loaded, template, chosen).encode(conversation)
    if len(chats) != 1:
        raise ConversationError(
            f"the conversation became {len(chats)} documents, one for each reply; "
            "ps.chat.ChatEncoder(tokenizer, template, knobs).encode(conversation) gives them all"
        )
    errors = [problem for problem in chats[0].certificate.problems if problem.is_error]
    if strict and errors:
        raise ConversationError(f"{conversation.origin or 'conversation'}: {'; '.join(map(str, errors))}")
    return chats[0]


def _read(given: Mapping[str, Any] | Sequence[Mapping[str, Any]], tools: Any) -> Conversation:
    """A record, or a list of messages with its tools, as one conversation."""
    record: Mapping[str, Any] = given if isinstance(given, Mapping) else {"messages": list(given)}
    if not isinstance(given, Mapping) and not given:
        raise ConversationError("the conversation is empty: give at least one message")
    read = read_conversation(record if tools is None else {**record, "tools": list(tools)})
    if isinstance(read, list):
        raise ConversationError(f"the record holds {len(read)} conversations; encode them one by one")
    return read
