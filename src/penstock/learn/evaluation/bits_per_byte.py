"""Bits per byte of texts: how well a model predicts them, comparable between tokenizers.

Each text is scored alone, after BOS if the model was trained with it. Without BOS the first token
is not predicted, and its bytes do not count. A text longer than the context is cut into windows;
each after the first sees `overlap` tokens before its own, and more overlap is fairer but slower. A
text's score is its own bits per byte. The mean is weighted by bytes, so it is all bits over all
bytes. Bytes are those of the text in UTF-8, so text that a tokenizer's normaliser drops counts too.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from penstock.core.errors import ConfigError, RecordError
from penstock.data.sources import open_sources, read_texts
from penstock.learn.evaluation.recognition import advice, task_of_file
from penstock.learn.evaluation.subject import Subject
from penstock.learn.evaluation.tasks import Answer, Problem, TaskSettings, fingerprint_of

Window = tuple[list[int], list[int]]
"""Context tokens, and the tokens after them that are predicted."""


@final
class BitsPerByte:
    """See the module. `data` is anything that `penstock prepare` reads: a text file, JSONL,
    Parquet, …
    """

    notes = ()

    def __init__(self, settings: TaskSettings) -> None:
        if settings.data is None:
            raise ConfigError(
                "task bits_per_byte: there is no default data; set data to texts (--task-data "
                "bits_per_byte=PATH)"
            )
        self.settings = settings
        try:
            self._texts = [text for text in read_texts(open_sources(settings.data)) if text]
        except RecordError as error:
            found = task_of_file(Path(settings.data))
            known = (
                advice(found, settings.name)
                or "; this task reads texts, or the field text of records"
            )
            raise RecordError(f"task bits_per_byte: {error}{known}") from error
        if not self._texts:
            raise ConfigError(
                f"task bits_per_byte: {settings.data} has no text; give data with non-empty texts"
            )

    def problems(self) -> Sequence[Problem]:
        """The texts, or the first ones."""
        return [
            Problem(name=str(number), content=one)
            for number, one in enumerate(self._texts[: self.settings.limit])
        ]

    def fingerprint(self) -> str:
        """Fingerprint of all texts."""
        return fingerprint_of(self._texts)

    def answer(self, subject: Subject, problems: Sequence[Problem]) -> Iterator[Answer]:
        """Bits per byte of each text."""
        begin, length = subject.begin_ids, subject.context_length
        overlap = length // 2 if self.settings.overlap is None else self.settings.overlap
        if overlap >= length:
            raise ConfigError(
                f"task bits_per_byte: overlap {overlap} must be less than the context of {length}"
            )
        requests: list[Window] = []
        counts: list[tuple[int, int]] = []
        for problem in problems:
            ids = [*begin, *subject.tokenizer.encode(problem.content).tolist()]
            made = windows(ids, length, overlap)
            requests += made
            unseen = 0 if begin else int(subject.tokenizer.byte_table.lengths[ids[0]]) if ids else 0
            counts.append((len(made), len(problem.content.encode()) - unseen))
        scored = iter(subject.log_likelihoods(requests))
        for problem, (count, num_bytes) in zip(problems, counts, strict=True):
            nats = -math.fsum(next(scored).log_probability for _ in range(count))
            bits = nats / math.log(2)
            # Without BOS, a text of one token has nothing to predict.
            weight = max(num_bytes, 0) if count else 0
            detail = {"bits": bits, "bytes": weight}
            yield Answer(
                problem=problem.name,
                score=bits / weight if weight else 0.0,
                weight=weight,
                detail=detail,
            )

    def figures(self, answers: Sequence[Answer]) -> dict[str, tuple[float, float]]:
        """None."""
        return {}


def windows(ids: Sequence[int], length: int, overlap: int) -> list[Window]:
    """Windows in which each token but the first is predicted once, from the tokens before it in its
    window.

    Args:
        ids: Ids of a text.
        length: Maximum tokens fed at once; the last token of a window is only predicted.
        overlap: Context tokens of each window after the first; at least one is used.
    """
    made: list[Window] = []
    at = 1
    while at < len(ids):
        begin = 0 if at == 1 else at - max(overlap, 1)
        end = min(begin + length + 1, len(ids))
        made.append((list(ids[begin:at]), list(ids[at:end])))
        at = end
    return made
