"""Conversations of raw files as they would be trained, to look at before anything is prepared.

`sample_records` takes some records, evenly spread over an input, in one pass at about 100 MB/s. It
holds at most twice the requested number of records: when there are more, it drops every second one.

`show_conversations` encodes them, in about a millisecond each. Nothing is silently left out: a
record that cannot be read, and a conversation that the template refuses or that trains nothing, are
shown with the reason.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np

from penstock.chat import ChatEncoder, Conversation, LayoutSettings, detect_family
from penstock.chat.records.cleaning import clean, fit
from penstock.chat.records.images import place_images
from penstock.chat.records.layouts import describe_layout, read_record
from penstock.core.errors import ConfigError, PenstockError, RecordError, TokenizerError
from penstock.core.json_values import JsonObject
from penstock.core.terminal import Progress
from penstock.core.urls import quoted
from penstock.data.prepare import ChatSettings
from penstock.data.prepare.chats import image_loader, in_short
from penstock.data.sources import Fields, ObjectBlock, open_sources
from penstock.data.sources.json_files import number_lines
from penstock.data.sources.records import Reject
from penstock.tokenizers import Tokenizer
from penstock.use.inspection.page_model import Note, PageDocument, from_chat
from penstock.use.inspection.text import in_words, token_texts

SHOW_PROGRESS_BYTES = 128 << 20
"""Inputs of this size and below are read without a progress bar."""
REFUSED, LEFT_OUT = "refused", "left out"
"""Kinds of notes: preparation would fail or reject the record; clean-up drops the conversation."""
SHOW_PROGRESS_RECORDS = 1000
"""Up to this number of records are encoded without a progress bar."""
REFUSED_CHARACTERS = 4000
"""Maximum number of characters to show of a refused record."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RawRecord:
    """One record of an input."""

    number: int
    """Number in the whole input, from 0."""
    origin: str
    """`file:line`, from 1; or `file:row`, from 0, for formats with rows."""
    value: JsonObject | None
    """None if it cannot be read."""
    problem: str = ""
    """Why it cannot be read."""
    excerpt: str = ""
    """Its beginning, if it cannot be read."""
    address: str = field(default="", repr=False)
    """What opens its file; it may hold secrets."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Some records of an input."""

    records: tuple[RawRecord, ...]
    total: int
    """Number of records in the input."""


def sample_records(
    sources: str | Sequence[str],
    count: int,
    *,
    format: str | None = None,
    numbers: Sequence[int] | None = None,
) -> Sample:
    """Read some records.

    Args:
        sources: Files, folders, globs or URLs of JSON, Parquet or Arrow.
        count: Maximum number of records, evenly spread.
        format: jsonl, parquet or arrow; None: by file name.
        numbers: Numbers of the records to read instead, from 0.

    Raises:
        RecordError: A file does not exist, or cannot be read in its format.
        ConfigError: A format is unknown or has no objects, or a number is out of range.
    """
    parts = number_lines(open_sources(sources, format=format, fields=Fields(whole=True)))
    size = sum(part.size_bytes for part in parts)
    kept: list[RawRecord] = []
    stride, total = 1, 0
    with Progress("reading", total=size, unit="B", enabled=size > SHOW_PROGRESS_BYTES) as progress:
        for block, *names in (
            (block, part.files, part.addresses) for part in parts for block in part.objects()
        ):
            for record in _records(block, *names):
                if total in numbers if numbers is not None else total % stride == 0:
                    kept.append(replace(record, number=total))
                if numbers is None and len(kept) > max(2 * count, 2):
                    kept, stride = kept[::2], 2 * stride
                total += 1
            progress.advance(block.size_bytes)
    missing = [number for number in numbers or () if not 0 <= number < total]
    if missing:
        raise ConfigError(
            f"there is no record {missing[0]}; the input has {total:,}, numbered from 0"
        )
    if numbers is None and len(kept) > count:
        kept = [kept[len(kept) * place // count] for place in range(count)]
    return Sample(records=tuple(kept), total=total)


def _records(
    block: ObjectBlock, files: tuple[str, ...], addresses: tuple[str, ...]
) -> Iterator[RawRecord]:
    """Valid and rejected records of a block in the order of their lines, not yet numbered."""
    bad = iter([*block.rejects, None])
    reject = next(bad)
    for value, line, file in zip(
        block.objects, block.lines.tolist(), block.files.tolist(), strict=True
    ):
        while reject is not None and reject.line < line:
            yield _rejected(reject)
            reject = next(bad)
        yield RawRecord(
            number=-1, origin=f"{files[file]}:{line}", value=value, address=addresses[file]
        )
    while reject is not None:
        yield _rejected(reject)
        reject = next(bad)


def _rejected(reject: Reject) -> RawRecord:
    origin = f"{reject.file}:{reject.line}"
    return RawRecord(
        number=-1, origin=origin, value=None, problem=reject.reason, excerpt=reject.excerpt
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShownConversations:
    """Some conversations of an input, encoded or refused."""

    documents: tuple[tuple[PageDocument, ...], ...]
    """Documents of each record; several if the layout or the settings split it."""
    total: int
    """Number of records in the whole input."""
    layout: str
    """The detected layout, and the reason."""
    encoder: ChatEncoder
    settings: dict[str, str]
    """Each setting with its effective value."""

    @property
    def flat(self) -> list[PageDocument]:
        """All documents."""
        return [document for record in self.documents for document in record]

    @property
    def refused(self) -> list[PageDocument]:
        """Documents for which preparation would fail, or which it would reject."""
        return [document for document in self.flat if reason_of(document)]


def show_conversations(
    sample: Sample, tokenizer: Tokenizer, chat: ChatSettings
) -> ShownConversations:
    """Encode records as preparation does, and keep those that it would refuse or drop, with the
    reason.

    Args:
        sample: The records.
        tokenizer: The tokenizer.
        chat: Template, layout, mask and clean-up settings.

    Raises:
        ConfigError: There is no template.
    """
    encoder = chat.open(tokenizer, None)
    shown = []
    with Progress(
        "encoding", total=len(sample.records), enabled=len(sample.records) > SHOW_PROGRESS_RECORDS
    ) as bar:
        for record in sample.records:
            shown.append(tuple(_documents(record, encoder, chat)))
            bar.advance(1)
    layout = _layout(sample, chat.layout)
    return ShownConversations(
        documents=tuple(shown),
        total=sample.total,
        layout=layout,
        encoder=encoder,
        settings=settings_of(encoder, chat),
    )


def settings_of(encoder: ChatEncoder, chat: ChatSettings) -> dict[str, str]:
    """Tokenizer, template, its family, and all settings that are not empty."""
    family = detect_family(encoder.template.source)
    groups = chat.describe().values()
    given = {"chat_template_kwargs": dict(chat.chat_template_kwargs), "date": chat.date}
    rest = {name: value for group in groups for name, value in group.items()}
    return {
        "tokenizer": encoder.tokenizer.name,
        "template": encoder.template.name,
        "family": "unknown" if family is None else f"{family.name} ({family.title})",
        **{
            name: in_words(value)
            for name, value in {**given, **rest}.items()
            if value not in (None, {}, "")
        },
    }


def _documents(
    record: RawRecord, encoder: ChatEncoder, chat: ChatSettings
) -> Iterator[PageDocument]:
    """The documents of one record with their certificates, or the reason for its refusal."""
    title = f"conversation {record.number}"
    if record.value is None:
        yield _refused(
            title, record.origin, record.problem, [("", record.excerpt)], encoder.tokenizer
        )
        return
    try:
        read = read_record(record.value, chat.layout, record.origin)
    except RecordError as error:
        text = quoted(json.dumps(record.value, ensure_ascii=False, indent=1, default=in_short))
        yield _refused(title, record.origin, str(error), [("", text)], encoder.tokenizer)
        return
    several = read if isinstance(read, list) else [read]
    load = image_loader(record.address, chat.images, encoder.processor)
    for number, conversation in enumerate(several):
        name = title if len(several) == 1 else f"{title} path {number}"
        try:
            if load is not None:
                conversation = place_images(conversation, load, load.processor.medium, load.frames)
            yield from _encoded(name, conversation, encoder, chat)
        except (RecordError, TokenizerError) as error:
            yield _refused(name, record.origin, str(error), _said(conversation), encoder.tokenizer)


def _encoded(
    title: str, conversation: Conversation, encoder: ChatEncoder, chat: ChatSettings
) -> Iterator[PageDocument]:
    """The documents of one conversation after clean-up, with the notes of their certificates."""
    trains: JsonObject = {
        "roles_to_train": chat.mask_settings.roles_to_train,
        "train_on_inputs": chat.mask_settings.train_on_inputs,
    }
    cleaned, counts = clean(conversation, chat.cleaning, **trains)
    if cleaned is not None:

        def length_of(head: Conversation) -> int:
            return max((len(one.tokens) for one in encoder.encode(head)), default=0)

        cleaned, more = fit(cleaned, chat.cleaning, length_of, **trains)
        counts += more
    notes = [
        Note(kind, what)
        for count, kind, what in (
            (
                counts.trimmed,
                "trimmed",
                f"{counts.trimmed_messages} messages at the end, without a reply",
            ),
            (
                counts.truncated,
                "truncated",
                f"{counts.truncated_messages} messages at the end: too long",
            ),
            (counts.empty, LEFT_OUT, "no messages, or no reply to any"),
            (counts.untrained, LEFT_OUT, "no message that the settings train"),
            (counts.too_long, LEFT_OUT, f"longer than {chat.cleaning.max_tokens} tokens"),
            (
                counts.media,
                "media left out",
                f"{counts.media} images, audio or video files, as the settings say",
            ),
        )
        if count
    ]
    if cleaned is None:
        notes = [note for note in notes if note.kind == LEFT_OUT]
        yield _unseen(title, conversation.origin, notes, _said(conversation), encoder.tokenizer)
        return
    chats = encoder.encode(cleaned)
    if not chats:
        reason = Note(
            REFUSED,
            "the template rewrites earlier turns, and none of its replies can be trained alone",
        )
        yield _unseen(
            title, conversation.origin, [*notes, reason], _said(cleaned), encoder.tokenizer
        )
    for number, one in enumerate(chats):
        page = from_chat(
            one,
            title=title if len(chats) == 1 else f"{title} reply {number}",
            origin=conversation.origin,
            special_tokens=encoder.tokenizer.special_tokens,
        )
        errors = [str(problem) for problem in one.certificate.problems if problem.is_error]
        refused = [Note(REFUSED, "; ".join(errors))] if errors else []
        yield replace(page, notes=(*refused, *page.notes, *notes))


def _refused(
    title: str, origin: str, reason: str, texts: Sequence[tuple[str, str]], tokenizer: Tokenizer
) -> PageDocument:
    """A refused record with its text and the reason."""
    return _unseen(
        title, origin, [Note(REFUSED, reason.removeprefix(f"{origin}: "))], texts, tokenizer
    )


def _unseen(
    title: str,
    origin: str,
    notes: Sequence[Note],
    texts: Sequence[tuple[str, str]],
    tokenizer: Tokenizer,
) -> PageDocument:
    """A document that is not prepared: the text of the record, all of it untrained."""
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
    """Why preparation would refuse a document; "": it would not."""
    return "; ".join(note[1] for note in document.notes if note[0] == REFUSED)


def _said(conversation: Conversation) -> list[tuple[str, str]]:
    """(role, text) of each message; values that are not text as JSON."""
    said = []
    for message in conversation.messages:
        content = message.get("content")
        rest = {name: value for name, value in message.items() if name not in ("role", "content")}
        text = content if isinstance(content, str) else ""
        text = text or (
            quoted(json.dumps(content, ensure_ascii=False, default=in_short)) if content else ""
        )
        text += (
            f"\n{quoted(json.dumps(rest, ensure_ascii=False, default=in_short))}" if rest else ""
        )
        said.append((str(message["role"]), f"{text}\n"))
    return said


def _layout(sample: Sample, settings: LayoutSettings) -> str:
    """The layouts of the records, with counts if they differ."""
    found: Counter[str] = Counter()
    for record in sample.records:
        try:
            found[describe_layout(record.value or {}, settings, record.origin)] += 1
        except PenstockError:
            found["unknown"] += 1
    lines = [
        f"{line}{f' ({count:,})' if len(found) > 1 else ''}" for line, count in found.most_common()
    ]
    return "; ".join(line.removeprefix("layout ") for line in lines)
