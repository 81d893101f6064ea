"""Images in rendered conversations: a template's placeholder becomes what stands for its image, before encoding.

The text that stands for an image is the processor's (see `penstock.media.processor`). It takes the placeholder's place
in the text that is encoded; afterwards tokens get their positions in the rendered text again, so that masks and checks
see only what the template wrote: all tokens of an image cover its placeholder. A placeholder that a message typed is
ordinary text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from penstock.chat.tokens.encoding import BoolArray, EncodedText, IntArray
from penstock.core.errors import ConversationError
from penstock.media.layout import NOUNS, Layout
from penstock.media.processor import Processor


@final
@dataclass(frozen=True, slots=True)
class ImagePlace:
    """Where an image is among the tokens of a conversation."""

    begin: int
    end: int
    """Tokens that stand for it, with markers of its rows and ends, [begin, end)."""
    layout: Layout


@final
@dataclass(frozen=True, slots=True)
class ExpandedText:
    """A rendered conversation with the texts of its images."""

    text: str
    literal: BoolArray
    """Which characters the template or a layout wrote, bool [characters]."""
    begins: IntArray
    """Begin of each character in the rendered text, int64 [characters]; of those of an image, its placeholder's."""
    ends: IntArray
    image: IntArray
    """Number of the image that each character belongs to, int64 [characters]; −1: none."""
    layouts: tuple[Layout, ...]


def expand(
    text: str, literal: BoolArray, placeholder: str, layouts: Sequence[Layout], noun: str = "image"
) -> ExpandedText:
    """Put layouts into a text.

    Args:
        text: As rendered.
        literal: Which characters the template wrote, bool [characters].
        placeholder: What it writes for an image.
        layouts: Of each image, in order.
        noun: What messages call an image.

    Raises:
        ConversationError: The template wrote more or fewer placeholders than there are images.
    """
    places = []
    at = text.find(placeholder)
    while at >= 0:
        if literal[at : at + len(placeholder)].all():
            places.append(at)
        at = text.find(placeholder, at + len(placeholder))
    if len(places) != len(layouts):
        raise ConversationError(
            f"the template writes {placeholder!r} {len(places)} times for {len(layouts)} {noun}s; take the template "
            "that comes with the processor"
        )
    pieces, flags, begins, ends, owners = [], [], [], [], []
    last = 0
    for number, (place, layout) in enumerate(zip([*places, len(text)], [*layouts, None], strict=True)):
        pieces.append(text[last:place])
        flags.append(literal[last:place])
        begins.append(np.arange(last, place))
        ends.append(np.arange(last + 1, place + 1))
        owners.append(np.full(place - last, -1))
        if layout is not None:
            last = place + len(placeholder)
            pieces.append(layout.text)
            flags.append(np.ones(len(layout.text), np.bool_))
            begins.append(np.full(len(layout.text), place))
            ends.append(np.full(len(layout.text), last))
            owners.append(np.full(len(layout.text), number))
    return ExpandedText(
        "".join(pieces),
        np.concatenate(flags),
        np.concatenate(begins),
        np.concatenate(ends),
        np.concatenate(owners),
        tuple(layouts),
    )


def restore(encoded: EncodedText, expanded: ExpandedText, processor: Processor) -> tuple[EncodedText, list[ImagePlace]]:
    """Tokens of an expanded text at their places in the rendered one, with all tokens of its images.

    Args:
        encoded: The expanded text's.
        expanded: From `expand`.
        processor: That made the layouts.

    Raises:
        ConversationError: The vocabulary does not encode what stands for an image as it must.
    """
    characters, noun = len(expanded.text), NOUNS[processor.medium]
    first = np.minimum(encoded.begins, characters - 1)
    last = np.maximum(encoded.ends - 1, first)
    image = expanded.image[first]
    inside = (image >= 0) & (image == expanded.image[last]) & (encoded.begins < encoded.ends)
    repeated = inside & np.isin(encoded.ids, list(processor.repeated.values())) & encoded.is_control
    counts = np.ones(len(encoded.ids), np.int64)
    wanted = np.array([count for layout in expanded.layouts for count in layout.counts], np.int64)
    if int(repeated.sum()) != len(wanted):
        raise ConversationError(
            f"the tokenizer makes {int(repeated.sum())} of {len(wanted)} tokens that stand for {noun}s; give the "
            "processor's own tokenizer"
        )
    counts[repeated] = wanted
    begins = np.where(encoded.ends > encoded.begins, expanded.begins[first], _at(expanded, encoded.begins))
    ends = np.where(encoded.ends > encoded.begins, expanded.ends[last], begins)
    owner = np.repeat(np.where(inside, image, -1), counts)
    made = EncodedText(
        ids=np.repeat(encoded.ids, counts),
        begins=np.repeat(begins, counts),
        ends=np.repeat(ends, counts),
        is_control=np.repeat(encoded.is_control, counts),
        forged=tuple((int(_at(expanded, np.array([place]))[0]), text) for place, text in encoded.forged),
    )
    places = []
    for number, layout in enumerate(expanded.layouts):
        found = np.flatnonzero(owner == number)
        slots = int((made.ids[found] == processor.slot_id).sum())
        if layout.slots == 0:
            raise ConversationError(f"{noun} {number} is too small for the processor {processor.name}: it has 0 slots")
        if slots != layout.slots:
            raise ConversationError(f"{noun} {number} has {slots} slots, expected {layout.slots}")
        places.append(ImagePlace(int(found[0]), int(found[-1]) + 1, layout))
    return made, places


def joint_difference(processor: Processor, text: str, tokens: Sequence[int], pictures: Sequence[Any]) -> str | None:
    """How the tokens of a conversation differ from the processor's own for text and pictures together.

    Args:
        processor: The processor.
        text: The rendered conversation, without control text in its messages.
        tokens: Its ids, without an EOS that was appended.
        pictures: Of each image, RGB.

    Returns:
        The first difference, in words; None: there is none.
    """
    expected, found = processor.joint_ids(text, pictures), [int(one) for one in tokens]
    if expected == found:
        return None
    at = next(
        (n for n, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), min(len(expected), len(found))
    )
    return (
        f"the processor {processor.name} encodes text and {NOUNS[processor.medium]}s together differently: from token "
        f"{at} on "
        f"{expected[at : at + 5]} of {len(expected)}, here {found[at : at + 5]} of {len(found)}"
    )


def _at(expanded: ExpandedText, places: IntArray) -> IntArray:
    """Places in the rendered text of places between characters."""
    edges = np.append(expanded.begins, expanded.ends[-1] if len(expanded.ends) else 0)
    return edges[np.minimum(places, len(edges) - 1)]
