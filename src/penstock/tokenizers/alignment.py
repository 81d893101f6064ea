"""Two tokenizations of one text, cut into chunks that spell the same bytes on both sides.

Alignment for a tokenizer without a byte table: by the strings of its tokens.

Both sides are walked as bytes, without whitespace, case and accents. Where they differ (an unknown word, a lossy
normaliser), dynamic programming matches tokens between the places that agree. None of this proves that bytes are equal,
so chunks are EQUIVALENT at best. Costs: those of the walk, and up to 10 ms per stretch that differs.

One tokenizer's ids as another's: the text that they spell, encoded again, with the other's control tokens.

Costs: about as much as encoding with the other tokenizer, and 5 µs per stretch between control tokens.

Guarantees: the finest such partition, many tokens to many; control tokens are recognised by id, never by their text;
only chunks that are proved equal are marked equal. Costs: linear time, no Python object per token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from penstock.tokenizers._alignment_kernels import (
    BEGINS,
    CELLS,
    CONTROL,
    DIFFERENT,
    ENDS,
    EQUIVALENT,
    EXACT,
    TEXT,
    match_tokens,
)
from penstock.tokenizers.alignment_sides import (
    BoundsArray,
    Chunks,
    Form,
    KindArray,
    Side,
    TokenTable,
    canonicalise,
    has_byte_table,
    mark_equivalent,
    normalise,
    walk,
    walk_same,
)
from penstock.tokenizers.tokenizer import Tokenizer
from penstock.tokenizers.vocabulary import IntArray


def align_strings(student: Side, teacher: Side) -> Chunks:
    """Chunks that look equal, EQUIVALENT; control tokens; and what lies between, DIFFERENT."""
    student, teacher = canonicalise(student), canonicalise(teacher)
    chunks = walk(student, teacher, resume=True)
    assert chunks is not None  # with `resume` it never stops early
    chunks.kinds[chunks.kinds == EXACT] = EQUIVALENT
    different = np.flatnonzero(chunks.kinds == DIFFERENT)
    if not len(different):
        return chunks
    rows = np.column_stack([chunks.student_bounds, chunks.teacher_bounds]).astype(np.int64)
    kept = np.column_stack([rows, chunks.kinds])[chunks.kinds != DIFFERENT]
    matched = [_match(student, teacher, rows[chunk]) for chunk in different]
    whole = np.concatenate([kept, *matched])
    whole = whole[np.argsort(whole[:, 0], kind="stable")]
    bounds = np.ascontiguousarray(whole[:, :4], np.int32)
    return Chunks(bounds[:, :2], bounds[:, 2:], whole[:, 4].astype(np.uint8))


def _match(student: Side, teacher: Side, stretch: IntArray) -> IntArray:
    """A stretch as matches and what lies between them, int64 [chunks, 5]: bounds of both sides, kind."""
    i0, i1, j0, j1 = (int(bound) for bound in stretch)
    rows, columns = i1 - i0, j1 - j0
    width = min(columns + 1, max(CELLS // (rows + 1), 1))
    shape = (rows + 1, width)
    found = np.empty((min(rows, columns), 4), np.int32)
    count = match_tokens(
        *(student.data, student.ends, student.open, i0, i1, teacher.data, teacher.ends, teacher.open, j0, j1),
        *(np.zeros(shape, np.int32), np.empty(shape, np.uint8), np.empty((*shape, 2), np.uint8), found),
    )
    chunks, i, j = [], i0, j0
    for i_begin, i_end, j_begin, j_end in [*found[len(found) - count :].tolist(), (i1, i1, j1, j1)]:
        if i < i_begin and j < j_begin:
            chunks.append((i, i_begin, j, j_begin, DIFFERENT))
        if i_begin < i_end:
            chunks.append((i_begin, i_end, j_begin, j_end, EQUIVALENT))
        i, j = i_end, j_end
    return np.array(chunks, np.int64).reshape(-1, 5)


CONTINUES = range(0x80, 0xC0)
"""Bytes that do not begin a character of UTF-8."""


@final
class Retokenizer:
    """From a student's ids to a teacher's."""

    def __init__(self, student: Tokenizer, teacher: Tokenizer, pairs: Mapping[int, int], *, exact: bool) -> None:
        """Args: `pairs`, control ids, student → teacher; `exact`, whether the student has a byte table."""
        self._student, self._teacher, self._pairs, self._exact = student, teacher, dict(pairs), exact
        self._always_spaced = student.inner is student  # a space before texts is also one before stretches
        # If the teacher begins each stretch with a space, text before and after a dropped token is one stretch.
        self._joins = teacher.adds_space and teacher.inner is teacher

    def encode(self, ids: IntArray, spelled: Side, *, begins_text: bool) -> IntArray:
        """The teacher's ids; `spelled` is what `ids` spell."""
        encoded: list[Any] = []
        parts = spelled.parts[ids]
        first, at_start, text = 0, begins_text, ""
        for place in [*np.flatnonzero(parts != TEXT).tolist(), len(ids)]:
            if place > first:
                spaced = begins_text if first == 0 else (at_start and not text) or self._always_spaced
                text += self._text(ids, spelled, first, place, spaced)
            first = place + 1
            control = self._counterpart(int(ids[place]), int(parts[place]), place == 0) if place < len(ids) else []
            if self._joins and not control and place < len(ids):
                continue
            if text:
                if self._joins and not begins_text and not encoded:
                    text = text.removeprefix(" ") or text  # the teacher adds its own
                encoded.append((self._teacher if at_start else self._teacher.inner).encode(text))
                at_start, text = False, ""
            encoded.append(control)
            at_start = at_start and place < len(ids) and bool(parts[place] & BEGINS)
        return np.concatenate(encoded).astype(np.int64)

    def _text(self, ids: IntArray, spelled: Side, first: int, end: int, spaced: bool) -> str:
        """The text of ids first:end; `spaced`: without the space that the student's tokenizer put before it."""
        if not self._exact:
            return self._student.decode(ids[first:end])
        begin = int(spelled.ends[first - 1]) if first else 0
        data = spelled.data[begin : int(spelled.ends[end - 1])].tobytes()
        if self._student.adds_space and spaced:
            data = data.removeprefix(b" ")
        try:
            return data.decode()
        except UnicodeDecodeError:
            return _whole_characters(data).decode(errors="replace")

    def _counterpart(self, token_id: int, part: int, is_first: bool) -> list[int]:
        """The teacher's control token with the same role, if there is one.

        A token that is both BOS and EOS, as in GPT-2, is BOS at the first place and EOS elsewhere.
        """
        if token_id in self._pairs:
            return [self._pairs[token_id]]
        begins = bool(part & BEGINS) and (is_first or not part & ENDS) and part != TEXT
        ends = bool(part & ENDS) and not begins
        found = self._teacher.bos_id if begins else self._teacher.eos_id if ends else None
        return [] if found is None else [found]


def _whole_characters(data: bytes) -> bytes:
    """`data` without incomplete characters at its beginning and end."""
    begin = 0
    while begin < min(3, len(data)) and data[begin] in CONTINUES:
        begin += 1
    for back in range(1, min(4, len(data) - begin) + 1):
        lead = data[-back]
        if lead in CONTINUES:
            continue
        size = 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        return data[begin : len(data) - back] if size > back else data[begin:]
    return data[begin:]


__all__ = ["CONTROL", "DIFFERENT", "EQUIVALENT", "EXACT", "Aligner", "Alignment", "align"]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alignment:
    """Chunks of a student's and a teacher's tokens.

    A token that is in no chunk is an orphan. Shares are fractions of the student's tokens.
    """

    student_bounds: BoundsArray
    """int32 [chunks, 2]: half-open ranges of the student's tokens, not empty, in order, disjoint."""
    teacher_bounds: BoundsArray
    """int32 [chunks, 2]: the same for the teacher's tokens."""
    kinds: KindArray
    """uint8 [chunks]: EXACT, equal bytes; EQUIVALENT, equal after Unicode normalisation; CONTROL, two control tokens
    with the same role; DIFFERENT, what lies between two places that are proved equal."""
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


def align(student_ids: Any, teacher_ids: Any, student_tokenizer: Tokenizer, teacher_tokenizer: Tokenizer) -> Alignment:
    """Align two tokenizations of one text; see `Aligner`, which keeps its tables for the next text."""
    return Aligner(student_tokenizer, teacher_tokenizer).align(student_ids, teacher_ids)


@final
class Aligner:
    """Aligns tokenizations by one student and one teacher; threads may share it, and pickling carries no tables.

    Attributes:
        student: The student's tokenizer; likewise `teacher`.
        is_identity: Whether they are the same tokenizer; then all control tokens have themselves as counterparts.
        is_exact: Whether both have a byte table; if not, tokens are compared by their strings.
    """

    def __init__(
        self, student: Tokenizer, teacher: Tokenizer, *, control_pairs: Mapping[int, int] | None = None
    ) -> None:
        """Args: `control_pairs`, student id → teacher id of control tokens with the same role, other than BOS and EOS.

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
            own = {token_id: token_id for token_id in student.special_tokens.values() if token_id != student.unknown_id}
            pairs = own | pairs
        forms = f"{student.normalization} {teacher.normalization}"
        self._form: Form = "NFKC" if "nfkc" in forms.lower() else "NFC"
        self._students = TokenTable(student, pairs, exact=exact[0])
        self._teachers = TokenTable(teacher, {number: number for number in pairs.values()}, exact=exact[1])
        self._retokenizer = Retokenizer(student, teacher, pairs, exact=exact[0])

    def __reduce__(self) -> tuple[Callable[..., "Aligner"], tuple[Any, ...]]:
        return _rebuild, (self.student, self.teacher, self._control_pairs)

    def align(self, student_ids: Any, teacher_ids: Any) -> Alignment:
        """Chunks of two tokenizations of one text.

        Args:
            student_ids: The student's ids, without padding, with or without control tokens; likewise `teacher_ids`.

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

    def teacher_ids(self, student_ids: Any, *, begins_text: bool = True) -> IntArray:
        """The teacher's own encoding of the text that `student_ids` spell, int64 [tokens].

        Control tokens become their counterparts, or are left out where they have none; each stretch of text between
        them is encoded as text. A character that the beginning or end of a stretch cuts is left out.

        Args:
            student_ids: The student's ids, without padding.
            begins_text: Whether the first id begins its document; if not, a leading space belongs to the text.

        Raises:
            TokenizerError: An id lies outside the vocabulary.
        """
        ids = _contiguous(student_ids)
        spelled = self._students.spell(ids)
        return ids if self.is_identity else self._retokenizer.encode(ids, spelled, begins_text=begins_text)


def _contiguous(ids: Any) -> IntArray:
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
