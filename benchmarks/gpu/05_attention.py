"""How fast is attention over packed rows? Backends, lengths, documents, grouped heads, windows,
prefixes, trees.

    python benchmarks/gpu/05_attention.py --output results

Forward and backward, in bfloat16 on CUDA: TFLOP/s, counted as 4 × width × pairs of query and key a
document forward, and 2.5 times that backward. `error`: of a small row against the dense twin in
float64, as a share of its largest value. `plain causal`: one SDPA call over the whole row, which
is what isolation is compared with.
"""

from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from common import Figures, MissingError, Report, need, seconds
from penstock.core.errors import PenstockError
from penstock.models.attention import RowAttention
from penstock.plan.inputs import AttentionRule

DIM = 128


def rule(slots: int, documents: int, prefix: float = 0.0) -> tuple[AttentionRule, float]:
    """Documents of unequal lengths, each with a share that sees itself in both directions; and the
    pairs of query and key that are not masked.
    """
    edges = np.linspace(0, 1, documents + 1) ** 1.3
    bounds = np.unique((edges * slots).astype(np.int64))
    begins, ends = bounds[:-1], bounds[1:]
    lengths, both = ends - begins, (prefix * (ends - begins)).astype(np.int64)
    pairs = lengths * (lengths + 1) / 2 + both * (both - 1) / 2
    return AttentionRule(np.stack([begins, begins + both, ends], axis=1)), float(pairs.sum())


def tree(slots: int, documents: int, answers: int = 8) -> tuple[AttentionRule, float]:
    """Documents that are a prompt, a quarter of the tokens, with answers that each see it and
    themselves; and the pairs of query and key.
    """
    begins: list[int] = []
    ends: list[int] = []
    reach: list[int] = []
    pairs = 0.0
    for bounds in np.array_split(np.arange(slots), documents):
        first, last = int(bounds[0]), int(bounds[-1]) + 1
        prompt = max(1, (last - first) // 4)
        begins.append(first)
        ends.append(first + prompt)
        reach.append(last)
        pairs += prompt * (prompt + 1) / 2
        for part in np.array_split(np.arange(first + prompt, last), answers):
            if len(part):
                begins.append(int(part[0]))
                ends.append(int(part[-1]) + 1)
                reach.append(int(part[-1]) + 1)
                pairs += len(part) * prompt + len(part) * (len(part) + 1) / 2
    pieces = np.stack([begins, begins, ends], axis=1)
    return AttentionRule(pieces, np.array(reach)), float(pairs)


def seen_in_window(one: AttentionRule, window: int) -> float:
    """Pairs of query and key within a window."""
    lengths = one.pieces[:, 2] - one.pieces[:, 0]
    inside = np.minimum(lengths, window)
    return float((inside * (inside + 1) / 2 + (lengths - inside) * window).sum())


def tensors(slots: int, heads: int, kv: int, device: torch.device, dtype: torch.dtype) -> Any:
    """q, k, v."""
    generator = torch.Generator(device).manual_seed(0)
    return tuple(
        torch.randn(slots, n, DIM, device=device, dtype=dtype, generator=generator).requires_grad_()
        for n in (heads, kv, kv)
    )


def both_ways(attend: Any, q: Any, k: Any, v: Any) -> Any:
    """Forward and backward."""
    return torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))


def measure(
    report: Report, slots: int, documents: int, backend: str, *, heads: int = 16, kv: int = 16,
    prefix: float = 0.0, deterministic: bool = False, window: int | None = None,
    trees: bool = False,
) -> Figures:  # fmt: skip
    """Seconds and TFLOP/s of one layer."""
    dtype = torch.bfloat16 if report.device.type == "cuda" else torch.float32
    one, pairs = tree(slots, documents) if trees else rule(slots, documents, prefix)
    pairs = pairs if window is None else seen_in_window(one, window)
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        attend = RowAttention.of(
            one, device=report.device, dtype=dtype, backend=backend, window=window
        )
        q, k, v = tensors(slots, heads, kv, report.device, dtype)
        repeats = 2 if report.toy else 10
        forward = seconds(lambda: attend(q, k, v), repeats)
        whole = seconds(lambda: both_ways(attend, q, k, v), repeats)
    except PenstockError as error:
        raise MissingError(str(error)) from None
    finally:
        torch.use_deterministic_algorithms(False)
    work = 4.0 * heads * DIM * pairs
    return {
        "forward_ms": 1e3 * forward,
        "both_ms": 1e3 * whole,
        "forward_tflops": work / forward / 1e12,
        "both_tflops": 3.5 * work / whole / 1e12,
    }


def plain(report: Report, slots: int) -> Figures:
    """One causal call over the row."""
    dtype = torch.bfloat16 if report.device.type == "cuda" else torch.float32
    q, k, v = tensors(slots, 16, 16, report.device, dtype)

    def attend(*given: Any) -> Any:
        return scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in given), is_causal=True
        )

    repeats = 2 if report.toy else 10
    forward = seconds(lambda: attend(q, k, v), repeats)
    whole = seconds(lambda: both_ways(attend, q, k, v), repeats)
    work = 4.0 * 16 * DIM * slots * (slots + 1) / 2
    return {
        "forward_ms": 1e3 * forward,
        "both_ms": 1e3 * whole,
        "forward_tflops": work / forward / 1e12,
        "both_tflops": 3.5 * work / whole / 1e12,
    }


def exact(report: Report, backend: str, prefix: float) -> Figures:
    """Error against the dense twin in float64."""
    dtype = torch.bfloat16 if report.device.type == "cuda" else torch.float32
    slots = 64 if report.toy else 512
    one, _ = rule(slots, 7, prefix)
    attend = RowAttention.of(one, device=report.device, dtype=dtype, backend=backend)
    twin = RowAttention.of(one, device="cpu", dtype=torch.float64, backend="dense")
    q, k, v = tensors(slots, 4, 2, report.device, dtype)
    wide = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    try:
        found = [attend(q, k, v), *both_ways(attend, q, k, v)]
    except PenstockError as error:
        raise MissingError(str(error)) from None
    due = [twin(*wide), *both_ways(twin, *wide)]
    names = ("out", "dq", "dk", "dv")
    return {
        name: float((a.detach().cpu().double() - b).abs().max() / b.abs().max())
        for name, a, b in zip(names, found, due, strict=True)
    }


def flash3(report: Report) -> Figures:
    """FlashAttention 3 by torch's switch."""
    from torch.nn import attention

    switch = getattr(attention, "activate_flash_attention_impl", None)
    if switch is None or report.device.type != "cuda":
        raise MissingError("torch has no switch for FlashAttention 3 here")
    need("flash_attn_interface")
    switch("FA3")
    return measure(report, 8192, 10, "varlen")


def main() -> None:
    report = Report(__file__, __doc__)
    backends = ("per_document", "dense") if report.toy else ("varlen", "flex", "per_document")
    lengths = (64, 128) if report.toy else (4096, 8192, 32768, 131072)
    for backend in dict.fromkeys((*backends, "flex")):
        for prefix in (0.0, 0.6):
            report.part(f"exact: {backend}, prefix {prefix}", exact, report, backend, prefix)
    for slots in lengths:
        report.part(f"plain causal, {slots}", plain, report, slots)
        for documents in (1, 4) if report.toy else (1, 10, 100, 500):
            for backend in backends:
                if backend == "per_document" and slots > 32768:
                    continue
                name = f"{backend}, {slots}, {documents} documents"
                report.part(name, measure, report, slots, documents, backend)
    some = lengths[-2]
    for backend in backends:
        report.part(f"{backend}, 4 key heads", measure, report, some, 4, backend, kv=4)
        report.part(f"{backend}, prefixes", measure, report, some, 4, backend, prefix=0.6)
        near = 8 if report.toy else 1024
        report.part(f"{backend}, window {near}", measure, report, some, 4, backend, window=near)
        report.part(f"{backend}, trees", measure, report, some, 4, backend, trees=True)
        report.part(
            f"{backend}, deterministic", measure, report, some, 4, backend, deterministic=True
        )
    report.part("FlashAttention 3", flash3, report)
    report.done()


if __name__ == "__main__":
    main()
