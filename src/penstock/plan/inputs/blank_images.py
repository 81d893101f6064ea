"""Rows without images for models with a vision tower: a blank image behind the row, as a document
without targets.
"""

from dataclasses import replace

import numpy as np

from penstock.plan.inputs.model_input import IGNORE, ModelInput


def with_blank(row: ModelInput) -> ModelInput:
    """A row without images, and a blank image behind it as one more document, without targets.

    See `BlankImage`. Requires positions and `cu_seqlens`; the row gets longer.
    """
    assert row.media is not None
    blank = row.media.blank
    slots, count = row.sequence_length, len(blank.tokens)
    positions = None
    if blank.positions is not None and row.media.positions is not None:
        positions = np.concatenate([row.media.positions, blank.positions], axis=2)
    borders = row.cu_seqlens
    # Padding must stay at the end: as a document without targets it may as well be one.
    documents = 0 if borders is None else len(borders) - 1
    none = np.full((len(row.targets), count), IGNORE, row.targets.dtype)
    weights = row.loss_weights
    return replace(
        row,
        tokens=np.concatenate([row.tokens, blank.tokens.astype(row.tokens.dtype)]),
        targets=np.concatenate([row.targets, none], axis=1),
        loss_weights=None if weights is None else np.pad(weights, ((0, 0), (0, count))),
        positions=None
        if row.positions is None
        else np.append(row.positions, np.arange(count, dtype=row.positions.dtype)),
        document_ids=None
        if row.document_ids is None
        else np.append(
            row.document_ids, np.full(count, row.document_ids[-1] + 1, row.document_ids.dtype)
        ),
        cu_seqlens=None if borders is None else np.append(borders, np.int32(slots + count)),
        max_seqlen=None if row.max_seqlen is None else max(row.max_seqlen, count),
        num_tokens=slots + count,
        source_ids=np.append(
            row.source_ids, np.full(documents + 1 - len(row.source_ids), -1, np.int32)
        ),
        reach=None if row.reach is None else np.append(row.reach, np.int32(slots + count)),
        columns={name: np.pad(values, (0, count)) for name, values in row.columns.items()},
        media=replace(
            row.media,
            begins=np.array([slots], np.int32),
            ends=np.array([slots + count], np.int32),
            slots=np.arange(slots, slots + count),
            documents=np.array([documents], np.int32),
            patches=np.zeros(1, np.int32),
            arrays=blank.arrays,
            positions=positions,
            digests=(b"",),
            keys=(),
        ),
    )
