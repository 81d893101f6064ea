"""What stands for an image in a text and in a row."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

NOUNS = {"image": "image", "audio": "sound"}
"""Medium of a processor → what messages call it."""

Size = tuple[int, int]
"""Height and width of an upright picture, in pixels."""


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """What stands for an image of some size."""

    text: str
    """As it is encoded: each run of one token of a processor's `repeated` is a single one here."""
    counts: tuple[int, ...]
    """How often each of these tokens stands in a row, in order."""
    slots: int
    """Number of tokens that become parts of the image: the slots of its features."""
    patches: int
    """Patches that the vision tower reads, its unit of work; where the processor makes none,
    squares of 16 x 16.
    """


def pattern_of(names: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the names, the longest first."""
    return re.compile("|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)))


def collapse(text: str, names: Iterable[str]) -> tuple[str, tuple[int, ...]]:
    """A text with each run of one of the names written once, and the lengths of the runs, in
    order.
    """
    counts: list[int] = []
    parts: list[str] = []
    at, last = 0, ""
    for found in pattern_of(names).finditer(text):
        if found.start() == at and last == found.group():
            counts[-1] += 1
        else:
            parts += [text[at : found.start()], found.group()]
            counts.append(1)
        at, last = found.end(), found.group()
    return "".join([*parts, text[at:]]), tuple(counts)


def spelled_out(layout: Layout, names: Iterable[str]) -> str:
    """The text of a layout with each run of one of the names as long as it is in a row; the inverse
    of `collapse`.
    """
    counts = iter(layout.counts)
    return pattern_of(names).sub(lambda found: found.group() * next(counts), layout.text)
