"""Tokens of a text with expanded images, at their places in the rendered text.

Masks and checks then see only what the template wrote: all tokens of an image cover its
placeholder.
"""

import numpy as np

from penstock.chat.tokens.encoding import EncodedText
from penstock.core.errors import ConversationError
from penstock.media.expansion import ExpandedText, ImagePlace
from penstock.media.layout import NOUNS
from penstock.media.processor import Processor


def restore(
    encoded: EncodedText, expanded: ExpandedText, processor: Processor
) -> tuple[EncodedText, list[ImagePlace]]:
    """Tokens of an expanded text at their places in the rendered one, with all tokens of its
    images.

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
            f"the tokenizer makes {int(repeated.sum())} of {len(wanted)} tokens that stand "
            f"for {noun}s; give the processor's own tokenizer"
        )
    counts[repeated] = wanted
    begins = np.where(
        encoded.ends > encoded.begins, expanded.begins[first], expanded.rendered(encoded.begins)
    )
    ends = np.where(encoded.ends > encoded.begins, expanded.ends[last], begins)
    owner = np.repeat(np.where(inside, image, -1), counts)
    made = EncodedText(
        ids=np.repeat(encoded.ids, counts),
        begins=np.repeat(begins, counts),
        ends=np.repeat(ends, counts),
        is_control=np.repeat(encoded.is_control, counts),
        forged=tuple(
            (int(expanded.rendered(np.array([place]))[0]), text) for place, text in encoded.forged
        ),
    )
    places = []
    for number, layout in enumerate(expanded.layouts):
        found = np.flatnonzero(owner == number)
        slots = int((made.ids[found] == processor.slot_id).sum())
        if layout.slots == 0:
            raise ConversationError(
                f"{noun} {number} is too small for the processor {processor.name}: it has 0 slots"
            )
        if slots != layout.slots:
            raise ConversationError(f"{noun} {number} has {slots} slots, expected {layout.slots}")
        places.append(ImagePlace(int(found[0]), int(found[-1]) + 1, layout))
    return made, places
