"""One row as it will be trained: its tokens, targets and weights, and where every document in it comes from."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np

from penstock.inputs import IGNORE
from penstock.inspection.rewritten import Stretch, in_order, pieces_of_step, rewritings_of, stretches_of
from penstock.inspection.text import origin_text, part_texts, token_texts
from penstock.loader import SOURCE, Loader

Array = np.ndarray[Any, Any]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RowDocument:
    """One document, or a part of one, in a row."""

    begin: int
    """First slot."""
    end: int
    """One after the last slot."""
    source: str
    origin: str
    """File and line, or row, of the record."""
    document: int
    """Number in its dataset."""
    first_token: int
    """Above 0 for a later part of a document that was split."""
    epoch: int
    task: str = ""
    """What the objective did to it, by name; empty where it has no tasks."""
    prefix: int = 0
    """So many slots at its beginning see each other."""
    stretches: tuple[Stretch, ...] = ()
    """What its slots are for, in order; none where it is as it was."""
    restored: tuple[tuple[str, int], ...] = ()
    """Its text as it was before, and the number of the span that each part is of, −1 = none; empty where its words
    are not told."""

    @property
    def num_spans(self) -> int:
        """Spans that were taken out of it."""
        return 1 + max((each.span for each in self.stretches if each.role == "target"), default=-1)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowView:
    """One row of one step. T slots, D target distances."""

    step: int
    row: int
    """Number of the row in the whole step."""
    tokens: np.ndarray[Any, Any]
    """[T]"""
    targets: np.ndarray[Any, Any]
    """[D, T], already shifted; −100 = none."""
    loss_weights: np.ndarray[Any, Any]
    """[D, T]"""
    positions: np.ndarray[Any, Any]
    """[T]"""
    num_tokens: int
    """Slots that are not padding."""
    documents: tuple[RowDocument, ...]
    texts: tuple[str, ...]
    """[T] what each token says; empty in the padding."""
    spell: Callable[[int], str]
    """What a token id says."""

    @property
    def sequence_length(self) -> int:
        """T."""
        return len(self.tokens)

    @property
    def learned_weights(self) -> np.ndarray[Any, Any]:
        """[T] how much each token counts as the target of the one before it; 0 = only read."""
        weights = np.zeros(self.sequence_length, np.float32)
        weights[1:] = np.where(self.targets[0, :-1] == IGNORE, 0.0, self.loss_weights[0, :-1])
        # The last target of a part that was split off is in no row: the slot after it holds another document.
        weights[[part.begin for part in self.documents]] = 0
        return weights

    def num_targets(self, distance: int = 1) -> int:
        """Targets that are trained at a distance."""
        return int(np.count_nonzero((self.targets[distance - 1] != IGNORE) & (self.loss_weights[distance - 1] != 0)))

    @property
    def tasks(self) -> dict[str, int]:
        """Documents of the row by task, most frequent first; documents without one are not counted."""
        return dict(Counter(document.task for document in self.documents if document.task).most_common())

    def as_json(self) -> dict[str, Any]:
        """Plain values, for a machine."""
        return {
            "step": self.step,
            "row": self.row,
            "num_tokens": self.num_tokens,
            "tasks": self.tasks,
            "documents": [asdict(document) for document in self.documents],
            "tokens": self.tokens.tolist(),
            "targets": self.targets.tolist(),
            "loss_weights": self.loss_weights.tolist(),
            "positions": self.positions.tolist(),
            "texts": list(self.texts),
        }


def view_rows(
    loader: Loader, step: int, rows: list[int], tokenizer_for: Callable[[Any], Any], *, lines: bool = False
) -> list[RowView]:
    """Fill one step and look at some of its rows.

    Args:
        loader: Made for a single process, asking for everything of a row; it is moved to `step`.
        step: Number of the step.
        rows: Numbers of rows in the step; those that the step does not have are left out.
        tokenizer_for: Dataset → tokenizer, or None.
        lines: Leave line ends and tabs in texts as they are.
    """
    pieces = pieces_of_step(loader, step)
    inputs = next(iter(loader))
    tokenizers = [
        _speller(tokenizer_for(dataset), rewriting.objective)
        for dataset, rewriting in zip(loader.datasets, rewritings_of(loader), strict=True)
    ]
    return [_view(loader, step, row, inputs[row], pieces[row], tokenizers, lines) for row in rows if row < len(inputs)]


def _view(loader: Loader, step: int, number: int, row: Any, pieces: Array, spellers: list[Any], lines: bool) -> RowView:
    documents, texts = [], [""] * row.sequence_length
    prefixes = [0] * len(pieces) if row.prefix_lengths is None else row.prefix_lengths.tolist()
    for origin, piece, prefix in zip(loader.explain(step, number), pieces, prefixes, strict=True):
        source = int(piece[SOURCE])
        begin, end = origin.begin, origin.begin + origin.num_tokens
        tokens = row.tokens[begin:end]
        texts[begin:end] = token_texts(spellers[source], tokens, lines=lines)
        stretches = stretches_of(rewritings_of(loader)[source], piece, tokens, begin, prefix)
        documents.append(
            RowDocument(
                begin=begin,
                end=end,
                source=origin.source,
                origin=origin_text(origin.origin),
                document=origin.document,
                first_token=origin.first_token,
                epoch=origin.epoch,
                task=origin.task,
                prefix=prefix,
                stretches=stretches,
                restored=_restored(stretches, row.tokens, spellers[source], lines),
            )
        )
    most = max(spellers, key=lambda tokenizer: 0 if tokenizer is None else tokenizer.vocab_size)
    return RowView(
        step=step,
        row=number,
        tokens=row.tokens,
        targets=row.targets,
        loss_weights=row.loss_weights,
        positions=row.positions,
        num_tokens=row.num_tokens,
        documents=tuple(documents),
        texts=tuple(texts),
        spell=lambda token: token_texts(most, [token])[0].strip() or "␣",
    )


def _restored(
    stretches: tuple[Stretch, ...], tokens: Array, tokenizer: Any, lines: bool
) -> tuple[tuple[str, int], ...]:
    parts = in_order(stretches)
    texts = part_texts(tokenizer, [tokens[part.begin : part.end].tolist() for part in parts], lines=lines)
    return tuple((text, part.span) for text, part in zip(texts, parts, strict=True))


def _speller(tokenizer: Any, objective: Any) -> Any:
    """The tokenizer that knows an objective's added tokens: its own, where it names one, else the dataset's."""
    from penstock.tokenizers import load_tokenizer

    extended = getattr(objective, "tokenizer", None)
    return tokenizer if tokenizer is None or not isinstance(extended, str) else load_tokenizer(extended)
