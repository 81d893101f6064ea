"""Conversations of raw files as they would be trained, for people to look at before anything is prepared.

Nothing is left out in silence: a record that cannot be read, a conversation that the template refuses or in which
nothing is trained is shown with the reason. Costs one pass over the input, and about a millisecond a conversation.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from penstock.chat import (
    ChatEncoder,
    Conversation,
    LayoutSettings,
    describe_layout,
    detect_family,
    read_conversation,
)
from penstock.chat.cleaning import clean, fit
from penstock.errors import PenstockError, RecordError, TokenizerError
from penstock.inspection.html import Note, PageDocument, from_chat
from penstock.inspection.samples import RawRecord, Sample
from penstock.inspection.text import in_words, token_texts
from penstock.prepare import ChatSettings
from penstock.progress import Progress
from penstock.tokenizers import Tokenizer

REFUSED, LEFT_OUT = "refused", "left out"
"""Kinds of notes: prepare would stop at it, or reject it; the clean-up drops it."""
SHOW_PROGRESS_RECORDS = 1000
"""Fewer are encoded before a bar would be of use."""
REFUSED_CHARACTERS = 4000
"""Of a record that was refused, so much is shown."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShownConversations:
    """Some conversations of an input, encoded or refused."""

    documents: tuple[tuple[PageDocument, ...], ...]
    """What each record became; several where the layout or the settings make several of one."""
    total: int
    """Records of the whole input."""
    layout: str
    """What the records were taken for, and why."""
    encoder: ChatEncoder
    settings: dict[str, str]
    """Each setting as it is in force."""

    @property
    def flat(self) -> list[PageDocument]:
        """All documents."""
        return [document for record in self.documents for document in record]

    @property
    def refused(self) -> list[PageDocument]:
        """Those at which prepare would stop, or which it would reject."""
        return [document for document in self.flat if reason_of(document)]


def show_conversations(sample: Sample, tokenizer: Tokenizer, chat: ChatSettings) -> ShownConversations:
    """Encode records as prepare does, and keep what it would refuse or drop, with the reason.

    Args:
        sample: The records.
        tokenizer: The tokenizer.
        chat: Template, how records are read, what is trained, what is cleaned up.

    Raises:
        ConfigError: There is no template.
    """
    encoder = chat.open(tokenizer, None)
    shown = []
    with Progress("encoding", total=len(sample.records), enabled=len(sample.records) > SHOW_PROGRESS_RECORDS) as bar:
        for record in sample.records:
            shown.append(tuple(_documents(record, encoder, chat)))
            bar.advance(1)
    layout = _layout(sample, chat.layout)
    return ShownConversations(
        documents=tuple(shown), total=sample.total, layout=layout, encoder=encoder, settings=settings_of(encoder, chat)
    )


def settings_of(encoder: ChatEncoder, chat: ChatSettings) -> dict[str, str]:
    """Tokenizer, template, its family, and every setting that is not empty."""
    family = detect_family(encoder.template.source)
    groups = chat.describe().values()
    given = {"chat_template_kwargs": dict(chat.chat_template_kwargs), "date": chat.date}
    rest = {name: value for group in groups for name, value in group.items()}
    return {
        "tokenizer": encoder.tokenizer.name,
        "template": encoder.template.name,
        "family": "not one that is known" if family is None else f"{family.name} ({family.title})",
        **{name: in_words(value) for name, value in {**given, **rest}.items() if value not in (None, {}, "")},
    }


def _documents(record: RawRecord, encoder: ChatEncoder, chat: ChatSettings) -> Iterator[PageDocument]:
    """What one record becomes: documents with their certificates, or the reason for which it is refused."""
    title = f"conversation {record.number}"
    if record.value is None:
        yield _refused(title, record.origin, record.problem, [("", record.excerpt)], encoder.tokenizer)
        return
    try:
        read = read_conversation(record.value, chat.layout, record.origin)
    except RecordError as error:
        text = json.dumps(record.value, ensure_ascii=False, indent=1, default=str)
        yield _refused(title, record.origin, str(error), [("", text)], encoder.tokenizer)
        return
    several = read if isinstance(read, list) else [read]
    for number, conversation in enumerate(several):
        name = title if len(several) == 1 else f"{title} path {number}"
        try:
            yield from _encoded(name, conversation, encoder, chat)
        except (RecordError, TokenizerError) as error:
            yield _refused(name, record.origin, str(error), _said(conversation), encoder.tokenizer)


def _encoded(
    title: str, conversation: Conversation, encoder: ChatEncoder, chat: ChatSettings
) -> Iterator[PageDocument]:
    """The documents of one conversation, cleaned up, with what its certificates say."""
    trains: dict[str, Any] = {
        "roles_to_train": chat.knobs.roles_to_train,
        "train_on_inputs": chat.knobs.train_on_inputs,
    }
    cleaned, counts = clean(conversation, chat.cleaning, **trains)
    if cleaned is not None:

        def length_of(head: Conversation) -> int:
            return max((len(one.tokens) for one in encoder.encode(head)), default=0)

        cleaned, more = fit(cleaned, chat.cleaning, length_of, **trains)
        counts += more
    told = [
        Note(kind, what)
        for count, kind, what in (
            (counts.trimmed, "trimmed", f"{counts.trimmed_messages} messages at the end, which no reply follows"),
            (counts.truncated, "truncated", f"{counts.truncated_messages} messages at the end: too long"),
            (counts.empty, LEFT_OUT, "no messages, or no reply to any"),
            (counts.untrained, LEFT_OUT, "no message that the settings train"),
            (counts.too_long, LEFT_OUT, f"longer than {chat.cleaning.max_tokens} tokens"),
            (counts.media, "media left out", f"{counts.media} images, audio or video files, as the settings say"),
        )
        if count
    ]
    if cleaned is None:
        told = [note for note in told if note.kind == LEFT_OUT]
        yield _unseen(title, conversation.origin, told, _said(conversation), encoder.tokenizer)
        return
    chats = encoder.encode(cleaned)
    if not chats:
        reason = Note(REFUSED, "the template rewrites earlier turns, and none of its replies can be trained alone")
        yield _unseen(title, conversation.origin, [*told, reason], _said(cleaned), encoder.tokenizer)
    for number, one in enumerate(chats):
        page = from_chat(
            one,
            title=title if len(chats) == 1 else f"{title} reply {number}",
            origin=conversation.origin,
            special_tokens=encoder.tokenizer.special_tokens,
        )
        errors = [str(problem) for problem in one.certificate.problems if problem.is_error]
        refused = [Note(REFUSED, "; ".join(errors))] if errors else []
        yield replace(page, notes=(*refused, *page.notes, *told))


def _refused(
    title: str, origin: str, reason: str, texts: Sequence[tuple[str, str]], tokenizer: Tokenizer
) -> PageDocument:
    """The words of a record that would not be prepared, and why."""
    return _unseen(title, origin, [Note(REFUSED, reason.removeprefix(f"{origin}: "))], texts, tokenizer)


def _unseen(
    title: str, origin: str, notes: Sequence[Note], texts: Sequence[tuple[str, str]], tokenizer: Tokenizer
) -> PageDocument:
    """A document that no model sees: the words of the record, none of them trained."""
    names = tuple(dict.fromkeys(role for role, _ in texts if role))
    ids: list[int] = []
    roles: list[int] = []
    turns: list[int] = []
    left = REFUSED_CHARACTERS
    for turn, (role, text) in enumerate(texts):
        found = tokenizer.encode(text[:left]).tolist() if left > 0 else []
        left -= len(text)
        ids += found
        roles += [names.index(role) if role else -1] * len(found)
        turns += [turn] * len(found)
    return PageDocument(
        title=title,
        origin=origin,
        pieces=token_texts(tokenizer, ids, lines=True),
        ids=np.array(ids, np.int64),
        loss_weights=np.zeros(len(ids), np.float32),
        roles=np.array(roles, np.int64) if names else None,
        role_names=names,
        turns=np.array(turns, np.int64) if names else None,
        notes=tuple(notes),
        ok=False,
    )


def reason_of(document: PageDocument) -> str:
    """Why prepare would refuse a document; "" where it would not."""
    return "; ".join(note[1] for note in document.notes if note[0] == REFUSED)


def _said(conversation: Conversation) -> list[tuple[str, str]]:
    """(role, text) of each message; what is no text as JSON."""
    said = []
    for message in conversation.messages:
        content = message.get("content")
        rest = {name: value for name, value in message.items() if name not in ("role", "content")}
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else ""
        text += f"\n{json.dumps(rest, ensure_ascii=False, default=str)}" if rest else ""
        said.append((str(message["role"]), f"{text}\n"))
    return said


def _layout(sample: Sample, settings: LayoutSettings) -> str:
    """Of the first record that has one; and of how many others there are, where they differ."""
    found: Counter[str] = Counter()
    for record in sample.records:
        try:
            found[describe_layout(record.value or {}, settings, record.origin)] += 1
        except PenstockError:
            found["none that is known"] += 1
    lines = [f"{line}{f' ({count:,})' if len(found) > 1 else ''}" for line, count in found.most_common()]
    return "; ".join(line.removeprefix("layout ") for line in lines)
