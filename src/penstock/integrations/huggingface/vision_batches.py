"""Batches of conversations with images, made as `penstock prepare` makes documents: same tokens,
weights and pixels.

Each image is decoded once, upright and in RGB, and takes the place of its placeholder before the
text is encoded. So nothing is compared afterwards, and `penstock.media.ImageSettings` apply. Rows
are padded on the tokenizer's side.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch

from penstock.chat.encoded_chat import EncodedChat
from penstock.chat.records.conversation import Conversation
from penstock.chat.records.images import place_images
from penstock.core.arrays import Float32
from penstock.core.errors import ConfigError
from penstock.media.images import ImageSettings, read_picture
from penstock.media.loading import LoadedImage, load_image
from penstock.media.processor import HuggingFaceProcessor, is_nested, join_arrays
from penstock.media.records import media_fields

_TYPES = ("mm_token_type_ids", "token_type_ids")
_OTHERS = re.compile("video|audio|document|file")
Weights = Float32


@final
class ImageBatches:
    """Makes batches with images.

    Args:
        processor: Of transformers.
        settings: Which images are accepted, and how they become RGB.

    Raises:
        ConfigError: The processor cannot be asked for one image.
    """

    def __init__(self, processor: object, settings: ImageSettings) -> None:
        if "cross_attention_mask" in (getattr(processor, "model_input_names", None) or ()):
            raise ConfigError(
                "the processor makes a mask of text over images, which depends on the whole batch"
            )
        self.processor = HuggingFaceProcessor(processor)
        if self.processor.medium != "image":
            raise ConfigError("the processor reads sounds")
        self._settings = settings
        self._types = _types_of(self.processor)

    def reads(self, conversations: Sequence[Conversation]) -> bool:
        """Whether all media are images that it can load: no video, no audio, no arrays."""
        return all(map(_holds_images, conversations))

    def place(self, conversation: Conversation) -> Conversation:
        """The conversation with its images loaded.

        Raises:
            ConversationError: An image is refused.
        """
        return place_images(conversation, self._load)

    def batch(self, chats: Sequence[EncodedChat]) -> tuple[dict[str, Any], Weights]:
        """Rows of ids, of what else the model reads, and of loss weights, all [rows, n] but for the
        pixels.
        """
        tokenizer = self.processor.inner.tokenizer
        left = tokenizer.padding_side == "left"
        longest = max(len(chat.tokens) for chat in chats)
        padding = tokenizer.pad_token_id
        if padding is None:
            raise ConfigError("the tokenizer has no pad_token; set processor.tokenizer.pad_token")
        ids = np.full((len(chats), longest), padding, np.int64)
        real, types = np.zeros((2, *ids.shape), np.int64)
        weights = np.zeros(ids.shape, np.float32)
        for row, chat in enumerate(chats):
            begin = longest - len(chat.tokens) if left else 0
            inside = slice(begin, begin + len(chat.tokens))
            ids[row, inside], real[row, inside], weights[row, inside] = (
                chat.tokens,
                1,
                chat.loss_weights,
            )
            for _, place in chat.images:
                slots = np.flatnonzero(
                    chat.tokens[place.begin : place.end] == self.processor.slot_id
                )
                types[row, begin + place.begin + slots] = 1
        made = {"input_ids": ids, "attention_mask": real}
        made |= dict.fromkeys(self._types, types)
        made |= _joined([[self._arrays(image) for image, _ in chat.images] for chat in chats])
        return {
            name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in made.items()
        }, weights

    def _load(self, value: object) -> LoadedImage:
        return load_image(value, self._settings.image_folder or "", self._settings, self.processor)

    def _arrays(self, image: LoadedImage) -> dict[str, Any]:
        return self.processor.arrays(read_picture(image.read(), self._settings))


def _types_of(processor: HuggingFaceProcessor) -> tuple[str, ...]:
    """Names under which the processor gives the kinds of tokens; some that it gives are not in
    `model_input_names`.
    """
    from PIL import Image

    images = [Image.new("RGB", (64, 64))]
    found = processor.inner(
        text=[processor.placeholder], images=[images] if processor.is_nested else images
    )
    return tuple(name for name in _TYPES if name in found)


def _joined(rows: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Arrays of the images of all rows, as the processor joins them."""
    images = [image for row in rows for image in row]
    if not images:
        return {}
    if not is_nested(images[0]):
        return join_arrays(images)
    # Rows lie along the first axis, and are padded to the most tiles.
    none = {name: array[:, :0] for name, array in images[0].items()}
    by_row = [join_arrays(row or [none]) for row in rows]
    return {name: _stacked([one[name] for one in by_row]) for name in images[0]}


def _stacked(rows: Sequence[Any]) -> Any:
    largest = [max(row.shape[d] for row in rows) for d in range(rows[0].ndim)]
    padded = []
    for row in rows:
        more = [most - size for size, most in zip(row.shape, largest, strict=True)]
        padded.append(np.pad(row, [(0, 0), *((0, one) for one in more[1:])]))
    return np.concatenate(padded)


def _holds_images(conversation: Conversation) -> bool:
    """Whether all media of a conversation are images in a form that can be loaded."""
    fields = dict(conversation.attachments)
    for message in conversation.messages:
        fields |= media_fields(message)
        content = message.get("content")
        if isinstance(content, list | tuple) and not all(map(_is_image, content)):
            return False
    return not any(_OTHERS.search(name) or _has_array(value) for name, value in fields.items())


def _is_image(part: object) -> bool:
    """Whether a part of a content is a text, or an image in a form that can be loaded."""
    return (
        isinstance(part, Mapping)
        and not _OTHERS.search(str(part.get("type", "")))
        and not any(map(_has_array, part.values()))
    )


def _has_array(value: object) -> bool:
    return (
        any(map(_has_array, value)) if isinstance(value, list | tuple) else hasattr(value, "shape")
    )
