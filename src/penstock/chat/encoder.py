"""Conversations to tokens with loss weights and a certificate: render with provenance, encode,
weigh, check.

A conversation that fails a check is an error. A token is trained only if its author is known.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, cast, final

import numpy as np

from penstock.chat.drafts import Draft, render_draft
from penstock.chat.encoded_chat import EncodedChat
from penstock.chat.masks.authors import find_authors
from penstock.chat.masks.boundaries import Boundary, ResolvedBoundary, resolve
from penstock.chat.masks.checks import certify
from penstock.chat.masks.evidence import Evidence
from penstock.chat.masks.families import Family, detect_family
from penstock.chat.masks.mask_keywords import MaskKeywords
from penstock.chat.masks.mask_settings import MaskSettings
from penstock.chat.masks.masks import Mask, decide, weigh
from penstock.chat.masks.scanning import scan
from penstock.chat.records.conversation import Conversation
from penstock.chat.records.layouts import read_conversation
from penstock.chat.records.unread import unread_of_messages
from penstock.chat.render.template import Template, load_template, own_template
from penstock.chat.render.turns import Turn
from penstock.chat.tokens.borders import encode_cut, merged_borders
from penstock.chat.tokens.encoding import EncodedText, encode_rendered_batch
from penstock.chat.tokens.images import restore
from penstock.chat.written import encode_written
from penstock.core.arrays import Bool
from penstock.core.errors import ConfigError, ConversationError, RecordError
from penstock.core.json_values import JsonMapping
from penstock.core.ragged import Ragged
from penstock.core.system import without_collector
from penstock.media.expansion import ImagePlace, expand
from penstock.media.layout import NOUNS
from penstock.media.placement import images_of
from penstock.media.processor import Processor
from penstock.media.records import refuse_media
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.loading import load_tokenizer

_log = logging.getLogger("penstock.chat")
_STRETCHES = 10_000
"""Texts between control tokens whose ids are kept."""
_REWRITES = ("rewritten", "context_differs")
"""Kinds of problems that `on_rewrite="split"` splits a conversation for."""

_NOT_OF_THE_MASK = (
    "; variables of the template come with it: template=ps.chat.load_template(…, "
    "enable_thinking=False); how a record is read: ps.chat.read_conversation"
)


@final
class ChatEncoder:
    """Encodes conversations with one tokenizer, template and settings; create it once for all
    conversations.

    Args:
        tokenizer: The tokenizer.
        template: The chat template.
        mask_settings: Which parts of a conversation are trained.
        boundaries: Role boundaries to check the masks with; empty: those of the template's family,
            if it is known.
        takes_media: Accept conversations with images, audio or video, because the caller adds them
            to the rows; False: refuse them.
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
        self.tokenizer, self.template, self.mask_settings = (
            tokenizer,
            template,
            mask_settings or MaskSettings(),
        )
        self.processor = processor
        self._declared = resolve(boundaries, tokenizer) if boundaries else ()
        self._takes_media = takes_media
        names = {token_id: text for text, token_id in tokenizer.special_tokens.items()}
        self._eos_text = None if tokenizer.eos_id is None else names.get(tokenizer.eos_id)
        self._stretches: dict[str, list[int]] = {}
        self._refuse_idle_settings()

    def _refuse_idle_settings(self) -> None:
        """Refuse a setting for terminators other than EOS where the template ends all turns with
        EOS.
        """
        settings = self.mask_settings
        if settings.on_merged_prompt == "split" and (
            self.tokenizer.adds_space or self.processor is not None
        ):
            reason = (
                "the tokenizer puts a space before each text"
                if self.tokenizer.adds_space
                else "with images"
            )
            raise ConfigError(
                f"on_merged_prompt: split is not possible: {reason}; set it to report or error"
            )
        if settings.train_on_eot in (None, settings.train_on_eos) or self._eos_text is None:
            return
        plain = MaskSettings(on_missing_terminator="allow")
        asked = read_conversation(
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
        )
        try:
            [chat] = ChatEncoder(self.tokenizer, self.template, plain).encode_batch(
                [cast(Conversation, asked)]
            )[0]
        except RecordError:
            return
        ends = {text.strip() for _, text, _ in chat.certificate.terminators}
        if ends == {self._eos_text}:
            raise ConfigError(
                f"train_on_eot is {settings.train_on_eot}, but chat template "
                f"{self.template.name} ends turns with {self._eos_text}, which is the "
                "tokenizer's EOS: train_on_eos decides about it"
            )

    def encode(self, conversation: Conversation) -> list[EncodedChat]:
        """One conversation as one document; with on_rewrite "split" and a rewriting template, one
        for each reply.
        """
        return self.encode_batch([conversation])[0]

    def encode_batch(self, conversations: Sequence[Conversation]) -> list[list[EncodedChat]]:
        """Conversations, each as one or several documents; certificates may contain errors.

        Raises:
            RecordError: The template refuses a conversation, or it contains media; names its
                origin.
            TokenizerError: A text cannot be encoded.
        """
        if any(conversation.written for conversation in conversations):
            return [
                [encode_written(one, self.tokenizer, one.unread)]
                if one.written
                else self.encode_batch([one])[0]
                for one in conversations
            ]
        if not conversations:
            return []
        if not self._takes_media and self.processor is None:
            for conversation in conversations:
                refuse_media(conversation.messages, conversation.attachments, conversation.origin)
        # Texts with their origins are many small objects without cycles, alive until the end: at
        # its usual pace Python's collector looked at them again and again, for a fifth of the time
        # of a long trace, and more the longer it was.
        with without_collector():
            return self._encode_drafts([self._draft(one) for one in conversations])

    def _encode_drafts(self, drafts: Sequence[Draft]) -> list[list[EncodedChat]]:
        """Rendered conversations as tokens with loss weights and certificates."""
        texts = [draft.rendered for draft in drafts]
        authors = [
            find_authors(draft.conversation, draft.rendered, self.mask_settings) for draft in drafts
        ]
        literals = [one.may_be_control(self.mask_settings) for one in authors]
        encoded, places = self._encode_texts(drafts, literals)
        merged = [self._merged(draft, text) for draft, text in zip(drafts, encoded, strict=True)]
        if self.mask_settings.on_merged_prompt == "split":
            encoded = [
                self._split_at(*each)
                for each in zip(drafts, encoded, literals, merged, strict=True)
            ]
            merged = [() for _ in drafts]
        decisions = [
            decide(
                draft.conversation,
                draft.rendered,
                draft.turns,
                draft.trained,
                text,
                self.mask_settings,
                self._eos_text,
                self._stops,
            )
            for draft, text in zip(drafts, encoded, strict=True)
        ]
        masks = weigh(decisions, [draft.turns for draft in drafts], texts, encoded)
        masks = [_without_images(mask, found) for mask, found in zip(masks, places, strict=True)]
        done = []
        scans = self._scan(encoded)
        for draft, text, wrote, mask, scanned, found, borders in zip(
            drafts, encoded, authors, masks, scans, places, merged, strict=True
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
                merged=borders,
                unread=(
                    *draft.conversation.unread,
                    *unread_of_messages(draft.conversation.messages, self.template.words),
                ),
                appended=(self._eos_text or "") if self._must_append(mask, draft.turns) else None,
            )
            done.append(
                self._split(draft.conversation, self._finish(evidence, found), mask.trained)
            )
        return done

    def _encode_texts(
        self, drafts: Sequence[Draft], literals: Sequence[Bool]
    ) -> tuple[list[EncodedText], list[list[ImagePlace]]]:
        """Tokens of rendered conversations, and the tokens of each image."""
        texts, forged = [draft.rendered.text for draft in drafts], self.mask_settings.allow_forged
        if self.processor is None:
            return encode_rendered_batch(self.tokenizer, texts, literals, allow_forged=forged), [
                [] for _ in drafts
            ]
        expanded = []
        for draft, text, literal in zip(drafts, texts, literals, strict=True):
            noun = NOUNS[self.processor.medium]
            layouts = [
                self.processor.layout(image.size)
                for image in images_of(draft.conversation.messages)
            ]
            try:
                expanded.append(expand(text, literal, self.processor.placeholder, layouts, noun))
            except ConversationError as error:
                raise ConversationError(
                    f"{draft.conversation.origin or 'conversation'}: {error}"
                ) from error
        encoded = encode_rendered_batch(
            self.tokenizer,
            [one.text for one in expanded],
            [one.literal for one in expanded],
            allow_forged=forged,
        )
        both = [
            restore(text, one, self.processor) for text, one in zip(encoded, expanded, strict=True)
        ]
        return [text for text, _ in both], [places for _, places in both]

    def _merged(self, draft: Draft, encoded: EncodedText) -> tuple[int, ...]:
        """Trained replies whose prompt has other ids than the document has up to them."""
        if self.processor is not None:
            return ()  # the text that is encoded has what stands for images
        borders: dict[int, int] = {}
        for message in draft.trained:
            turn = draft.turns.get(message)
            if (
                turn is not None
                and draft.conversation.messages[message]["role"] == "assistant"
                and turn.begin
            ):
                borders.setdefault(turn.begin, message)
        found = merged_borders(encoded, draft.rendered.text, sorted(borders), self._encode_stretch)
        return tuple(borders[border] for border in found)

    def _encode_stretch(self, text: str) -> Sequence[int]:
        """Ids of text between control tokens; what prompts end with is always the same."""
        if text not in self._stretches:
            if len(self._stretches) >= _STRETCHES:
                self._stretches.clear()
            self._stretches[text] = self.tokenizer.encode(text).tolist()
        return self._stretches[text]

    def _split_at(
        self, draft: Draft, encoded: EncodedText, literal: Any, merged: Sequence[int]
    ) -> EncodedText:
        """The tokens of a conversation, ended where the prompts for some replies end."""
        if not merged:
            return encoded
        borders = [draft.turns[message].begin for message in merged]
        forged = self.mask_settings.allow_forged
        return encode_cut(
            self.tokenizer, draft.rendered.text, literal, borders, allow_forged=forged
        )

    def _scan(self, encoded: Sequence[EncodedText]) -> Sequence[Bool | None]:
        """Tokens that the role boundaries train, for each conversation of a batch; None where there
        are none.
        """
        roles = {boundary.role for boundary in self.boundaries} & set(
            self.mask_settings.roles_to_train
        )
        if not roles or not encoded:
            return [None] * len(encoded)
        rows = Ragged.from_rows([text.ids for text in encoded], np.uint32)
        weights = scan(rows, self.boundaries, roles, self.mask_settings.train_on_eos)
        return np.split(weights.values != 0, weights.offsets[1:-1])

    def _draft(self, conversation: Conversation, *, prompted: bool = False) -> Draft:
        return render_draft(
            conversation, self.template, self.mask_settings, self._stops, prompted=prompted
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
            begins, ends, owners = (
                np.append(begins, at),
                np.append(ends, at),
                np.append(owners, mask.trained[-1]),
            )
        return EncodedChat(
            tokens=tokens,
            loss_weights=weights,
            text=text,
            begins=begins,
            ends=ends,
            is_control=control,
            messages=owners,
            roles=tuple(message["role"] for message in evidence.conversation.messages),
            certificate=certify(evidence),
            images=tuple(zip(images_of(evidence.conversation.messages), places, strict=True))
            if places
            else (),
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
                f"on_missing_terminator is append, but the tokenizer {self.tokenizer.name} "
                "has no EOS; set it to error or allow"
            )
        return last == max(turns) and last not in mask.terminators

    def _split(
        self, conversation: Conversation, chat: EncodedChat, trained: Sequence[int]
    ) -> list[EncodedChat]:
        """The conversation as one document, or one for each trained reply if the template rewrites
        any.
        """
        if self.mask_settings.on_merged_prompt == "error":
            merged = [
                problem for problem in chat.certificate.problems if problem.kind == "merged_prompt"
            ]
            if merged:
                raise ConversationError(f"{conversation.origin or 'conversation'}: {merged[0]}")
        rewritten = [problem for problem in chat.certificate.problems if problem.kind in _REWRITES]
        if not rewritten or self.mask_settings.on_rewrite == "report":
            return [chat]
        if self.mask_settings.on_rewrite == "error":
            raise ConversationError(f"{conversation.origin or 'conversation'}: {rewritten[0]}")
        settings = replace(self.mask_settings, mask_history=True, on_rewrite="report")
        alone = ChatEncoder(self.tokenizer, self.template, settings, processor=self.processor)
        replies = [
            message for message in trained if conversation.messages[message]["role"] == "assistant"
        ]
        heads = [conversation.head(message + 1) for message in replies]
        return [
            chat
            for [chat] in alone._encode_drafts(
                [alone._draft(head, prompted=True) for head in heads]
            )
        ]

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
        """Role boundaries that masks are checked with: the declared ones, or those of the
        template's family.

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


def encode(
    conversation: Conversation | JsonMapping | Sequence[JsonMapping],
    *,
    tokenizer: Tokenizer | str | Path,
    template: Template | str | Path | None = None,
    tools: Sequence[JsonMapping] | None = None,
    strict: bool = True,
    **mask_settings: Unpack[MaskKeywords],
) -> EncodedChat:
    """Encode one conversation.

    Args:
        conversation: A list of messages, a record of any layout, or a `Conversation`.
        tokenizer: A tokenizer, or where to load it from.
        template: A chat template, or where to load it from; by default, and with "auto", the one
            that came with the tokenizer.
        tools: JSON schemas of functions, for a list of messages; a record has its own.
        strict: Raise if the certificate contains an error; False: return it for inspection.
        mask_settings: See `MaskSettings`.

    Raises:
        ConversationError: The conversation cannot be read or rendered, or its certificate contains
            an error.
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
            "ps.chat.ChatEncoder(tokenizer, template, mask_settings).encode(conversation) "
            "returns them all"
        )
    errors = [problem for problem in chats[0].certificate.problems if problem.is_error]
    if strict and errors:
        raise ConversationError(
            f"{conversation.origin or 'conversation'}: {'; '.join(map(str, errors))}"
        )
    return chats[0]


def _read(given: JsonMapping | Sequence[JsonMapping], tools: Any) -> Conversation:
    """A record, or a list of messages with its tools, as one conversation."""
    record: JsonMapping = given if isinstance(given, Mapping) else {"messages": list(given)}
    if not isinstance(given, Mapping) and not given:
        raise ConversationError("the conversation is empty: give at least one message")
    read = read_conversation(record if tools is None else {**record, "tools": list(tools)})
    if isinstance(read, list):
        raise ConversationError(
            f"the record holds {len(read)} conversations; encode them one by one"
        )
    return read
