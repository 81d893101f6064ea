"""The token sequences of a trajectory: what was sent and what was sampled, with loss weights.

A trajectory is one path as long as each prompt begins with all that was sent and sampled before.
Where a prompt does not, a new path begins: a branch, which shares its beginning with the path
before it. Each sampled token is trained in exactly one path, the one in which it was sampled.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, final

import numpy as np

from penstock.core.arrays import Float32, Int64
from penstock.media.expansion import ImagePlace
from penstock.media.loading import LoadedImage, key_at

PathImage = tuple[LoadedImage, ImagePlace]
"""An image of a path, and the tokens that stand for it."""


class TokenPath(NamedTuple):
    """One token sequence of a trajectory, T tokens."""

    ids: Int64
    """int64 [T]."""
    weights: Float32
    """float32 [T]: 1 for tokens that are trained here, else 0."""
    log_probabilities: Float32
    """float32 [T], nats: of each sampled token when it was sampled; 0 for all others."""
    replies: tuple[int, ...]
    """Numbers of the replies that were sampled in this path, from 0."""
    begins: tuple[int, ...]
    """First token of each of these."""
    images: tuple[PathImage, ...] = ()
    """Its images, sounds and frames of videos, in order."""


@final
@dataclass(slots=True)
class OpenPath:
    """A path that can still grow."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    logs: list[float] = field(default_factory=list)
    replies: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    sampled_end: int = 0
    """One after the last token that was sampled in it."""
    images: list[PathImage] = field(default_factory=list)

    @property
    def keys(self) -> list[int]:
        """The ids, with a number below 0 for tokens of an image; see `key_at`."""
        return keyed(self.ids, self.images)

    def read(self, ids: Iterable[int], images: Iterable[PathImage] = ()) -> None:
        """Add tokens that were sent, with the images among them, counted from the first one."""
        before = len(self.ids)
        self.images += moved(images, before)
        self.ids.extend(ids)
        nothing = [0.0] * (len(self.ids) - before)
        self.weights += nothing
        self.logs += nothing

    def sampled(
        self, number: int, ids: Sequence[int], logs: Sequence[float], weights: Sequence[float]
    ) -> None:
        """Add a reply."""
        self.begins.append(len(self.ids))
        self.ids += ids
        self.logs += logs
        self.weights += weights
        self.replies.append(number)
        self.sampled_end = len(self.ids)

    def branch(self, ids: Sequence[int], images: Sequence[PathImage] = ()) -> "OpenPath":
        """A new path with other ids and images; it keeps the log-probabilities of the shared
        beginning.
        """
        shared = common(self.keys, keyed(ids, images))
        rest = [0.0] * (len(ids) - shared)
        return OpenPath([*ids], [0.0] * len(ids), self.logs[:shared] + rest, images=[*images])

    def done(self) -> TokenPath:
        """As arrays, up to the last token that was sampled: what follows teaches nothing."""
        end = self.sampled_end
        return TokenPath(
            np.array(self.ids[:end], np.int64),
            np.array(self.weights[:end], np.float32),
            np.array(self.logs[:end], np.float32),
            tuple(self.replies),
            tuple(self.begins),
            tuple(one for one in self.images if one[1].end <= end),
        )


def keyed(ids: Sequence[int], images: Iterable[PathImage]) -> list[int]:
    """Ids with a number below 0 for tokens of an image; see `key_at`."""
    keys = [*ids]
    for image, place in images:
        key = key_at(image.digest, place.begin, place.end)
        keys[place.begin : place.end] = [key] * (place.end - place.begin)
    return keys


def moved(images: Iterable[PathImage], by: int) -> Iterator[PathImage]:
    """The images, some tokens further on."""
    for image, place in images:
        yield image, ImagePlace(place.begin + by, place.end + by, place.layout)


def common(one: Sequence[object], other: Sequence[object]) -> int:
    """Number of equal elements at the beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
