"""Prompts with images as rows of one document, and back."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.core.arrays import Array
from penstock.media.prompts import PromptImages
from penstock.plan.inputs.model_input import IGNORE, ModelInput


def images_of_document(row: ModelInput) -> PromptImages:
    """The images of a row of one document, each with slots that follow each other; one image at
    most.
    """
    media = row.media
    assert media is not None
    return PromptImages(
        begins=tuple(media.begins.tolist()),
        ends=tuple(media.ends.tolist()),
        slots=(media.slots,) * len(media),
        arrays=(dict(media.arrays),) * len(media),
        positions=media.positions,
        digests=media.digests,
        blank=media.blank,
    )


def document_of(images: PromptImages, tokens: Sequence[int] | Array) -> ModelInput:
    """A prompt with images, and what was written after it, as a row of one document without
    targets.
    """
    ids = np.asarray(tokens, np.int64)
    length = len(ids)
    media = images.part(0, length)
    return ModelInput(
        tokens=ids,
        targets=np.full((1, length), IGNORE),
        loss_weights=np.zeros((1, length), np.float32),
        positions=np.arange(length),
        document_ids=np.zeros(length, np.int64),
        cu_seqlens=np.array([0, length], np.int32),
        max_seqlen=length,
        num_tokens=length,
        source_ids=np.zeros(1, np.int32),
        media=replace(media, slots=media.slots.astype(np.int64)),
    )
