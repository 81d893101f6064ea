"""Images of conversations: found wherever records hold them, loaded, and put into the contents as
parts.

Contents refer to them as `penstock.media.placement` says. If nothing refers to a field's images,
they come first in the first message of the user, as in TRL.
"""

from collections.abc import Sequence
from dataclasses import replace

from penstock.chat.records.conversation import Conversation, MessageWeights
from penstock.core.errors import ConversationError
from penstock.core.json_values import JsonObject
from penstock.media.layout import NOUNS
from penstock.media.placement import Frames, Load, MediaPlacer, images_of
from penstock.media.processor import Medium
from penstock.media.records import find_media


def place_images(
    conversation: Conversation, load: Load, medium: Medium = "image", frames: Frames | None = None
) -> Conversation:
    """Load the images of a conversation, or its sounds, and make each a part of its message.

    Args:
        conversation: As read.
        load: Looks at one image.
        medium: What the model reads; anything else is refused.
        frames: Looks at one video, whose frames become images; None: videos are refused.

    Raises:
        ConversationError: There is something else than images; images and references to them differ
            in number; or an image is refused. Names the message.
    """
    inside = any(True for _ in find_media(conversation.messages))
    if not inside and not conversation.attachments:
        return conversation
    where = conversation.origin or "conversation"
    placed = MediaPlacer(where, load, medium, frames)
    placed.waiting = placed.of_fields(conversation.attachments, f"{where}: the record")
    weights = conversation.message_weights
    messages = [
        placed.message(number, message, has_ranges=bool(own.ranges))
        for number, (message, own) in enumerate(zip(conversation.messages, weights, strict=True))
    ]
    if placed.waiting:
        _put_first(messages, weights, placed.take_all(), where, medium)
    return replace(conversation, messages=tuple(messages), attachments={})


def _put_first(
    messages: list[JsonObject],
    weights: Sequence[MessageWeights],
    parts: list[JsonObject],
    where: str,
    medium: Medium,
) -> None:
    """Put images that nothing refers to before the text of the first message of the user."""
    place = next(
        (number for number, message in enumerate(messages) if message["role"] == "user"), None
    )
    if place is None or images_of(messages) or weights[place].ranges:
        raise ConversationError(
            f"{where}: {len(parts)} {NOUNS[medium]}s that no message refers to; put "
            f"<{medium}> where each belongs, or give them as parts of contents"
        )
    content = messages[place].get("content")
    text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    messages[place] = {**messages[place], "content": parts + text}
