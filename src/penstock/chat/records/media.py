"""Conversations without their images, audio and video: `drop_media` removes them with their
placeholders.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.chat.records.conversation import Conversation, MessageWeights, Range
from penstock.core.errors import ConversationError
from penstock.core.json_values import JsonObject
from penstock.media.records import count_media, find_media, is_media_part, media_fields

_PLACEHOLDER = re.compile(r"\n?<(image|video|audio)>\Z|<(image|video|audio)>\n?")


def drop_media(conversation: Conversation, *, join: bool = True) -> Conversation:
    """The conversation without media and their placeholders; `dropped_media` counts them.

    Placeholders refer to media in fields. For n media of a kind, its first n placeholders are
    removed; any others are ordinary text.

    Args:
        conversation: As read.
        join: Join contents that have only texts left into one string.

    Raises:
        ConversationError: A placeholder is in a text that has ranges of characters, or in a reply,
            where it may be ordinary text.
    """
    inside = sum(count for _, _, count in find_media(conversation.messages))
    count = inside + sum(map(count_media, conversation.attachments.values()))
    if count == 0:
        return conversation
    in_fields = _count_in_fields(conversation)
    messages, weights = list(conversation.messages), list(conversation.message_weights)
    # Replies last: an error there needs the number of media that the other messages leave over.
    for index in sorted(
        range(len(messages)), key=lambda index: messages[index]["role"] == "assistant"
    ):
        where = f"{conversation.origin}: message {index}"
        messages[index], weights[index] = _without_media(
            messages[index], weights[index], join, in_fields, where
        )
    return replace(
        conversation,
        messages=tuple(messages),
        message_weights=tuple(weights),
        attachments={},
        dropped_media=count,
    )


def _count_in_fields(conversation: Conversation) -> Counter[str]:
    """Number of media of each kind in fields, which have placeholders in the texts."""
    counts: Counter[str] = Counter()
    for item in (conversation.attachments, *conversation.messages):
        for name, value in media_fields(item).items():
            counts[
                next((kind for kind in ("video", "audio") if kind in name.lower()), "image")
            ] += count_media(value)
    return counts


def _without_media(
    message: JsonObject, weights: MessageWeights, join: bool, in_fields: Counter[str], where: str
) -> tuple[JsonObject, MessageWeights]:
    def without_placeholders(text: str, name: str) -> str:
        return _without_placeholders(
            text,
            message["role"],
            any(one.field == name for one in weights.ranges),
            in_fields,
            where,
        )

    kept = {name: value for name, value in message.items() if name not in media_fields(message)}
    content = kept.get("content")
    if isinstance(content, str):
        kept["content"] = without_placeholders(content, "content")
    elif isinstance(content, list | tuple) and any(map(is_media_part, content)):
        others = {place: part for place, part in enumerate(content) if not is_media_part(part)}
        for place, part in others.items():
            if _is_text(part):
                others[place] = {
                    **part,
                    "text": without_placeholders(part["text"], f"content.{place}.text"),
                }
        joined = join and all(map(_is_text, others.values()))
        kept["content"] = (
            "".join(part["text"] for part in others.values()) if joined else list(others.values())
        )
        weights = (
            replace(weights, ranges=tuple(_moved(weights.ranges, others, joined)))
            if weights.ranges
            else weights
        )
    return kept, weights


def _moved(ranges: Sequence[Range], kept: Mapping[int, Any], joined: bool) -> Iterator[Range]:
    """Ranges after only the parts `kept` (place → part) are left."""
    places, at = {}, 0
    for number, (place, part) in enumerate(kept.items()):
        places[f"content.{place}.text"] = (
            ("content", at) if joined else (f"content.{number}.text", 0)
        )
        at += len(part["text"]) if joined else 0
    for one in ranges:
        name, shift = places.get(one.field, (one.field, 0))
        yield replace(one, field=name, begin=one.begin + shift, end=one.end + shift)


def _without_placeholders(
    text: str, role: str, ranges: bool, in_fields: Counter[str], where: str
) -> str:
    """A text without the placeholders of the media counted in `in_fields`; each one found lowers
    its count.
    """

    def drop(found: re.Match[str]) -> str:
        named = found[1] or found[2]
        # LLaVA also writes <image> for videos.
        kind = next(
            filter(in_fields.get, ("image", "video") if named == "image" else (named,)), None
        )
        if kind is None:
            return found[0]
        if role == "assistant":
            raise ConversationError(
                f"{where} is a reply with {found[0].strip()!r}, which may be a placeholder or "
                "ordinary text; remove the record, or give its media as parts of the "
                "messages' contents"
            )
        in_fields[kind] -= 1
        return ""

    cleaned = _PLACEHOLDER.sub(drop, text)
    if cleaned != text and ranges:
        raise ConversationError(
            f"{where} has a placeholder of media in a text with ranges of characters, which "
            "would shift without it; remove the placeholder from the record, and correct its "
            "ranges"
        )
    return cleaned


def _is_text(part: object) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    )
