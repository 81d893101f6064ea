"""Conversations to tokens with loss weights and a certificate: render with provenance, encode, weigh, check.

A conversation that fails a check is an error. A token is trained only if its author is known.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Unpack, final

import numpy as np

from penstock.chat.masks.authors import find_authors
from penstock.chat.masks.boundaries import Boundary, ResolvedBoundary, resolve
from penstock.chat.masks.certificate import Certificate
from penstock.chat.masks.checks import Evidence, as_prompted, certify
from penstock.chat.masks.families import Family, detect_family
from penstock.chat.masks.mask_settings import MaskKeywords, MaskSettings
from penstock.chat.masks.masks import Mask, decide, trained_messages, weigh
from penstock.chat.masks.reasons import BEHIND, IMAGE, reasons_of
from penstock.chat.masks.scanning import scan
from penstock.chat.records.conversation import Conversation
from penstock.chat.records.images import images_of
from penstock.chat.records.layouts import read_conversation
from penstock.chat.records.media import refuse_media
from penstock.chat.render.forms import render_form
from penstock.chat.render.template import Rendered, Template, load_template, own_template
from penstock.chat.render.turns import Turn, find_turns
from penstock.chat.tokens.encoding import EncodedText, encode_rendered_batch
from penstock.chat.tokens.images import ImagePlace, expand, restore
from penstock.core.arrays import Ragged
from penstock.core.errors import ConfigError, ConversationError
from penstock.core.notebook import card, marked_text
from penstock.media.layout import NOUNS
from penstock.media.loading import LoadedImage
from penstock.media.processor import Processor
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.loading import load_tokenizer

IntArray = np.ndarray[Any, np.dtype[np.int64]]
_log = logging.getLogger("penstock.chat")
_REWRITES = ("rewritten", "context_differs")
"""Kinds of problems that `on_rewrite="split"` splits a conversation for."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedChat:
    """A conversation as it is trained."""

    tokens: np.ndarray[Any, np.dtype[np.uint32]]
    """uint32 [tokens]."""
    loss_weights: np.ndarray[Any, np.dtype[np.float32]]
    """Loss weight of each token as a target, float32 [tokens]."""
    text: str
    """The rendered conversation."""
    begins: IntArray
    """First character of each token in `text`, int64 [tokens]."""
    ends: IntArray
    """One after its last character, int64 [tokens]."""
    is_control: np.ndarray[Any, np.dtype[np.bool_]]
    """Which tokens are control tokens, bool [tokens]."""
    messages: IntArray
    """Message of each token, int64 [tokens]: of its first character, or of the turn around it; −1: the template's."""
    roles: tuple[str, ...]
    """Role of each message."""
    certificate: Certificate
    images: tuple[tuple[LoadedImage, ImagePlace], ...] = ()
    """Each image with the tokens that stand for it, in order."""
    evidence: tuple[Evidence, str | None] | None = field(default=None, repr=False, compare=False)
    """What `reasons` are found from: the conversation with all that was computed from it, and the text of EOS."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why each token is not trained, in words; "" for a token that is."""
        if self.evidence is None:
            raise ConfigError("this chat was not made by a ChatEncoder, which knows why its tokens are not trained")
        found = reasons_of(*self.evidence)
        for _, place in self.images:
            found[place.begin : place.end] = [IMAGE] * (place.end - place.begin)
        # One that was appended comes last.
        found += [BEHIND] * (len(self.tokens) - len(found))
        return tuple("" if weight else why for why, weight in zip(found, self.loss_weights, strict=True))

    @property
    def trained_text(self) -> tuple[tuple[int, str], ...]:
        """(message, text) of each stretch of trained tokens, in order."""
        edges = np.flatnonzero(np.diff(np.concatenate([[0], self.loss_weights != 0, [0]]))).tolist()
        return tuple(
            (int(self.messages[(first + last - 1) // 2]), self.text[int(self.begins[first]) : int(self.ends[last - 1])])
            for first, last in zip(edges[::2], edges[1::2], strict=True)
        )

    def __repr__(self) -> str:
        """One line, however long the chat: counts, no numbers of arrays."""
        trained = int(np.count_nonzero(self.loss_weights))
        verdict = ", ".join(problem.kind for problem in self.certificate.problems) or "proven"
        return f"EncodedChat({len(self.roles)} messages, {len(self.tokens)} tokens, {trained} trained; {verdict})"

    def _repr_html_(self) -> str:
        """What a notebook shows: the text with its trained tokens marked, and what the certificate says."""
        trained = int(np.count_nonzero(self.loss_weights))
        problems = "; ".join(str(problem) for problem in self.certificate.problems) or "none"
        facts = [("tokens", f"{len(self.tokens):,}, {trained:,} trained"), ("problems", problems)]
        return card("Chat", facts, marked_text(self._pieces()))

    def _pieces(self) -> Iterator[tuple[str, float]]:
        """The text in stretches of equal loss weight; characters of no token have weight 0."""
        at = 0
        for begin, end, weight in zip(
            self.begins.tolist(), self.ends.tolist(), self.loss_weights.tolist(), strict=True
        ):
            if begin > at:
                yield self.text[at:begin], 0.0
            if end > at:
                yield self.text[max(begin, at) : end], weight
            at = max(at, end)
        yield self.text[at:], 0.0


class _Draft(NamedTuple):
    """A conversation in the form that the template accepts, as text, with its turns."""

    conversation: Conversation
    rendered: Rendered
    turns: dict[int, Turn]


@final
class ChatEncoder:
    """Encodes conversations with one tokenizer, template and settings; create it once for all conversations.

    Args:
        tokenizer: The tokenizer.
        template: The chat template.
        mask_settings: Which parts of a conversation are trained.
        boundaries: Role boundaries to check the masks with; empty: those of the template's family, if it is known.
        takes_media: Accept conversations with images, audio or video, because the caller adds them to the rows; False:
            refuse them.
        processor: Says what stands for images; None: conversations with images are refused.

    Raises:
        ConfigError: A declared boundary cannot be resolved.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template,
        mask_settings: MaskSettings | None = None,
        boundaries: Sequence[Boundary] = (),
        *,
        takes_media: bool = False,
        processor: Processor | None = None,
    ) -> None:
        self.tokenizer, self.template, self.mask_settings = tokenizer, template, mask_settings or MaskSettings()
        self.processor = processor
        self._declared = resolve(boundaries, tokenizer) if boundaries else ()
        self._takes_media = takes_media
        names = {token_id: text for text, token_id in tokenizer.special_tokens.items()}
        self._eos_text = None if tokenizer.eos_id is None else names.get(tokenizer.eos_id)

    def encode(self, conversation: Conversation) -> list[EncodedChat]:
        """One conversation as one document; with on_rewrite "split" and a rewriting template, one for each reply."""
        return self.encode_batch([conversation])[0]

    def encode_batch(self, conversations: Sequence[Conversation]) -> list[list[EncodedChat]]:
        """Conversations, each as one or several documents; certificates may contain errors.

        Raises:
            RecordError: The template refuses a conversation, or it contains media; names its origin.
            TokenizerError: A text cannot be encoded.
        """
        if not conversations:
            return []
        if not self._takes_media and self.processor is None:
            for conversation in conversations:
                refuse_media(conversation.messages, conversation.attachments, conversation.origin)
        return self._encode_drafts([self._render(conversation) for conversation in conversations])

    def _encode_drafts(self, drafts: Sequence[_Draft]) -> list[list[EncodedChat]]:
        """Rendered conversations as tokens with loss weights and certificates."""
        texts = [draft.rendered for draft in drafts]
        authors = [find_authors(draft.conversation, draft.rendered, self.mask_settings) for draft in drafts]
        encoded, places = self._encode_texts(drafts, [one.may_be_control(self.mask_settings) for one in authors])
        decisions = [
            decide(
                draft.conversation, draft.rendered, draft.turns, text, self.mask_settings, self._eos_text, self._stops
            )
            for draft, text in zip(drafts, encoded, strict=True)
        ]
        masks = weigh(decisions, [draft.turns for draft in drafts], texts, encoded)
        masks = [_without_images(mask, found) for mask, found in zip(masks, places, strict=True)]
        done = []
        scans = self._scan(encoded)
        for draft, text, wrote, mask, scanned, found in zip(
            drafts, encoded, authors, masks, scans, places, strict=True
        ):
            evidence = Evidence(
                conversation=draft.conversation,
                rendered=draft.rendered,
                turns=draft.turns,
                encoded=text,
                authors=wrote,
                mask=mask,
                settings=self.mask_settings,
                scanned=scanned,
                family=self._family.name if self._family and not self._declared else "the settings",
                appended=(self._eos_text or "") if self._must_append(mask, draft.turns) else None,
            )
            done.append(self._split(draft.conversation, self._finish(evidence, found), mask.trained))
        return done

    def _encode_texts(
        self, drafts: Sequence[_Draft], literals: Sequence[np.ndarray[Any, np.dtype[np.bool_]]]
    ) -> tuple[list[EncodedText], list[list[ImagePlace]]]:
        """Tokens of rendered conversations, and the tokens of each image."""
        texts, forged = [draft.rendered.text for draft in drafts], self.mask_settings.allow_forged
        if self.processor is None:
            return encode_rendered_batch(self.tokenizer, texts, literals, allow_forged=forged), [[] for _ in drafts]
        expanded = []
        for draft, text, literal in zip(drafts, texts, literals, strict=True):
            noun = NOUNS[self.processor.medium]
            layouts = [self.processor.layout(image.size) for image in images_of(draft.conversation.messages)]
            try:
                expanded.append(expand(text, literal, self.processor.placeholder, layouts, noun))
            except ConversationError as error:
                raise ConversationError(f"{draft.conversation.origin or 'conversation'}: {error}") from error
        encoded = encode_rendered_batch(
            self.tokenizer, [one.text for one in expanded], [one.literal for one in expanded], allow_forged=forged
        )
        both = [restore(text, one, self.processor) for text, one in zip(encoded, expanded, strict=True)]
        return [text for text, _ in both], [places for _, places in both]

    def _scan(self, encoded: Sequence[EncodedText]) -> Sequence[np.ndarray[Any, np.dtype[np.bool_]] | None]:
        """Tokens that the role boundaries train, for each conversation of a batch; None where there are none."""
        roles = {boundary.role for boundary in self.boundaries} & set(self.mask_settings.roles_to_train)
        if not roles or not encoded:
            return [None] * len(encoded)
        rows = Ragged.from_rows([text.ids for text in encoded], np.uint32)
        weights = scan(rows, self.boundaries, roles, self.mask_settings.train_on_eos)
        return [weights[row] != 0 for row in range(len(encoded))]

    def _render(self, conversation: Conversation, *, prompted: bool = False) -> _Draft:
        """A conversation as text, with its turns; `prompted`: with the prompt for its last turn before that turn."""
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
        trained = trained_messages(conversation, self.mask_settings)
        replies = [number for number in trained if messages[number]["role"] == "assistant"]
        return find_turns(
            self.template, rendered, messages, replies, tools=conversation.tools, **dict(conversation.variables)
        )

    def _finish(self, evidence: Evidence, places: Sequence[ImagePlace] = ()) -> EncodedChat:
        encoded, mask, text = evidence.encoded, evidence.mask, evidence.rendered.text
        tokens, weights, begins, ends = encoded.ids, mask.tokens, encoded.begins, encoded.ends
        control, owners = encoded.is_control, mask.owners
        if evidence.appended is not None:
            at = np.array([len(text)])
            own = evidence.conversation.message_weights[mask.trained[-1]].weight
            tokens = np.append(tokens, np.uint32(self.tokenizer.eos_id or 0))
            own_weight = np.float32(1 if own is None else own)
            # The model must write the whitespace after the text before it writes EOS.
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
            images=tuple(zip(images_of(evidence.conversation.messages), places, strict=True)) if places else (),
            evidence=(evidence, self._eos_text),
        )

    def _must_append(self, mask: Mask, turns: Mapping[int, Turn]) -> bool:
        settings = self.mask_settings
        if (
            settings.on_missing_terminator != "append"
            or settings.train_on_eos == "none"
            or not (mask.trained and turns)
        ):
            return False
        last = mask.trained[-1]
        if self.tokenizer.eos_id is None:
            raise ConfigError(
                f"on_missing_terminator is append, but the tokenizer {self.tokenizer.name} has no EOS; set it to error "
                "or allow"
            )
        return last == max(turns) and last not in mask.terminators

    def _split(self, conversation: Conversation, chat: EncodedChat, trained: Sequence[int]) -> list[EncodedChat]:
        """The conversation as one document, or one for each trained reply if the template rewrites any."""
        rewritten = [problem for problem in chat.certificate.problems if problem.kind in _REWRITES]
        if not rewritten or self.mask_settings.on_rewrite == "report":
            return [chat]
        if self.mask_settings.on_rewrite == "error":
            raise ConversationError(f"{conversation.origin or 'conversation'}: {rewritten[0]}")
        settings = replace(self.mask_settings, mask_history=True, on_rewrite="report")
        alone = ChatEncoder(self.tokenizer, self.template, settings, processor=self.processor)
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
        """Role boundaries that masks are checked with: the declared ones, or those of the template's family.

        Empty if the family is unknown or the tokenizer lacks its markers.
        """
        if self._declared or self._family is None:
            return self._declared
        try:
            return self._family.resolve(self.tokenizer)
        except ConfigError as error:
            _log.info("no cross-check by role boundaries: %s", error)
            return ()


def _without_images(mask: Mask, places: Sequence[ImagePlace]) -> Mask:
    """A mask in which no token that stands for an image is trained, whatever the settings train."""
    if not places:
        return mask
    weights = mask.tokens.copy()
    for place in places:
        weights[place.begin : place.end] = 0
    return replace(mask, tokens=weights)


_NOT_OF_THE_MASK = (
    "; variables of the template come with it: template=ps.chat.load_template(…, enable_thinking=False); how a record "
    "is read: ps.chat.read_conversation"
)


def encode(
    conversation: Conversation | Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    tokenizer: Tokenizer | str | Path,
    template: Template | str | Path | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    strict: bool = True,
    **mask_settings: Unpack[MaskKeywords],
) -> EncodedChat:
    """Encode one conversation.

    Args:
        conversation: A list of messages, a record of any layout, or a `Conversation`.
        tokenizer: A tokenizer, or where to load it from.
        template: A chat template, or where to load it from; by default, and with "auto", the one that came with the
            tokenizer.
        tools: JSON schemas of functions, for a list of messages; a record has its own.
        strict: Raise if the certificate contains an error; False: return it for inspection.
        mask_settings: See `MaskSettings`.

    Raises:
        ConversationError: The conversation cannot be read or rendered, or its certificate contains an error.
        ConfigError: A setting is unknown or out of range.
    """
    loaded = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
    if template is None or template == "auto":
        template = own_template(loaded)
    elif not isinstance(template, Template):
        template = load_template(template, tokenizer=loaded)
    chosen = MaskSettings.of(mask_settings, _NOT_OF_THE_MASK)
    if not isinstance(conversation, Conversation):
        conversation = _read(conversation, tools)
    chats = ChatEncoder(loaded, template, chosen).encode(conversation)
    if len(chats) != 1:
        raise ConversationError(
            f"the conversation became {len(chats)} documents, one for each reply; "
            "ps.chat.ChatEncoder(tokenizer, template, mask_settings).encode(conversation) returns them all"
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
