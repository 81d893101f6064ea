"""One row as it is trained: its tokens, targets and weights, the origins of its documents, and the
work of objectives.

`stretches_of` reads back from a row what an objective did to a document: which slots have the
document's own tokens (*words*), and what the other slots are for. It goes by position, not by id:
the objective's own `restore` gives the slot of each word, so words that look like sentinels are not
mistaken for them. Only added tokens are named by their ids, which no two roles share. Infilling at
characters encodes the words again, and fragments are found by their separators, so there ids
decide. For an objective of the user, only the prefix is known. Costs one restoration per document,
a few microseconds per token.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import numpy as np

from penstock.core.arrays import Array
from penstock.core.json_values import JsonObject
from penstock.data.shards.tables.corpus import Corpus
from penstock.plan.inputs import IGNORE
from penstock.plan.loader.extras import extras_of
from penstock.plan.loader.loader import Loader
from penstock.plan.loader.rewriting import Rewriting
from penstock.plan.objectives.denoise import Denoise
from penstock.plan.objectives.fragments import WrittenFragment
from penstock.plan.objectives.infill import ORDERS, Infill
from penstock.plan.objectives.objective import OwnVocabulary
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.loading import load_tokenizer
from penstock.use.inspection.images import ShownImage, images_shown, with_labels
from penstock.use.inspection.text import origin_text, part_texts, token_texts

TEXT = "text"
WORD_ROLES = frozenset({"input", "target", TEXT, "prefix", "suffix", "middle", "prefix and middle"})
"""Roles of the document's own tokens; all other roles are of tokens that the objective or the
loader added.
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Adjacent slots of a row with one purpose."""

    begin: int
    """First slot."""
    end: int
    """One after the last slot."""
    part: str
    """Part of the rewritten document: inputs, targets; prefix, suffix, middle; text if it has only
    one part.
    """
    role: str
    """Role of each token: input, target, sentinel (in place of a span, and before the span), mode,
    input end, …
    """
    span: int = -1
    """Number, from 0, of the span that the sentinel or words belong to; −1: none."""
    word: int = -1
    """Number of its first token among the document's words; −1: it has no words."""

    @property
    def is_added(self) -> bool:
        """Whether the tokens are not the document's own."""
        return self.role not in WORD_ROLES


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
    """Name of the objective's task for it; empty if the objective has no tasks."""
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
    def num_spans(self) -> int:
        """Number of spans that were taken out of it."""
        return 1 + max((each.span for each in self.stretches if each.role == "target"), default=-1)


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
    """[D, T], already shifted; −100 = none."""
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

    @property
    def sequence_length(self) -> int:
        """T."""
        return len(self.tokens)

    @property
    def learned_weights(self) -> Array:
        """[T] loss weight of each token as the target of the token before it; 0 = only read."""
        weights = np.zeros(self.sequence_length, np.float32)
        weights[1:] = np.where(self.targets[0, :-1] == IGNORE, 0.0, self.loss_weights[0, :-1])
        # The last target of a part of a split document is in no row: the slot after it has another
        # document.
        weights[[part.begin for part in self.documents]] = 0
        return weights

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
    prefixes = [0] * len(pieces) if row.prefix_lengths is None else row.prefix_lengths.tolist()
    for origin, piece, prefix in zip(loader.explain(step, number), pieces, prefixes, strict=True):
        source = int(piece["source"])
        begin, end = origin.begin, origin.begin + origin.num_tokens
        tokens = row.tokens[begin:end]
        images = images_shown(_images(loader, source, origin), pictures=lines)
        texts[begin:end] = with_labels(token_texts(spellers[source], tokens, lines=lines), images)
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
    )


def _images(loader: Loader, source: int, origin: Any) -> Sequence[Any]:
    """The images of a document of a row, which are there only if it is whole."""
    extras = extras_of(loader.datasets[source])
    return extras.images(origin.document) if extras is not None and extras.has_images else ()


def _restored(
    stretches: tuple[Stretch, ...], tokens: Array, tokenizer: Tokenizer | None, lines: bool
) -> tuple[tuple[str, int], ...]:
    parts = in_order(stretches)
    texts = part_texts(
        tokenizer, [tokens[part.begin : part.end].tolist() for part in parts], lines=lines
    )
    return tuple((text, part.span) for text, part in zip(texts, parts, strict=True))


def in_order(stretches: Sequence[Stretch]) -> list[Stretch]:
    """The stretches with words, in the order of the document."""
    return sorted((each for each in stretches if each.word >= 0), key=lambda each: each.word)


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


def stretches_of(
    rewriting: Rewriting, piece: Any, tokens: Array, begin: int, prefix: int
) -> tuple[Stretch, ...]:
    """The stretches of one document in a row, in order; none if it is unchanged.

    Args:
        rewriting: The rewriting of its source.
        piece: Its line in the plan.
        tokens: [slots] its tokens in the row.
        begin: Its first slot.
        prefix: Number of its first slots that see each other in both directions.
    """
    if rewriting.is_causal:
        return ()
    head, tail, length = (int(part[0]) for part in rewriting.framing(piece[None]))
    # EOS comes before tokens that only fill the document up, which only objectives in Python add.
    filling = rewriting.write(piece).padding if rewriting.runs_in_python else 0
    eos = len(tokens) - tail - filling
    inner = np.delete(np.asarray(tokens), slice(eos, eos + tail))[head:]
    key = int(rewriting.keys(piece[None])[0])
    if not length or not (
        found := _read(rewriting.objective, inner, length, key, prefix - head, filling)
    ):
        return ()
    found = [replace(each, begin=each.begin + head, end=each.end + head) for each in found]
    behind = [
        replace(each, begin=each.begin + tail, end=each.end + tail)
        for each in found
        if each.begin >= eos
    ]
    before = [each for each in found if each.begin < eos]
    parts = [
        *([Stretch(begin=0, end=1, part=found[0].part, role="BOS")] if head else []),
        *before,
        *([Stretch(begin=eos, end=eos + 1, part=before[-1].part, role="EOS")] if tail else []),
        *behind,
    ]
    return tuple(replace(each, begin=each.begin + begin, end=each.end + begin) for each in parts)


def _read(
    objective: object, tokens: Array, length: int, key: int, prefix: int, filling: int
) -> list[Stretch]:
    if isinstance(objective, Denoise):
        return _read_denoised(objective, tokens, length, key)
    if isinstance(objective, Infill):
        return _read_infilled(objective, tokens, length, key, filling)
    if prefix <= 0:
        return []
    end = len(tokens) - filling
    rest = [Stretch(begin=prefix, end=end, part="rest", role=TEXT)] if prefix < end else []
    return [
        Stretch(begin=0, end=prefix, part="prefix", role="prefix"),
        *rest,
        *_filled_up(end, tokens, "rest"),
    ]


def _filled_up(end: int, tokens: Array, part: str) -> list[Stretch]:
    return (
        [Stretch(begin=end, end=len(tokens), part=part, role="filling")]
        if end < len(tokens)
        else []
    )


def _read_denoised(objective: Denoise, tokens: Array, length: int, key: int) -> list[Stretch]:
    words, owners = np.full((2, len(tokens)), -1)
    places = objective.restore(np.arange(len(tokens), dtype=np.int32), length, key)
    words[places] = np.arange(length)
    spans = objective.spans(length, key)
    for number, (begin, end) in enumerate(spans):
        owners[places[begin:end]] = number
    roles = np.where(owners >= 0, "target", "input" if spans else TEXT).astype(object)
    names = _names_of(objective)
    for slot in np.flatnonzero(words < 0).tolist():
        roles[slot], owners[slot] = names[int(tokens[slot])]
    if not spans:
        return _grouped(words, roles, owners, np.full(len(tokens), TEXT, object))
    if objective.final_sentinel:
        roles[-1], owners[-1] = "final sentinel", -1
    bar = int(np.flatnonzero(roles == "target")[0])
    bar -= int(roles[bar - 1] == "sentinel")
    return _grouped(
        words, roles, owners, np.where(np.arange(len(tokens)) < bar, "inputs", "targets")
    )


def _names_of(objective: Denoise) -> dict[int, tuple[str, int]]:
    """Role of each added id, and the span that a sentinel represents."""
    named = [(task.mode, ("mode", -1)) for task in objective.tasks]
    named.append((objective.input_end, ("input end", -1)))
    named += [
        (sentinel, ("sentinel", number))
        for number, sentinel in enumerate(objective.sentinels or ())
    ]
    return {token: role for token, role in named if isinstance(token, int)}


def _grouped(words: Array, roles: Array, owners: Array, parts: Array) -> list[Stretch]:
    """Stretches of slots with the same properties and consecutive words."""
    breaks = (roles[1:] != roles[:-1]) | (owners[1:] != owners[:-1]) | (parts[1:] != parts[:-1])
    breaks |= (words[1:] >= 0) & (words[1:] != words[:-1] + 1)
    begins = [0, *(np.flatnonzero(breaks) + 1).tolist()]
    return [
        Stretch(
            begin=begin,
            end=end,
            part=str(parts[begin]),
            role=str(roles[begin]),
            span=int(owners[begin]),
            word=int(words[begin]),
        )
        for begin, end in zip(begins, [*begins[1:], len(words)], strict=True)
    ]


def _read_infilled(
    objective: Infill, tokens: Array, length: int, key: int, filling: int
) -> list[Stretch]:
    order = objective.task(length, key)
    if order == "causal":
        return []
    end = len(tokens) - filling
    if objective.program() is None:
        found = _read_fragments(objective, tokens[:end], key)
        return [*found, *_filled_up(end, tokens, found[-1].part)]
    _, middle_id, suffix_id, *_ = objective.tokens or ()
    added = np.ones(len(tokens), bool)
    added[objective.restore(np.arange(len(tokens), dtype=np.int32), length, key)] = False
    suffix, middle = (
        int(np.flatnonzero(added & (tokens == token))[0]) for token in (suffix_id, middle_id)
    )
    return _sections(
        WrittenFragment(begin=0, end=end, order=ORDERS.index(order), suffix=suffix, middle=middle),
        word=0,
        span=0,
    )


def _read_fragments(objective: Infill, tokens: Array, key: int) -> list[Stretch]:
    """The stretches of a document that is infilled in fragments; separators are text."""
    found: list[Stretch] = []
    word = span = 0
    for fragment in objective.fragments(tokens, key):
        begin, after = fragment.begin, min(fragment.end + 1, len(tokens))
        size = sum(section.stop - section.start for section in fragment.sections)
        if ORDERS[fragment.order] != "causal":
            found += _sections(fragment, word=word, span=span)
            begin, span = fragment.end, span + 1
            word, size = word + size, 0
        size += after - fragment.end
        if begin < after:
            text = Stretch(begin=begin, end=after, part=TEXT, role=TEXT, word=word)
            if found and found[-1].role == TEXT:
                text = replace(text, begin=found[-1].begin, word=found.pop().word)
            found.append(text)
        word += size
    return found


def _sections(fragment: WrittenFragment, *, word: int, span: int) -> list[Stretch]:
    """The stretches of a fragment that begins with this word of its document."""
    begin, end, suffix, middle = fragment.begin, fragment.end, fragment.suffix, fragment.middle
    first, last = suffix - begin - 1, end - middle - 1
    if ORDERS[fragment.order] == "PSM":
        words = [
            ("prefix", begin, begin + 1, suffix, 0, -1),
            ("suffix", suffix, suffix + 1, middle, first + last, -1),
        ]
        words.append(("middle", middle, middle + 1, end, first, span))
    else:
        # The row does not show where the prefix ends and the middle begins, and the model does not
        # see it either.
        words = [("prefix", begin, begin + 1, begin + 1, 0, -1)]
        words.append(("suffix", suffix, suffix + 1, middle, last, -1))
        words.append(("prefix and middle", middle, middle + 1, end, 0, -1))
    found = []
    for role, at, start, stop, place, number in words:
        token = "middle token" if at == middle else f"{role} token"
        found.append(Stretch(begin=at, end=start, part=role, role=token, span=number))
        if start < stop:
            found.append(
                Stretch(begin=start, end=stop, part=role, role=role, span=number, word=word + place)
            )
    return found
