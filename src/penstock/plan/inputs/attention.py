"""Who sees whom in a row, in one line: same document, and (before or at it, or both in its prefix).

A query at q may attend to a key at k iff they are in the same document and k ≤ q or both are in the
prefix. A prefix is the beginning of its document, so three numbers a document say all of it;
`AttentionRule` holds these, and document ids, prefix flags and a dense mask follow from them.
Padding is a document of its own, without a prefix, so that every token sees at least itself. With
attention="row" the documents of a row are one, and nothing can be in a prefix: a "beginning" would
have no meaning there, so the two together are refused.

Making a rule costs some microseconds and O(documents) bytes; flags are O(row), the dense mask
O(row²).

Source of the rule: t5x, `make_decoder_mask` (causal or both in the prefix, and the same segment).
"""

from dataclasses import dataclass
from typing import Annotated, Self, final

import numpy as np

from penstock.core.arrays import Bool, Int32, Int64
from penstock.core.errors import ConfigError
from penstock.plan.inputs.model_input import ModelInput


@final
@dataclass(frozen=True, slots=True, eq=False)
class AttentionRule:
    """Whom the tokens of one row see. n pieces, padding among them; T slots.

    A piece is a document, or a node of a document that is a prefix tree: sequences whose common
    beginnings are stored once. Nodes stand depth first, so what continues a node, its subtree,
    follows it without a gap, and a query at q sees a key at k of its document iff k ≤ q < reach of
    k's piece, or both are in the prefix of one piece. So the queries that see a key follow each
    other: those from the key, or from the begin of the prefix that it is in, to the end of the
    subtree. Blocks of block diffusion are pieces that are all prefix.
    """

    pieces: Annotated[Int64, "pieces 3"]
    """[n, 3] begin, end of the prefix (`begin` without one) and end of each piece, in slots of the
    row.
    """
    reach: Annotated[Int64, "pieces"] | None = None
    """[n] end of each piece's subtree; None: no document is a tree, so each is its piece's own
    end.
    """

    def __post_init__(self) -> None:
        pieces = self.pieces
        if pieces.ndim != 2 or pieces.shape[1] != 3 or not len(pieces) or pieces.dtype.kind != "i":
            raise ConfigError(
                "pieces of an attention rule must be integers [documents ≥ 1, 3]: begin, end "
                f"of prefix, end; got {pieces.dtype}{list(pieces.shape)}; make the rule by "
                "AttentionRule.of(row)"
            )
        begins, prefix_ends, ends = pieces.T
        follow = begins[0] == 0 and np.array_equal(begins[1:], ends[:-1])
        if (
            not follow
            or (begins >= ends).any()
            or (prefix_ends < begins).any()
            or (prefix_ends > ends).any()
        ):
            raise ConfigError(
                "pieces of an attention rule must begin at 0, follow each other, hold a "
                "token or more, and have their prefix inside; got "
                f"{pieces[:8].tolist()}{' …' if len(pieces) > 8 else ''}"
            )
        if self.reach is not None:
            self._check_reach(self.reach)

    def _check_reach(self, reach: Annotated[Int64, "pieces"]) -> None:
        begins, _, ends = self.pieces.T
        if (
            reach.shape != ends.shape
            or reach.dtype.kind != "i"
            or (reach < ends).any()
            or not _nested(begins, reach)
        ):
            raise ConfigError(
                "reach of an attention rule must have the end of each piece's subtree, "
                f"inside that of each piece whose subtree it is in; got {reach.tolist()[:8]} "
                f"for pieces {self.pieces[:8].tolist()}"
            )

    @classmethod
    def of(cls, row: ModelInput) -> Self:
        """The rule of a row: from its `cu_seqlens`, which follow attention="row"; else from its
        `document_ids`.

        Raises:
            ConfigError: The row has neither, or has prefixes although its documents are joined.
        """
        bounds = _bounds(row)
        pieces = np.stack([bounds[:-1], bounds[:-1], bounds[1:]], axis=1)
        lengths = row.prefix_lengths
        if lengths is not None:
            padding = row.num_tokens < row.sequence_length
            if len(pieces) - padding == len(lengths):
                pieces[: len(lengths), 1] += lengths
            elif lengths.any():
                raise ConfigError(
                    f"a row with prefixes has {len(lengths)} documents, but cu_seqlens say "
                    f"{len(pieces) - padding}: attention='row' and bidirectional prefixes "
                    "exclude each other; take attention='document', or a causal-only "
                    "objective (bidirectional=False)"
                )
        return cls(pieces, None if row.reach is None else row.reach.astype(np.int64))

    @property
    def num_slots(self) -> int:
        """T."""
        return int(self.pieces[-1, 2])

    @property
    def bidirectional(self) -> bool:
        """Whether any token sees a later one; a prefix of one token is causal."""
        return bool((self.pieces[:, 1] - self.pieces[:, 0] > 1).any())

    @property
    def forked(self) -> bool:
        """Whether a document is a tree of several nodes."""
        return self.reach is not None and bool((self.reach > self.pieces[:, 2]).any())

    @property
    def ends(self) -> Annotated[Int64, "pieces"]:
        """[n] end of each piece's subtree: `reach`, or the piece's own end."""
        return self.pieces[:, 2] if self.reach is None else self.reach

    @property
    def seen_by(self) -> tuple[Annotated[Int64, "slots"], Annotated[Int64, "slots"]]:
        """[T] first query that sees each key, and [T] the one after the last."""
        begins, prefix_ends, _ = self.pieces[self.document_ids].T
        slots = np.arange(self.num_slots)
        return np.where(slots < prefix_ends, begins, slots), self.ends[self.document_ids]

    @property
    def positions(self) -> Annotated[Int64, "slots"]:
        """[T] position of each slot in its document: on the path from the root to it."""
        first = np.zeros(len(self.pieces), np.int64)
        above: list[int] = []
        for number, (begin, end) in enumerate(
            zip(self.pieces[:, 0].tolist(), self.ends.tolist(), strict=True)
        ):
            while above and self.ends[above[-1]] <= begin:
                above.pop()
            if above:
                parent = above[-1]
                first[number] = first[parent] + self.pieces[parent, 2] - self.pieces[parent, 0]
            if end > self.pieces[number, 2]:
                above.append(number)
        lengths = self.pieces[:, 2] - self.pieces[:, 0]
        return np.arange(self.num_slots) + np.repeat(first - self.pieces[:, 0], lengths)

    @property
    def cu_seqlens(self) -> Annotated[Int32, "borders"]:
        """[n + 1] where each piece begins; the last entry is T."""
        return np.append(self.pieces[:, 0], self.num_slots).astype(np.int32)

    @property
    def document_ids(self) -> Annotated[Int32, "slots"]:
        """[T] number of each slot's piece, from 0."""
        return np.repeat(
            np.arange(len(self.pieces), dtype=np.int32), self.pieces[:, 2] - self.pieces[:, 0]
        )

    @property
    def prefix(self) -> Annotated[Bool, "slots"]:
        """[T]: whether the slot is in its document's prefix."""
        begins, prefix_ends, ends = self.pieces.T
        lengths = np.stack([prefix_ends - begins, ends - prefix_ends], axis=1)
        return np.repeat(np.tile([True, False], len(self.pieces)), lengths.ravel())

    def dense_mask(self) -> Annotated[Bool, "slots slots"]:
        """[T, T]: whether the query (first axis) sees the key (second). T² bytes: for small rows
        and tests.
        """
        ids, prefix, slots = self.document_ids, self.prefix, np.arange(self.num_slots)
        mask: Bool = prefix[:, None] & prefix[None, :]
        mask &= ids[:, None] == ids[None, :]
        mask |= (slots[None, :] <= slots[:, None]) & (slots[:, None] < self.ends[ids][None, :])
        return mask


def _nested(begins: Annotated[Int64, "pieces"], reach: Annotated[Int64, "pieces"]) -> bool:
    """Whether each piece that begins in a subtree also ends its own subtree there, and subtrees end
    at pieces' ends.
    """
    above: list[int] = []
    known = {*begins.tolist(), int(reach.max())}
    for begin, end in zip(begins.tolist(), reach.tolist(), strict=True):
        while above and above[-1] <= begin:
            above.pop()
        if (above and end > above[-1]) or end not in known:
            return False
        above.append(end)
    return True


def _bounds(row: ModelInput) -> Annotated[Int64, "borders"]:
    """[n + 1]: where documents begin, and T. Entries that only fill `cu_seqlens` up to a capacity
    are left out.
    """
    if row.cu_seqlens is not None:
        bounds = row.cu_seqlens.astype(np.int64)
        return bounds[: np.searchsorted(bounds, row.sequence_length) + 1]
    if row.document_ids is not None:
        changes = np.flatnonzero(np.diff(row.document_ids)) + 1
        return np.concatenate([[0], changes, [row.sequence_length]]).astype(np.int64)
    raise ConfigError(
        "a row without cu_seqlens and document_ids does not say where its documents are; "
        "require one of them: InputRequirements(cu_seqlens=True, prefix=True)"
    )
