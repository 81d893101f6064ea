"""The cells of a projection, as three flat arrays: equal tokens, tokens split into pieces, and
similar tokens.

Tokens are compared by their bytes, and control tokens by their role, never by their strings. A
token is spelled as it would be inside a text, without the space that some tokenizers put before a
text. Costs: one batch of encoding in each direction, a dictionary of each vocabulary's bytes, and
sorts of the cells.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np

from penstock.core.arrays import Array, Bool, Bytes, Float32, Float64, Int32, Int64
from penstock.core.errors import ConfigError
from penstock.core.ragged import Ragged
from penstock.core.terminal import Progress
from penstock.tokenizers import ByteTable, Tokenizer

IntArray = Int64
FloatArray = Float64

ANCHORS = ("", "\n", "\x01")
"""Prefixes that are tried in turn until a token boundary falls right behind the prefix. Nothing
works if the tokenizer puts no space before a text; the others are characters that do not join with
what follows.
"""
SIMILARITY_POWER = 10
"""Weights of similar tokens are cosines to this power, so that a row is not spread over slightly
similar tokens.
"""
BLOCK_BYTES = 64 << 20
"""Bytes of cosines computed at once."""
BLOCK_TOKENS = 20_000
"""Tokens encoded at once; progress is reported after each block."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """Cells of a sparse matrix, in any order: int64 `rows` and `columns`, float64 `weights`."""

    rows: IntArray
    columns: IntArray
    weights: FloatArray

    def _taken(self, places: Array) -> "Cells":
        return Cells(
            rows=self.rows[places], columns=self.columns[places], weights=self.weights[places]
        )

    def transposed(self) -> "Cells":
        """Rows and columns exchanged."""
        return Cells(rows=self.columns, columns=self.rows, weights=self.weights)

    def joined(self, other: "Cells") -> "Cells":
        """The cells of both."""
        return Cells(
            rows=np.concatenate((self.rows, other.rows)),
            columns=np.concatenate((self.columns, other.columns)),
            weights=np.concatenate((self.weights, other.weights)),
        )

    def summed(self, num_columns: int) -> "Cells":
        """Each (row, column) once, in order, with its weights added."""
        places, number = np.unique(self.rows * num_columns + self.columns, return_inverse=True)
        weights = np.bincount(number, self.weights, len(places)).astype(np.float64)
        return Cells(rows=places // num_columns, columns=places % num_columns, weights=weights)

    def without_rows(self, rows: IntArray) -> "Cells":
        """The cells of all other rows."""
        return self._taken(~np.isin(self.rows, rows))

    def normalised(self, num_rows: int) -> "Cells":
        """Weights of each row divided by their sum."""
        sums = np.bincount(self.rows, self.weights, num_rows)
        return Cells(rows=self.rows, columns=self.columns, weights=self.weights / sums[self.rows])

    def mixed(self, other: "Cells", share: float, num_rows: int) -> "Cells":
        """Rows of both; where both have cells, `share` of `other`. Both are normalised, and so is
        the mixture.
        """
        ours, theirs = np.zeros(num_rows, np.bool_), np.zeros(num_rows, np.bool_)
        ours[self.rows], theirs[other.rows] = True, True
        kept = self.weights * np.where(theirs[self.rows], 1 - share, 1.0)
        added = other.weights * np.where(ours[other.rows], share, 1.0)
        both = self.joined(other)
        return Cells(rows=both.rows, columns=both.columns, weights=np.concatenate((kept, added)))


def equal_pairs(
    student: Tokenizer, teacher: Tokenizer, control_pairs: Mapping[int, int]
) -> tuple[IntArray, Bool]:
    """Tokens with equal bytes, and control tokens with the same role.

    Returns:
        (student id, teacher id), int64 [n, 2], each student id at most once; and which of them have
        bytes that the student's encoder writes as another id (SentencePiece has `A` and the byte
        0x41), bool [n].
    """
    ours, theirs = _writers(student), _writers(teacher)
    spelled = _spellings(student.byte_table)
    found = {token: theirs[data] for token, data in enumerate(spelled) if data in theirs}
    # EOS after BOS: if one token is both, it is predicted as the end of a text.
    parts = ((student.bos_id, teacher.bos_id), (student.eos_id, teacher.eos_id))
    found |= {one: other for one, other in parts if one is not None and other is not None}
    _check_controls(student, teacher, control_pairs)
    found |= control_pairs
    pairs = np.array(sorted(found.items()), np.int64).reshape(-1, 2)
    twins = np.array(
        [bool(spelled[token]) and ours[spelled[token]] != token for token in pairs[:, 0]], np.bool_
    )
    return pairs, twins


def split_cells(
    tokenizer: Tokenizer, other: Tokenizer, max_pieces: int, decay: float, progress: Progress
) -> Cells:
    """Each token of `tokenizer` in pieces of `other`: the first `max_pieces`, each `decay` times
    the one before.

    The weights of a token sum to 1. Tokens that are not text by themselves, such as half a
    character, have no cells.
    """
    spellings = _spellings(tokenizer.byte_table)
    found: list[IntArray] = []
    for begin in range(0, len(spellings), BLOCK_TOKENS):
        found += encode_inside(other, spellings[begin : begin + BLOCK_TOKENS])
        progress.advance(len(spellings[begin : begin + BLOCK_TOKENS]))
    pieces = Ragged.from_rows(found, np.int64)
    place = np.arange(len(pieces.values)) - np.repeat(pieces.offsets[:-1], pieces.lengths)
    rows = np.repeat(np.arange(len(pieces)), pieces.lengths)
    kept = place < max_pieces
    weights = np.power(decay, place[kept], dtype=np.float64)
    cells = Cells(rows=rows[kept], columns=pieces.values[kept].astype(np.int64), weights=weights)
    return cells.normalised(len(pieces))


def encode_inside(tokenizer: Tokenizer, spellings: Sequence[bytes]) -> Ragged:
    """Ids that spell exactly these bytes inside a text, int64; none if the bytes are not UTF-8 or
    have no such ids.
    """
    rows: dict[int, IntArray] = {}
    waiting = {
        number: text
        for number, data in enumerate(spellings)
        if data and (text := _text(data)) is not None
    }
    for anchor in ANCHORS:
        numbers = list(waiting)
        ids = _encode(tokenizer, [anchor + waiting[number] for number in numbers])
        spelled = [spellings[number] for number in numbers]
        for place, found in _tails(
            tokenizer.byte_table, ids, Ragged.from_rows([*map(_bytes, spelled)], np.uint8)
        ):
            rows[numbers[place]] = found
            del waiting[numbers[place]]
    nothing = np.empty(0, np.int64)
    return Ragged.from_rows(
        [rows.get(number, nothing) for number in range(len(spellings))], np.int64
    )


def similar_cells(
    student: Tokenizer,
    teacher: Tokenizer,
    embeddings: tuple[object, object],
    known: IntArray,
    top_k: int,
) -> Cells:
    """The teacher tokens with the largest cosines, for each student token that has bytes and is not
    in `known`.

    Raises:
        ConfigError: The embeddings do not fit the vocabularies or each other.
    """
    vectors = [np.asarray(one, np.float32) for one in embeddings]
    sizes = (student.vocab_size, teacher.vocab_size)
    if any(one.ndim != 2 or len(one) < size for one, size in zip(vectors, sizes, strict=True)) or (
        vectors[0].shape[1] != vectors[1].shape[1]
    ):
        raise ConfigError(
            f"embeddings have shapes {vectors[0].shape} and {vectors[1].shape}, expected "
            f"[{sizes[0]}, d] and [{sizes[1]}, d]"
        )
    of_text = [one.byte_table.lengths > 0 for one in (student, teacher)]
    units = [one / np.maximum(np.linalg.norm(one, axis=1, keepdims=True), 1e-12) for one in vectors]
    asked = np.setdiff1d(np.flatnonzero(of_text[0]), known)
    offered = np.flatnonzero(of_text[1])
    k = min(top_k, len(offered))
    found: list[Cells] = []
    block = max(1, BLOCK_BYTES // (4 * max(1, len(offered))))
    for begin in range(0, len(asked), block):
        rows = asked[begin : begin + block]
        cosines = units[0][rows] @ units[1][offered].T
        best = np.argpartition(-cosines, k - 1, 1)[:, :k]
        weights = (
            np.maximum(np.take_along_axis(cosines, best, 1), 0).astype(np.float64)
            ** SIMILARITY_POWER
        )
        some = weights.ravel() > 0
        found.append(
            Cells(
                rows=np.repeat(rows, k)[some],
                columns=offered[best.ravel()[some]],
                weights=weights.ravel()[some],
            )
        )
    cells = Cells(rows=np.empty(0, np.int64), columns=np.empty(0, np.int64), weights=np.empty(0))
    for one in found:
        cells = cells.joined(one)
    return cells.normalised(student.vocab_size)


def heaviest(cells: Cells, num_rows: int, top_k: int) -> tuple[Int32, Float32]:
    """The `top_k` heaviest cells of each row, normalised again: int32 columns (−1: none) and
    float32 weights.

    Cells of equal weight are ordered by column.
    """
    order = np.lexsort((cells.columns, -cells.weights, cells.rows))
    rows = cells.rows[order]
    place = np.arange(len(rows)) - np.searchsorted(rows, rows)
    kept = order[place < top_k]
    best = Cells(
        rows=cells.rows[kept], columns=cells.columns[kept], weights=cells.weights[kept]
    ).normalised(num_rows)
    indices = np.full((num_rows, top_k), -1, np.int32)
    weights = np.zeros((num_rows, top_k), np.float32)
    indices[best.rows, place[place < top_k]] = best.columns
    weights[best.rows, place[place < top_k]] = best.weights
    return indices, weights


def _spellings(table: ByteTable) -> list[bytes]:
    """The bytes of each id; empty for control tokens."""
    data, ends = table.data.tobytes(), table.offsets.tolist()
    return [data[begin:end] for begin, end in pairwise(ends)]


def _writers(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Bytes → id; of several ids with the same bytes, the one that the encoder writes, else the
    lowest.
    """
    writers: dict[bytes, int] = {}
    several: dict[bytes, None] = {}
    for token, data in enumerate(_spellings(tokenizer.byte_table)):
        if data and writers.setdefault(data, token) != token:
            several[data] = None
    for data, written in zip(several, encode_inside(tokenizer, list(several)), strict=True):
        if len(written) == 1:
            writers[data] = int(written[0])
    return writers


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def _encode(tokenizer: Tokenizer, texts: list[str]) -> Ragged:
    import pyarrow as pa

    return tokenizer.encode_batch(pa.array(texts, pa.large_string()))


def _tails(table: ByteTable, ids: Ragged, expected: Ragged) -> list[tuple[int, IntArray]]:
    """(row, its last ids) for each row that ends in ids which spell exactly the expected bytes."""
    lengths = table.lengths[ids.values.astype(np.int64)]
    ends = np.concatenate(([0], np.cumsum(lengths)))
    # The tail begins where the row has exactly the expected number of bytes left.
    begins = np.searchsorted(ends, ends[ids.offsets[1:]] - expected.lengths, "left")
    begins = np.clip(begins, ids.offsets[:-1], ids.offsets[1:])
    fits = ends[ids.offsets[1:]] - ends[begins] == expected.lengths
    found = []
    for row in np.flatnonzero(fits).tolist():
        tail = ids.values[begins[row] : ids.offsets[row + 1]].astype(np.int64)
        if np.array_equal(table.spell(tail), expected[row]):
            found.append((row, tail))
    return found


def _check_controls(student: Tokenizer, teacher: Tokenizer, pairs: Mapping[int, int]) -> None:
    for side, tokenizer, ids in (
        ("student", student, pairs.keys()),
        ("teacher", teacher, pairs.values()),
    ):
        for token in ids:
            if not 0 <= token < tokenizer.vocab_size:
                raise ConfigError(
                    f"control pair: {side} id {token} is outside the {tokenizer.vocab_size} "
                    f"ids of {tokenizer.name}"
                )
