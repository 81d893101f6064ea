"""Images, sounds and frames of videos in the prompts of a trajectory: read from its messages, found
again in what the template writes, and expanded to the tokens of the model's processor.

A template writes a placeholder for each. Which image a placeholder stands for is known by
provenance: it was written in the round of a part in a loop, or in the turn of a message. So an
image that a template leaves out, writes twice or in another order is refused; it would otherwise
get the tokens of another one.
"""

import base64
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, final

import numpy as np

from penstock.chat.records.conversation import DEFAULT_WEIGHTS, Conversation
from penstock.chat.records.images import place_images
from penstock.chat.render.template import Template, own_template
from penstock.chat.render.traced_text import LITERAL, Run
from penstock.chat.tokens.images import restore
from penstock.chat.trajectories.paths import PathImage
from penstock.chat.trajectories.seams import Stretch, encoded_behind
from penstock.chat.trajectories.wholes import Whole
from penstock.core.arrays import Bool
from penstock.core.errors import ConversationError, RecordError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.media.expansion import ImagePlace, expand, placeholders_in
from penstock.media.images import ImageSettings
from penstock.media.layout import NOUNS, Layout, spelled_out
from penstock.media.loading import ImageLoader, LoadedImage
from penstock.media.processor import Processor
from penstock.media.prompts import PromptImages
from penstock.media.records import find_media
from penstock.tokenizers import Tokenizer

CURE = "must stay where its message has it; take the template that comes with the processor"


class Placed(NamedTuple):
    """An image in the text that a template writes."""

    at: int
    """First character of its placeholder."""
    image: LoadedImage


class _Given(NamedTuple):
    """An image of a message."""

    message: int
    part: int
    image: LoadedImage


@final
class TrajectoryImages:
    """The images of one trajectory's prompts.

    Args:
        processor: The model's.
        settings: Which images are accepted; `image_folder` is where relative paths begin.
        tokenizer: Of the ids.
        template: Name of the template; empty: nothing is rendered.
    """

    def __init__(
        self,
        processor: Processor,
        settings: ImageSettings,
        tokenizer: Tokenizer,
        template: str = "",
    ) -> None:
        self.processor, self.noun = processor, NOUNS[processor.medium]
        self._tokenizer, self._template = tokenizer, template
        self._load = ImageLoader(settings.image_folder or "", settings, processor)

    def read(
        self,
        messages: Sequence[JsonObject],
        where: str,
        attachments: JsonMapping = MappingProxyType({}),
    ) -> list[JsonObject]:
        """Messages with each image looked at, as a part of its content.

        Args:
            messages: As templates see them.
            where: Of the first one, for errors.
            attachments: Images next to the messages, by the names of their fields.

        Raises:
            ConversationError: An image is refused; names its message.
        """
        plain = Conversation(
            messages=tuple(messages),
            message_weights=(DEFAULT_WEIGHTS,) * len(messages),
            attachments=dict(attachments),
            origin=where,
        )
        found = place_images(plain, self._look, self.processor.medium, self._load.frames).messages
        for one in _images_in(found):
            self._layout(one.image, f"{where}: message {one.message}")
        return [dict(message) for message in found]

    def find(self, whole: Whole, begin: int = 0, after: int = -1) -> list[Placed]:
        """Which image each placeholder of a text stands for.

        Args:
            whole: The conversation.
            begin: First character that is looked at.
            after: Images of later messages alone belong there.

        Raises:
            ConversationError: The template writes them in another order, not once each, or those of
                other messages.
        """
        given = [one for one in _images_in(whole.conversation.messages) if one.message > after]
        places = placeholders_in(whole.text, whole.literal, self.processor.placeholder)
        places = [at for at in places if at >= begin]
        names = _names_at(places, whole.rendered.runs)
        if len(names) != len(given) or not all(map(_is_it, names, given)):
            raise ConversationError(
                f"chat template {self._template}: {self._moved(names, given, after)}; "
                f"{'an' if self.noun == 'image' else 'a'} {self.noun} {CURE}"
            )
        return [Placed(at, one.image) for at, one in zip(places, given, strict=True)]

    def encode(
        self,
        names: Mapping[int, str],
        before: int | None,
        text: str,
        literal: Bool,
        images: Sequence[LoadedImage],
    ) -> Stretch:
        """Tokens of a text behind a token, with all tokens of its images; see `encoded_behind`.

        Raises:
            ConversationError: The vocabulary does not encode what stands for an image.
        """
        if not text:
            return Stretch([], [], "")
        layouts = [self._layout(image) for image in images]
        expanded = expand(text, literal, self.processor.placeholder, layouts, self.noun)
        encoded = encoded_behind(self._tokenizer, names, before, expanded.text, expanded.literal)
        if not layouts:
            return Stretch(encoded.ids.tolist(), [], text)
        made, places = restore(encoded, expanded, self.processor)
        written, at = [], 0
        for place, layout in zip(
            placeholders_in(text, literal, self.processor.placeholder), layouts, strict=True
        ):
            written += [text[at:place], spelled_out(layout, self.processor.repeated)]
            at = place + len(self.processor.placeholder)
        return Stretch(
            made.ids.tolist(),
            list(zip(images, places, strict=True)),
            "".join([*written, text[at:]]),
        )

    def of_prompt(self, ids: Sequence[int], images: Sequence[PathImage]) -> PromptImages:
        """What a model reads of the images of a prompt.

        Raises:
            RecordError: An image is damaged, or the processor refuses it.
        """
        return PromptImages.of(
            self.processor,
            ids,
            [(place.begin, place.end) for _, place in images],
            [self.processor.read(image.read(), self._load.settings) for image, _ in images],
            [image.digest for image, _ in images],
        )

    def refuse_slots(self, where: str, ids: Sequence[int]) -> None:
        """Refuse sampled ids in which the model would look for an image.

        Raises:
            ConversationError: One is the token of images.
        """
        if self.processor.slot_id in ids:
            at = [*ids].index(self.processor.slot_id)
            raise ConversationError(
                f"{where}: token {at} is {self.processor.slot_id}, where models read a part of "
                f"{_a(self.noun)}; keep the engine from sampling it (logit_bias)"
            )

    def slots(self, images: Sequence[LoadedImage]) -> int:
        """Tokens that models replace by features of these images."""
        return sum(self._layout(image).slots for image in images)

    def slots_in(self, ids: Sequence[int]) -> int:
        """The number of such tokens in ids."""
        return [*ids].count(self.processor.slot_id)

    def in_ids(self, ids: Sequence[int], images: Sequence[LoadedImage]) -> list[PathImage]:
        """Where images stand in ids that an engine gives.

        Raises:
            ConversationError: The ids have other tokens for images than the processor makes.
        """
        tokens = np.asarray(ids, np.int64)
        slots = np.flatnonzero(tokens == self.processor.slot_id).tolist()
        layouts = [self._layout(image) for image in images]
        if len(slots) != self.slots(images):
            raise ConversationError(
                f"has {len(slots):,} tokens of {self.noun}s, but the {len(images)} {self.noun}s of "
                f"its messages take {self.slots(images):,} by the processor {self.processor.name}; "
                f"give messages with all {self.noun}s of the prompt, and ids with the tokens that "
                "the engine puts in their places"
            )
        found: list[PathImage] = []
        last = 0
        for number, (image, layout) in enumerate(zip(images, layouts, strict=True)):
            own, slots = slots[: layout.slots], slots[layout.slots :]
            place = self._around(ids, own, layout, last)
            if place is None:
                raise ConversationError(
                    f"has {self.noun} {number} at tokens {own[0]} to {own[-1]}, with others "
                    f"between them than the processor {self.processor.name} makes for one of "
                    f"{image.size[1]}x{image.size[0]}"
                )
            found.append((image, place))
            last = place.end
        return found

    def _around(
        self, ids: Sequence[int], own: list[int], layout: Layout, last: int
    ) -> ImagePlace | None:
        """The place of an image with these slots, with the markers at its ends; None: other tokens
        stand between them.
        """
        holder = self.processor.placeholder
        literal = np.ones(len(holder), np.bool_)
        expanded = expand(holder, literal, holder, [layout], self.noun)
        encoded = encoded_behind(self._tokenizer, {}, None, expanded.text, expanded.literal)
        alone = restore(encoded, expanded, self.processor)[0].ids.tolist()
        inside = [place for place, one in enumerate(alone) if one == self.processor.slot_id]
        begin, end = own[0], own[-1] + 1
        if [*ids[begin:end]] != alone[inside[0] : inside[-1] + 1]:
            return None
        for one in reversed(alone[: inside[0]]):
            if begin == last or ids[begin - 1] != one:
                break
            begin -= 1
        for one in alone[inside[-1] + 1 :]:
            if end == len(ids) or ids[end] != one:
                break
            end += 1
        return ImagePlace(begin, end, layout)

    def _look(self, value: object) -> LoadedImage:
        """An image of a message; one of another trajectory's messages, as it is."""
        inner = next(iter(value.values())) if isinstance(value, Mapping) and value else None
        return inner if isinstance(inner, LoadedImage) else self._load(value)

    def _layout(self, image: LoadedImage, where: str = "trajectory") -> Layout:
        try:
            return self.processor.layout(image.size)
        except RecordError as error:
            raise ConversationError(f"{where}: {error}") from error

    def _moved(
        self, names: Sequence[tuple[int, int] | None], given: Sequence[_Given], after: int
    ) -> str:
        """What the template does with images, where that is not right."""
        noun = self.noun
        known = [name for name in names if name is not None]
        if again := [message for message, _ in known if message <= after]:
            return (
                f"writes {_a(noun)} of message {again[0]} again behind message {after}, a sampled "
                "reply"
            )
        if len(known) == len(names):
            wrote = Counter(message for message, _ in known)
            for message, count in Counter(one.message for one in given).items():
                if wrote[message] != count:
                    where = f" behind message {after}, a sampled reply" if after >= 0 else ""
                    return (
                        f"writes {wrote[message]} {noun}s for the {count} of message {message}"
                        f"{where}"
                    )
        if len(names) != len(given):
            return (
                f"writes {self.processor.placeholder!r} {len(names)} times for {len(given)} {noun}s"
            )
        name, one = next(
            (name, one)
            for name, one in zip(names, given, strict=True)
            if name is not None and not _is_it(name, one)
        )
        other = f"part {name[1]} of message {name[0]}" if name[1] >= 0 else f"message {name[0]}"
        return (
            f"writes {_a(noun)} of {other} where that of part {one.part} of message {one.message} "
            "belongs"
        )


def template_of(tokenizer: Tokenizer, processor: Processor | None) -> Template:
    """The template that came with a processor, or with a tokenizer.

    Raises:
        ConfigError: There is none.
    """
    if processor is None or processor.template is None:
        return own_template(tokenizer)
    made = own_template(tokenizer, source=processor.template)
    return replace(made, name=f"of {processor.name}")


def as_plain(messages: Sequence[JsonMapping]) -> list[JsonObject]:
    """Messages that `TrajectoryImages.read` made, as JSON holds them: images as absolute paths, or
    as data URLs where they are no files.
    """
    return [
        {
            **message,
            "content": [
                {**part, part["type"]: _address(part[part["type"]])}
                if isinstance(part.get(part.get("type")), LoadedImage)
                else part
                for part in message["content"]
            ],
        }
        if isinstance(message.get("content"), list)
        else dict(message)
        for message in messages
    ]


def has_images(messages: Sequence[JsonMapping]) -> bool:
    """Whether messages hold images, sounds or videos."""
    return any(True for _ in find_media(messages))


def _address(image: LoadedImage) -> str:
    if image.data is None and image.within is None and image.origin:
        return os.path.abspath(image.address or image.origin)
    return f"data:application/octet-stream;base64,{base64.b64encode(image.read()).decode()}"


def _images_in(messages: Sequence[JsonMapping]) -> list[_Given]:
    return [
        _Given(number, place, part[part["type"]])
        for number, message in enumerate(messages)
        if isinstance(message.get("content"), list)
        for place, part in enumerate(message["content"])
        if isinstance(part, Mapping) and isinstance(part.get(part.get("type")), LoadedImage)
    ]


def _names_at(places: Sequence[int], runs: Sequence[Run]) -> list[tuple[int, int] | None]:
    """Message and part that each placeholder was written for; part −1: unknown; None: both."""
    ends = np.cumsum([run[0] for run in runs])
    found: list[tuple[int, int] | None] = []
    for at in places:
        _, origin, field, _, owner, _ = runs[int(np.searchsorted(ends, at, "right"))]
        message, _, path = field.partition(" content.")
        if origin == LITERAL and path:
            found.append((int(message), int(path.split(".")[0])))
        else:
            found.append((owner, -1) if owner is not None and owner >= 0 else None)
    return found


def _is_it(name: tuple[int, int] | None, one: _Given) -> bool:
    return name is None or (name[0] == one.message and name[1] in (-1, one.part))


def _a(noun: str) -> str:
    return f"an {noun}" if noun == "image" else f"a {noun}"
