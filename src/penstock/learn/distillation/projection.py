"""The projection of a student's vocabulary on a teacher's: a sparse matrix, a few teacher tokens
per student token.

Guarantees: a row's weights are not negative and sum to 1, or the row is empty. A student token with
the same bytes as a teacher token maps to that one alone. A file is used only with the two
tokenizers that it was made for. Costs: 8 bytes a cell; it is built from lists of cells, never as
vocabulary × vocabulary, in a few seconds for 32k × 151k. `describe_projection` summarises a
projection before it is used in training.

Source: X-Token's projection as NeMo-RL builds it (weights of pieces, reverse pass, one-hot rows of
equal strings).
"""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import final

import numpy as np

from penstock.core.arrays import Bool, Float32, Int32, Int64
from penstock.core.errors import ConfigError, FormatError, OutputError, TokenizerError
from penstock.core.formats import PROJECTION
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.core.terminal import Progress
from penstock.data.stores.files import usual_mode
from penstock.learn.distillation.projection_cells import (
    Cells,
    equal_pairs,
    heaviest,
    similar_cells,
    split_cells,
)
from penstock.tokenizers import Tokenizer

EXAMPLES = 6
"""Number of examples of each kind in a description."""

Ids = Int32
Weights = Float32


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """A few teacher tokens for each student token, heaviest first.

    Attributes:
        indices: Teacher ids, int32 [student vocabulary, k]; −1 = none.
        weights: Share of the student token's probability that goes to each, float32 [student
            vocabulary, k].
        exact: Student tokens that the student's own encoder writes and that equal a teacher token
            in bytes or in role (BOS, EOS, control pairs); bool [student vocabulary].
        student_fingerprint: Fingerprint of the student's tokenizer; likewise `teacher_fingerprint`.
        student_size: Number of ids of the student's vocabulary; likewise `teacher_size`.
        student_name: Name of the student's tokenizer; likewise `teacher_name`.
        settings: Arguments of `project`.
    """

    indices: Ids
    weights: Weights
    exact: Bool
    student_fingerprint: str
    teacher_fingerprint: str
    student_size: int
    teacher_size: int
    student_name: str = "the student"
    teacher_name: str = "the teacher"
    settings: JsonMapping = field(default_factory=dict)

    @property
    def empty(self) -> Bool:
        """Student tokens without a teacher token, bool [student vocabulary]; their probability is
        lost.
        """
        found: Bool = self.indices[:, 0] < 0
        return found

    def pairs(self, threshold: float = 1.0) -> Int64:
        """The common vocabulary, one to one: int64 [n, 2] of (student id, teacher id), ordered by
        student id.

        Args:
            threshold: Minimum weight of a row's heaviest cell; at 1 only exact rows count. If
                several student tokens share a teacher token, an exact one wins, then the heaviest,
                then the lowest id.

        Raises:
            ConfigError: There is no such pair, so nothing could be learnt.
        """
        if not 0 < threshold <= 1:
            raise ConfigError(f"threshold must be above 0 and at most 1, got {threshold!r}")
        top = self.weights[:, 0]
        students = np.flatnonzero(
            self.exact if threshold == 1 else ~self.empty & (top >= np.float32(threshold))
        )
        order = students[np.lexsort((students, -top[students], ~self.exact[students]))]
        teachers, first = np.unique(self.indices[order, 0], return_index=True)
        if not len(teachers):
            raise ConfigError(
                f"{self.student_name} and {self.teacher_name} have no token in common at a "
                f"weight of {threshold}; use another loss (p_kl, alm), or make the projection "
                "again"
            )
        found = np.stack((order[first], teachers), 1).astype(np.int64)
        return found[np.argsort(found[:, 0])]

    def check(self, student: Tokenizer, teacher: Tokenizer) -> None:
        """Refuse tokenizers other than those that the projection was made for.

        Raises:
            ConfigError: Names the side that differs.
        """
        for side, made_for, expected, found in (
            ("student", self.student_name, self.student_fingerprint, student),
            ("teacher", self.teacher_name, self.teacher_fingerprint, teacher),
        ):
            if found.fingerprint != expected:
                raise ConfigError(
                    f"the projection was made for the {side} tokenizer {made_for} "
                    f"({expected[:8]}…), found {found.name} ({found.fingerprint[:8]}…); make "
                    "it again with `penstock distill project`"
                )

    def save(self, path: str | Path) -> None:
        """Write it as safetensors, completely or not at all.

        Raises:
            OutputError: The file cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        own = ("indices", "weights", "exact", "settings")
        scalars = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name not in own
        }
        metadata = {
            "format": PROJECTION.text,
            "projection": json.dumps({**scalars, "settings": dict(self.settings)}),
        }
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
            FormatError: There is no such file, or it is not a projection.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), "numpy") as file:
                metadata = file.metadata() or {}
                PROJECTION.check(metadata, path, cure="make one with `penstock distill project`")
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
    embeddings: tuple[object, object] | None = None,
    embedding_share: float = 0.0,
    progress: bool = False,
) -> Projection:
    """Build the projection of one vocabulary on another.

    Args:
        student: Tokenizer of the rows.
        teacher: Tokenizer of the columns.
        top_k: Maximum cells of a row; the heaviest are kept.
        max_pieces: If the other side spells a token in several pieces, only the first `max_pieces`
            count.
        decay: Weight of a piece, divided by that of the piece before it.
        reverse: Also give a teacher token to the student tokens that spell it.
        control_pairs: Student id → teacher id of control tokens with the same meaning, in addition
            to BOS and EOS.
        embeddings: Vectors of the student's and the teacher's tokens in one space, [vocabulary, d]
            each: rows without a cell get the most similar teacher tokens.
        embedding_share: Share of similar tokens in rows that have other cells too, in [0, 1); exact
            rows stay as they are.
        progress: Show a progress bar on standard error.

    Raises:
        ConfigError: A setting is out of range, or the embeddings fit neither the vocabularies nor
            each other.
        TokenizerError: A tokenizer has no byte table.
    """
    _check_settings(top_k, max_pieces, decay, embedding_share)
    _check_bytes(student, teacher)
    equal, twins = equal_pairs(student, teacher, control_pairs or {})
    total = student.vocab_size + (teacher.vocab_size if reverse else 0)
    with Progress("projecting", total=total, unit=" tokens", enabled=progress) as shown:
        cells = split_cells(student, teacher, max_pieces, decay, shown)
        if reverse:
            cells = cells.joined(
                split_cells(teacher, student, max_pieces, decay, shown).transposed()
            )
    cells = (
        cells.summed(teacher.vocab_size).without_rows(equal[:, 0]).normalised(student.vocab_size)
    )
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
                f"{tokenizer.name}: vocabularies are compared by bytes, and this tokenizer "
                f"has {error}; use loss uld, or alm with debias false"
            ) from None


def _check_settings(top_k: int, max_pieces: int, decay: float, embedding_share: float) -> None:
    for name, value in (("top_k", top_k), ("max_pieces", max_pieces)):
        if value < 1:
            raise ConfigError(f"a projection's {name} must be at least 1, got {value}")
    if not 0 < decay <= 1:
        raise ConfigError(f"a projection's decay must be above 0 and at most 1, got {decay!r}")
    if not 0 <= embedding_share < 1:
        raise ConfigError(
            "a projection's embedding_share must be at least 0 and below 1, got "
            f"{embedding_share!r}"
        )


def describe_projection(
    projection: Projection, student: Tokenizer, teacher: Tokenizer
) -> JsonObject:
    """Figures of a projection, JSON-ready.

    Returns:
        Shares of the student's ids: `exact`; `twins` (bytes of a teacher token, but an id that the
        student never writes); `split` (other rows); `empty`. `reached`: share of the teacher's ids
        that some row has; no other can get probability. `common`: number of pairs in the common
        vocabulary. `examples`: split and empty rows.
    """
    several = ~projection.exact & ~projection.empty
    spelled = {
        side: [one.byte_table[token] for token in range(one.vocab_size)]
        for side, one in (("student", student), ("teacher", teacher))
    }
    twins = np.array([
        bool(data) and several[token] and spelled["teacher"][projection.indices[token, 0]] == data
        for token, data in enumerate(spelled["student"])
    ])  # fmt: skip
    split = several & ~twins
    used = np.unique(projection.indices)
    return {
        "student": student.name,
        "teacher": teacher.name,
        "student_size": projection.student_size,
        "teacher_size": projection.teacher_size,
        "exact": float(projection.exact.mean()),
        "twins": float(twins.mean()),
        "split": float(split.mean()),
        "empty": float(projection.empty.mean()),
        "reached": int((used >= 0).sum()) / projection.teacher_size,
        "common": int(projection.exact.sum()) and len(projection.pairs()),
        "examples": {
            "split": [_row(projection, token, spelled) for token in _spread(split)],
            "empty": [_shown(spelled["student"][token]) for token in _spread(projection.empty)],
        },
    }


def show_projection(report: JsonObject) -> None:
    """Print what `describe_projection` returned."""
    print(f"{report['student']} ({report['student_size']:,} ids) projected on {report['teacher']} "
          f"({report['teacher_size']:,} ids)")  # fmt: skip
    print(
        f"{100 * report['exact']:6.2f} %  equal to one teacher token; a common vocabulary of "
        f"{report['common']:,}"
    )
    print(
        f"{100 * report['twins']:6.2f} %  other ids with such bytes, which the student never writes"
    )
    print(f"{100 * report['split']:6.2f} %  in several pieces, such as")
    for example in report["examples"]["split"]:
        print(f"            {example}")
    print(
        f"{100 * report['empty']:6.2f} %  empty, such as {', '.join(report['examples']['empty'])}"
    )
    print(
        f"{100 * report['reached']:6.2f} %  of the teacher's ids are reached; no other can "
        "get probability"
    )


def control_pairs(asked: Sequence[str], student: Tokenizer, teacher: Tokenizer) -> dict[int, int]:
    """Parse pairs such as `<|im_end|>=<|eot|>` to ids.

    Raises:
        ConfigError: A text is not a pair, or a side has no such control token.
    """
    found: dict[int, int] = {}
    for pair in asked:
        # Control tokens may contain `=` themselves.
        ways = [
            (pair[:place], pair[place + 1 :]) for place, letter in enumerate(pair) if letter == "="
        ]
        fits = [
            (a, b) for a, b in ways if a in student.special_tokens and b in teacher.special_tokens
        ]
        if not fits:
            raise ConfigError(
                f"control pair {pair!r}: expected STUDENT=TEACHER, a control token of "
                f"{student.name} and one of {teacher.name}; `penstock tokenizer show` lists "
                "them"
            )
        found[student.special_tokens[fits[0][0]]] = teacher.special_tokens[fits[0][1]]
    return found


def _spread(chosen: Bool) -> list[int]:
    """Up to `EXAMPLES` of the chosen tokens, spread over the vocabulary."""
    tokens = np.flatnonzero(chosen)
    places = np.linspace(0, len(tokens) - 1, min(EXAMPLES, len(tokens))).astype(np.int64)
    found: list[int] = tokens[places].tolist()
    return found


def _row(projection: Projection, token: int, spelled: dict[str, list[bytes]]) -> str:
    cells = zip(projection.indices[token].tolist(), projection.weights[token].tolist(), strict=True)
    pieces = [
        f"{_shown(spelled['teacher'][piece])} {weight:.3f}" for piece, weight in cells if piece >= 0
    ]
    return f"{_shown(spelled['student'][token])} → {', '.join(pieces)}"


def _shown(data: bytes) -> str:
    """Text in quotes, bytes that are not text as bytes, and `(control)`."""
    if not data:
        return "(control)"
    try:
        return repr(data.decode())
    except UnicodeDecodeError:
        return repr(data)
