"""What do head and loss cost? Chunks × vocabulary: time and memory, against plain and Liger's.

    python benchmarks/gpu/06_head.py --output results

Hidden states of a pass against an output matrix, forward and backward, in bfloat16 on CUDA.
`plain`: all logits at once in float32. `liger`: its fused linear cross entropy, if installed.
`share of the peak`: three products of slots × width × vocabulary over the time.
"""

from typing import Any

import torch
from torch.nn.functional import cross_entropy

from common import PEAK, Figures, Report, need, peak_gb, seconds
from penstock.learn.training.cross_entropy import chunked_cross_entropy


class Head:
    """A head of one size, and what stands before it."""

    def __init__(self, report: Report, slots: int, width: int, vocabulary: int) -> None:
        cuda = report.device.type == "cuda"
        self.dtype = torch.bfloat16 if cuda else torch.float32
        generator = torch.Generator(report.device).manual_seed(0)
        shared: dict[str, Any] = {"device": report.device, "generator": generator}
        self.hidden = torch.randn(slots, width, **shared).to(self.dtype).requires_grad_()
        self.weight = (torch.randn(vocabulary, width, **shared) / width**0.5).requires_grad_()
        self.targets = torch.randint(vocabulary, (slots,), **shared)
        self.report, self.products = report, 6.0 * slots * width * vocabulary

    def ours(self, chunk: int | None) -> None:
        """In chunks."""

        def logits(part: Any) -> Any:
            return part @ self.weight.to(self.dtype).t()

        ones = torch.ones(len(self.targets), device=self.targets.device)
        found, _ = chunked_cross_entropy(logits, self.hidden, self.targets, ones, chunk=chunk)
        torch.autograd.grad(found, (self.hidden, self.weight))

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
    chunks = (None, 16, 64) if report.toy else (None, 512, 1024, 2048, 4096, 8192)
    for vocabulary in vocabularies:
        head = Head(report, slots, width, vocabulary)
        for chunk in chunks:
            name = f"{vocabulary}, chunk {chunk or 'chosen'}"
            report.part(name, lambda head=head, chunk=chunk: head.measure(lambda: head.ours(chunk)))
        report.part(f"{vocabulary}, plain", head.measure, head.plain)
        report.part(f"{vocabulary}, liger", head.measure, head.liger)
    report.done()


if __name__ == "__main__":
    main()
