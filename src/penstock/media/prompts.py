"""The images of one prompt, which may be read in parts: no part ends within an image."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from penstock.core.arrays import Array
from penstock.media.processor import Processor, join_arrays
from penstock.media.rows import BlankImage, RowMedia, blank_image, grid_positions


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptImages:
    """Images of a prompt of L tokens, in the order of their tokens."""

    begins: tuple[int, ...]
    """First token of each image."""
    ends: tuple[int, ...]
    """One after its last token."""
    slots: tuple[Array, ...]
    """Slots of each image's features in the prompt, int64."""
    arrays: tuple[dict[str, Array], ...]
    """What the processor gives for each."""
    positions: Array | None
    """int64 [4, 1, L], as `RowMedia.positions`."""
    digests: tuple[bytes, ...]
    """Of each image's bytes."""
    blank: BlankImage

    @classmethod
    def of(
        cls,
        processor: Processor,
        ids: Sequence[int],
        places: Sequence[tuple[int, int]],
        pictures: Sequence[object],
        digests: Sequence[bytes],
    ) -> "PromptImages":
        """Process the images of a prompt.

        Args:
            processor: The model's.
            ids: Of the prompt.
            places: Tokens of each image, [begin, end).
            pictures: RGB pictures of Pillow.
            digests: Of their bytes.

        Raises:
            RecordError: The processor refuses a picture.
        """
        tokens = np.asarray(ids, np.int64)
        slots = tuple(
            begin + np.flatnonzero(tokens[begin:end] == processor.slot_id) for begin, end in places
        )
        arrays = tuple(processor.arrays(picture) for picture in pictures)
        positions = None
        if processor.has_grids:
            grids = np.concatenate([one["image_grid_thw"] for one in arrays])
            spatial = grid_positions(np.concatenate(slots), len(tokens), grids, processor.merge)
            positions = np.concatenate([np.arange(len(tokens))[None], spatial])[:, None]
        return cls(
            begins=tuple(begin for begin, _ in places),
            ends=tuple(end for _, end in places),
            slots=slots,
            arrays=arrays,
            positions=positions,
            digests=tuple(digests),
            blank=blank_image(processor),
        )

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def shift(self) -> int:
        """What is added to the index of a token after the prompt to get its position in time,
        height and width.
        """
        return (
            0
            if self.positions is None
            else int(self.positions[1:].max()) + 1 - self.positions.shape[2]
        )

    def floor(self, place: int) -> int:
        """The last place up to `place` that is not within an image."""
        return next(
            (
                begin
                for begin, end in zip(self.begins, self.ends, strict=True)
                if begin < place < end
            ),
            place,
        )

    def ceiling(self, place: int) -> int:
        """The first place from `place` that is not within an image."""
        return next(
            (end for begin, end in zip(self.begins, self.ends, strict=True) if begin < place < end),
            place,
        )

    def keyed(self, ids: Sequence[int]) -> list[int]:
        """The prompt's ids with a number below 0 for tokens of an image, so that equal numbers mean
        equal images.
        """
        keys = list(ids)
        for begin, end, digest in zip(self.begins, self.ends, self.digests, strict=True):
            keys[begin:end] = [-1 - int.from_bytes(digest[:8], "little")] * (end - begin)
        return keys

    def part(self, begin: int, end: int) -> RowMedia:
        """The images among some tokens of the prompt and of what was written after it, counted from
        `begin`.
        """
        inside = [number for number, at in enumerate(self.begins) if begin <= at < end]
        positions = None
        if self.positions is not None:
            length = self.positions.shape[2]
            later = np.arange(max(begin, length), end)
            after = np.stack([later, *[later + self.shift] * 3])[:, None]
            positions = np.concatenate([self.positions[:, :, begin:end], after], axis=2)
        return RowMedia(
            begins=np.array([self.begins[number] - begin for number in inside], np.int32),
            ends=np.array([self.ends[number] - begin for number in inside], np.int32),
            slots=np.concatenate(
                [np.empty(0, np.int64), *(self.slots[number] - begin for number in inside)]
            ),
            documents=np.zeros(len(inside), np.int32),
            patches=np.zeros(len(inside), np.int32),
            arrays=join_arrays([self.arrays[number] for number in inside]) if inside else {},
            positions=positions,
            digests=tuple(self.digests[number] for number in inside),
            blank=self.blank,
        )
