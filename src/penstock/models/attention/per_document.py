"""A scaled-dot-product call for each document: no wasted products between documents, so the way of the CPU.

A document with a prefix takes two calls: the prefix in full, and the rest, which sees the whole document up to itself.
The rest has more keys than queries, and torch's `is_causal` is aligned top-left, so it gets a mask of its own, aligned
bottom-right: (rest × document) bytes a document, made once a row.

Queries, keys and values are split and the outputs joined in one operation each. Slices instead would each have a
backward pass over the whole row.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from penstock.inputs import AttentionRule
from penstock.models.attention.backend import Attend, Backend, attend_heads


@final
@dataclass(frozen=True, slots=True)
class _Part:
    """Queries that one call answers; the parts of a row follow each other."""

    document: int
    queries: int
    keys: int
    mask: Tensor | None
    causal: bool


def _prepare(rule: AttentionRule, device: torch.device) -> Attend:
    lengths = (rule.pieces[:, 2] - rule.pieces[:, 0]).tolist()
    prefixes = (rule.pieces[:, 1] - rule.pieces[:, 0]).tolist()
    parts = [
        part
        for document, (length, prefix) in enumerate(zip(lengths, prefixes, strict=True))
        for part in _parts(document, length, prefix, device)
    ]
    counts = [part.queries for part in parts]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = k.split(lengths), v.split(lengths)
        outputs = [
            attend_heads(
                query,
                keys[part.document][: part.keys],
                values[part.document][: part.keys],
                mask=part.mask,
                causal=part.causal,
            )
            for query, part in zip(q.split(counts), parts, strict=True)
        ]
        return torch.cat(outputs)

    return attend


def _parts(document: int, length: int, prefix: int, device: torch.device) -> list[_Part]:
    if prefix <= 1:
        return [_Part(document, length, length, None, True)]
    whole = _Part(document, prefix, prefix, None, False)
    rest = length - prefix
    if not rest:
        return [whole]
    mask = torch.ones(rest, length, dtype=torch.bool, device=device).tril(prefix)
    return [whole, _Part(document, rest, length, mask, False)]


PER_DOCUMENT = Backend(name="per_document", refusal=lambda rule, device, dtype: None, prepare=_prepare)
