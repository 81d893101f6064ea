"""Images of a row: the arrays that a vision tower reads, the slots that its features fill, and
positions in 2-D.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, final

import numpy as np

from penstock.core.arrays import Array, Int32, Int64
from penstock.media.processor import Processor, join_arrays


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlankImage:
    """A small blank image and its tokens, as a document of its own.

    A model that gets it next to a row without images runs its vision tower, so that all its
    parameters have gradients (zeros) on every rank; without, DDP raises and FSDP waits for ever.
    """

    tokens: Annotated[Int64, "tokens"]
    arrays: Mapping[str, Array]
    positions: Annotated[Int64, "4 1 tokens"] | None


def blank_image(processor: Processor) -> BlankImage:
    """A blank image as a model with this processor gets it."""
    blank = processor.blank()
    layout = processor.layout(
        (1, len(blank)) if processor.medium == "audio" else (blank.height, blank.width)
    )
    tokens = np.full(layout.slots, processor.slot_id, np.int64)
    arrays = processor.arrays(blank)
    positions = None
    if processor.has_grids:
        spatial = grid_positions(
            np.arange(layout.slots), layout.slots, arrays["image_grid_thw"], processor.merge
        )
        positions = np.concatenate([np.arange(layout.slots)[None], spatial])[:, None]
    return BlankImage(tokens=tokens, arrays=arrays, positions=positions)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowMedia:
    """The images of a row of T slots, in the order of their slots; n of them, S slots in all."""

    begins: Annotated[Int32, "images"]
    """[n] first token of each image."""
    ends: Annotated[Int32, "images"]
    """[n] one after its last token; markers of its rows and ends are tokens of it, but no slots."""
    slots: Annotated[Int64, "image_slots"]
    """[S] slots that the images' features fill, in order."""
    documents: Annotated[Int32, "images"]
    """[n] number of its document in the row."""
    patches: Annotated[Int32, "images"]
    """[n] patches of each, the vision tower's unit of work."""
    arrays: Mapping[str, Array]
    """Name → what the model's processor gives for the images together, such as `pixel_values`;
    empty without images.
    """
    positions: Annotated[Int64, "4 1 slots"] | None
    """[4, 1, T] position of each slot in its document: of the text, then in time, height and width,
    where the arrays have grids (`image_grid_thw`); else None. Source: M-RoPE, Qwen2-VL, arXiv
    2409.12191.
    """
    digests: tuple[bytes, ...]
    """Of each image's original bytes."""
    blank: BlankImage
    keys: tuple[bytes, ...] = ()
    """Of each image's arrays: digests of its bytes and of how they are processed; empty: not
    known.
    """

    def __len__(self) -> int:
        return len(self.begins)

    def __repr__(self) -> str:
        """One line: counts, and the arrays' shapes and dtypes; no numbers of arrays."""
        arrays = ", ".join(
            f"{name} {value.dtype}{list(value.shape)}" for name, value in self.arrays.items()
        )
        return (
            f"RowMedia({len(self)} images in {len(self.slots)} slots, {self.patches.sum()} "
            f"patches; {arrays})"
        )

    def without_images(self) -> "RowMedia":
        """The same of a row of padding: no images."""
        none, places = np.empty(0, np.int32), None
        if self.positions is not None:
            places = np.broadcast_to(
                np.arange(self.positions.shape[2]), self.positions.shape
            ).copy()
        return replace(
            self,
            begins=none,
            ends=none,
            slots=np.empty(0, np.int64),
            documents=none,
            patches=none,
            arrays={},
            positions=places,
            digests=(),
            keys=(),
        )

    @staticmethod
    def join(rows: "Sequence[RowMedia]", slots: int, documents: Sequence[int]) -> "RowMedia":
        """Those of rows that lie end to end.

        Args:
            rows: Of each row.
            slots: Of a row.
            documents: Number of documents of each row; padding counts as one.
        """
        begins = [slots * number for number in range(len(rows))]
        before = np.cumsum([0, *documents[:-1]]).tolist()
        positions = None
        if rows[0].positions is not None:
            positions = np.concatenate(
                [row.positions for row in rows if row.positions is not None], axis=2
            )
        return RowMedia(
            begins=_joined([row.begins for row in rows], begins),
            ends=_joined([row.ends for row in rows], begins),
            slots=_joined([row.slots for row in rows], begins),
            documents=_joined([row.documents for row in rows], before),
            patches=_joined([row.patches for row in rows], [0] * len(rows)),
            arrays=join_arrays([row.arrays for row in rows if len(row)])
            if any(map(len, rows))
            else {},
            positions=positions,
            digests=tuple(digest for row in rows for digest in row.digests),
            keys=tuple(key for row in rows for key in row.keys),
            blank=rows[0].blank,
        )


def _joined(parts: Sequence[Array], shifts: Sequence[int]) -> Array:
    return np.concatenate(
        [part + np.array(shift, part.dtype) for part, shift in zip(parts, shifts, strict=True)]
    )


def grid_positions(
    slots: Annotated[Int64, "image_slots"],
    length: int,
    grids: Annotated[Int64, "images 3"],
    merge: int,
) -> Annotated[Int64, "3 tokens"]:
    """Positions of one document's tokens in time, height and width.

    Text counts on in all three. All features of an image share one time index; rows and columns
    count from the end of the preceding text, and text resumes after the largest index.

    Args:
        slots: Slots of the images' features in the document, image after image.
        length: Tokens of the document.
        grids: Patches of each image in time, height and width.
        merge: Patches that become one feature, along height and along width.
    """
    out = np.empty((3, length), np.int64)
    at = token = first = 0
    for time, height, width in (grids // (1, merge, merge)).tolist():
        count = time * height * width
        places = slots[first : first + count]
        begin = int(places[0])
        out[:, token:begin] = np.arange(at, at + begin - token)
        at += begin - token
        out[:, places] = at + np.indices((time, height, width)).reshape(3, -1)
        token, first, at = int(places[-1]) + 1, first + count, at + max(time, height, width)
    out[:, token:] = np.arange(at, at + length - token)
    return out
