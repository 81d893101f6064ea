"""What a student could learn from a teacher with another tokenizer, counted before any training.

`Audit` takes texts, token ids or conversations one at a time. It counts how many of the student's
tokens are in chunks, what the vocabularies share, and where the two texts differ. Cost: encoding on
both sides, and about 50 ns a token.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np

from penstock.core.json_values import JsonObject
from penstock.learn.distillation.companions import align_chats
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.alignment import CONTROL, DIFFERENT, EQUIVALENT, EXACT, Aligner, Alignment
from penstock.tokenizers.alignment_sides import has_byte_table

WORST_PLACES = 5
SHOWN_CHARACTERS = 48
MOSTLY = 0.9
"""A loss over the common vocabulary needs a teacher that has at least this share of the student's
numerals.
"""
COVERED = 0.98
"""If a smaller share of tokens is in chunks, the report advises looking at the differing places
first.
"""
FINER = 0.5
"""A loss over the common vocabulary needs chunks of one token: at least this share of the student's
tokens.
"""

_NUMERAL = re.compile(rb"[0-9]{2,}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SharedVocabulary:
    """What two vocabularies have in common, by the exact bytes of their tokens, without control
    tokens.
    """

    student: int
    teacher: int
    shared: int
    """Student tokens that the teacher has."""
    in_text: float
    """Their share of the student's tokens in the text."""
    numerals: int
    """Student tokens that are numerals of two or more digits."""
    shared_numerals: int
    """Those that the teacher has. A teacher without them predicts nothing about numbers token by
    token.
    """


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place where the two texts differ, or a long chunk."""

    document: int
    kind: str
    """"different", "orphaned" or "longest"."""
    student_tokens: int
    teacher_tokens: int
    student_text: str
    teacher_text: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The findings. Shares are of `student_tokens`; in chats, only trained tokens count."""

    student: str
    teacher: str
    documents: int
    student_tokens: int
    teacher_tokens: int
    methods: Mapping[str, int]
    """Alignment method → number of documents."""
    coverage: float
    """Share of tokens in usable chunks: those that are not `different`."""
    one_to_one: float
    """Share in usable chunks of one token on both sides."""
    exact: float
    equivalent: float
    control: float
    different: float
    orphaned: float
    chunks: int
    longest: Place | None
    """The exact or equivalent chunk with the most tokens."""
    vocabulary: SharedVocabulary
    worst: tuple[Place, ...]
    loss: str
    """The recommended loss: "kl", "p_kl", "h_kl" or "alm"."""
    advice: str

    def to_json(self) -> JsonObject:
        """The report, JSON-ready."""
        return asdict(self)


@final
class Audit:
    """Counts over documents; `report` summarises them."""

    def __init__(
        self,
        student: Tokenizer,
        teacher: Tokenizer,
        *,
        control_pairs: Mapping[int, int] | None = None,
    ) -> None:
        """Args: `control_pairs`, as in `Aligner`."""
        self._aligner = Aligner(student, teacher, control_pairs=control_pairs)
        self._tables = tuple(
            tokenizer.byte_table if has_byte_table(tokenizer) else tokenizer.rough_byte_table
            for tokenizer in (student, teacher)
        )
        self._shared = _shared_ids(*self._tables)
        self._methods: Counter[str] = Counter()
        self._tokens = np.zeros(4, np.int64)
        self._documents = self._student_tokens = self._teacher_tokens = self._one_to_one = 0
        self._chunks = self._plain_tokens = self._shared_tokens = 0
        self._longest: Place | None = None
        self._worst: list[tuple[int, int, Place]] = []

    def add_text(self, text: str) -> Alignment:
        """Encode a text on both sides and count it."""
        student_ids = self._aligner.student.encode(text).astype(np.int64)
        return self._count(student_ids, self._aligner.teacher.encode(text).astype(np.int64))

    def add_ids(self, student_ids: object) -> Alignment:
        """Count a document given as the student's tokens; the teacher encodes the text that they
        spell.
        """
        ids = np.asarray(student_ids, np.int64)
        return self._count(ids, self._aligner.teacher_ids(ids))

    def add_chat(self, student_chat: Any, teacher_chat: Any) -> Alignment:
        """Count the trained turns of a conversation, as `penstock.chat.encode` returns it for each
        side.
        """
        sides = [
            (np.asarray(chat.tokens, np.int64), np.asarray(chat.loss_weights))
            for chat in (student_chat, teacher_chat)
        ]
        found = align_chats(self._aligner, *sides[0], *sides[1])
        return self._count(
            sides[0][0], sides[1][0], found=found, trained=(sides[0][1] != 0, sides[1][1] != 0)
        )

    def _count(
        self,
        student_ids: Any,
        teacher_ids: Any,
        *,
        found: Alignment | None = None,
        trained: Any = None,
    ) -> Alignment:
        found = found or self._aligner.align(student_ids, teacher_ids)
        counted = [
            ids if trained is None else ids[trained[k]]
            for k, ids in enumerate((student_ids, teacher_ids))
        ]
        sizes = np.column_stack([np.diff(found.student_bounds), np.diff(found.teacher_bounds)])
        useful = found.kinds != DIFFERENT
        self._tokens += np.bincount(found.kinds, sizes[:, 0], minlength=4).astype(np.int64)
        self._one_to_one += int((useful & (sizes == 1).all(1)).sum())
        self._chunks += len(sizes)
        self._methods[found.method] += 1
        plain = counted[0][~self._tables[0].is_control[counted[0]]]
        self._plain_tokens += len(plain)
        self._shared_tokens += int(self._shared[plain].sum())
        self._note_places(student_ids, teacher_ids, found, sizes, trained)
        self._documents += 1
        self._student_tokens += len(counted[0])
        self._teacher_tokens += len(counted[1])
        return found

    def _note_places(
        self, student_ids: Any, teacher_ids: Any, found: Alignment, sizes: Any, trained: object
    ) -> None:
        """Keep the longest usable chunk and the largest unusable places."""
        ranges = np.column_stack([found.student_bounds, found.teacher_bounds]).tolist()
        useful = np.flatnonzero((found.kinds == EXACT) | (found.kinds == EQUIVALENT))
        if len(useful):
            chunk = int(useful[np.argmax(sizes[useful].sum(1))])
            longest = self._place("longest", student_ids, teacher_ids, ranges[chunk])
            if self._longest is None or _tokens_in(longest) > _tokens_in(self._longest):
                self._longest = longest
        for chunk in np.flatnonzero(found.kinds == DIFFERENT).tolist():
            self._keep(self._place("different", student_ids, teacher_ids, ranges[chunk]))
        if trained is None:
            for gap in _gaps(ranges, len(student_ids), len(teacher_ids)):
                self._keep(self._place("orphaned", student_ids, teacher_ids, gap))

    def _keep(self, place: Place) -> None:
        """Add a place to the worst if it is one of them; they are sorted, the least bad first."""
        entry = (_tokens_in(place), -self._documents, place)
        if len(self._worst) < WORST_PLACES:
            self._worst.append(entry)
        elif entry[:2] > self._worst[0][:2]:
            self._worst[0] = entry
        self._worst.sort(key=lambda kept: kept[:2])

    def _place(self, kind: str, student_ids: Any, teacher_ids: Any, ranges: list[int]) -> Place:
        a, b, c, d = ranges
        return Place(
            document=self._documents,
            kind=kind,
            student_tokens=b - a,
            teacher_tokens=d - c,
            student_text=_shown(self._aligner.student, student_ids[a:b]),
            teacher_text=_shown(self._aligner.teacher, teacher_ids[c:d]),
        )

    def report(self) -> AuditReport:
        """Summarise the documents counted so far."""
        total = max(self._student_tokens, 1)
        kinds = dict(
            zip(
                (EXACT, EQUIVALENT, CONTROL, DIFFERENT),
                (self._tokens / total).tolist(),
                strict=True,
            )
        )
        vocabulary = self._vocabulary()
        coverage = (
            1 - kinds[DIFFERENT] - (total - int(self._tokens.sum())) / total
            if self._student_tokens
            else 0.0
        )
        one_to_one = self._one_to_one / total
        loss, advice = _advise(self._aligner, vocabulary, coverage, one_to_one)
        return AuditReport(
            student=self._aligner.student.name,
            teacher=self._aligner.teacher.name,
            documents=self._documents,
            student_tokens=self._student_tokens,
            teacher_tokens=self._teacher_tokens,
            methods=dict(self._methods),
            coverage=coverage,
            one_to_one=one_to_one,
            exact=kinds[EXACT],
            equivalent=kinds[EQUIVALENT],
            control=kinds[CONTROL],
            different=kinds[DIFFERENT],
            orphaned=(self._student_tokens - int(self._tokens.sum())) / total,
            chunks=self._chunks,
            longest=self._longest,
            vocabulary=vocabulary,
            worst=tuple(place for *_, place in reversed(self._worst)),
            loss=loss,
            advice=advice,
        )

    def _vocabulary(self) -> SharedVocabulary:
        student, teacher = self._tables
        numerals = [k for k in range(len(student)) if _NUMERAL.fullmatch(student[k])]
        return SharedVocabulary(
            student=int((~student.is_control).sum()),
            teacher=int((~teacher.is_control).sum()),
            shared=int(self._shared.sum()),
            in_text=self._shared_tokens / max(self._plain_tokens, 1),
            numerals=len(numerals),
            shared_numerals=int(self._shared[numerals].sum()),
        )


def _shared_ids(student: Any, teacher: Any) -> Any:
    """Which student ids have the same bytes as a teacher id, bool [student vocabulary]."""
    known = {teacher[k] for k in np.flatnonzero(~teacher.is_control).tolist()}
    return np.array(
        [not student.is_control[k] and student[k] in known for k in range(len(student))], np.bool_
    )


def _gaps(ranges: list[list[int]], num_student: int, num_teacher: int) -> list[list[int]]:
    """Ranges of tokens outside all chunks, as [student begin, end, teacher begin, end]."""
    gaps, i, j = [], 0, 0
    for a, b, c, d in [*ranges, [num_student, num_student, num_teacher, num_teacher]]:
        if i < a or j < c:
            gaps.append([i, a, j, c])
        i, j = b, d
    return gaps


def _tokens_in(place: Place) -> int:
    return place.student_tokens + place.teacher_tokens


def _shown(tokenizer: Tokenizer, ids: Any) -> str:
    """The text of some tokens, at most `SHOWN_CHARACTERS` of it."""
    text = tokenizer.decode(ids[: 4 * SHOWN_CHARACTERS])
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


def _advise(
    aligner: Aligner, vocabulary: SharedVocabulary, coverage: float, one_to_one: float
) -> tuple[str, str]:
    """The recommended loss, and why.

    Source: NeMo-RL's comparison of P-KL and H-KL. A teacher without the student's numerals (0 of
    1,100) taught arithmetic well only through the projection; a teacher with all of them (1,100 of
    1,100) taught it better by H-KL. Own measurement, on the texts of
    docs/tutorials/distillation.md: a student that cuts finer than its teacher (13 % of tokens one
    to one) learned by H-KL and P-KL to predict whole words, which its text is not made of: 0.65 and
    0.24 bits per byte on held-out texts, where alone it had 0.20, and 0.18 by ALM.
    """
    if aligner.is_identity:
        return "kl", "The tokenizers are the same: kl, token by token."
    if not aligner.is_exact:
        return (
            "alm",
            (
                "A tokenizer has no byte table, so chunks only look equal: alm, which needs no "
                "common vocabulary."
            ),
        )
    numerals = (
        f"{vocabulary.shared_numerals:,} of the student's {vocabulary.numerals:,} numerals of "
        "several digits"
        if vocabulary.numerals
        else "its digits one by one, as the student has them"
    )
    words = f"{vocabulary.in_text:.1%} of the text's tokens"
    look = (
        ""
        if coverage >= COVERED
        else f" Only {coverage:.1%} of tokens are in chunks: look at the places above first."
    )
    if vocabulary.shared_numerals < MOSTLY * vocabulary.numerals:
        return (
            "p_kl",
            (
                f"The teacher has {numerals}: p_kl gives a numeral's probability to its digits; "
                f"or alm.{look}"
            ),
        )
    if vocabulary.in_text < MOSTLY:
        return (
            "p_kl",
            f"The teacher has only {words}: p_kl, which covers the rest in pieces; or alm.{look}",
        )
    if one_to_one < FINER:
        face = f"only {one_to_one:.1%} face a single one of its own"
        return (
            "alm",
            f"The teacher has {words}, but {face}: alm, which compares whole chunks.{look}",
        )
    return (
        "h_kl",
        f"The teacher has {words}, and {numerals}: h_kl, over the common vocabulary.{look}",
    )
