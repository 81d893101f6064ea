"""Rows for teachers: what a teacher reads for each of the student's rows, and which chunks of both
correspond.

`TeacherRows` is a companion of the loader, so rows are made in its threads, ahead of training. Each
document is read in one of three ways: its text is encoded with the teacher's tokenizer and aligned
by bytes; or, if the source has companion documents, the record's own document is read, and in chats
aligned turn by turn; or, if the tokenizers are the same, the teacher reads the student's own
tokens. The teacher's documents are packed in one row in the student's order, separate, without
padding to the longest.

Guarantees: every listed chunk has a predictor on both sides and only trained tokens. Everything
else is just not listed and never an error: a first token, a tail past the teacher's context, tokens
outside all chunks. The result depends only on the row and its pieces. Costs: encoding and alignment
are linear in bytes, the rest is a few NumPy passes over the row. There is a Python object per
document, none per token or chunk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, final

import numpy as np

from penstock.core.arrays import Array, Float32, Int32, Int64, Records
from penstock.core.errors import ConfigError, ConversationError, TokenizerError
from penstock.learn.distillation.companions import CompanionDocuments, align_chats, check_chat
from penstock.plan.inputs import IGNORE, pack_documents
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.loader import CompanionSource
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.alignment import DIFFERENT, Aligner, Alignment

__all__ = ["TeacherRow", "TeacherRows", "TeacherText"]

Weights = Float32

_FILLER = np.zeros(1, np.int32)
"""Replaces a document of which the teacher reads nothing, so that no document of a row is empty."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherRow:
    """One teacher's side of a row, with C chunks and n documents."""

    input: ModelInput
    """What the teacher reads: the row's documents in its tokens, packed in the same order but
    separate, all arrays int32, targets at distance 1, padding at the end. If the tokenizers are the
    same, the student's own row.
    """
    student_bounds: Int32
    """[C, 2] half-open ranges of slots of the student's row, ascending and disjoint. The predictors
    of the chunk [b, e) are the slots b − 1 … e − 2, all in its document.
    """
    teacher_bounds: Int32
    """[C, 2], the same in `input`."""
    weights: Weights
    """[C] mean loss weight of the chunk's student tokens as targets, above 0. A chunk with an
    untrained token is not listed.
    """
    documents: Int32
    """[C] number of the chunk's document in the row."""
    starts: Int64
    """[n] first slot of each document in `input`, whose positions do not tell where all of a row
    see each other.
    """
    text_bytes: Int64
    """[n] bytes of each document's text that the teacher reads, for scores per byte."""
    pieces: Int64
    """[n, 4] source, document, first token, number of tokens: the key of a piece in a teacher's
    cache.
    """
    same_tokenizer: bool
    """Whether both sides have the same ids."""

    @property
    def slot_documents(self) -> Int64:
        """[slots of `input`] number of each slot's document; n in padding."""
        slots = np.arange(len(self.input.tokens))
        documents: Int64 = np.searchsorted(self.starts, slots, side="right") - 1
        documents[self.input.num_tokens :] = len(self.starts)
        return documents


@final
@dataclass(frozen=True, slots=True)
class TeacherText:
    """How a teacher reads text."""

    tokenizer: Tokenizer
    documents: Mapping[str, str | Path] = field(default_factory=dict)
    """Source name → companion dataset: the same records, prepared with the teacher's tokenizer and
    chat template. Records are matched by file and line.
    """
    _: KW_ONLY
    control_pairs: Mapping[int, int] = field(default_factory=dict)
    """Control tokens with the same meaning, student id → teacher id, in addition to BOS and EOS."""
    bos: bool | None = None
    """Whether the teacher's documents begin with its BOS, all or none. None: companion documents
    stay as they are; texts begin as those that the teacher was trained on (`trained_with_bos`). If
    that is unknown, a text gets the BOS if the teacher's tokenizer puts it there by itself, as in
    `penstock prepare`, or if the student's document begins with its own.
    """
    trained_with_bos: bool | None = None
    """Whether the texts that the teacher was trained on begin with its BOS; None: unknown."""
    max_tokens: int | None = None
    """The teacher's context: the rest of a longer document is left out."""
    multiple: int = 1
    """The row's length is rounded up to a multiple of this (64 or 128 suit GPUs)."""

    def __post_init__(self) -> None:
        for name, value in (("max_tokens", self.max_tokens), ("multiple", self.multiple)):
            if value is not None and value < 1:
                raise ConfigError(
                    f"teacher {self.tokenizer.name!r}: {name} must be at least 1, got {value}"
                )
        if self.bos and self.tokenizer.bos_id is None:
            raise ConfigError(
                f"teacher {self.tokenizer.name!r}: bos is True, but its tokenizer has no BOS; "
                "leave out bos"
            )


@final
class TeacherRows:
    """A companion for `penstock.Loader`: a row's `distillation` is a tuple with a `TeacherRow` for
    each teacher.

    Args:
        student_tokenizer: The tokenizer that the sources were prepared with.
        teachers: In the order of the results.

    Raises:
        TokenizerError: Two tokenizers cannot be aligned.
    """

    def __init__(self, student_tokenizer: Tokenizer, teachers: Sequence[TeacherText]) -> None:
        self._student = student_tokenizer
        self._makers = tuple(RowMaker.of(student_tokenizer, teacher) for teacher in teachers)

    def begin(self, sources: Sequence[CompanionSource]) -> Self:
        """A companion for these sources, which shares the tables.

        Raises:
            ConfigError: A teacher would not read a source's text, or companion documents do not
                fit.
        """
        if pictured := next((one.name for one in sources if one.dataset.media is not None), None):
            raise ConfigError(
                f"source {pictured!r}: documents have images, which teachers do not see yet; "
                "distill on text, or train without a teacher"
            )
        for source in sources:
            info = source.dataset.tokenizer
            if (
                info is not None
                and info.fingerprint
                and info.fingerprint != self._student.fingerprint
            ):
                raise ConfigError(
                    f"source {source.name!r} was prepared with tokenizer {info.name!r} "
                    f"({info.fingerprint[:8]}), the student's is {self._student.name!r} "
                    f"({self._student.fingerprint[:8]}); use the tokenizer in the dataset's "
                    "folder"
                )
        ready = object.__new__(type(self))
        ready._student = self._student
        ready._makers = tuple(maker.begin(sources) for maker in self._makers)
        return ready

    def __call__(self, row: ModelInput, pieces: Records) -> tuple[TeacherRow, ...]:
        """The teachers' sides of one row; see `penstock.plan.loader.Accompany`."""
        return tuple(maker(row, pieces) for maker in self._makers)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """The tokens that the teacher reads of one document, and the chunks of both sides, counted from
    its first token.
    """

    ids: Int32
    student_bounds: Int32
    teacher_bounds: Int32


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reader:
    """Reads documents for one teacher; several threads may use it at once."""

    teacher: TeacherText
    aligner: Aligner
    companions: tuple[CompanionDocuments | None, ...] = ()
    """Of each source; empty before `begin`."""

    def begin(self, sources: Sequence[CompanionSource]) -> Self:
        """A reader for these sources.

        Raises:
            ConfigError: The teacher would not read a source's text, or companion documents do not
                fit.
        """
        name, wanted = self.teacher.tokenizer.name, self.teacher.documents
        known = [source.name for source in sources]
        if unknown := sorted(set(wanted) - set(known)):
            raise ConfigError(
                f"teacher {name!r} has companion documents for {unknown[0]!r}, which is no "
                f"source; sources are {', '.join(known)}"
            )
        for source in sources:
            if source.is_rewritten and not self.aligner.is_identity:
                raise ConfigError(
                    f"source {source.name!r}: objective {source.objective!r} rewrites "
                    f"documents, and teacher {name!r} with another tokenizer would read its "
                    "control tokens as part of the text; distill from this teacher with the "
                    "causal objective, or from a teacher with the same tokenizer"
                )
            if source.name not in wanted and not self.aligner.is_identity:
                check_chat(source, name, self.teacher.control_pairs)
        opened = (
            CompanionDocuments.open(
                source.name, source.dataset, wanted[source.name], self.teacher.tokenizer
            )
            if source.name in wanted
            else None
            for source in sources
        )
        return replace(self, companions=tuple(opened))

    def read(self, ids: Int32, weights: Weights, piece: np.void) -> Reading:
        """Read one document of a row.

        Args:
            ids: Its tokens in the row.
            weights: [tokens] loss weight of each slot's target.
            piece: Its line of the row's pieces.

        Raises:
            ConversationError: Its companion document has another number of turns; names file and
                line.
        """
        companion = self.companions[piece["source"]] if self.companions else None
        if companion is not None:
            return self._read_companion(ids, weights, piece, companion)
        if self.aligner.is_identity:
            both = np.stack([np.arange(len(ids)), np.arange(1, len(ids) + 1)], axis=1).astype(
                np.int32
            )
            return self._cut(ids, both, both, self.teacher.bos)
        student_ids = ids.astype(np.int64)
        teacher_ids = self.aligner.teacher_ids(student_ids, begins_text=int(piece["begin"]) == 0)
        return self._cut(
            teacher_ids, *_known(self.aligner.align(student_ids, teacher_ids)), self._bos_of_texts
        )

    def _read_companion(
        self, ids: object, weights: Any, piece: np.void, companion: CompanionDocuments
    ) -> Reading:
        """Read the record's companion document. If the student's is a part, the teacher reads all
        up to its end.
        """
        document, first, last = (
            int(piece["document"]),
            int(piece["begin"]),
            int(piece["begin"] + piece["tokens"]),
        )
        stored = companion.read(document)
        student_weights = np.concatenate([[0], weights[:-1]])
        is_cut = first > 0 or last < companion.student.table.lengths[document, 0]
        if is_cut:
            whole = companion.student[document]
            ids, student_weights = whole.tokens, whole.loss_weights
        if companion.student.chat is None:
            alignment = self.aligner.align(ids, stored.tokens)
        else:
            try:
                alignment = align_chats(
                    self.aligner, ids, student_weights, stored.tokens, stored.loss_weights
                )
            except ConversationError as error:
                raise ConversationError(f"{stored.origin} (document {document}): {error}") from None
        student_bounds, teacher_bounds = _known(alignment)
        if not is_cut:
            return self._cut(stored.tokens, student_bounds, teacher_bounds, self.teacher.bos)
        here = (student_bounds[:, 0] >= first) & (student_bounds[:, 1] <= last)
        teacher_bounds = teacher_bounds[here]
        read = stored.tokens[: teacher_bounds.max(initial=0)]
        return self._cut(
            read, student_bounds[here] - np.int32(first), teacher_bounds, self.teacher.bos
        )

    @property
    def _bos_of_texts(self) -> bool | None:
        """Whether texts begin with the teacher's BOS; None: if the student's document begins with
        its own.
        """
        tokenizer, known = self.teacher.tokenizer, self.teacher.trained_with_bos
        if self.teacher.bos is not None or tokenizer.bos_id is None:
            return self.teacher.bos
        if known is None:
            return True if tokenizer.begin_ids else None
        # An EOS that is BOS as well is not taken away: it may end an empty document.
        return known or (None if tokenizer.bos_id == tokenizer.eos_id else False)

    def _cut(
        self, ids: Array, student_bounds: Array, teacher_bounds: Array, wanted: bool | None
    ) -> Reading:
        """Add or remove BOS as `wanted`, and cut at the teacher's context."""
        bos, limit = self.teacher.tokenizer.bos_id, self.teacher.max_tokens
        has_bos = len(ids) > 0 and ids[0] == bos
        if wanted is not None and wanted != has_bos:
            ids = np.concatenate([[bos], ids]) if wanted else ids[1:]
            teacher_bounds = teacher_bounds + np.int32(1 if wanted else -1)
            if not wanted:
                # A chunk of BOS itself has no place any more.
                student_bounds, teacher_bounds = (
                    side[teacher_bounds[:, 0] >= 0] for side in (student_bounds, teacher_bounds)
                )
        if limit is not None and len(ids) > limit:
            fitting = np.searchsorted(teacher_bounds[:, 1], limit, side="right")
            ids, student_bounds, teacher_bounds = (
                ids[:limit],
                student_bounds[:fitting],
                teacher_bounds[:fitting],
            )
        return Reading(
            ids=np.asarray(ids, np.int32),
            student_bounds=student_bounds,
            teacher_bounds=teacher_bounds,
        )


def _known(alignment: Alignment) -> tuple[Int32, Int32]:
    """Bounds of all chunks except DIFFERENT ones."""
    known = alignment.kinds != DIFFERENT
    if known.all():
        return alignment.student_bounds, alignment.teacher_bounds
    return alignment.student_bounds[known], alignment.teacher_bounds[known]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowMaker:
    """Makes one teacher's rows; several threads may use it at once."""

    teacher: TeacherText
    reader: Reader
    token_bytes: Int64
    """[vocabulary] bytes of each of the teacher's tokens."""

    @classmethod
    def of(cls, student: Tokenizer, teacher: TeacherText) -> Self:
        """A maker without companion documents, until `begin`."""
        aligner = Aligner(student, teacher.tokenizer, control_pairs=teacher.control_pairs)
        return cls(
            teacher=teacher,
            reader=Reader(teacher=teacher, aligner=aligner),
            token_bytes=_token_bytes(teacher.tokenizer),
        )

    def begin(self, sources: Sequence[CompanionSource]) -> Self:
        """A maker for these sources; see `TeacherRows.begin`."""
        return replace(self, reader=self.reader.begin(sources))

    def __call__(self, row: ModelInput, pieces: Records) -> TeacherRow:
        """The teacher's side of a row."""
        starts = np.concatenate([[0], np.cumsum(pieces["length"])])
        weights = _slot_weights(row)
        if self.reader.aligner.is_identity and self._reads_as_it_is(row, pieces):
            return self._own_row(row, pieces, starts, weights)
        readings = [
            self.reader.read(row.tokens[begin:end], weights[begin:end], piece)
            for (begin, end), piece in zip(pairwise(starts.tolist()), pieces, strict=True)
        ]
        ids = [reading.ids if len(reading.ids) else _FILLER for reading in readings]
        packed, teacher_starts = pack_documents(ids, row.source_ids, multiple=self.teacher.multiple)
        chunks = [len(reading.student_bounds) for reading in readings]
        student = _in_slots([reading.student_bounds for reading in readings], starts[:-1], chunks)
        teacher = _in_slots(
            [reading.teacher_bounds for reading in readings], teacher_starts, chunks
        )
        documents = np.repeat(np.arange(len(readings), dtype=np.int32), chunks)
        means = _mean_weights(weights, student)
        begin_later = (student[:, 0] > starts[documents]) & (
            teacher[:, 0] > teacher_starts[documents]
        )
        kept = np.flatnonzero(begin_later & (means > 0))
        return TeacherRow(
            input=packed,
            student_bounds=student[kept],
            teacher_bounds=teacher[kept],
            weights=means[kept],
            documents=documents[kept],
            starts=teacher_starts,
            text_bytes=np.array(
                [self.token_bytes[reading.ids].sum() for reading in readings], np.int64
            ),
            pieces=_keys(pieces),
            same_tokenizer=self.reader.aligner.is_identity,
        )

    def _reads_as_it_is(self, row: ModelInput, pieces: Records) -> bool:
        """Whether the teacher, of the same tokenizer, can read the student's own row."""
        limit = self.teacher.max_tokens
        cut = limit is not None and pieces["length"].max(initial=0) > limit
        if cut and row.prefix_lengths is not None:
            raise ConfigError(
                f"teacher {self.teacher.tokenizer.name!r} reads {limit} tokens, but a "
                f"document of the row has {pieces['length'].max()} and a bidirectional "
                "prefix, which cannot be cut; use shorter rows"
            )
        return not cut and self.teacher.bos is None and not self.teacher.documents

    def _own_row(
        self, row: ModelInput, pieces: Records, starts: Int64, weights: Weights
    ) -> TeacherRow:
        """The student's row itself, with one chunk for each trained target inside the row."""
        in_row = weights[: starts[-1]] != 0
        in_row[starts[1:] - 1] = False
        predictors = np.flatnonzero(in_row)
        bounds = np.stack([predictors + 1, predictors + 2], axis=1).astype(np.int32)
        ends = np.concatenate([[0], np.cumsum(self.token_bytes[row.tokens[: starts[-1]]])])
        return TeacherRow(
            input=row,
            student_bounds=bounds,
            teacher_bounds=bounds,
            weights=weights[predictors],
            documents=(np.searchsorted(starts, predictors, side="right") - 1).astype(np.int32),
            starts=starts[:-1],
            text_bytes=np.diff(ends[starts]),
            pieces=_keys(pieces),
            same_tokenizer=True,
        )


def _in_slots(bounds: Sequence[Int32], starts: Int64, chunks: Sequence[int]) -> Int32:
    """Bounds of all documents' chunks in slots of the row, int32 [C, 2]."""
    shifts = np.repeat(starts.astype(np.int32), chunks)[:, None]
    return np.concatenate([np.zeros((0, 2), np.int32), *bounds]) + shifts


def _token_bytes(tokenizer: Tokenizer) -> Int64:
    try:
        return tokenizer.byte_table.lengths
    except TokenizerError:
        # There are no exact bytes; those of each token's own text come close.
        return np.array(
            [len(tokenizer.decode([token]).encode()) for token in range(tokenizer.vocab_size)],
            np.int64,
        )


def _slot_weights(row: ModelInput) -> Weights:
    """Loss weight of each slot's target at distance 1, float32 [T]."""
    weights: Weights
    weights = (
        (row.targets[0] != IGNORE).astype(np.float32)
        if row.loss_weights is None
        else row.loss_weights[0]
    )
    return weights


def _mean_weights(weights: Weights, bounds: Int32) -> Weights:
    """Mean weight of each chunk's tokens as targets; 0 if one of them is not trained.

    The chunk [b, e) has the predictors b − 1 … e − 2. The caller leaves out a chunk at the
    beginning of its document.
    """
    sums = np.concatenate([[0.0], np.cumsum(weights, dtype=np.float64)])
    trained = np.concatenate([[0], np.cumsum(weights != 0)])
    begin, end = np.maximum(bounds[:, 0] - 1, 0), bounds[:, 1] - 1
    tokens = bounds[:, 1] - bounds[:, 0]
    means = (sums[end] - sums[begin]) / tokens
    return np.where(trained[end] - trained[begin] == tokens, means, 0).astype(np.float32)


def _keys(pieces: Records) -> Int64:
    return np.stack([pieces[name] for name in ("source", "document", "begin", "tokens")], axis=1)
