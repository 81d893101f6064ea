"""Attention over packed rows on the CPU: a call a document against one call with a dense mask.
Forward and backward.

    python benchmarks/bench_attention.py [--threads 1]

A row of 4,096 tokens holds documents of 400 (the last shorter), 8 heads of 64, float32. Wall time,
since both are work alone; rivals take turns. With prefixes, 60 % of each document see each other.
"""

import time
from collections.abc import Callable

import numpy as np
import torch

from common import arguments, table, take_turns
from penstock.models.attention import RowAttention
from penstock.plan.inputs import AttentionRule

SLOTS, DOCUMENT, HEADS, DIM = 4096, 400, 8, 64


def rule(prefix_share: float) -> AttentionRule:
    begins = np.arange(0, SLOTS, DOCUMENT)
    ends = np.minimum(begins + DOCUMENT, SLOTS)
    return AttentionRule(
        np.stack([begins, begins + (prefix_share * (ends - begins)).astype(np.int64), ends], axis=1)
    )


def rival(attention: RowAttention, kv_heads: int) -> Callable[[], float]:
    q, k, v = (
        torch.randn(SLOTS, heads, DIM, requires_grad=True) for heads in (HEADS, kv_heads, kv_heads)
    )

    def run() -> float:
        begun = time.perf_counter()
        torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
        return time.perf_counter() - begun

    return run


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    rows = []
    for what, share, kv_heads in (
        ("causal", 0.0, HEADS),
        ("causal, 2 kv heads", 0.0, 2),
        ("prefixes", 0.6, HEADS),
    ):
        made = {
            name: RowAttention.of(rule(share), device="cpu", dtype=torch.float32, backend=name)
            for name in ("per_document", "dense")
        }
        seconds = take_turns(
            {name: rival(attention, kv_heads) for name, attention in made.items()}, flags.repeats
        )
        mine, dense = seconds["per_document"], seconds["dense"]
        rows.append(
            (
                what,
                f"{dense / mine:.1f} ×",
                f"per_document {1e3 * mine:.1f} ms, dense {1e3 * dense:.1f} ms",
            )
        )
    table(
        f"per_document against dense, {SLOTS} tokens, documents of {DOCUMENT}, "
        f"{flags.threads} thread(s)",
        rows,
    )


if __name__ == "__main__":
    main()
