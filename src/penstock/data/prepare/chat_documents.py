"""Records of conversations while they are prepared, and the documents that they become."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from penstock.chat import Conversation, EncodedChat
from penstock.chat.masks.certificate import Problem
from penstock.chat.records.cleaning import Counts
from penstock.core.arrays import Float32
from penstock.core.arrow import from_texts
from penstock.core.json_values import JsonObject
from penstock.core.ragged import Ragged
from penstock.data.prepare.answers import Answers
from penstock.data.prepare.documents import Documents, split_rows
from penstock.data.prepare.settings import PrepareSettings, column_name
from penstock.data.shards.format.images import stored_image
from penstock.data.shards.writing.blocks import spans_of
from penstock.data.sources import ObjectBlock
from penstock.data.sources.checks import look_up


@final
@dataclass(slots=True)
class ChatRecord:
    """One record while it is processed."""

    row: int
    origin: str
    key: str = ""
    """The text that determines its split."""
    counts: dict[int, Counts] = field(default_factory=dict)
    """Id of a conversation, or a number of its own if it was dropped → what the clean-up did with
    it.
    """
    layout: str = ""
    waiting: list[Conversation] = field(default_factory=list)
    chats: list[EncodedChat] = field(default_factory=list)
    answers: list[Answers] = field(default_factory=list)
    """Where answers are kept: those of each document."""
    encoded: dict[int, list[EncodedChat]] = field(default_factory=dict)
    """Id of a conversation that is kept whole → its documents."""
    reason: str | None = None
    """Why it is rejected."""
    problems: list[Problem] = field(default_factory=list)
    """What the certificates of its conversations say."""

    value: JsonObject = field(default_factory=dict)
    """The record itself, where its fields become columns."""

    def numbers(self, name: str, chat: EncodedChat) -> Float32:
        """float32 [tokens] of a conversation: the record's number, or that of the message of each
        token; else 0.
        """
        given, _ = look_up(self.value, name)
        if isinstance(given, list):
            table = np.zeros(len(chat.roles) + 1, np.float32)
            known = [number or 0.0 for number in given[: len(chat.roles)]]
            table[: len(known)] = known
            # The last entry is that of no message, −1.
            found: Float32 = table[chat.messages]
            return found
        return np.full(len(chat.tokens), 0.0 if given is None else given, np.float32)

    def check_numbers(self, names: Sequence[str]) -> None:
        """Reject the record if a field that becomes a column holds something else than numbers."""
        for name in names:
            given, _ = look_up(self.value, name)
            for one in given if isinstance(given, list) else [given]:
                if one is not None and (isinstance(one, bool) or not isinstance(one, int | float)):
                    self.fail(
                        f"field {name!r} holds {one!r:.40}; expected a number, or one for "
                        "each message"
                    )

    def count(self, kept: Conversation | None, counts: Counts) -> None:
        """Note what the clean-up did with a conversation; `kept`: what is left of it."""
        self.counts[-1 - len(self.counts) if kept is None else id(kept)] = counts

    def fail(self, error: Exception | str) -> None:
        """Reject the record; the first reason is kept."""
        self.reason = self.reason or str(error).removeprefix(f"{self.origin}: ")


def documents_of(
    records: Sequence[ChatRecord], block: ObjectBlock, vocab_size: int, settings: PrepareSettings
) -> dict[str, Documents]:
    """The documents of each split."""
    splits = {}
    storage = "copy" if settings.chat is None else settings.chat.images.image_storage
    keys = from_texts([record.key for record in records])
    for name, chosen in split_rows(keys, settings).items():
        picked = [record for record, choice in zip(records, chosen, strict=True) if choice]
        if settings.chat is not None and settings.chat.keeps_answers:
            if found := _answer_documents(picked, block, vocab_size, settings):
                splits[name] = found
            continue
        chats = [one for record in picked for one in record.chats]
        if not chats:
            continue
        rows = np.repeat(
            [record.row for record in picked], [len(record.chats) for record in picked]
        )
        texts = from_texts([one.text for one in chats])
        splits[name] = Documents(
            tokens=Ragged.from_rows(
                [one.tokens for one in chats],
                np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32),
            ),
            spans=spans_of(
                Ragged.from_rows([one.loss_weights for one in chats], np.dtype(np.float32))
            ),
            texts=texts if settings.keep_text else None,
            lines=block.lines[rows],
            files=block.files[rows],
            text_sizes=np.array([len(one.text.encode()) for one in chats], np.int64),
            columns=_columns(
                [(record, one) for record in picked for one in record.chats], settings
            ),
            images=[
                [stored_image(image, place, storage) for image, place in one.images]
                for one in chats
            ],
        )
    return splits


def _columns(
    chats: Sequence[tuple[ChatRecord, EncodedChat]], settings: PrepareSettings
) -> dict[str, Ragged]:
    """Name → a number for each token of documents that are one conversation each."""
    return {
        column.name: Ragged.from_rows(
            [record.numbers(name, chat) for record, chat in chats], np.float32
        )
        for name, column in zip(settings.token_columns, settings.columns, strict=True)
    }


def numbers_of(
    record: ChatRecord, settings: PrepareSettings, chats: Sequence[EncodedChat]
) -> dict[str, list[Any]]:
    """Column → a number for each token of each path."""
    return {
        column_name(name): [record.numbers(name, chat) for chat in chats]
        for name in settings.token_columns
    }


def _answer_documents(
    picked: Sequence[ChatRecord], block: ObjectBlock, vocab_size: int, settings: PrepareSettings
) -> Documents | None:
    """One document for each set of answers."""
    answers = [one for record in picked for one in record.answers]
    if not answers:
        return None
    rows = np.repeat([record.row for record in picked], [len(record.answers) for record in picked])
    made = [one.document for one in answers if one.document is not None]
    return Documents(
        tokens=Ragged.from_rows(
            [one.tokens for one in made], np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
        ),
        spans=spans_of(Ragged.from_rows([one.loss_weights for one in made], np.dtype(np.float32))),
        texts=from_texts([one.chats[0].text for one in answers]) if settings.keep_text else None,
        lines=block.lines[rows],
        files=block.files[rows],
        text_sizes=np.array(
            [sum(len(chat.text.encode()) for chat in one.chats) for one in answers], np.int64
        ),
        trees=[one.tree for one in answers],
        images=[[*one.images] for one in made],
        columns={
            column.name: Ragged.from_rows([one.columns[column.name] for one in made], np.float32)
            for column in settings.columns
        },
    )
