"""One row as it is trained: its tokens, targets and weights, the origins of its documents, and the
work of objectives.

`stretches` reads back from a row what an objective did to each document.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np

from penstock.core.arrays import Array
from penstock.core.json_values import JsonObject
from penstock.data.shards.tables.corpus import Corpus
from penstock.plan.inputs import IGNORE, AttentionRule
from penstock.plan.loader.extras import extras_of
from penstock.plan.loader.loader import Loader
from penstock.plan.loader.rewriting import Rewriting
from penstock.plan.objectives.objective import OwnVocabulary
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.loading import load_tokenizer
from penstock.use.inspection.images import ShownImage, images_shown, with_labels
from penstock.use.inspection.stretches import PREDICTING, STANDING, Stretch, in_order, stretches_of
from penstock.use.inspection.text import origin_text, part_texts, token_texts


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
    """First token in the document; above 0 for a later part of a split document, or the end of a
    longer one.
    """
    epoch: int
    task: str = ""
    """Name of the objective's task for it; of an objective without tasks, its own name if it writes
    targets, else empty.
    """
    own_targets: bool = False
    """Whether each slot has a target that the objective wrote; else it predicts the token behind
    it.
    """
    prefix: int = 0
    """Number of its first slots that see each other in both directions."""
    stretches: tuple[Stretch, ...] = ()
    """Purpose of its slots, in order; empty if it is unchanged."""
    restored: tuple[tuple[str, int], ...] = ()
    """Its original text in parts, each with the number of its span (−1 = none); empty if its words
    are unknown.
    """
    images: tuple[ShownImage, ...] = ()
    """Its images, at slots of the row."""

    @property
    def num_predicted(self) -> int:
        """Number of its slots with a target, if targets are its own."""
        return sum(each.end - each.begin for each in self.stretches if each.role in PREDICTING)

    @property
    def num_spans(self) -> int:
        """Number of spans that were taken out of it."""
        return 1 + max((each.span for each in self.stretches if each.role == "target"), default=-1)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RowNode:
    """Adjacent slots of a row that the same later slots see: a node of a prefix tree, a block, or a
    whole document.
    """

    begin: int
    """First slot."""
    end: int
    """One after the last slot."""
    prefix: int
    """Number of its first slots that see each other in both directions."""
    reach: int
    """One after the last slot that sees it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowView:
    """One row of one step. T slots, D target distances."""

    step: int
    row: int
    """Number of the row in the whole step."""
    tokens: Array
    """[T]"""
    targets: Array
    """[D, T] what each slot predicts: the token d slots later, or what its objective wrote; −100 =
    none.
    """
    loss_weights: Array
    """[D, T]"""
    positions: Array
    """[T]"""
    num_tokens: int
    """Slots that are not padding."""
    documents: tuple[RowDocument, ...]
    texts: tuple[str, ...]
    """[T] text of each token; empty in the padding."""
    spell: Callable[[int], str]
    """Token id → text."""
    target_texts: tuple[str, ...] = ()
    """[T] text of what each slot predicts, if an objective writes targets; else empty."""
    nodes: tuple[RowNode, ...] = ()
    """Who sees whom, if documents are trees or cut into blocks: each slot sees its own node up to
    itself, and the nodes before it that reach it.
    """

    @property
    def sequence_length(self) -> int:
        """T."""
        return len(self.tokens)

    @property
    def learned_weights(self) -> Array:
        """[T] loss weight of each token as the target of the token before it; 0 = only read. Where
        targets are the objective's own, the weight of each slot's target.
        """
        weights = np.zeros(self.sequence_length, np.float32)
        by_slot = np.where(self.targets[0] == IGNORE, 0.0, self.loss_weights[0])
        weights[1:] = by_slot[:-1]
        # The last target of a part of a split document is in no row: the slot after it has another
        # document.
        weights[[part.begin for part in self.documents]] = 0
        for part in self.documents:
            if part.own_targets:
                weights[part.begin : part.end] = by_slot[part.begin : part.end]
        return weights

    @property
    def own_targets(self) -> bool:
        """Whether the objective of some document writes its targets."""
        return any(part.own_targets for part in self.documents)

    def num_targets(self, distance: int = 1) -> int:
        """Number of trained targets at a distance."""
        return int(
            np.count_nonzero(
                (self.targets[distance - 1] != IGNORE) & (self.loss_weights[distance - 1] != 0)
            )
        )

    @property
    def tasks(self) -> dict[str, int]:
        """Documents of the row by task, most frequent first; documents without one are not
        counted.
        """
        return dict(
            Counter(document.task for document in self.documents if document.task).most_common()
        )

    def as_json(self) -> JsonObject:
        """All fields as JSON values."""
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
            "target_texts": list(self.target_texts),
            "nodes": [asdict(node) for node in self.nodes],
        }


def view_rows(
    loader: Loader,
    step: int,
    rows: list[int],
    tokenizer_for: Callable[[Corpus], Tokenizer | None],
    *,
    lines: bool = False,
) -> list[RowView]:
    """Fill one step and show some of its rows.

    Args:
        loader: For a single process, with requirements for all fields of a row; it is moved to
            `step`.
        step: Number of the step.
        rows: Numbers of rows in the step; numbers outside the step are left out.
        tokenizer_for: Dataset → tokenizer, or None.
        lines: Keep line ends and tabs in texts.
    """
    pieces = pieces_of_step(loader, step)
    inputs = next(iter(loader))
    tokenizers = [
        _speller(tokenizer_for(dataset), rewriting.objective)
        for dataset, rewriting in zip(loader.datasets, rewritings_of(loader), strict=True)
    ]
    return [
        _view(loader, step, row, inputs[row], pieces[row], tokenizers, lines)
        for row in rows
        if row < len(inputs)
    ]


def _view(
    loader: Loader,
    step: int,
    number: int,
    row: Any,
    pieces: Array,
    spellers: list[Tokenizer | None],
    lines: bool,
) -> RowView:
    documents, texts = [], [""] * row.sequence_length
    target_texts = [""] * row.sequence_length
    for origin, piece in zip(loader.explain(step, number), pieces, strict=True):
        source = int(piece["source"])
        rewriting, speller = rewritings_of(loader)[source], spellers[source]
        begin, end = origin.begin, origin.begin + origin.num_tokens
        tokens = row.tokens[begin:end]
        images = images_shown(_images(loader, source, origin), pictures=lines)
        texts[begin:end] = with_labels(token_texts(speller, tokens, lines=lines), images)
        # Of documents that are cut into nodes, `prefix_lengths` has an entry for each node.
        prefix = 0 if row.prefix is None else int(row.prefix[begin:end].sum())
        own = rewriting.writes_targets
        if own:
            target_texts[begin:end] = _target_texts(
                speller, tokens, row.targets[0, begin:end], lines=lines
            )
        stretches = stretches_of(
            rewriting,
            piece,
            tokens,
            begin,
            prefix,
            targets=row.targets[0, begin:end] if own else None,
            controls=_controls(speller),
        )
        documents.append(
            RowDocument(
                begin=begin,
                end=end,
                source=origin.source,
                origin=origin_text(origin.origin),
                document=origin.document,
                first_token=origin.first_token,
                epoch=origin.epoch,
                task=origin.task or (rewriting.objective.name if own else ""),
                own_targets=own,
                prefix=prefix,
                stretches=stretches,
                restored=_restored(stretches, row, speller, lines),
                images=tuple(image.moved(begin) for image in images),
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
        target_texts=tuple(target_texts) if any(part.own_targets for part in documents) else (),
        nodes=_nodes(row),
    )


def _target_texts(
    tokenizer: Tokenizer | None, tokens: Array, targets: Array, *, lines: bool
) -> list[str]:
    """[slots] text of each target, in the place of its slot; empty where there is none."""
    # Between the tokens around them, because several may share the bytes of a character.
    found = token_texts(tokenizer, np.where(targets == IGNORE, tokens, targets), lines=lines)
    return ["" if target == IGNORE else text for text, target in zip(found, targets, strict=True)]


def _nodes(row: Any) -> tuple[RowNode, ...]:
    if row.reach is None:
        return ()
    rule = AttentionRule.of(row)
    return tuple(
        RowNode(begin=begin, end=end, prefix=prefix_end - begin, reach=reach)
        for (begin, prefix_end, end), reach in zip(
            rule.pieces.tolist(), rule.ends.tolist(), strict=True
        )
        if begin < row.num_tokens
    )


def _controls(tokenizer: Tokenizer | None) -> frozenset[int]:
    return frozenset() if tokenizer is None else frozenset(tokenizer.special_tokens.values())


def _images(loader: Loader, source: int, origin: Any) -> Sequence[Any]:
    """The images of a document of a row, which are there only if it is whole."""
    extras = extras_of(loader.datasets[source])
    return extras.images(origin.document) if extras is not None and extras.has_images else ()


def _restored(
    stretches: tuple[Stretch, ...], row: Any, tokenizer: Tokenizer | None, lines: bool
) -> tuple[tuple[str, int], ...]:
    parts = in_order(stretches)
    ids = [
        (row.targets[0] if part.role in STANDING else row.tokens)[part.begin : part.end].tolist()
        for part in parts
    ]
    texts = part_texts(tokenizer, ids, lines=lines)
    return tuple((text, part.span) for text, part in zip(texts, parts, strict=True))


def _speller(tokenizer: Tokenizer | None, objective: object) -> Tokenizer | None:
    """The tokenizer that knows an objective's added tokens: the objective's if it names one, else
    the dataset's.
    """
    extended = objective.tokenizer if isinstance(objective, OwnVocabulary) else None
    return (
        tokenizer
        if tokenizer is None or not isinstance(extended, str)
        else load_tokenizer(extended)
    )


def pieces_of_step(loader: Loader, step: int) -> list[Array]:
    """The lines of the plan for each row of a step, each [pieces, columns]; moves the loader to the
    step.
    """
    plan = loader.seek(step)._planner.next()
    return [] if plan is None else np.split(plan.pieces, plan.row_starts[1:-1])


def rewritings_of(loader: Loader) -> list[Rewriting]:
    """The rewriting of each source."""
    return list(loader._plan.rewritings)
