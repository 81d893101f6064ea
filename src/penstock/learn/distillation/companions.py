"""Companion documents: the same records, prepared again with a teacher's tokenizer and chat
template.

Documents are matched by file and line; if a record gave several documents, by their order. The
table from the student's documents to the teacher's is made at set-up from the two origin columns:
about 0.3 s for a million documents, 8 bytes a document. A record that is missing from the teacher's
dataset is an error at set-up, before any step.

Two renderings of a conversation have no common text, because templates differ in everything around
the turns. But both train the assistant's words and the tokens that end its turns, so the trained
runs are the turns, and both sides have the same number of them. `align_chats` aligns each pair of
turns by bytes, and their last tokens, whatever control tokens they are, by one explicit pair.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import numpy as np

from penstock.core.arrays import Int64
from penstock.core.errors import ConfigError, ConversationError
from penstock.data.shards import Corpus, Document
from penstock.data.shards.opening import open_dataset
from penstock.data.shards.origins import knows_origins, read_origins
from penstock.plan.loader import CompanionSource
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.alignment import CONTROL, Aligner, Alignment

_METHODS = ("bytes", "normalised", "resync", "strings")
"""Alignment methods, the strictest first. A conversation's method is the least strict of its turns'
methods.
"""
_PROBED_DOCUMENTS = 16
"""Number of conversations that are searched for control tokens."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompanionDocuments:
    """The teacher's documents of one source."""

    student: Any
    teacher: Corpus
    matches: Int64
    """[documents of the student]"""

    @classmethod
    def open(cls, source: str, student: Any, path: str | Path, tokenizer: Tokenizer) -> Self:
        """Match a source's documents with those in `path`.

        Raises:
            ConfigError: They were not prepared with the teacher's tokenizer, or lack records.
            FormatError: `path` is not a dataset.
        """
        where = f"source {source!r}: companion documents {path}"
        if not knows_origins(student):
            raise ConfigError(
                f"{where}: the source's own dataset does not record where its documents came "
                "from; use one that `penstock prepare` wrote"
            )
        teacher = open_dataset(path)
        if not knows_origins(teacher) or teacher.tokenizer is None:
            raise ConfigError(
                f"{where}: does not say where its documents came from; give what penstock "
                "prepare made"
            )
        if teacher.tokenizer.fingerprint != tokenizer.fingerprint:
            raise ConfigError(
                f"{where}: prepared with tokenizer {teacher.tokenizer.name!r} "
                f"({teacher.tokenizer.fingerprint[:8]}), the teacher's is {tokenizer.name!r} "
                f"({tokenizer.fingerprint[:8]}); prepare them with the teacher's"
            )
        matches = match_documents(student, teacher)
        if len(missing := np.flatnonzero(matches < 0)):
            first = int(missing[0])
            raise ConfigError(
                f"{where}: {len(missing)} of {len(student)} records are missing, the first is "
                f"{student[first].origin} (document {first}); prepare the same files under "
                "the same names, with settings that drop no record"
            )
        return cls(student=student, teacher=teacher, matches=matches)

    def read(self, document: int) -> Document:
        """The teacher's document for one of the student's."""
        return self.teacher[int(self.matches[document])]


def match_documents(student: Any, teacher: Any) -> Int64:
    """The teacher's document for each of the student's, int64 [documents of the student]; −1 if
    there is none.
    """
    student_files, student_lines = read_origins(student)
    teacher_files, teacher_lines = read_origins(teacher)
    # Files are compared by name. Documents without a file have the number −1, which stands for the
    # empty name.
    numbers = {
        name: number
        for number, name in enumerate(dict.fromkeys(["", *student.files, *teacher.files]))
    }
    files = np.concatenate(
        [
            np.array([*(numbers[name] for name in dataset.files), 0], np.int64)[found]
            for dataset, found in ((student, student_files), (teacher, teacher_files))
        ]
    )
    lines = np.concatenate([student_lines, teacher_lines])
    is_student = np.arange(len(files)) < len(student)
    occurrence = np.concatenate(
        [_occurrences(files[side], lines[side]) for side in (is_student, ~is_student)]
    )
    # Both sides in one order: the teacher's document of a key comes just before the student's.
    order = np.lexsort((is_student, occurrence, lines, files))
    keys = np.stack([files, lines, occurrence])[:, order]
    before, here = order[:-1], order[1:]
    pairs = (keys[:, :-1] == keys[:, 1:]).all(axis=0) & is_student[here] & ~is_student[before]
    matches = np.full(len(student), -1, np.int64)
    matches[here[pairs]] = before[pairs] - len(student)
    return matches


def _occurrences(files: Int64, lines: Int64) -> Int64:
    """Number of documents of the same record before each document."""
    order = np.lexsort((lines, files))  # stable: documents of a record stay in order
    place = np.arange(len(order))
    first = np.ones(len(order), np.bool_)
    first[1:] = (np.diff(files[order]) != 0) | (np.diff(lines[order]) != 0)
    counted = np.empty(len(order), np.int64)
    counted[order] = place - np.maximum.accumulate(np.where(first, place, 0))
    return counted


def align_chats(
    aligner: Aligner, student_ids: Any, student_weights: Any, teacher_ids: Any, teacher_weights: Any
) -> Alignment:
    """Align the trained runs of two renderings of one conversation, turn by turn.

    Args:
        aligner: For the two tokenizers.
        student_ids: [tokens]; `student_weights` has the same shape: the loss weight of each token.
        teacher_ids: [tokens]; likewise `teacher_weights`.

    Returns:
        Chunks of trained tokens only. If a turn ends in a control token on both sides, and neither
        has its counterpart elsewhere in the turn, the two form a CONTROL pair.

    Raises:
        ConversationError: The two have different numbers of turns.
    """
    student_turns, teacher_turns = _runs(student_weights), _runs(teacher_weights)
    if len(student_turns) != len(teacher_turns):
        raise ConversationError(
            f"{len(student_turns)} trained turns in the student's tokens, "
            f"{len(teacher_turns)} in the teacher's; prepare both from the same records with "
            "the same choice of trained messages"
        )
    student_control, teacher_control = _control_ids(aligner.student), _control_ids(aligner.teacher)
    chunks = [(np.zeros((0, 2), np.int32), np.zeros((0, 2), np.int32), np.zeros(0, np.uint8))]
    methods = [_METHODS[0]]
    for (begin, end), (first, last) in zip(
        student_turns.tolist(), teacher_turns.tolist(), strict=True
    ):
        turn = aligner.align(student_ids[begin:end], teacher_ids[first:last])
        methods.append(turn.method)
        chunks.append((turn.student_bounds + begin, turn.teacher_bounds + first, turn.kinds))
        # Control tokens before the last, such as the end of a tool call, mean something of their
        # own, so the aligner pairs them only if it knows their counterparts.
        has_eos = (
            student_ids[end - 1] == aligner.student.eos_id,
            teacher_ids[last - 1] == aligner.teacher.eos_id,
        )
        own = _end_of_turn(student_ids, begin, end, student_control, has_eos == (True, False))
        other = _end_of_turn(teacher_ids, first, last, teacher_control, has_eos == (False, True))
        if (
            int(student_ids[own]) in student_control
            and int(teacher_ids[other]) in teacher_control
            and turn.student_bounds.max(initial=0) <= own - begin
            and turn.teacher_bounds.max(initial=0) <= other - first
        ):
            chunks.append(
                (
                    np.array([[own, own + 1]]),
                    np.array([[other, other + 1]]),
                    np.array([CONTROL]),
                )
            )
    student_bounds, teacher_bounds, kinds = (
        np.concatenate(column) for column in zip(*chunks, strict=True)
    )
    return Alignment(
        student_bounds=student_bounds.astype(np.int32),
        teacher_bounds=teacher_bounds.astype(np.int32),
        kinds=kinds.astype(np.uint8),
        num_student_tokens=len(student_ids),
        num_teacher_tokens=len(teacher_ids),
        method=max(methods, key=_METHODS.index),
    )


def check_chat(source: CompanionSource, teacher: str, paired: Collection[int]) -> None:
    """Refuse chats that a teacher with another tokenizer would read without their control tokens.

    The teacher has never seen "<|im_start|>user …" as plain text: its predictions would look right
    but be worth little.

    Args:
        source: A source of the mixture.
        teacher: Name of the teacher.
        paired: The student's control ids that have a counterpart in the teacher's vocabulary.

    Raises:
        ConfigError: The source holds chats with control tokens other than BOS, EOS and the paired
            ones.
    """
    dataset = source.dataset
    if dataset.chat is None:
        return
    tokenizer = dataset.loaded_tokenizer
    assert tokenizer is not None, "chats lie next to their tokenizer"
    foreign = _control_ids(tokenizer) - {
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.unknown_id,
        *paired,
    }
    for document in (dataset[number] for number in range(min(_PROBED_DOCUMENTS, len(dataset)))):
        if found := foreign.intersection(document.tokens.tolist()):
            shown = tokenizer.decode([min(found)])
            raise ConfigError(
                f"source {source.name!r} holds chats with control tokens such as {shown!r} "
                f"({document.origin}), which mean nothing to teacher {teacher!r}, which has "
                "another tokenizer; prepare the same records with the teacher's tokenizer "
                "and chat template, and give that dataset to the teacher as its documents "
                f"for {source.name!r}; or pair each such token with one of the teacher's "
                "(control_tokens in a run file, control_pairs in Python)"
            )


def _runs(weights: object) -> Int64:
    """Half-open ranges of trained tokens, int64 [runs, 2]."""
    trained = np.concatenate([[False], np.asarray(weights) > 0, [False]])
    return np.flatnonzero(trained[1:] != trained[:-1]).reshape(-1, 2)


def _end_of_turn(
    ids: Any, begin: int, end: int, control: Collection[int], has_lone_eos: bool
) -> int:
    """Place of the token that ends a turn: the last, but for an EOS behind it that the other side
    does not write.
    """
    behind = has_lone_eos and end - begin > 1 and int(ids[end - 2]) in control
    return end - 2 if behind else end - 1


def _control_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(tokenizer.special_tokens.values())
