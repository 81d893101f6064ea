"""Where tokens come from: the plan of a step as files, lines and text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from penstock.core.arrays import UInt32
from penstock.core.errors import ConfigError
from penstock.data.shards import Corpus, Document, Origin
from penstock.plan.loader.mixture import Mixture
from penstock.plan.loader.rewriting import Rewriting
from penstock.plan.loader.step_planner import StepPlan


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PieceOrigin:
    """Some tokens of a row, and where they come from."""

    row: int
    """Row in the whole step."""
    begin: int
    """First slot in the row."""
    num_tokens: int
    """Slots taken: as many as its tokens, or what the objective made of them."""
    source: str
    """Name of the source."""
    document: int
    """Number of the document in its source: in its dataset, or in all its datasets together."""
    first_token: int
    """First of its tokens that is here; above 0 for a later part of a document that was split, or
    for the end of one (`too_long="keep_end"`).
    """
    epoch: int
    """How often the source had been read through before."""
    origin: Origin
    """File and line (or row) of the record."""
    shard: str
    """Path of the file that holds the document."""
    text: str | None
    """What its tokens say, before the objective rewrites them; None when the tokenizer cannot be
    loaded.
    """
    task: str = ""
    """What the objective did to it, by name ("R", "PSM", …); empty for objectives without tasks."""
    branches: tuple[str, ...] = ()
    """Of a prefix tree: a line for each branch: its slots in the document, its paths, and the token
    at its fork.
    """
    images: tuple[str, ...] = ()
    """A line for each image: its file, its size, and its slots in the row."""

    def __str__(self) -> str:
        part = f" from token {self.first_token}" if self.first_token else ""
        text = "" if self.text is None else f": {self.text[:60]!r}"
        task = f" {self.task}" if self.task else ""
        return (
            f"row {self.row} [{self.begin}:{self.begin + self.num_tokens}]{task} "
            f"{self.source} {self.origin} (document {self.document}{part}, epoch "
            f"{self.epoch}){text}"
        ) + "".join(f"\n    {line}" for line in (*self.branches, *self.images))


def explain(
    mixture: Mixture,
    datasets: Sequence[Corpus],
    rewritings: Sequence[Rewriting],
    plan: StepPlan,
    row: int | None,
) -> list[PieceOrigin]:
    """The pieces of a planned step, or of one of its rows, in order."""
    rows = range(len(plan.row_starts) - 1) if row is None else [row]
    found = []
    for number in rows:
        if not 0 <= number < len(plan.row_starts) - 1:
            raise ConfigError(
                f"row must be 0 … {len(plan.row_starts) - 2} in this step, got {number}"
            )
        begin = 0
        for piece in plan.pieces[plan.row_starts[number] : plan.row_starts[number + 1]]:
            source, dataset = mixture.sources[piece["source"]], datasets[piece["source"]]
            document, first, slots = (
                int(piece["document"]),
                int(piece["begin"]),
                int(piece["length"]),
            )
            stored = dataset[document]
            low, high = (round(part * len(dataset)) for part in source.slice)
            found.append(
                PieceOrigin(
                    row=number,
                    begin=begin,
                    num_tokens=slots,
                    source=source.name,
                    document=document,
                    first_token=first,
                    epoch=int(piece["position"]) // (high - low),
                    origin=stored.origin,
                    shard=str(dataset.table.paths[dataset.table.locate(document)[0]]),
                    text=_without_images(dataset, stored)
                    if stored.images
                    else _text(dataset, stored.tokens[first : first + int(piece["tokens"])]),
                    task=rewritings[piece["source"]].task(piece),
                    branches=_branches(dataset, stored),
                    images=tuple(
                        f"image {image.name or image.digest.hex()}: "
                        f"{image.width}x{image.height}, slots {begin + image.begin} to "
                        f"{begin + image.end - 1}"
                        for image in stored.images
                    ),
                )
            )
            begin += slots
    return found


def _branches(dataset: Corpus, document: Document) -> tuple[str, ...]:
    """A line for each branch of a tree; none for an ordinary document."""
    if document.tree is None:
        return ()
    views = document.tree.describe(len(document.tokens))
    forks = [_text(dataset, document.tokens[view.begin : view.begin + 2]) for view in views]
    return tuple(
        f"branch {number}: {view}" + ("" if fork is None or view.parent < 0 else f", {fork!r}")
        for number, (view, fork) in enumerate(zip(views, forks, strict=True))
    )


def _without_images(dataset: Corpus, document: Document) -> str | None:
    """The text of a document, with `[image]` for each of its images."""
    parts, at = [], 0
    for image in document.images:
        parts += [_text(dataset, document.tokens[at : image.begin]), "[image]"]
        at = image.end
    parts.append(_text(dataset, document.tokens[at:]))
    return None if None in parts else "".join(part for part in parts if part is not None)


def _text(dataset: Corpus, tokens: UInt32) -> str | None:
    tokenizer = dataset.loaded_tokenizer
    return None if tokenizer is None else tokenizer.decode(tokens)
