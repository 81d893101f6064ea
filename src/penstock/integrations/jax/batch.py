"""What a jitted step gets: several rows as arrays whose shapes never change."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import jax
import numpy as np

from penstock.errors import ConfigError
from penstock.inputs import IGNORE, InputRequirements, ModelInput

REQUIREMENTS = InputRequirements(
    asked_by="penstock.integrations.jax",
    loss_weights=True,
    positions=True,
    document_ids=True,
    cu_seqlens=True,
    prefix=True,
)
"""What a loader must give for this integration; a loader that is told nothing gives all of it."""

_NEEDED = ("loss_weights", "positions", "document_ids", "cu_seqlens")


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """B rows of T tokens, of at most N documents each: a pytree of arrays, the same shapes in every step.

    Names and conventions are those of MaxText and Grain where they have one: targets are shifted already, segments
    count from 1, and 0 is padding. `targets`, `loss_weights` and `loss_denominator` have no axis of distances unless
    the loader was asked for several, D of them.

    Where the loader was told attention="row", a row is one document here in all but its targets and their weights.
    """

    tokens: jax.Array
    """int32 [B, T]; padding holds the loader's `pad_id`."""
    targets: jax.Array
    """int32 [B, T], or [B, D, T]: the token that is due; 0 where nothing is, and the weight is 0 there. (−100 is no
    index into logits: JAX gives NaN for one that is outside, which stays NaN when it is multiplied by 0.)"""
    loss_weights: jax.Array
    """float32, like `targets`: how much each counts."""
    segment_ids: jax.Array
    """int32 [B, T]: 1 … n for the row's documents, 0 for padding."""
    positions: jax.Array
    """int32 [B, T]: place in the document, from 0; restarts in the padding."""
    prefix: jax.Array | None
    """bool [B, T]: whether the token is in the part of its document that sees itself in both directions; None where no
    objective of the loader makes such parts."""
    num_documents: jax.Array
    """int32 [B]: n of each row."""
    document_lengths: jax.Array
    """int32 [B, N]: tokens of each document, then zeros."""
    cu_seqlens: jax.Array
    """int32 [B, N + 2]: where each document begins, then the padding, then T again and again."""
    loss_denominator: jax.Array
    """float32 [], or [D]: sum of the loss weights of the whole step, over all processes and all its batches."""


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
    """Copy rows into a batch of NumPy arrays that nobody else holds, so that JAX may keep them without copying.

    Args:
        rows: Some rows, perhaps none.
        like: Any row of the loader.
        size: B; rows that are missing are padding.
        max_documents: N.
        denominators: Of the step, for each distance.
        where: Which step it is, for errors.
        first: Number of the first row in the step, for errors.

    Raises:
        ConfigError: A row has more than N documents, or lacks an array.
    """
    missing = [name for name in _NEEDED if getattr(like, name) is None]
    if missing:
        raise ConfigError(
            f"the loader's rows have no {', '.join(missing)}; make it with "
            "requirements=penstock.integrations.jax.REQUIREMENTS, or merge that into yours"
        )
    distances, slots = like.targets.shape
    arrays = _room(size, distances, slots, max_documents, with_prefix=like.prefix is not None)
    for number, row in enumerate(rows):
        documents = _count_documents(row)
        if documents > max_documents:
            raise ConfigError(
                f"{where}, row {first + number}: {documents} documents, but max_documents is {max_documents}; raise it"
            )
        if row.tokens.itemsize > 4 and max(row.tokens.max(), row.targets.max()) >= 2**31:
            raise ConfigError(
                f"{where}, row {first + number}: a token id of 2^31 or more, which the int32 of a batch cannot hold; "
                "prepare the data with lower ids"
            )
        _write(arrays, number, row, documents)
    for number in range(len(rows), size):
        _write_padding(arrays, number)
    denominator = np.array(denominators, np.float32)
    if distances == 1:
        arrays |= {"targets": arrays["targets"][:, 0], "loss_weights": arrays["loss_weights"][:, 0]}
        denominator = denominator.reshape(())
    return Batch(**arrays, loss_denominator=cast("jax.Array", denominator))


def _room(size: int, distances: int, slots: int, documents: int, *, with_prefix: bool) -> dict[str, Any]:
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


def _count_documents(row: ModelInput) -> int:
    """As `cu_seqlens` has them: those of a row that was joined are one."""
    assert row.cu_seqlens is not None
    return int(np.searchsorted(row.cu_seqlens, row.num_tokens))


def _write(arrays: dict[str, Any], number: int, row: ModelInput, documents: int) -> None:
    assert row.document_ids is not None
    assert row.cu_seqlens is not None
    used = row.num_tokens
    arrays["tokens"][number] = row.tokens
    np.multiply(row.targets, row.targets != IGNORE, out=arrays["targets"][number], casting="same_kind")
    arrays["loss_weights"][number] = row.loss_weights
    arrays["positions"][number] = row.positions
    # Documents that were joined are one segment.
    np.add(row.document_ids[:used] if documents > 1 else 0, 1, out=arrays["segment_ids"][number, :used])
    arrays["segment_ids"][number, used:] = 0
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


def _write_borders(arrays: dict[str, Any], number: int, borders: np.ndarray[Any, Any]) -> None:
    """Where the documents begin and the last one ends, and what follows from it."""
    documents = len(borders) - 1
    arrays["num_documents"][number] = documents
    arrays["document_lengths"][number, :documents] = np.diff(borders)
    arrays["document_lengths"][number, documents:] = 0
    arrays["cu_seqlens"][number, : documents + 1] = borders
    arrays["cu_seqlens"][number, documents + 1 :] = arrays["tokens"].shape[1]
