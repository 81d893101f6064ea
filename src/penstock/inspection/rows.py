"""One row as it will be trained: its tokens, targets and weights, and where every document in it comes from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from penstock.inputs import IGNORE
from penstock.inspection.text import origin_text, token_texts
from penstock.loader import Loader


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

    def as_json(self) -> dict[str, Any]:
        """Plain values, for a machine."""
        names = RowDocument.__dataclass_fields__
        return {
            "step": self.step,
            "row": self.row,
            "num_tokens": self.num_tokens,
            "documents": [{name: getattr(document, name) for name in names} for document in self.documents],
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
    inputs = next(iter(loader.seek(step)))
    tokenizers = {
        source.name: tokenizer_for(dataset)
        for source, dataset in zip(loader.mixture.sources, loader.datasets, strict=True)
    }
    first = next(iter(tokenizers.values()))
    return [_view(loader, step, row, inputs[row], tokenizers, first, lines) for row in rows if row < len(inputs)]


def _view(
    loader: Loader,
    step: int,
    number: int,
    row: Any,
    tokenizers: dict[str, Any],
    any_tokenizer: Any,
    lines: bool,
) -> RowView:
    documents, texts = [], [""] * row.sequence_length
    for piece in loader.explain(step, number):
        begin, end = piece.begin, piece.begin + piece.num_tokens
        texts[begin:end] = token_texts(tokenizers[piece.source], row.tokens[begin:end], lines=lines)
        documents.append(
            RowDocument(
                begin=begin,
                end=end,
                source=piece.source,
                origin=origin_text(piece.origin),
                document=piece.document,
                first_token=piece.first_token,
                epoch=piece.epoch,
            )
        )
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
        spell=lambda token: token_texts(any_tokenizer, [token])[0].strip() or "␣",
    )
