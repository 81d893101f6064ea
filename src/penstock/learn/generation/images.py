"""Images of prompts: from what a message holds to what a model reads.

Which images may be read is the caller's to say: a server must not open files or URLs because a
client names them.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from penstock.chat.records.conversation import DEFAULT_WEIGHTS, Conversation
from penstock.chat.records.images import place_images
from penstock.core.errors import RecordError
from penstock.core.folders import is_url
from penstock.core.json_values import JsonObject
from penstock.media.finding import find_image
from penstock.media.images import ImageSettings
from penstock.media.layout import NOUNS
from penstock.media.loading import LoadedImage, load_frames, load_image
from penstock.media.processor import Processor
from penstock.media.prompts import PromptImages
from penstock.media.rows import BlankImage, blank_image

MOST_IMAGES = 64
"""Maximum images of a prompt."""


@final
class ImageReader:
    """Reads the images of prompts.

    Args:
        processor: The model's.
        settings: Which images are accepted, and how they become RGB; as in training.
        folder: Files may be read from this folder, by relative paths or absolute ones within it;
            None: only images that the messages themselves hold (data URLs, bytes). "" means any
            file or URL, for the user's own prompts.

    Attributes:
        blank: For models, which find out with it how they read images.
    """

    def __init__(
        self,
        processor: Processor,
        settings: ImageSettings | None = None,
        *,
        folder: str | Path | None = None,
    ) -> None:
        self.processor, self.settings = processor, settings or ImageSettings()
        self._folder = folder
        self.blank: BlankImage = blank_image(processor)

    def within(self, folder: str | Path | None) -> "ImageReader":
        """The same, with other files that may be read."""
        return ImageReader(self.processor, self.settings, folder=folder)

    def place(self, messages: Sequence[Mapping[str, object]]) -> list[JsonObject]:
        """Messages with each image loaded, as a part of its content.

        Raises:
            ConversationError: An image is refused; names its message.
        """
        conversation = Conversation(
            messages=tuple({"content": None, **message} for message in messages),
            message_weights=(DEFAULT_WEIGHTS,) * len(messages),
        )
        frames = (
            self._load_frames
            if self.settings.video_frames and self.processor.medium == "image"
            else None
        )
        return [
            dict(message)
            for message in place_images(
                conversation, self._load, self.processor.medium, frames
            ).messages
        ]

    def read(
        self, ids: Sequence[int], places: Sequence[tuple[int, int]], images: Sequence[LoadedImage]
    ) -> PromptImages:
        """What a model reads of the images of a prompt.

        Args:
            ids: Of the prompt.
            places: Tokens of each image, [begin, end).
            images: In the same order.

        Raises:
            RecordError: An image is damaged, or the processor refuses it.
        """
        pictures = [self.processor.read(image.read(), self.settings) for image in images]
        return PromptImages.of(
            self.processor, ids, places, pictures, [image.digest for image in images]
        )

    def _load(self, value: object) -> LoadedImage:
        return load_image(self._allowed(value), "", self.settings, self.processor)

    def _load_frames(self, value: object) -> list[LoadedImage]:
        while isinstance(value, Mapping) and len(value) == 1:
            [value] = value.values()
        frames = (
            [self._allowed(one) for one in value]
            if isinstance(value, list | tuple)
            else self._allowed(value)
        )
        return load_frames(frames, "", self.settings, self.processor)

    def _allowed(self, value: object) -> object:
        """What may be read: the value itself, or its bytes, or its path."""
        if self._folder == "":
            return value
        noun = NOUNS[self.processor.medium]
        origin, data = find_image(
            value, "" if self._folder is None else str(self._folder), self.settings, noun
        )
        if data is not None:
            return data
        if self._folder is None:
            raise RecordError(
                f"only {noun}s in data URLs (data:{self.processor.medium}/…;base64,…) are "
                "accepted here"
            )
        # Links are followed first: a name within the folder may lead out of it.
        path, allowed = os.path.realpath(origin), os.path.realpath(self._folder)
        if is_url(origin) or os.path.commonpath([path, allowed]) != allowed:
            raise RecordError(
                f"only {noun}s in data URLs and files of the folder for images are accepted here"
            )
        return Path(path)
