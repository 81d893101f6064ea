"""Which calls of attention answer a row document by document.

A document with a prefix takes two: the prefix in full, and the rest, which sees the whole document up to itself. The
rest has more keys than queries, and torch's `is_causal` is aligned top-left, so it gets a mask of its own, aligned
bottom-right. (The causal half over the whole document and the prefix over it needs no mask, but is 1.0 to 1.7 times
slower with prefixes of half and more, because torch's kernel on the CPU skips little of what is ahead.)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True, slots=True)
class Call:
    """Queries that one call answers, and the keys it looks at."""

    queries: slice
    keys: slice
    causal: bool
    mask: Tensor | None = None
    """[queries, keys] is added to the scores: 0 or minus infinity."""


def calls(pieces: list[list[int]], device: torch.device, dtype: torch.dtype) -> Iterator[Call]:
    """The calls of a row, in the order of their queries, from [begin, end of prefix, end] of its documents."""
    for begin, prefix_end, end in pieces:
        if prefix_end <= begin + 1:
            yield Call(slice(begin, end), slice(begin, end), causal=True)
            continue
        yield Call(slice(begin, prefix_end), slice(begin, prefix_end), causal=False)
        if prefix_end < end:
            mask = torch.full((end - prefix_end, end - begin), -torch.inf, dtype=dtype, device=device)
            yield Call(slice(prefix_end, end), slice(begin, end), False, mask.triu(prefix_end - begin + 1))
