"""What stands for images in a text: a template's placeholders become the layouts of the images,
before encoding.

The text that stands for an image is the processor's (see `penstock.media.processor`). It takes the
placeholder's place in the text that is encoded. A placeholder that a message typed is ordinary
text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from penstock.core.arrays import Bool, Int64
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
    literal: Bool
    """Which characters the template or a layout wrote, bool [characters]."""
    begins: Int64
    """Begin of each character in the rendered text, int64 [characters]; of those of an image, its
    placeholder's.
    """
    ends: Int64
    image: Int64
    """Number of the image that each character belongs to, int64 [characters]; −1: none."""
    layouts: tuple[Layout, ...]

    def rendered(self, places: Int64) -> Int64:
        """Places in the rendered text of places between characters."""
        edges = np.append(self.begins, self.ends[-1] if len(self.ends) else 0)
        found: Int64 = edges[np.minimum(places, len(edges) - 1)]
        return found


def expand(
    text: str, literal: Bool, placeholder: str, layouts: Sequence[Layout], noun: str = "image"
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
    places = placeholders_in(text, literal, placeholder)
    if len(places) != len(layouts):
        raise ConversationError(
            f"the template writes {placeholder!r} {len(places)} times for {len(layouts)} "
            f"{noun}s; take the template that comes with the processor"
        )
    pieces, flags, begins, ends, owners = [], [], [], [], []
    last = 0
    for number, (place, layout) in enumerate(
        zip([*places, len(text)], [*layouts, None], strict=True)
    ):
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


def placeholders_in(text: str, literal: Bool, placeholder: str) -> list[int]:
    """First character of each placeholder that the template wrote; arguments as for `expand`."""
    places = []
    at = text.find(placeholder)
    while at >= 0:
        if literal[at : at + len(placeholder)].all():
            places.append(at)
        at = text.find(placeholder, at + len(placeholder))
    return places


def joint_difference(
    processor: Processor, text: str, tokens: Sequence[int], pictures: Sequence[object]
) -> str | None:
    """How the tokens of a conversation differ from the processor's own for text and pictures
    together.

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
        (n for n, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
        min(len(expected), len(found)),
    )
    return (
        f"the processor {processor.name} encodes text and {NOUNS[processor.medium]}s together "
        f"differently: from token {at} on {expected[at : at + 5]} of {len(expected)}, here "
        f"{found[at : at + 5]} of {len(found)}"
    )
