"""Figures of a step that are still on the device: summed over ranks and read at once.

    sums = StepSums(ranks)
    sums.add({"nats": nats, "experts.evenness": evenness})      tensors of the device, or numbers
    sums.same({"gradient_norm": norm})                          equal on all ranks
    read = sums.take()                                          one all-reduce, one copy to the host

Each read makes the host wait until the device has done all that it was given, and then the device
waits for the host. So a pass only adds to tensors, and a step reads once, whatever it reports.
"""

from collections.abc import Mapping
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from penstock.learn.training.distributed import Ranks
from penstock.plan.inputs.torch_tensors import on_device


@final
class StepSums:
    """Sums by name, in float64; every rank must add the same names in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._summed: dict[str, Tensor | float] = {}
        self._same: dict[str, Tensor | float] = {}

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        """Add scalars that are summed over ranks."""
        self._summed.update(values)

    def same(self, values: Mapping[str, Tensor | float]) -> None:
        """Add scalars that are equal on all ranks."""
        self._same.update(values)

    def take(self) -> dict[str, float]:
        """All by name, over all ranks; the only time that the host waits for the device."""
        summed, same = self._joined(self._summed), self._joined(self._same)
        if self._ranks.several and len(summed):
            dist.all_reduce(summed)
        found: list[float] = torch.cat([summed, same]).tolist()
        return dict(zip((*self._summed, *self._same), found, strict=True))

    def _joined(self, values: Mapping[str, Tensor | float]) -> Tensor:
        """[n] float64 on the device; numbers of the host go there in one copy, without waiting."""
        device = self._ranks.device
        numbers = [float(one) for one in values.values() if not isinstance(one, Tensor)]
        sent = iter(on_device(np.array(numbers), device).unbind()) if numbers else iter(())
        parts = [
            one.detach().to(torch.float64) if isinstance(one, Tensor) else next(sent)
            for one in values.values()
        ]
        return torch.stack(parts) if parts else torch.zeros(0, dtype=torch.float64, device=device)
