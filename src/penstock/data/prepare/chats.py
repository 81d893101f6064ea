"""Turns blocks of records into documents of conversations: reads, cleans up, encodes and checks
them.

A record is one unit, even if it gives several conversations (a tree may). It is rejected as a whole
if one of them cannot be read, rendered, or certified, and dropped if the clean-up leaves nothing of
it. There is one document per conversation, or with on_rewrite "split", one per reply. All documents
of a record go to the same split, by a hash of its first conversation as it was read, so that
neither the template nor the clean-up moves it from train to validation.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from penstock.chat import ChatEncoder, Conversation, EncodedChat
from penstock.chat.records.answers import answers_layout, read_answers
from penstock.chat.records.cleaning import Counts, clean, fit
from penstock.chat.records.images import place_images
from penstock.chat.records.layouts import read_detected
from penstock.chat.render.forms import normalise
from penstock.core.errors import ConfigError, RecordError, TokenizerError
from penstock.core.json_values import JsonObject
from penstock.core.urls import Address
from penstock.data.prepare.answers import Answers, add_mismatched
from penstock.data.prepare.chat_documents import ChatRecord, documents_of, numbers_of
from penstock.data.prepare.chat_settings import ChatSettings
from penstock.data.prepare.documents import Encoded
from penstock.data.prepare.settings import PrepareSettings
from penstock.data.reports.chat_summary import ChatSummary
from penstock.data.sources import ObjectBlock, Reject
from penstock.data.sources.records import excerpt
from penstock.media.expansion import joint_difference
from penstock.media.finding import folder_of
from penstock.media.images import ImageSettings
from penstock.media.loading import ImageLoader, Room
from penstock.media.processor import Processor

BATCH = 256
"""Conversations that are encoded together."""

KEPT_BYTES = 256 << 20
"""Bytes of the images of a block that stay in memory until they are stored; files beyond are read
twice.
"""

VERIFIED = 4
"""Conversations with images of a block that are compared with the processor's own encoding."""


def image_loader(
    file: str, settings: ImageSettings, processor: Processor | None, room: Room | None = None
) -> ImageLoader | None:
    """What looks at the images of a record; `file` is the path or full URL that it is in."""
    if processor is None:
        return None
    return ImageLoader(folder_of(file, settings), settings, processor, room)


def encode_chats(
    block: ObjectBlock,
    files: tuple[str, ...],
    addresses: tuple[str, ...],
    encoder: ChatEncoder,
    chat: ChatSettings,
    settings: PrepareSettings,
) -> Encoded:
    """Encode the conversations of a block.

    Args:
        block: The records.
        files: Names that `block.files` points into.
        addresses: What opens each of these files.
        encoder: Renders and encodes conversations.
        chat: How records are read and cleaned up.
        settings: Split, and whether texts are kept.
    """
    places = zip(block.files.tolist(), block.lines.tolist(), strict=True)
    records = [ChatRecord(row, f"{files[file]}:{line}") for row, (file, line) in enumerate(places)]
    room = Room(KEPT_BYTES)
    loaders = {
        number: image_loader(addresses[number], chat.images, encoder.processor, room)
        for number in set(block.files.tolist())
    }
    for record, file, value in zip(records, block.files.tolist(), block.objects, strict=True):
        _read(record, value, chat, loaders[file], needs_key=settings.validation > 0)
    if chat.keeps_answers:
        add_mismatched(
            [one for record in records if record.reason is None for one in record.answers]
        )
        for record in records:
            record.waiting = [
                conversation for one in record.answers for conversation in one.conversations
            ]
    if settings.token_columns:
        for record in records:
            record.value = block.objects[record.row]
            record.check_numbers(settings.token_columns)
    summary, control = ChatSummary(), frozenset(encoder.tokenizer.special_tokens)
    jobs = [
        (record, conversation)
        for record in records
        if record.reason is None
        for conversation in record.waiting
    ]
    for begin in range(0, len(jobs), BATCH):
        for (record, conversation), chats in _encode(jobs[begin : begin + BATCH], encoder):
            _accept(record, conversation, chats, encoder, chat, summary)
    if chat.keeps_answers:
        for record in records:
            _plant(record, chat, settings, summary)
    rejects = []
    for record in records:
        if record.reason is not None:
            place = files[block.files[record.row]], int(block.lines[record.row])
            shown = json.dumps(block.objects[record.row], ensure_ascii=False, default=in_short)
            rejects.append(Reject(*place, record.reason, excerpt(shown)))
    good = [record for record in records if record.reason is None]
    kept = [record for record in good if record.chats]
    summary.layouts = dict(Counter(record.layout for record in good))
    summary.add_cleaned(
        [(record.origin, counts) for record in good for counts in record.counts.values()]
    )
    for record in records:
        if record.problems:
            summary.add_problems(record.problems, record.origin, rejected=record.reason is not None)
    columns = {name.partition(".")[0] for name in settings.token_columns}
    unread = (
        dict.fromkeys(name for chat in record.chats for name in chat.certificate.unread)
        for record in kept
    )
    summary.add_unread(Counter(name for names in unread for name in names if name not in columns))
    summary.add_nulls(block.removed)
    summary.add_documents([one for record in kept for one in record.chats], control)
    return Encoded(
        splits=documents_of(kept, block, encoder.tokenizer.vocab_size, settings),
        rejects=rejects,
        straddling=summary.straddling_tokens,
        edge_controls=0,
        dropped=len(good) - len(kept),
        more_documents=sum(len(record.answers or record.chats) - 1 for record in kept),
        chats=summary,
    )


def _read(
    record: ChatRecord,
    value: JsonObject,
    chat: ChatSettings,
    load: ImageLoader | None,
    *,
    needs_key: bool,
) -> None:
    """Read the conversations of a record with their images, and clean them up."""
    try:
        if chat.keeps_answers:
            _read_answers(record, value, chat, load, needs_key=needs_key)
            return
        record.layout, read = read_detected(value, chat.layout, record.origin)
        found = read if isinstance(read, list) else [read]
        if load is not None:
            found = [
                place_images(conversation, load, load.processor.medium, load.frames)
                for conversation in found
            ]
        if found and needs_key:
            record.key = _key_of(found[0])
        for conversation in found:
            kept, counts = clean(conversation, chat.cleaning, **_what_trains(chat))
            record.count(kept, counts)
            if kept is not None:
                record.waiting.append(kept)
    except RecordError as error:
        record.fail(error)


def _key_of(conversation: Conversation) -> str:
    """The text that determines the split of a record with this conversation."""
    if conversation.written:
        return json.dumps(
            [[piece.text, piece.ids] for piece in conversation.written], ensure_ascii=False
        )
    return json.dumps(normalise(conversation).messages, ensure_ascii=False, default=repr)


def _read_answers(
    record: ChatRecord,
    value: JsonObject,
    chat: ChatSettings,
    load: ImageLoader | None,
    *,
    needs_key: bool,
) -> None:
    """Read all answers of a record; a set of which the clean-up drops one is dropped."""
    record.layout = answers_layout(value, chat.layout, record.origin)
    sets = read_answers(value, chat.layout, record.origin)
    if load is not None:
        sets = [
            replace(
                one,
                conversations=tuple(
                    place_images(conversation, load, load.processor.medium, load.frames)
                    for conversation in one.conversations
                ),
            )
            for one in sets
        ]
    if sets and needs_key:
        record.key = _key_of(sets[0].conversations[0])
    for one in sets:
        kept = []
        for conversation in one.conversations:
            cleaned, counts = clean(conversation, chat.cleaning, **_what_trains(chat))
            record.count(cleaned, counts)
            kept.append(cleaned)
        if all(cleaned is not None for cleaned in kept):
            record.answers.append(
                Answers(replace(one, conversations=tuple(c for c in kept if c is not None)))
            )


def _plant(
    record: ChatRecord, chat: ChatSettings, settings: PrepareSettings, summary: ChatSummary
) -> None:
    """Make documents of a record's answers; a set of which one was too long is dropped."""
    planted, share = [], chat.layout.answers == "tree"
    for answers in record.answers:
        if record.reason is not None:
            break
        if any(id(conversation) not in record.encoded for conversation in answers.conversations):
            continue
        try:
            encoded = [record.encoded[id(conversation)] for conversation in answers.conversations]
            answers.plant(
                encoded,
                partial(numbers_of, record, settings),
                share=share,
                shared_weights=chat.layout.shared_weights,
                image_storage=chat.images.image_storage,
            )
        except ConfigError as error:
            record.fail(error)
            break
        planted.append(answers)
    record.answers = planted if record.reason is None else []
    record.chats = [chat for answers in record.answers for chat in answers.chats]
    for answers in record.answers:
        answers.count(summary.trees, shared=share)


def _encode(
    jobs: Sequence[tuple[ChatRecord, Conversation]], encoder: ChatEncoder
) -> list[tuple[tuple[ChatRecord, Conversation], list[EncodedChat]]]:
    """Encode conversations together; if one fails, halve the batch until it is isolated and
    rejected.
    """
    try:
        return list(
            zip(jobs, encoder.encode_batch([conversation for _, conversation in jobs]), strict=True)
        )
    except (RecordError, TokenizerError) as error:
        if len(jobs) == 1:
            jobs[0][0].fail(error)
            return []
    middle = len(jobs) // 2
    return _encode(jobs[:middle], encoder) + _encode(jobs[middle:], encoder)


def _accept(
    record: ChatRecord,
    conversation: Conversation,
    chats: list[EncodedChat],
    encoder: ChatEncoder,
    chat: ChatSettings,
    summary: ChatSummary,
) -> None:
    """Apply the length limit to an encoded conversation, and check its certificates."""
    encoded = {len(conversation.messages): chats}

    def length_of(head: Conversation) -> int:
        size = len(head.messages)
        if size not in encoded:
            encoded[size] = encoder.encode(head)
        return max((len(one.tokens) for one in encoded[size]), default=0)

    try:
        kept, counts = fit(conversation, chat.cleaning, length_of, **_what_trains(chat))
    except (RecordError, TokenizerError) as error:
        return record.fail(error)
    before = record.counts.get(id(conversation), Counts())
    record.counts[id(conversation)] = (before.of_dropped if kept is None else before) + counts
    if kept is None:
        return None
    chats = encoded[len(kept.messages)]
    record.problems += [problem for one in chats for problem in one.certificate.problems]
    errors = [problem for one in chats for problem in one.certificate.problems if problem.is_error]
    if errors:
        record.fail("; ".join(map(str, errors)))
    elif not chats:
        record.fail(
            "the template rewrites earlier turns, and none of its replies can be trained separately"
        )
    elif encoder.processor is not None and (
        chat.images.verify_all or summary.images.get("verified", 0) < VERIFIED
    ):
        summary.add_verified(_verify(record, chats, encoder.processor, chat.images))
    record.chats += chats
    if len(kept.messages) == len(conversation.messages):
        record.encoded[id(conversation)] = chats
    return None


def _verify(
    record: ChatRecord, chats: Sequence[EncodedChat], processor: Processor, settings: ImageSettings
) -> int:
    """Compare documents with the processor's own encoding; returns how many could be compared."""
    compared = 0
    for one in chats:
        if not one.images or one.certificate.forged or one.certificate.typed:
            continue  # the processor would make control tokens of what messages typed
        compared += 1
        tokens = one.tokens[:-1] if int(one.begins[-1]) == len(one.text) else one.tokens
        try:
            pictures = [processor.read(image.read(), settings) for image, _ in one.images]
            difference = joint_difference(processor, one.text, tokens.tolist(), pictures)
        except RecordError as error:
            difference = str(error)
        if difference is not None:
            record.fail(difference)
    return compared


def in_short(value: object) -> str:
    """What JSON cannot hold, for a message; the bytes of an image would be megabytes."""
    if isinstance(value, Address):
        return str(value)
    return f"<{len(value):,} bytes>" if isinstance(value, bytes) else repr(value)


def _what_trains(chat: ChatSettings) -> JsonObject:
    return {
        "roles_to_train": chat.mask_settings.roles_to_train,
        "train_on_inputs": chat.mask_settings.train_on_inputs,
    }
