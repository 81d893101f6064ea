"""One microbatch as Megatron's packed sequence (THD): rows end to end, documents separated by
`cu_seqlens`.

Megatron has no label for "nothing to predict": labels are 0 there and `loss_mask` is 0, which holds
any loss weight. The padding of rows is a document without targets. With context parallelism each
document is padded to a multiple of twice the ranks: then `cu_seqlens` count real tokens, and
`cu_seqlens_padded` say where documents lie.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, final

import numpy as np

from penstock.core.arrays import Float32, Int32, Int64
from penstock.core.errors import ConfigError
from penstock.integrations.plain_targets import PlainTargets
from penstock.plan.inputs import IGNORE
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.requirements import InputRequirements

REQUIREMENTS = InputRequirements(
    asked_by="Megatron",
    target_distances=1,
    loss_weights=True,
    positions=True,
    cu_seqlens=True,
    prefix=False,
    trees=False,
    images=False,
)
"""What a loader must give; one without requirements gives more than that."""
TARGETS = PlainTargets("Megatron", fractional=True)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """The arrays of one microbatch. S slots, n documents, padding among them."""

    tokens: Annotated[Int64, "slots"]
    labels: Annotated[Int64, "slots"]
    """[S] already shifted; 0 where there is no target."""
    position_ids: Annotated[Int64, "slots"]
    loss_mask: Annotated[Float32, "slots"]
    """[S] loss weights; 0 where there is no target."""
    cu_seqlens: Annotated[Int32, "documents+1"]
    """[n + 1] cumulative lengths of documents without their padding."""
    cu_seqlens_padded: Annotated[Int32, "documents+1"]
    """[n + 1] where documents begin; equal to `cu_seqlens` if none is padded."""

    @property
    def max_seqlen(self) -> int:
        """Slots of the longest document, its padding included."""
        return int(np.diff(self.cu_seqlens_padded).max())


def pack_rows(
    rows: Sequence[ModelInput], *, document_multiple: int = 1, slots: int | None = None
) -> Packed:
    """Rows of a loader as one packed sequence.

    Args:
        rows: At least one.
        document_multiple: Slots of each document are a multiple of this.
        slots: S; None: the slots of all rows, and with a multiple as many as the documents need.

    Raises:
        ConfigError: The rows need more slots, or have what Megatron does not express.
    """
    targets, weights = (
        np.concatenate(parts) for parts in zip(*(TARGETS.of(row) for row in rows), strict=True)
    )
    arrays = {
        "tokens": np.concatenate([row.tokens for row in rows]).astype(np.int64),
        "labels": np.where(targets == IGNORE, 0, targets),
        "position_ids": np.concatenate([_required(row, "positions") for row in rows]).astype(
            np.int64
        ),
        "loss_mask": weights.astype(np.float32),
    }
    borders = _borders(rows)
    if document_multiple == 1:
        spare = _spare(len(arrays["tokens"]), slots)
        if spare:
            arrays = {name: _longer(name, value, spare) for name, value in arrays.items()}
            borders = np.append(borders, borders[-1] + spare)
        ends = borders.astype(np.int32)
        return Packed(**arrays, cu_seqlens=ends, cu_seqlens_padded=ends)
    return _spread(rows, arrays, borders, document_multiple, slots)


def _spread(
    rows: Sequence[ModelInput],
    arrays: dict[str, Any],
    borders: Int64,
    multiple: int,
    slots: int | None,
) -> Packed:
    """Documents with their own padding; that of rows is left out."""
    size = rows[0].sequence_length
    begins, ends = borders[:-1], borders[1:]
    used = np.array([number * size + row.num_tokens for number, row in enumerate(rows)])
    real = begins < used[begins // size]
    ends = np.minimum(ends, used[begins // size])[real]
    begins = begins[real]
    lengths = ends - begins
    room = -(-lengths // multiple) * multiple
    spare = _spare(int(room.sum()), slots)
    if spare % multiple:
        raise ConfigError(
            f"Megatron: slots={slots} must be a multiple of document_multiple={multiple}"
        )
    if spare or not len(room):
        lengths, room = np.append(lengths, spare or multiple), np.append(room, spare or multiple)
        begins = np.append(begins, -1)
    starts = np.cumsum(room) - room
    made = {name: _longer(name, value[:0], int(room.sum())) for name, value in arrays.items()}
    for start, begin, length, slots_of in zip(
        starts.tolist(), begins.tolist(), lengths.tolist(), room.tolist(), strict=True
    ):
        made["position_ids"][start : start + slots_of] = np.arange(slots_of)
        if begin >= 0:
            for name, value in arrays.items():
                made[name][start : start + length] = value[begin : begin + length]
    return Packed(**made, cu_seqlens=_cumulative(lengths), cu_seqlens_padded=_cumulative(room))


def _cumulative(lengths: Int64) -> Annotated[Int32, "documents+1"]:
    sums: Int32 = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]).astype(np.int32)
    return sums


def _spare(needed: int, slots: int | None) -> int:
    if slots is None:
        return 0
    if needed > slots:
        raise ConfigError(
            f"Megatron: a microbatch needs {needed:,} slots, but slots={slots:,}; set more, "
            "or join fewer rows"
        )
    return slots - needed


def _longer(name: str, value: Any, more: int) -> Any:
    tail = np.arange(more) if name == "position_ids" else np.zeros(more)
    return np.concatenate([value, tail.astype(value.dtype)])


def _borders(rows: Sequence[ModelInput]) -> Annotated[Int64, "documents+1"]:
    """Where documents of all rows begin, padding of each row among them, and the end; without
    repeated entries.
    """
    size = rows[0].sequence_length
    ends = [
        _required(row, "cu_seqlens")[1:].astype(np.int64) + number * size
        for number, row in enumerate(rows)
    ]
    return np.concatenate([np.zeros(1, np.int64), np.unique(np.concatenate(ends))])


def _required(row: ModelInput, name: str) -> Any:
    value = getattr(row, name)
    if value is None:
        raise ConfigError(
            f"Megatron: the row has no {name}; make the loader without requirements, or with "
            "positions=True and cu_seqlens=True"
        )
    return value
