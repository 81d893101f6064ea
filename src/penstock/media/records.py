"""Media in records, as plain dicts: the parts and fields of messages that hold images, sounds or
videos.

Records hold media as parts of a content (`{"type": "image", …}`), as fields of a message
(`images`), or as fields of the record, with placeholders such as `<image>` in the texts (LLaVA,
LLaMA-Factory, ms-swift). A `Conversation` keeps all three. Text encoding rejects them with
`refuse_media`, because the template would write a placeholder for an image that the model never
sees.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from penstock.core.errors import ConversationError
from penstock.core.json_values import JsonMapping, JsonObject

MEDIA_TYPES = (
    "image",
    "video",
    "audio",
    "input_image",
    "input_audio",
    "input_video",
    "file",
    "input_file",
    "document",
)
"""Prefixes of the types of parts that are not text; templates of multimodal models know them."""

_FIELD = re.compile(
    r"(?:input_)?(?:image|img|picture|photo|video|audio)s?(?:_(?:url|path|file|byte|base64|b64|data|list)s?)?",
    re.IGNORECASE,
)


@cache
def is_media_field(name: str) -> bool:
    """Whether a field of a record, message or part has a name for media."""
    return _FIELD.fullmatch(name) is not None


def media_fields(item: JsonMapping) -> JsonObject:
    """Fields of a record, message or part that hold media, without empty ones."""
    return {
        name: value for name, value in item.items() if is_media_field(str(name)) and _holds(value)
    }


def find_media(messages: Sequence[JsonMapping]) -> Iterator[tuple[int, str, int]]:
    """(message, place in it, count) of all media in messages of a `Conversation`."""
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list | tuple):
            for place, part in enumerate(content):
                if is_media_part(part):
                    yield index, f'part {place} of its content is of type "{part["type"]}"', 1
        elif len(message) == 2:
            continue
        for name, value in media_fields(message).items():
            yield index, f'its field "{name}" holds media', count_media(value)


def refuse_media(
    messages: Sequence[JsonMapping], attachments: JsonMapping, origin: str = ""
) -> None:
    """Raise if a conversation that is to be encoded as text holds media.

    Args:
        messages: As templates see them.
        attachments: Media of the record next to its messages.
        origin: `file:line`, for the error.

    Raises:
        ConversationError: It does; names the first message with media, and the cure.
    """
    found = next((f"message {index}: {where}" for index, where, _ in find_media(messages)), None)
    if found is None and attachments:
        found = f'the record\'s field "{next(iter(attachments))}" holds media'
    if found is not None:
        raise ConversationError(
            f"{f'{origin}: ' if origin else ''}{found}; images need the processor of a model "
            "that reads them (processor), and audio and video are not supported here; or "
            "train the text alone (media: drop), or remove such records"
        )


def is_media_part(part: object) -> bool:
    """Whether a part of a content is no text."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind.startswith(MEDIA_TYPES)


def _holds(value: object) -> bool:
    """Whether a value holds anything: Arrow fills missing fields with nulls, at any depth."""
    if isinstance(value, Mapping):
        return any(_holds(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds(item) for item in value)
    return not (
        value is None or isinstance(value, bool) or (isinstance(value, str | bytes) and not value)
    )


def count_media(value: object) -> int:
    """Media in the value of a field: those of a list, or one."""
    return sum(_holds(item) for item in value) if isinstance(value, list | tuple) else 1
