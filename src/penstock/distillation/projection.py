"""What a student's vocabulary is in a teacher's words: a sparse matrix of a few teacher tokens for each student token.

Guarantees: a row's weights are not negative and sum to 1, or the row is empty; a student token that spells the same
bytes as a teacher token stands for that one alone; a file is used with the two tokenizers it was made for, or refused.
Costs: 8 bytes a cell; built from lists of cells, never as vocabulary × vocabulary: some seconds for 32k × 151k.

Source: X-Token's projection as NeMo-RL builds it (weights of pieces, reverse pass, one-hot rows of equal strings).
"""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np

from penstock.distillation.projection_cells import (
    Cells,
    equal_pairs,
    heaviest,
    similar_cells,
    split_cells,
)
from penstock.errors import ConfigError, FormatError, OutputError, TokenizerError
from penstock.progress import Progress
from penstock.shards import usual_mode
from penstock.tokenizers import Tokenizer

FORMAT = "penstock projection 1"

Ids = np.ndarray[Any, np.dtype[np.int32]]
Weights = np.ndarray[Any, np.dtype[np.float32]]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """For each student token some teacher tokens, heaviest first.

    Attributes:
        indices: Teacher ids, int32 [student vocabulary, k]; −1 = none.
        weights: How the probability of the student token is shared among them, float32 [student vocabulary, k].
        exact: Student tokens that a teacher token equals, in bytes or in part (BOS, EOS, told pairs), and that the
            student's own encoder writes; bool [student vocabulary].
        student_fingerprint: Of the student's tokenizer; likewise `teacher_fingerprint`.
        student_size: Ids of the student's vocabulary; likewise `teacher_size`.
        student_name: What the student's tokenizer is called; likewise `teacher_name`.
        settings: What it was built with.
    """

    indices: Ids
    weights: Weights
    exact: np.ndarray[Any, np.dtype[np.bool_]]
    student_fingerprint: str
    teacher_fingerprint: str
    student_size: int
    teacher_size: int
    student_name: str = "the student"
    teacher_name: str = "the teacher"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def empty(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Student tokens that no teacher token stands for, bool [student vocabulary]; their probability is lost."""
        found: np.ndarray[Any, np.dtype[np.bool_]] = self.indices[:, 0] < 0
        return found

    def pairs(self, threshold: float = 1.0) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The vocabulary that both have, one to one: int64 [n, 2] of (student id, teacher id), by student id.

        Args:
            threshold: Least weight of a row's heaviest cell; at 1 only exact rows count. Where several students share
                a teacher token, an exact one wins, then the heaviest, then the lowest id.

        Raises:
            ConfigError: There is no such pair: nothing could be learnt from these two vocabularies.
        """
        if not 0 < threshold <= 1:
            raise ConfigError(f"threshold must be above 0 and at most 1, got {threshold!r}")
        top = self.weights[:, 0]
        students = np.flatnonzero(self.exact if threshold == 1 else ~self.empty & (top >= np.float32(threshold)))
        order = students[np.lexsort((students, -top[students], ~self.exact[students]))]
        teachers, first = np.unique(self.indices[order, 0], return_index=True)
        if not len(teachers):
            raise ConfigError(
                f"{self.student_name} and {self.teacher_name} have no token in common at a weight of {threshold}; use "
                "another loss (p_kl, alm), or make the projection anew"
            )
        found = np.stack((order[first], teachers), 1).astype(np.int64)
        return found[np.argsort(found[:, 0])]

    def check(self, student: Tokenizer, teacher: Tokenizer) -> None:
        """Refuse other tokenizers than those it was made for.

        Raises:
            ConfigError: Names the side that differs.
        """
        for side, made_for, due, found in (
            ("student", self.student_name, self.student_fingerprint, student),
            ("teacher", self.teacher_name, self.teacher_fingerprint, teacher),
        ):
            if found.fingerprint != due:
                raise ConfigError(
                    f"the projection was made for the {side} tokenizer {made_for} ({due[:8]}…), found {found.name} "
                    f"({found.fingerprint[:8]}…); make it anew with `penstock distill project`"
                )

    def save(self, path: str | Path) -> None:
        """Write it as safetensors, whole or not at all.

        Raises:
            OutputError: The file cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        scalars = {
            name: getattr(self, name)
            for name in (
                "student_fingerprint", "teacher_fingerprint", "student_size", "teacher_size", "student_name",
                "teacher_name",
            )
        }  # fmt: skip
        metadata = {"format": FORMAT, "projection": json.dumps({**scalars, "settings": dict(self.settings)})}
        arrays = {"indices": self.indices, "weights": self.weights, "exact": self.exact}
        aside = Path(f"{path}.{os.getpid()}.tmp")
        try:
            aside.parent.mkdir(parents=True, exist_ok=True)
            save_file(arrays, aside, metadata)
            usual_mode(aside)
            os.replace(aside, path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise OutputError(f"{path}: cannot write the projection: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> "Projection":
        """Read what `save` wrote.

        Raises:
            FormatError: There is no such file, or it is no projection.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), "numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise FormatError(
                        f"{path}: is no projection ({FORMAT!r} due, {metadata.get('format')!r} found); make one with "
                        "`penstock distill project`"
                    )
                arrays = {name: file.get_tensor(name) for name in ("indices", "weights", "exact")}
        except (OSError, SafetensorError) as error:
            raise FormatError(f"{path}: cannot be read as a projection: {error}") from error
        return cls(**arrays, **json.loads(metadata["projection"]))


def project(
    student: Tokenizer,
    teacher: Tokenizer,
    *,
    top_k: int = 4,
    max_pieces: int = 4,
    decay: float = 0.1,
    reverse: bool = True,
    control_pairs: Mapping[int, int] | None = None,
    embeddings: tuple[Any, Any] | None = None,
    embedding_share: float = 0.0,
    progress: bool = False,
) -> Projection:
    """Build the projection of one vocabulary on another.

    Args:
        student: Whose tokens are the rows.
        teacher: Whose tokens they are said in.
        top_k: Cells of a row, the heaviest.
        max_pieces: Of a token that the other side spells in several, so many count, the first ones.
        decay: Weight of a piece over that of the piece before it.
        reverse: Also let a teacher token count for the student tokens that it is spelled with.
        control_pairs: Student id → teacher id of control tokens that mean the same, beside BOS and EOS.
        embeddings: Vectors of the student's and the teacher's tokens in one space, [vocabulary, d] each: rows without
            a cell get the most similar teacher tokens.
        embedding_share: Share of those in rows that have other cells too, in [0, 1); exact rows stay as they are.
        progress: Show a bar on standard error.

    Raises:
        ConfigError: A setting is out of range, or the embeddings fit neither the vocabularies nor each other.
        TokenizerError: A tokenizer has no byte table.
    """
    _check_settings(top_k, max_pieces, decay, embedding_share)
    _check_bytes(student, teacher)
    equal, twins = equal_pairs(student, teacher, control_pairs or {})
    total = student.vocab_size + (teacher.vocab_size if reverse else 0)
    with Progress("projecting", total=total, unit=" tokens", enabled=progress) as shown:
        cells = split_cells(student, teacher, max_pieces, decay, shown)
        if reverse:
            cells = cells.joined(split_cells(teacher, student, max_pieces, decay, shown).transposed())
    cells = cells.summed(teacher.vocab_size).without_rows(equal[:, 0]).normalised(student.vocab_size)
    if embeddings is not None:
        known = np.union1d(equal[:, 0], cells.rows) if embedding_share == 0 else equal[:, 0]
        similar = similar_cells(student, teacher, embeddings, known, top_k)
        cells = cells.mixed(similar, embedding_share, student.vocab_size).summed(teacher.vocab_size)
    one_hot = Cells(rows=equal[:, 0], columns=equal[:, 1], weights=np.ones(len(equal)))
    indices, weights = heaviest(cells.joined(one_hot), student.vocab_size, top_k)
    exact = np.zeros(student.vocab_size, np.bool_)
    exact[equal[~twins, 0]] = True
    return Projection(
        indices=indices,
        weights=weights,
        exact=exact,
        student_fingerprint=student.fingerprint,
        teacher_fingerprint=teacher.fingerprint,
        student_size=student.vocab_size,
        teacher_size=teacher.vocab_size,
        student_name=student.name,
        teacher_name=teacher.name,
        settings={
            "top_k": top_k, "max_pieces": max_pieces, "decay": decay, "reverse": reverse,
            "embeddings": embeddings is not None, "embedding_share": embedding_share,
        },
    )  # fmt: skip


def _check_bytes(*tokenizers: Tokenizer) -> None:
    for tokenizer in tokenizers:
        try:
            _ = tokenizer.byte_table
        except TokenizerError as error:
            raise TokenizerError(
                f"{tokenizer.name}: vocabularies are compared by bytes, and it has {error}; take loss uld, or alm with "
                "debias false"
            ) from None


def _check_settings(top_k: int, max_pieces: int, decay: float, embedding_share: float) -> None:
    for name, value in (("top_k", top_k), ("max_pieces", max_pieces)):
        if value < 1:
            raise ConfigError(f"a projection's {name} must be at least 1, got {value}")
    if not 0 < decay <= 1:
        raise ConfigError(f"a projection's decay must be above 0 and at most 1, got {decay!r}")
    if not 0 <= embedding_share < 1:
        raise ConfigError(f"a projection's embedding_share must be at least 0 and below 1, got {embedding_share!r}")
