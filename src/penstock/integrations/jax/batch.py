"""The input of a jitted step: several rows as arrays of fixed shapes, and their dense attention
mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import jax
import jax.numpy as jnp
import numpy as np

from penstock.core.arrays import Array, Int32
from penstock.core.errors import ConfigError
from penstock.plan.inputs import IGNORE
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.requirements import InputRequirements

REQUIREMENTS = InputRequirements(
    asked_by="penstock.integrations.jax",
    loss_weights=True,
    positions=True,
    document_ids=True,
    cu_seqlens=True,
    prefix=True,
    trees=False,
)
"""What a loader must provide for this integration; a loader without requirements provides all of
it.
"""
_NEEDED = ("loss_weights", "positions", "document_ids", "cu_seqlens")


def attention_mask(segment_ids: jax.Array, prefix: jax.Array | None = None) -> jax.Array:
    """bool [B, 1, T, T], for `jax.nn.dot_product_attention(mask=…)`: [b, 0, q, k] says whether q
    sees k.

    A token sees itself and the earlier tokens of its segment; a token of a prefix also sees the
    later tokens of that prefix. Padding is a segment too, so no row of the mask is empty and no
    softmax is NaN.

    The mask costs T² bytes per row, 16 MiB for 4,096 tokens. For long rows, pass `segment_ids` to
    an attention that takes them, and refuse prefixes if it does not support them.

    Args:
        segment_ids: int32 [B, T].
        prefix: bool [B, T]; None: no prefixes.
    """
    slots = segment_ids.shape[-1]
    place = jnp.arange(slots, dtype=jnp.int32)
    seen = place[:, None] >= place[None, :]
    if prefix is not None:
        seen = seen | (prefix[:, :, None] & prefix[:, None, :])
    return (seen & (segment_ids[:, :, None] == segment_ids[:, None, :]))[:, None]


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """B rows of T tokens, with at most N documents each: a pytree of arrays, the same shapes in
    every step.

    Names and conventions follow MaxText and Grain: targets are already shifted, segments count from
    1, and 0 is padding. `targets`, `loss_weights` and `loss_denominator` have an axis of D
    distances only if the loader was asked for several.

    For a loader with attention="row", each row is one document here, except for its targets and
    their weights.
    """

    tokens: jax.Array
    """int32 [B, T]; padding holds the loader's `pad_id`."""
    targets: jax.Array
    """int32 [B, T], or [B, D, T]: the expected token; 0 with weight 0 for no target. (−100 cannot
    index logits: JAX returns NaN for an index out of range, and NaN times 0 is NaN.)
    """
    loss_weights: jax.Array
    """float32, shaped like `targets`: how much each target counts."""
    segment_ids: jax.Array
    """int32 [B, T]: 1 … n for the row's documents, 0 for padding."""
    positions: jax.Array
    """int32 [B, T]: position in the document, from 0; restarts in the padding."""
    prefix: jax.Array | None
    """bool [B, T]: whether the token is in the bidirectional prefix of its document; None: the
    loader makes none.
    """
    num_documents: jax.Array
    """int32 [B]: n of each row."""
    document_lengths: jax.Array
    """int32 [B, N]: tokens of each document, then zeros."""
    cu_seqlens: jax.Array
    """int32 [B, N + 2]: where each document begins, then the padding, then T again and again."""
    loss_denominator: jax.Array
    """float32 [], or [D]: sum of the loss weights of the whole step, over all processes and all its
    batches.
    """


def stack(
    rows: Sequence[ModelInput],
    *,
    like: ModelInput,
    size: int,
    max_documents: int,
    denominators: tuple[float, ...],
    where: str,
    first: int,
) -> Batch:
    """Copy rows into a batch of new NumPy arrays, which JAX may keep without copying.

    Args:
        rows: Some rows, perhaps none.
        like: Any row of the loader.
        size: B; missing rows are padding.
        max_documents: N.
        denominators: The step's, for each distance.
        where: Which step it is, for errors.
        first: Number of the first row in the step, for errors.

    Raises:
        ConfigError: A row has more than N documents or trees, or lacks an array.
    """
    missing = [name for name in _NEEDED if getattr(like, name) is None]
    if missing:
        raise ConfigError(
            f"the loader's rows have no {', '.join(missing)}; make the loader with "
            "requirements=penstock.integrations.jax.REQUIREMENTS, or merge that into yours"
        )
    distances, slots = like.targets.shape
    arrays = _room(size, distances, slots, max_documents, with_prefix=like.prefix is not None)
    for number, row in enumerate(rows):
        documents = _count_documents(row)
        if row.reach is not None:
            raise ConfigError(
                f"{where}, row {first + number}: documents are prefix trees, or blocks of block "
                "diffusion, which batches for JAX do not describe; make the loader with "
                "requirements=penstock.integrations.jax.REQUIREMENTS, which refuses them at once"
            )
        if documents > max_documents:
            raise ConfigError(
                f"{where}, row {first + number}: {documents} documents, but max_documents is "
                f"{max_documents}; raise it, or make the loader with "
                f"documents_per_row={max_documents}"
            )
        if row.tokens.itemsize > 4 and max(row.tokens.max(), row.targets.max()) >= 2**31:
            raise ConfigError(
                f"{where}, row {first + number}: a token id is 2^31 or more, which int32 "
                "cannot hold; prepare the data with lower ids"
            )
        _write(arrays, number, row, documents)
    for number in range(len(rows), size):
        _write_padding(arrays, number)
    denominator = np.array(denominators, np.float32)
    if distances == 1:
        arrays |= {"targets": arrays["targets"][:, 0], "loss_weights": arrays["loss_weights"][:, 0]}
        denominator = denominator.reshape(())
    return Batch(**arrays, loss_denominator=cast("jax.Array", denominator))


def _room(
    size: int, distances: int, slots: int, documents: int, *, with_prefix: bool
) -> dict[str, Any]:
    return {
        "tokens": np.empty((size, slots), np.int32),
        "targets": np.empty((size, distances, slots), np.int32),
        "loss_weights": np.empty((size, distances, slots), np.float32),
        "segment_ids": np.empty((size, slots), np.int32),
        "positions": np.empty((size, slots), np.int32),
        "prefix": np.empty((size, slots), np.bool_) if with_prefix else None,
        "num_documents": np.empty(size, np.int32),
        "document_lengths": np.empty((size, documents), np.int32),
        "cu_seqlens": np.empty((size, documents + 2), np.int32),
    }


def segments_of(row: ModelInput) -> Int32:
    """int32 [T]: 1 … n for the row's documents, 0 for padding; joined documents are one.

    Raises:
        ConfigError: The row lacks an array for this.
    """
    if row.document_ids is None or row.cu_seqlens is None:
        raise ConfigError(
            "segment ids need document_ids and cu_seqlens; make the loader with "
            "requirements=penstock.integrations.jax.REQUIREMENTS, or merge that into yours"
        )
    used, ids = row.num_tokens, np.zeros(len(row.tokens), np.int32)
    np.add(
        row.document_ids[:used] if _count_documents(row) > 1 else 0,
        1,
        out=ids[:used],
        casting="same_kind",
    )
    return ids


def _count_documents(row: ModelInput) -> int:
    """Number of documents by `cu_seqlens`, where joined documents count as one."""
    assert row.cu_seqlens is not None
    return int(np.searchsorted(row.cu_seqlens, row.num_tokens))


def _write(arrays: dict[str, Any], number: int, row: ModelInput, documents: int) -> None:
    assert row.cu_seqlens is not None
    arrays["tokens"][number] = row.tokens
    np.multiply(
        row.targets, row.targets != IGNORE, out=arrays["targets"][number], casting="same_kind"
    )
    arrays["loss_weights"][number] = row.loss_weights
    arrays["positions"][number] = row.positions
    arrays["segment_ids"][number] = segments_of(row)
    if row.prefix is not None:
        arrays["prefix"][number] = row.prefix
    _write_borders(arrays, number, row.cu_seqlens[: documents + 1])


def _write_padding(arrays: dict[str, Any], number: int) -> None:
    for name in ("tokens", "targets", "loss_weights", "segment_ids"):
        arrays[name][number] = 0
    arrays["positions"][number] = np.arange(arrays["positions"].shape[1])
    if arrays["prefix"] is not None:
        arrays["prefix"][number] = False
    _write_borders(arrays, number, np.zeros(1, np.int32))


def _write_borders(arrays: dict[str, Any], number: int, borders: Array) -> None:
    """Write the borders of a row's documents, and the arrays that follow from them."""
    documents = len(borders) - 1
    arrays["num_documents"][number] = documents
    arrays["document_lengths"][number, :documents] = np.diff(borders)
    arrays["document_lengths"][number, documents:] = 0
    arrays["cu_seqlens"][number, : documents + 1] = borders
    arrays["cu_seqlens"][number, documents + 1 :] = arrays["tokens"].shape[1]
