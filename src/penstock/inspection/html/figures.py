"""The page's figures where the caller has none: lengths, trained shares, and who says how much."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.inspection.html.views import Histogram, PageDocument

BINS = 24


def histograms_of(documents: Sequence[PageDocument]) -> dict[str, Histogram]:
    """Lengths and trained shares of documents, in bins of equal width."""
    if not documents:
        return {}
    lengths = np.array([len(document.ids) for document in documents])
    shares = np.array([100 * document.trained_share for document in documents])
    width = max(1, _round_up(lengths.max() / BINS))
    edges = np.arange(0, lengths.max() + width + 1, width)
    return {
        "tokens of a document": Histogram(edges.tolist(), np.histogram(lengths, edges)[0].tolist()),
        "trained share of a document, %": Histogram(
            list(range(0, 101, 5)), np.histogram(shares, np.arange(0, 101, 5))[0].tolist()
        ),
    }


def shares_of(documents: Sequence[PageDocument]) -> dict[str, dict[str, float]]:
    """Tokens and trained tokens by role; what nobody says is "template"."""
    read: dict[str, float] = {}
    trained: dict[str, float] = {}
    for document in documents:
        if document.roles is None:
            continue
        names = [*document.role_names, "template"]
        roles: Any = np.where(np.asarray(document.roles) < 0, len(names) - 1, document.roles)
        for found, weights in ((read, None), (trained, np.asarray(document.loss_weights) != 0)):
            for name, count in zip(names, np.bincount(roles, weights, minlength=len(names)).tolist(), strict=True):
                if count:
                    found[name] = found.get(name, 0) + count
    return {name: parts for name, parts in (("tokens by role", read), ("trained tokens by role", trained)) if parts}


def _round_up(value: float) -> int:
    """To 1, 2 or 5 times a power of ten."""
    power = 10 ** int(np.floor(np.log10(max(value, 1))))
    return int(next(step * power for step in (1, 2, 5, 10) if step * power >= value))
