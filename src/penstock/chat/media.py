"""Images, audio and video of conversations: where records hold them, and what the text path does about them.

Records hold media as parts of a content (`{"type": "image", …}`), as fields of a message (`images`), or as fields of
the record itself, with placeholders such as `<image>` in the texts (LLaVA, LLaMA-Factory, ms-swift). All three stay in
the `Conversation`. Whoever encodes text alone refuses them by `refuse_media`: a template would write a placeholder for
an image that the model never sees. `drop_media` takes them out, and says how many there were.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from penstock.chat.conversation import Conversation, Marks, Range
from penstock.errors import ConversationError

MEDIA_TYPES = ("image", "video", "audio", "input_image", "input_audio", "input_video", "file", "input_file", "document")
"""Beginnings of the types of parts that hold something else than text; templates of such models know them."""

_FIELD = re.compile(
    r"(?:input_)?(?:image|img|picture|photo|video|audio)s?(?:_(?:url|path|file|byte|base64|b64|data|list)s?)?",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(r"\n?<(image|video|audio)>\Z|<(image|video|audio)>\n?")


@cache
def is_media_field(name: str) -> bool:
    """Whether a field of a record, message or part is called as those that hold media are."""
    return _FIELD.fullmatch(name) is not None


def media_fields(item: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record, message or part that hold media; those that hold nothing are none."""
    return {name: value for name, value in item.items() if is_media_field(str(name)) and _holds(value)}


def find_media(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str, int]]:
    """(message, where in it, how many) of all media in messages as `read_conversation` gives them."""
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list | tuple):
            for place, part in enumerate(content):
                if _is_media(part):
                    yield index, f'part {place} of its content is of type "{part["type"]}"', 1
        elif len(message) == 2:
            continue
        for name, value in media_fields(message).items():
            yield index, f'its field "{name}" holds media', _count(value)


def refuse_media(messages: Sequence[Mapping[str, Any]], attachments: Mapping[str, Any], origin: str = "") -> None:
    """Refuse a conversation that holds media, before it is encoded as text alone.

    Args:
        messages: As templates see them.
        attachments: Media of the record next to its messages.
        origin: `file:line`, for the error.

    Raises:
        ConversationError: There are some; names the first message that holds any, and the cure.
    """
    found = next((f"message {index}: {where}" for index, where, _ in find_media(messages)), None)
    if found is None and attachments:
        found = f'the record\'s field "{next(iter(attachments))}" holds media'
    if found is not None:
        raise ConversationError(
            f"{f'{origin}: ' if origin else ''}{found}; images, audio and video are not supported here yet; media: "
            "drop trains the text without them and counts them, or leave such records out (processors of "
            "transformers: penstock.huggingface.VisionCollator)"
        )


def drop_media(conversation: Conversation, *, join: bool = True) -> Conversation:
    """The conversation without media and their placeholders; `dropped_media` counts them.

    Placeholders stand for media in fields, next to the texts. The first ones of each kind are taken out, as many as
    there are media; all others are words.

    Args:
        conversation: As read.
        join: Whether contents that are texts alone become one string.

    Raises:
        ConversationError: A placeholder stands in a text whose ranges of characters are marked, or in a reply, where it
            may as well be a word.
    """
    inside = sum(count for _, _, count in find_media(conversation.messages))
    count = inside + sum(map(_count, conversation.attachments.values()))
    if count == 0:
        return conversation
    in_fields = _count_in_fields(conversation)
    messages, marks = list(conversation.messages), list(conversation.marks)
    # Replies last: what the others leave of the media is asked for there.
    for index in sorted(range(len(messages)), key=lambda index: messages[index]["role"] == "assistant"):
        where = f"{conversation.origin}: message {index}"
        messages[index], marks[index] = _without_media(messages[index], marks[index], join, in_fields, where)
    return replace(
        conversation,
        messages=tuple(messages),
        marks=tuple(marks),
        attachments={},
        dropped_media=count,
    )


def _count_in_fields(conversation: Conversation) -> Counter[str]:
    """How many media of each kind stand in fields: those that have placeholders in texts."""
    counts: Counter[str] = Counter()
    for item in (conversation.attachments, *conversation.messages):
        for name, value in media_fields(item).items():
            counts[next((kind for kind in ("video", "audio") if kind in name.lower()), "image")] += _count(value)
    return counts


def _without_media(
    message: dict[str, Any], marks: Marks, join: bool, in_fields: Counter[str], where: str
) -> tuple[dict[str, Any], Marks]:
    def without_placeholders(text: str, name: str) -> str:
        return _without_placeholders(
            text, message["role"], any(one.field == name for one in marks.ranges), in_fields, where
        )

    kept = {name: value for name, value in message.items() if name not in media_fields(message)}
    content = kept.get("content")
    if isinstance(content, str):
        kept["content"] = without_placeholders(content, "content")
    elif isinstance(content, list | tuple) and any(map(_is_media, content)):
        others = {place: part for place, part in enumerate(content) if not _is_media(part)}
        for place, part in others.items():
            if _is_text(part):
                others[place] = {**part, "text": without_placeholders(part["text"], f"content.{place}.text")}
        joined = join and all(map(_is_text, others.values()))
        kept["content"] = "".join(part["text"] for part in others.values()) if joined else list(others.values())
        marks = replace(marks, ranges=tuple(_moved(marks.ranges, others, joined))) if marks.ranges else marks
    return kept, marks


def _moved(ranges: Sequence[Range], kept: Mapping[int, Any], joined: bool) -> Iterator[Range]:
    """Ranges of the parts `kept` (place → part) after the others are gone."""
    places, at = {}, 0
    for number, (place, part) in enumerate(kept.items()):
        places[f"content.{place}.text"] = ("content", at) if joined else (f"content.{number}.text", 0)
        at += len(part["text"]) if joined else 0
    for one in ranges:
        name, shift = places.get(one.field, (one.field, 0))
        yield replace(one, field=name, begin=one.begin + shift, end=one.end + shift)


def _without_placeholders(text: str, role: str, ranges: bool, in_fields: Counter[str], where: str) -> str:
    """A text without the placeholders of media that are left in `in_fields`, which it counts down."""

    def drop(found: re.Match[str]) -> str:
        named = found[1] or found[2]
        # LLaVA's videos have <image> too.
        kind = next(filter(in_fields.get, ("image", "video") if named == "image" else (named,)), None)
        if kind is None:
            return found[0]
        if role == "assistant":
            raise ConversationError(
                f"{where} is a reply with {found[0].strip()!r}, which may stand for one of the record's media or be a "
                "word; leave the record out, or give its media as parts of the messages' contents"
            )
        in_fields[kind] -= 1
        return ""

    cleaned = _PLACEHOLDER.sub(drop, text)
    if cleaned != text and ranges:
        raise ConversationError(
            f"{where} has a placeholder of media in a text with ranges of characters, which dropping it would shift; "
            "take the placeholder out of the record, and correct its ranges"
        )
    return cleaned


def _is_media(part: Any) -> bool:
    """Whether a part of a content is of a type that holds no text."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind.startswith(MEDIA_TYPES)


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _holds(value: Any) -> bool:
    """Whether anything is in a value: Arrow fills missing fields with nulls, at any depth."""
    if isinstance(value, Mapping):
        return any(_holds(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds(item) for item in value)
    return not (value is None or isinstance(value, bool) or (isinstance(value, str | bytes) and not value))


def _count(value: Any) -> int:
    return sum(_holds(item) for item in value) if isinstance(value, list | tuple) else 1
