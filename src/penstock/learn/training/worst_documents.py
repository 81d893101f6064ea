"""The held-out documents with the highest loss, for the evaluator `loss`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.arrays import Int64
from penstock.core.json_values import JsonObject
from penstock.data.shards import Corpus
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.document_losses import DocumentLosses
from penstock.plan.inputs.torch_tensors import on_host
from penstock.plan.loader import StepDocuments
from penstock.plan.loader.mixture import Source


class _Place(NamedTuple):
    """Sorts documents with the highest loss first, and equal ones by their place in the data."""

    minus_mean: float
    source: int
    number: int
    first_token: int
    targets: int
    right: int


def _line(place: _Place, source: Source) -> str:
    """A document as a text: where it is, and how it was predicted."""
    origin = cast(Corpus, source.path)[place.number].origin
    part = f" from token {place.first_token}" if place.first_token else ""
    return (
        f"{source.name} {origin} (document {place.number}{part}): {-place.minus_mean:.4f} nats a "
        f"target, {place.right:,} of {place.targets:,} right"
    )


@final
class WorstDocuments:
    """Collects the losses of documents, row by row, and finds the worst of all ranks.

    Args:
        count: How many to find.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._sums: list[Tensor] = []
        self._places: list[Int64] = []

    def add(self, found: DocumentLosses, documents: StepDocuments, row: int) -> None:
        """Add a row of a step."""
        here = documents.rows == row
        places = (documents.sources, documents.numbers, documents.first_tokens)
        self._places.append(np.stack([one[here] for one in places]))
        # Read by the host once, in the end.
        sums = (found.losses[0], found.weights[0], found.targets[0], found.right[0])
        self._sums.append(torch.stack([one.detach().double() for one in sums]))

    def pending(self, device: torch.device) -> dict[str, Tensor]:
        """Targets, and those that are right, as they are on the device, for `StepSums`."""
        empty = torch.zeros(4, dtype=torch.float64, device=device)
        _, _, targets, right = sum((one.sum(1) for one in self._sums), empty)
        return {"all targets": targets, "right": right}

    def figures(
        self, sums: Mapping[str, float], ranks: Ranks, sources: Sequence[Source]
    ) -> JsonObject:
        """`accuracy`, and `worst.1`, … as texts, the highest loss first: the same on every rank;
        all ranks call it together.

        Args:
            sums: What `pending` gave, summed over ranks.
            ranks: The processes that evaluate.
            sources: With opened datasets.
        """
        everyone = sorted({place for mine in ranks.gather(self._mine()) for place in mine})
        figures: JsonObject = {"accuracy": sums["right"] / max(sums["all targets"], 1.0)}
        for number, place in enumerate(everyone[: self._count], 1):
            figures[f"worst.{number}"] = _line(place, sources[place.source])
        return figures

    def _mine(self) -> list[_Place]:
        """The worst of this rank."""
        if not self._sums:
            return []
        places = np.concatenate(self._places, axis=1).tolist()
        losses, weights, targets, right = on_host(torch.cat(self._sums, 1))
        found = [
            _Place(-float(loss / weight), source, number, first, int(count), int(correct))
            for loss, weight, count, correct, source, number, first in zip(
                losses, weights, targets, right, *places, strict=True
            )
            if weight > 0
        ]
        return [_Place(*one) for one in sorted(found)[: self._count]]
