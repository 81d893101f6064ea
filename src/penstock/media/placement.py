"""Images put into messages, which are plain dicts: each becomes a part where a content refers to
it.

An image may be a part of a content (`{"type": "image", "image": …}`, `image_url`, …), or in a field
of the message or of the record, in the order in which the contents refer to it: with parts of type
image that hold nothing, or with `<image>` in texts (LLaVA, LLaMA-Factory, ms-swift). Afterwards
each image is a part `{"type": "image", "image": LoadedImage}`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from penstock.core.errors import ConversationError, RecordError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.media.layout import NOUNS
from penstock.media.loading import LoadedImage
from penstock.media.processor import Medium
from penstock.media.records import is_media_part, media_fields

Load = Callable[[object], LoadedImage]
"""Looks at one image; raises RecordError."""
Frames = Callable[[object], list[LoadedImage]]
"""Looks at the frames of one video; raises RecordError."""

_OTHERS: Mapping[Medium, re.Pattern[str]] = {
    "image": re.compile("video|audio|document|file", re.IGNORECASE),
    "audio": re.compile("video|image|img|picture|photo|document|file", re.IGNORECASE),
}
_ONLY: Mapping[Medium, str] = {
    "image": "only images are supported here, and videos as frames (video_frames)",
    "audio": "only audio is supported here, as the model's processor reads sounds",
}


def images_of(messages: Sequence[JsonMapping]) -> list[LoadedImage]:
    """The images of messages that `place_images` made, in order."""
    return [
        part[part["type"]]
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, Mapping) and isinstance(part.get(part.get("type")), LoadedImage)
    ]


@final
class MediaPlacer:
    """Takes images in the order in which contents refer to them, and makes each a part.

    Args:
        where: The conversation, for messages.
        load: Looks at one image.
        medium: What the model reads; anything else is refused.
        frames: Looks at one video, whose frames become images; None: videos are refused.
    """

    def __init__(self, where: str, load: Load, medium: Medium, frames: Frames | None) -> None:
        self.where, self._load, self._medium, self._frames = where, load, medium, frames
        self.waiting: list[object] = []
        self._placeholder = re.compile(rf"<({medium}|video)>\n?" if frames else rf"<({medium})>\n?")

    def message(self, number: int, message: JsonObject, *, has_ranges: bool) -> JsonObject:
        """A message with its images as parts; `has_ranges`: weights of it count characters of its
        texts.
        """
        where = f"{self.where}: message {number}"
        fields = media_fields(message) if len(message) > 2 else {}
        own = self.of_fields(fields, where)
        kept = {name: value for name, value in message.items() if name not in fields}
        source = own or self.waiting
        content = kept.get("content")
        if isinstance(content, str):
            content = self._cut(content, source, where) if source else content
            if not isinstance(content, str) and has_ranges:
                raise ConversationError(
                    f"{where}: a text with ranges of characters has <{self._medium}> in it; "
                    f"give its {NOUNS[self._medium]}s as parts"
                )
        elif isinstance(content, list | tuple):
            content = [made for part in content for made in self._part(part, source, where)]
        if own:
            parts = [part for value in own for part in self._made(value, where)]
            own.clear()
            text = (
                [{"type": "text", "text": content}]
                if isinstance(content, str)
                else list(content or ())
            )
            content = parts + text
        return {**kept, "content": content}

    def take_all(self) -> list[JsonObject]:
        """The images that nothing refers to, as parts."""
        taken = [part for value in self.waiting for part in self._made(value, self.where)]
        self.waiting.clear()
        return taken

    def _part(self, part: Any, source: list[object], where: str) -> list[JsonObject]:
        if not is_media_part(part):
            text = part.get("text") if isinstance(part, Mapping) else None
            if source and isinstance(text, str):
                cut = self._cut(text, source, where)
                return [part] if isinstance(cut, str) else cut
            return [part]
        kind = part["type"]
        is_video = self._frames is not None and "video" in kind
        if not is_video and _OTHERS[self._medium].search(kind):
            raise ConversationError(
                f'{where}: a part of type "{part["type"]}"; {_ONLY[self._medium]}'
            )
        rest = {
            name: value
            for name, value in part.items()
            if name not in ("type", "text") and value is not None
        }
        if rest:
            return self._made(_Video(rest) if is_video else rest, where)
        return self._made(self._next(source, is_video, where), where)

    def _cut(self, text: str, source: list[object], where: str) -> str | list[JsonObject]:
        """A text cut at its placeholders, as far as there are images for them."""
        parts: list[JsonObject] = []
        at = 0
        for found in self._placeholder.finditer(text):
            if not source:
                break
            if found.start() > at:
                parts.append({"type": "text", "text": text[at : found.start()]})
            parts += self._made(self._next(source, found[1] == "video", where), where)
            at = found.end()
        if not parts:
            return text
        return [*parts, {"type": "text", "text": text[at:]}] if at < len(text) else parts

    def _next(self, source: list[object], is_video: bool, where: str) -> object:
        """The next of a kind; LLaVA also writes <image> for a video."""
        if not source:
            one = "a video" if is_video else {"image": "an image", "audio": "a sound"}[self._medium]
            raise ConversationError(f"{where} refers to {one} that the record does not have")
        return source.pop(
            next((at for at, one in enumerate(source) if isinstance(one, _Video) == is_video), 0)
        )

    def _made(self, value: object, where: str) -> list[JsonObject]:
        """The part of an image, or those of a video's frames."""
        try:
            if isinstance(value, _Video) and self._frames is not None:
                return [
                    {"type": self._medium, self._medium: frame}
                    for frame in self._frames(value.value)
                ]
            return [{"type": self._medium, self._medium: self._load(value)}]
        except RecordError as error:
            raise ConversationError(f"{where}: {error}") from error

    def of_fields(self, fields: JsonMapping, where: str) -> list[object]:
        """The images in fields of a record or a message, in order."""
        found: list[object] = []
        for name, value in fields.items():
            is_video = self._frames is not None and "video" in name.lower()
            if not is_video and _OTHERS[self._medium].search(name):
                raise ConversationError(
                    f'{where} has media in its field "{name}"; {_ONLY[self._medium]}'
                )
            values = (
                [one for one in value if one is not None]
                if isinstance(value, list | tuple)
                else [value]
            )
            found += [_Video(one) for one in values] if is_video else values
        return found


@dataclass(frozen=True, slots=True)
class _Video:
    """A video among images."""

    value: object
