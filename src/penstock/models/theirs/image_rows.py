"""Images in models of transformers: their arguments, and which way of running packed rows is exact
with them.

Features are merged into the embeddings by transformers' own forward, which gets the arrays of all
images of a row. What may go wrong is attention and positions: documents of a row may see each
other, or an image be read in another way than alone. So the first row with images starts a trial on
a row of three small documents with images of noise, each compared with transformers' own result for
the document alone. The ways, in this order: our attention; transformers' attention with restarting
positions; its attention with masks of ours, for models in which the tokens of an image see each
other.
"""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from penstock.core.arrays import Int64
from penstock.media.processor import join_arrays
from penstock.media.rows import BlankImage, RowMedia
from penstock.plan.inputs import IGNORE, AttentionRule
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.torch_tensors import on_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Way = Literal["ours", "own", "borders", "masks", "sliding_masks", "alone"]
"""How rows with images run: with our attention; with transformers' own; with its own and masks of
ours, where an image's tokens see each other in all layers (Gemma 3) or in those with a sliding
window (Gemma 4); or one document a row.
"""

_TEXTS = ((4, 5), (7,), (3, 4))
"""Tokens of the trial's documents before and after their images."""
_PADDING = 5
_FLOATS = (np.float16, np.float32, np.float64)


def has_vision(inner: "PreTrainedModel") -> bool:
    """Whether a model of transformers reads images, or sounds."""
    return any(
        getattr(inner.config, name, None) is not None for name in ("vision_config", "audio_config")
    )


def image_token(inner: "PreTrainedModel") -> int | None:
    """The token that a model replaces by features of images; None: its settings name none."""
    for name in ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index"):
        found = getattr(inner.config, name, None)
        if isinstance(found, int):
            return found
    return None


def image_arguments(
    inner: object, row: ModelInput, device: torch.device, dtype: torch.dtype
) -> dict[str, object]:
    """Arguments for a forward of a row's tokens and images together, without those for attention.

    Args:
        inner: The model of transformers.
        row: A row with `media`.
        device: The model's.
        dtype: Of its weights: pixels are converted to it.
    """
    assert row.media is not None
    assert row.positions is not None
    tokens, places = (
        torch.from_numpy(array.astype(np.int64)) for array in (row.tokens, row.positions)
    )
    return part_arguments(inner, tokens, places, row.media, device, dtype)


def part_arguments(
    inner: "PreTrainedModel",
    tokens: Tensor,
    places: Tensor,
    media: RowMedia,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, object]:
    """As `image_arguments`, of some tokens [n], their positions in the document [n], and the images
    among them.
    """
    known = set(inspect.signature(inner.forward).parameters)
    positions = places[None]
    if media.positions is not None and uses_grids(inner):
        positions = torch.from_numpy(media.positions)
    types = np.zeros(len(tokens), np.int64)
    types[media.slots] = 1
    given = {
        "input_ids": tokens[None],
        "position_ids": positions,
        **{
            name: torch.from_numpy(types)[None]
            for name in ("mm_token_type_ids", "token_type_ids")
            if name in known
        },
        **{
            name: torch.from_numpy(np.ascontiguousarray(array))
            for name, array in media.arrays.items()
        },
    }
    if len(media) and needs_cross_attention(inner):
        given["cross_attention_mask"] = torch.from_numpy(cross_attention_mask(media, len(tokens)))[
            None
        ]
    moved = {name: on_device(value, device) for name, value in given.items()}
    return {
        **{
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in moved.items()
        },
        "use_cache": False,
    }


def needs_cross_attention(inner: "PreTrainedModel") -> bool:
    """Whether text attends to images in layers of its own, by a mask of one document (Llama 3.2
    Vision).
    """
    return "cross_attention_mask" in inspect.signature(inner.forward).parameters


def cross_attention_mask(media: RowMedia, length: int) -> Int64:
    """[T, images, tiles]: 1 where a token of a row of one document sees a tile, as Llama 3.2 Vision
    is trained.

    A token sees the image before it, and not those before that; images that follow each other are
    seen together.
    """
    tiles = media.arrays["aspect_ratio_mask"][0]
    seen = np.zeros((length, *tiles.shape), np.int64)
    places = media.slots.tolist()
    end = length
    for number in reversed(range(len(places))):
        following = places[number + 1] if number + 1 < len(places) else length
        end = end if following == places[number] + 1 and number + 1 < len(places) else following
        seen[places[number] : end, number] = tiles[number] != 0
    return seen


def uses_grids(inner: object) -> bool:
    """Whether positions of images are in time, height and width (M-RoPE)."""
    return hasattr(inner, "get_rope_index") or hasattr(
        getattr(inner, "model", None), "get_rope_index"
    )


def image_masks(
    row: ModelInput,
    window: int | None,
    device: torch.device,
    dtype: torch.dtype,
    *,
    everywhere: bool = True,
) -> dict[str, Tensor]:
    """Masks [1, 1, T, T], added to scores: causal in each document, and all of an image's slots see
    each other.

    Args:
        row: A row with `media`.
        everywhere: Whether the slots of an image see each other in full layers, too.
        window: Maximum tokens that a token of a sliding layer sees, including itself.
        device: The model's.
        dtype: Of its scores.
    """
    media = row.media
    assert media is not None
    rule = AttentionRule.of(row)
    borders = torch.from_numpy(np.append(rule.pieces[:, 0], rule.num_slots))
    places = torch.arange(rule.num_slots)
    document = torch.bucketize(places, borders[1:], right=True)
    block = torch.full((rule.num_slots,), -1)
    slots = torch.from_numpy(media.slots)
    # Slots that follow each other are one block, as transformers counts them, also if they are of
    # two images.
    block[slots] = torch.cumsum(torch.diff(slots, prepend=slots[:1] - 2) != 1, 0)
    causal, same = places[:, None] >= places[None], document[:, None] == document[None]
    near = (causal | ((block[:, None] == block[None]) & (block[:, None] >= 0))) & same
    full = near if everywhere else causal & same
    sliding = near if window is None else near & (places[:, None] - places[None] < window)
    lowest = torch.finfo(dtype).min

    def added(seen: Tensor) -> Tensor:
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, lowest)
        return on_device(mask[None, None], device)

    return {"full_attention": added(full), "sliding_attention": added(sliding)}


def trial_row(
    blank: BlankImage, vocabulary: int, seed: int = 0, swapped: bool = False
) -> list[ModelInput]:
    """The row of the trial, and each of its documents alone.

    Args:
        blank: The loader's blank image; its pixels are replaced by noise.
        vocabulary: Number of ids.
        seed: Of tokens and noise.
        swapped: Take another image for the first document.
    """
    random = np.random.default_rng(seed)
    ids = np.setdiff1d(np.arange(min(vocabulary, 1000)), blank.tokens)
    documents = []
    for number, texts in enumerate(_TEXTS):
        noise = np.random.default_rng([seed, number, swapped and number == 0])
        text = [random.choice(ids, count) for count in texts]
        documents.append(_document(blank, text, noise))
    return [_packed(documents, _PADDING), *documents]


def _document(blank: BlankImage, text: list[Any], noise: np.random.Generator) -> ModelInput:
    """A document of text, an image if there are two texts, and more text."""
    pictured = len(text) > 1
    tokens = np.concatenate([text[0], blank.tokens, text[1]]) if pictured else text[0]
    begin, count = len(text[0]), len(blank.tokens) if pictured else 0
    arrays: Mapping[str, Any] = {}
    if pictured:
        arrays = {
            name: np.asarray(noise.standard_normal(array.shape), array.dtype)
            if array.dtype in _FLOATS
            else array
            for name, array in blank.arrays.items()
        }
    positions = None
    if blank.positions is not None:
        before = np.arange(begin)[None].repeat(4, 0)
        inside = begin + blank.positions[:, 0, :count]
        at = int(inside[1:].max(initial=begin - 1)) + 1
        after = np.arange(at, at + len(tokens) - begin - count)[None].repeat(4, 0)
        after[0] += begin + count - at
        positions = np.concatenate([before, inside, after], axis=1)[:, None]
    slots = np.arange(begin, begin + count)
    media = RowMedia(
        begins=slots[:1].astype(np.int32),
        ends=(slots[-1:] + 1).astype(np.int32),
        slots=slots,
        documents=np.zeros(int(pictured), np.int32),
        patches=np.zeros(int(pictured), np.int32),
        arrays=arrays,
        positions=positions,
        digests=(b"",) * pictured,
        blank=blank,
    )
    length = len(tokens)
    return ModelInput(
        tokens=tokens.astype(np.int64),
        targets=np.full((1, length), IGNORE),
        loss_weights=np.zeros((1, length), np.float32),
        positions=np.arange(length),
        document_ids=np.zeros(length, np.int64),
        cu_seqlens=np.array([0, length], np.int32),
        max_seqlen=length,
        num_tokens=length,
        source_ids=np.zeros(1, np.int32),
        media=media,
    )


def _packed(documents: list[ModelInput], padding: int) -> ModelInput:
    lengths = [len(one.tokens) for one in documents]
    begins = np.cumsum([0, *lengths])
    slots = int(begins[-1]) + padding
    media = [one.media for one in documents if one.media is not None]
    shift = zip(begins, media, strict=False)
    positions = None
    if media[0].positions is not None:
        rest = np.arange(padding)[None, None].repeat(4, 0)
        positions = np.concatenate(
            [*(one.positions for one in media if one.positions is not None), rest], axis=2
        )
    return replace(
        documents[0],
        tokens=np.concatenate([*(one.tokens for one in documents), np.zeros(padding, np.int64)]),
        targets=np.full((1, slots), IGNORE),
        loss_weights=np.zeros((1, slots), np.float32),
        positions=np.concatenate([*map(np.arange, lengths), np.arange(padding)]),
        document_ids=np.repeat(np.arange(len(documents) + 1), [*lengths, padding]),
        cu_seqlens=np.append(begins, slots).astype(np.int32),
        max_seqlen=max(lengths),
        num_tokens=slots - padding,
        source_ids=np.zeros(len(documents), np.int32),
        media=replace(
            media[0],
            begins=np.concatenate(
                [one.begins + np.int32(at) for at, one in zip(begins, media, strict=False)]
            ),
            ends=np.concatenate(
                [one.ends + np.int32(at) for at, one in zip(begins, media, strict=False)]
            ),
            slots=np.concatenate([one.slots + at for at, one in shift]),
            documents=np.repeat(np.arange(len(media)), [len(one) for one in media]).astype(
                np.int32
            ),
            patches=np.concatenate([one.patches for one in media]),
            arrays=join_arrays([one.arrays for one in media if len(one)]),
            positions=positions,
            digests=(b"",) * sum(map(len, media)),
        ),
    )
