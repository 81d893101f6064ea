"""What do head and loss cost? Chunks × vocabulary: time and memory, against plain and Liger's.

    python benchmarks/gpu/06_head.py --output results

Hidden states of a pass against an output matrix, forward and backward, in bfloat16 on CUDA.
`kernel`: our kernel turns a chunk's logits into their gradient; `torch`: torch's operations do.
`cast each chunk`: the matrix is cast for each chunk, not once. `plain`: all logits at once in
float32. `liger`: its fused linear cross entropy, if installed. `share of the peak`: three products
of slots × width × vocabulary over the time. `a chunk alone`: the kernel without the products, with
the bytes that it must move, two reads and a write of the logits, over the time.
"""

from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from common import PEAK, Figures, MissingError, Report, need, peak_gb, seconds
from penstock.learn.training import cross_entropy as losses
from penstock.models.head import cast


@contextmanager
def torch_alone() -> Any:
    """Without the kernel."""
    chosen, losses.fused_for = losses.fused_for, lambda device, dtype: None
    try:
        yield
    finally:
        losses.fused_for = chosen


class Head:
    """A head of one size, and what stands before it."""

    def __init__(self, report: Report, slots: int, width: int, vocabulary: int) -> None:
        cuda = report.device.type == "cuda"
        self.dtype = torch.bfloat16 if cuda else torch.float32
        generator = torch.Generator(report.device).manual_seed(0)
        shared: dict[str, Any] = {"device": report.device, "generator": generator}
        self.hidden = torch.randn(slots, width, **shared).to(self.dtype).requires_grad_()
        self.weight = torch.nn.Parameter(torch.randn(vocabulary, width, **shared) / width**0.5)
        self.targets = torch.randint(vocabulary, (slots,), **shared)
        self.report, self.products = report, 6.0 * slots * width * vocabulary

    def ours(self, chunk: int | None, *, once: bool = True) -> None:
        """In chunks; `once`: the matrix is cast once."""

        def logits(part: Any) -> Any:
            matrix = cast(self.weight, self.dtype) if once else self.weight.to(self.dtype)
            return part @ matrix.t()

        ones = torch.ones(len(self.targets), device=self.targets.device)
        found, _ = losses.chunked_cross_entropy(
            logits, self.hidden, self.targets, ones, chunk=chunk
        )
        torch.autograd.grad(found, (self.hidden, self.weight))

    def kernel(self) -> Any:
        """Our kernel."""
        fused = losses.fused_for(self.hidden.device, self.dtype)
        if fused is None:
            raise MissingError("the kernel needs CUDA and triton")
        return fused

    def by_kernel(self, chunk: int | None) -> None:
        """In chunks, by the kernel."""
        self.kernel()
        self.ours(chunk)

    def by_torch(self, chunk: int | None) -> None:
        """In chunks, without the kernel."""
        with torch_alone():
            self.ours(chunk)

    def plain(self) -> None:
        """All logits."""
        logits = (self.hidden @ self.weight.to(self.dtype).t()).float()
        found = cross_entropy(logits, self.targets, reduction="sum")
        torch.autograd.grad(found, (self.hidden, self.weight))

    def liger(self) -> None:
        """Liger's kernel."""
        kernels = need("liger_kernel.transformers")
        function = kernels.LigerFusedLinearCrossEntropyLoss(reduction="sum")
        found = function(self.weight.to(self.dtype), self.hidden, self.targets)
        torch.autograd.grad(found, (self.hidden, self.weight))

    def chunk_alone(self) -> Figures:
        """The kernel, on the logits of one chunk."""
        fused, vocabulary = self.kernel(), len(self.weight)
        chunk = losses.chunk_size(
            len(self.hidden), vocabulary, self.dtype, self.hidden.device, fused
        )
        logits = (self.hidden[:chunk] @ self.weight.to(self.dtype).t()).detach()
        weights = torch.ones(len(logits), device=logits.device)
        took = seconds(
            lambda: fused(
                logits,
                self.targets[:chunk],
                weights,
                scale=1.0,
                z_loss=0.0,
                gradient=torch.empty_like(logits),
            ),
            10,
        )
        moved = 3 * logits.numel() * logits.element_size()
        return {"positions": len(logits), "ms": 1e3 * took, "gb_a_second": moved / took / 1e9}

    def measure(self, work: Any) -> Figures:
        """Seconds, peak memory and share of the peak."""
        if self.report.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
        took = seconds(work, 2 if self.report.toy else 10)
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        peak = next((one for part, one in PEAK.items() if part in name), None)
        return {
            "ms": 1e3 * took,
            "extra_gb": peak_gb() - before,
            "share_of_the_peak": None if peak is None else self.products / took / peak,
        }


def main() -> None:
    report = Report(__file__, __doc__)
    slots, width = (128, 32) if report.toy else (8192, 4096)
    vocabularies = (300, 1000) if report.toy else (32000, 128256, 256000)
    chunks = (None, 16, 64) if report.toy else (None, 1024, 2048, 4096, 8192)
    for vocabulary in vocabularies:
        head = Head(report, slots, width, vocabulary)
        for chunk in chunks:
            for name, work in (("kernel", head.by_kernel), ("torch", head.by_torch)):
                report.part(
                    f"{vocabulary}, chunk {chunk or 'chosen'}, {name}",
                    lambda head=head, work=work, chunk=chunk: head.measure(lambda: work(chunk)),
                )
        report.part(
            f"{vocabulary}, cast each chunk",
            lambda head=head: head.measure(lambda: head.ours(None, once=False)),
        )
        report.part(f"{vocabulary}, a chunk alone", head.chunk_alone)
        report.part(f"{vocabulary}, plain", head.measure, head.plain)
        report.part(f"{vocabulary}, liger", head.measure, head.liger)
    report.done()


if __name__ == "__main__":
    main()
