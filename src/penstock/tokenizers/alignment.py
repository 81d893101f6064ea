"""Two tokenizations of one text, cut into chunks that spell the same bytes on both sides.

Guarantees: the finest such partition, many tokens to many; control tokens are recognised by id,
never by their text; only chunks that are proved equal are marked equal. Costs: linear time, no
Python object per token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from penstock.tokenizers._alignment_kernels import CONTROL, DIFFERENT, EQUIVALENT, EXACT
from penstock.tokenizers.alignment_forms import Form, mark_equivalent, normalise
from penstock.tokenizers.alignment_sides import (
    BoundsArray,
    Chunks,
    KindArray,
    TokenTable,
    has_byte_table,
    walk,
    walk_same,
)
from penstock.tokenizers.byte_table import IntArray
from penstock.tokenizers.retokenizer import Retokenizer
from penstock.tokenizers.string_alignment import align_strings
from penstock.tokenizers.tokenizer import Tokenizer

__all__ = ["CONTROL", "DIFFERENT", "EQUIVALENT", "EXACT", "Aligner", "Alignment", "align"]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alignment:
    """Chunks of a student's and a teacher's tokens.

    A token that is in no chunk is an orphan. Shares are fractions of the student's tokens.
    """

    student_bounds: BoundsArray
    """int32 [chunks, 2]: half-open ranges of the student's tokens, not empty, in order,
    disjoint.
    """
    teacher_bounds: BoundsArray
    """int32 [chunks, 2]: the same for the teacher's tokens."""
    kinds: KindArray
    """uint8 [chunks]: EXACT, equal bytes; EQUIVALENT, equal after Unicode normalisation; CONTROL,
    two control tokens with the same role; DIFFERENT, what lies between two places that are proved
    equal.
    """
    num_student_tokens: int
    num_teacher_tokens: int
    method: str = "bytes"
    """"bytes", "normalised", "resync" or "strings": the method that aligned them."""

    def tokens_of(self, kind: int) -> int:
        """Student tokens in chunks of one kind."""
        return int(np.diff(self.student_bounds[self.kinds == kind]).sum())

    @property
    def coverage(self) -> float:
        """Share of student tokens in chunks that are not DIFFERENT."""
        return self._share(int(np.diff(self.student_bounds[self.kinds != DIFFERENT]).sum()))

    @property
    def one_to_one(self) -> float:
        """Share of student tokens in chunks of one token on both sides that are not DIFFERENT."""
        single = (np.diff(self.student_bounds) == 1) & (np.diff(self.teacher_bounds) == 1)
        return self._share(int((single[:, 0] & (self.kinds != DIFFERENT)).sum()))

    @property
    def orphaned(self) -> float:
        """Share of student tokens in no chunk."""
        return self._share(self.num_student_tokens - int(np.diff(self.student_bounds).sum()))

    def _share(self, tokens: int) -> float:
        return tokens / self.num_student_tokens if self.num_student_tokens else float(tokens)


def align(
    student_ids: object,
    teacher_ids: object,
    student_tokenizer: Tokenizer,
    teacher_tokenizer: Tokenizer,
) -> Alignment:
    """Align two tokenizations of one text; see `Aligner`, which keeps its tables for the next
    text.
    """
    return Aligner(student_tokenizer, teacher_tokenizer).align(student_ids, teacher_ids)


@final
class Aligner:
    """Aligns tokenizations by one student and one teacher; threads may share it, and pickling
    carries no tables.

    Attributes:
        student: The student's tokenizer; likewise `teacher`.
        is_identity: Whether they are the same tokenizer; then all control tokens have themselves as
            counterparts.
        is_exact: Whether both have a byte table; if not, tokens are compared by their strings.
    """

    def __init__(
        self,
        student: Tokenizer,
        teacher: Tokenizer,
        *,
        control_pairs: Mapping[int, int] | None = None,
    ) -> None:
        """Args: `control_pairs`, student id → teacher id of control tokens with the same role,
        other than BOS and EOS.

        Raises:
            TokenizerError: A pair names an id that is no control token.
        """
        self.student, self.teacher = student, teacher
        self.is_identity = student.fingerprint == teacher.fingerprint
        exact = has_byte_table(student), has_byte_table(teacher)
        self.is_exact = all(exact)
        self._control_pairs = dict(control_pairs or {})
        pairs = self._control_pairs
        if self.is_identity:
            own = {
                token_id: token_id
                for token_id in student.special_tokens.values()
                if token_id != student.unknown_id
            }
            pairs = own | pairs
        forms = f"{student.normalization} {teacher.normalization}"
        self._form: Form = "NFKC" if "nfkc" in forms.lower() else "NFC"
        self._students = TokenTable(student, pairs, exact=exact[0])
        self._teachers = TokenTable(
            teacher, {number: number for number in pairs.values()}, exact=exact[1]
        )
        self._retokenizer = Retokenizer(student, teacher, pairs, exact=exact[0])

    def __reduce__(self) -> tuple[Callable[..., "Aligner"], tuple[object, ...]]:
        return _rebuild, (self.student, self.teacher, self._control_pairs)

    def align(self, student_ids: object, teacher_ids: object) -> Alignment:
        """Chunks of two tokenizations of one text.

        Args:
            student_ids: The student's ids, without padding, with or without control tokens;
                likewise `teacher_ids`.

        Raises:
            TokenizerError: An id lies outside its vocabulary.
        """
        ids = _contiguous(student_ids), _contiguous(teacher_ids)
        if self.is_identity and np.array_equal(*ids):
            self._students.spell(ids[0])  # checks the ids
            return _made(_identical(self._students.parts[ids[0]]), ids, "bytes")
        if self.is_exact:
            chunks = walk_same(self._students, ids[0], self._teachers, ids[1])
            if chunks is not None:
                return _made(chunks, ids, "bytes")
        students, teachers = self._students.spell(ids[0]), self._teachers.spell(ids[1])
        if not self.is_exact:
            return _made(align_strings(students, teachers), ids, "strings")
        chunks = walk(students, teachers)
        if chunks is not None:
            return _made(chunks, ids, "bytes")
        normal = normalise(students, self._form), normalise(teachers, self._form)
        chunks = walk(*normal)
        method = "resync" if chunks is None else "normalised"
        if chunks is None:
            chunks = walk(*normal, resume=True)
            assert chunks is not None
        mark_equivalent(chunks, (students, teachers), normal)
        return _made(chunks, ids, method)

    def teacher_ids(self, student_ids: object, *, begins_text: bool = True) -> IntArray:
        """The teacher's own encoding of the text that `student_ids` spell, int64 [tokens].

        Control tokens become their counterparts, or are left out where they have none; each stretch
        of text between them is encoded as text. A character that the beginning or end of a stretch
        cuts is left out.

        Args:
            student_ids: The student's ids, without padding.
            begins_text: Whether the first id begins its document; if not, a leading space belongs
                to the text.

        Raises:
            TokenizerError: An id lies outside the vocabulary.
        """
        ids = _contiguous(student_ids)
        spelled = self._students.spell(ids)
        return (
            ids
            if self.is_identity
            else self._retokenizer.encode(ids, spelled, begins_text=begins_text)
        )


def _contiguous(ids: object) -> IntArray:
    return np.ascontiguousarray(ids, np.int64)


def _made(chunks: Chunks, ids: tuple[IntArray, IntArray], method: str) -> Alignment:
    return Alignment(
        student_bounds=chunks.student_bounds,
        teacher_bounds=chunks.teacher_bounds,
        kinds=chunks.kinds,
        num_student_tokens=len(ids[0]),
        num_teacher_tokens=len(ids[1]),
        method=method,
    )


def _identical(parts: IntArray) -> Chunks:
    """Every token is its own counterpart."""
    places = np.arange(len(parts), dtype=np.int32)
    bounds = np.stack([places, places + 1], 1)
    return Chunks(bounds, bounds, np.where(parts > 0, CONTROL, EXACT).astype(np.uint8))


def _rebuild(student: Tokenizer, teacher: Tokenizer, control_pairs: dict[int, int]) -> Aligner:
    return Aligner(student, teacher, control_pairs=control_pairs)
