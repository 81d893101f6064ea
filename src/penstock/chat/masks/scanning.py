"""Loss weights by role boundaries: which tokens are trained, found from token ids alone.

The second method next to provenance, for data that is already tokenized, for the output of
multimodal processors, and as a cross-check. It sees only ids, so it can be deceived: a marker *as
control tokens* in a user's text looks like a turn. Our encoders never turn text into control
tokens; for data that others encoded, prefer provenance.

**The scan** goes over each row from left to right:

- The longest matching start opens a turn; no other start is searched inside it.
- The first `end` or `until` in or right after its content closes it, the longest if several match.
  A turn that is never closed runs to the end of its row.
- In a trained role the content counts, and the start if `include_start`.
- An end counts if `include_end`, by `train_on_eos`: "turn", ends of trained turns; "all", ends of
  every turn; "last", the end of the last trained turn that closed; "none".
- The scan continues after the end. It continues at the end if that is not included, starts the next
  turn, or is an `until`.
- Tokens outside all turns, padding and masked ids never count. Padding is recognised by its place,
  not its id, so an end of text with the padding id still counts.

Costs about 1 ns per token and 10 µs per call.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, final, get_args

import numpy as np

from penstock.chat.masks._kernels import clear_ids, find_extents, scan_rows
from penstock.chat.masks.boundaries import (
    AnyTokenizer,
    Boundary,
    Marker,
    ResolvedBoundary,
    check_starts,
    resolve,
)
from penstock.core.arrays import Array
from penstock.core.errors import ConfigError
from penstock.core.ragged import Ragged

TrainOnEos = Literal["turn", "all", "last", "none"]
EOS_MODES: tuple[TrainOnEos, ...] = get_args(TrainOnEos)
"""In the order of the kernel's constants."""

Ids = TypeVar("Ids")


def scan(
    token_ids: object,
    boundaries: Iterable[Boundary | ResolvedBoundary],
    roles_to_train: Collection[str] | None = None,
    train_on_eos: TrainOnEos = "turn",
    train_on_inputs: bool = False,
    *,
    tokenizer: AnyTokenizer | str | Path | None = None,
    attention_mask: object = None,
    lengths: object = None,
    masked_ids: Collection[int] = (),
) -> Any:
    """Loss weights by role boundaries: 1 where a token is trained, else 0.

    Args:
        token_ids: Integers [n] or [rows, n], an array, nested lists or a CPU tensor; or a `Ragged`
            of rows.
        boundaries: Declared or resolved; resolve them once if you call scan often. Empty: nothing
            is trained.
        roles_to_train: None: the assistant; empty: nothing.
        train_on_eos: Which ends count: "turn", "all", "last" or "none"; see the module.
        train_on_inputs: Train everything except padding and masked ids, whatever the boundaries and
            roles.
        tokenizer: Encodes boundaries that are text.
        attention_mask: Same shape as `token_ids`; 0 is padding, on either side or in between.
        lengths: Number of tokens of each row before its padding, [rows]; instead of an attention
            mask.
        masked_ids: Ids that never count, such as those of images, audio and video.

    Returns:
        float32 of the shape of `token_ids` (a `Ragged` for a `Ragged`).

    Raises:
        ConfigError: `train_on_eos` or a role to train is unknown, shapes disagree, or a boundary
            cannot be resolved.
    """
    if train_on_eos not in EOS_MODES:
        raise ConfigError(
            f"train_on_eos is {train_on_eos!r}; expected one of {', '.join(EOS_MODES)}"
        )
    rows = _as_rows(token_ids, attention_mask, lengths)
    weights = np.zeros(len(rows.ids), np.float32)
    if train_on_inputs:
        for begin, end in zip(rows.begins, rows.ends, strict=True):
            weights[begin:end] = 1.0
    else:
        resolved = resolve(boundaries, tokenizer)
        trained = _trained(resolved, roles_to_train)
        if trained.any() or train_on_eos == "all":
            table = _tabulate(resolved)
            scan_rows(
                rows.ids,
                rows.begins,
                rows.ends,
                *table,
                trained,
                EOS_MODES.index(train_on_eos),
                weights,
            )
    if len(masked_ids):
        masked = np.unique(np.fromiter(masked_ids, np.int64))
        clear_ids(rows.ids, masked, np.uint64(_filter(masked)), weights)
    if rows.hidden is not None:
        weights[rows.hidden] = 0.0
    return (
        Ragged(weights, token_ids.offsets)
        if isinstance(token_ids, Ragged)
        else weights.reshape(rows.shape)
    )


@final
@dataclass(frozen=True, slots=True)
class _Rows:
    ids: Array
    """All rows end to end, integers [tokens]."""
    begins: Array
    """First token of each row that is no padding, int64 [rows]."""
    ends: Array
    """One after its last such token, int64 [rows]."""
    shape: tuple[int, ...]
    hidden: Array | None
    """Padding inside rows, bool [tokens]; None: there is none."""


def _as_rows(token_ids: object, attention_mask: object, lengths: object) -> _Rows:
    if isinstance(token_ids, Ragged):
        if attention_mask is not None or lengths is not None:
            raise ConfigError("a Ragged has no padding: remove attention_mask and lengths")
        return _Rows(
            _integers(token_ids.values), token_ids.offsets[:-1], token_ids.offsets[1:], (), None
        )
    try:
        given = np.asarray(token_ids)
    except ValueError as error:
        raise ConfigError(
            "token_ids have rows of different lengths; pad them, or pass a Ragged"
        ) from error
    ids = _integers(given)
    if ids.ndim not in (1, 2):
        raise ConfigError(f"token_ids have shape {ids.shape}; expected [n] or [rows, n]")
    rows, width = (1, len(ids)) if ids.ndim == 1 else ids.shape
    begins = np.arange(rows, dtype=np.int64) * width
    ends, hidden = begins + width, None
    if attention_mask is not None and lengths is not None:
        raise ConfigError("attention_mask and lengths both define the padding; pass only one")
    if lengths is not None:
        counts = np.atleast_1d(np.asarray(lengths, np.int64))
        if counts.shape != (rows,) or ((counts < 0) | (counts > width)).any():
            raise ConfigError(f"lengths are {lengths}; expected {rows} numbers from 0 to {width}")
        ends = begins + counts
    if attention_mask is not None:
        real = np.asarray(attention_mask).astype(np.bool_, copy=False)
        if real.shape != ids.shape:
            raise ConfigError(
                f"attention_mask has shape {real.shape}, token_ids have {ids.shape}; they "
                "must agree"
            )
        flat = np.ascontiguousarray(real).reshape(-1)
        hidden = ~flat if find_extents(flat.view(np.uint8), begins, ends) else None
    return _Rows(ids.reshape(-1), begins, ends, ids.shape, hidden)


def _integers(ids: Array) -> Array:
    """Ids in a dtype that the kernels are compiled for, copied only if necessary."""
    if ids.dtype in (np.uint16, np.uint32, np.int32, np.int64):
        return np.ascontiguousarray(ids)
    if ids.size and ids.dtype.kind not in "iu":
        raise ConfigError(f"token_ids are {ids.dtype}; expected integers")
    return np.ascontiguousarray(ids, np.int64)


def _trained(resolved: Sequence[ResolvedBoundary], roles_to_train: Collection[str] | None) -> Array:
    """Whether the role of each boundary is trained, uint8 [boundaries]."""
    declared = {boundary.role for boundary in resolved}
    if isinstance(roles_to_train, str):
        raise ConfigError(f"roles_to_train is {roles_to_train!r}; expected a list of roles")
    unknown = [role for role in roles_to_train or () if role not in declared]
    if unknown and declared:
        raise ConfigError(
            f"roles_to_train: no boundary is declared for {', '.join(unknown)}; declared: "
            f"{', '.join(sorted(declared))}"
        )
    wanted = {"assistant"} if roles_to_train is None else set(roles_to_train)
    return np.array([boundary.role in wanted for boundary in resolved], np.uint8)


@lru_cache(maxsize=64)
def _tabulate(resolved: tuple[ResolvedBoundary, ...]) -> tuple[Array, Array, Array, Array, Array]:
    """The kernel's tables; see `_kernels`."""
    # Boundaries that were resolved separately may conflict.
    check_starts(resolved)
    pool: list[int] = []

    def place(ids: Sequence[int]) -> tuple[int, int]:
        pool.extend(ids)
        return len(pool) - len(ids), len(pool)

    starts: list[tuple[Marker, int]] = []
    closings: list[tuple[int, int, int, int]] = []
    turns: list[tuple[int, ...]] = []
    filters: list[int] = []
    for number, boundary in enumerate(resolved):
        starts += [(marker, number) for marker in boundary.starts]
        marked = [(marker, 1) for marker in boundary.ends] + [
            (marker, 0) for marker in boundary.until
        ]
        marked.sort(key=lambda entry: -len(entry[0].ids))
        first = len(closings)
        closings += [(*place(marker.ids), is_end, number) for marker, is_end in marked]
        turns.append(
            (
                first,
                len(closings),
                boundary.include_start,
                boundary.include_end,
                boundary.end_starts_next,
            )
        )
        filters.append(_filter(np.array([marker.ids[0] for marker, _ in marked], np.int64)))
    starts.sort(key=lambda entry: -len(entry[0].ids))
    # A start of one token may also be one of its tails.
    first_ids = [marker.ids[0] for marker, _ in starts]
    first_ids += [token for marker, _ in starts if len(marker.ids) == 1 for token in marker.tails]
    filters.append(_filter(np.array(first_ids, np.int64)))
    begun = [(*place(marker.ids), *place(marker.tails), number) for marker, number in starts]
    return (
        np.array(pool, np.int64),
        np.array(begun, np.int64).reshape(-1, 5),
        np.array(closings, np.int64).reshape(-1, 4),
        np.array(turns, np.int64).reshape(-1, 5),
        np.array(filters, np.uint64),
    )


def _filter(ids: Array) -> int:
    """A word of 64 bits with a bit for the lowest six bits of each id."""
    return (
        int(np.bitwise_or.reduce(np.uint64(1) << (ids.astype(np.uint64) & np.uint64(63))))
        if len(ids)
        else 0
    )
