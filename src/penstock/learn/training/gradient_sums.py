"""Sums gradients over ranks where each rank has all weights, while the backward pass goes on.

Gradients come from the last layer to the first. They are gathered in buckets in that order; a
bucket is sent as soon as all of its gradients are there, so that the network works during the rest
of the pass (PyTorch DDP, Li et al. 2020, arXiv:2006.15704, section 3.2.3). Buckets are sent in the
same order on each rank, whatever order gradients come in, and those that a rank's rows do not reach
wait for the end. So all ranks speak of the same bucket, and a weight without a gradient gets zeros.

Every rank gets the same sums; only the number of ranks decides the order of additions.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch import distributed as dist

from penstock.core.errors import StateError

BUCKET_BYTES = 32 << 20
"""Maximum bytes of gradients summed in one call, unless a single gradient is larger."""


@final
class GradientSums:
    """The sums of a step.

    Args:
        weights: All weights; those without `requires_grad` are left out.
        several: Whether there are other ranks.
        early: Whether sums may begin during the last pass: it has one backward pass, in which each
            gradient is whole when it comes. Otherwise they begin after it.
        bucket_bytes: Maximum bytes of a bucket.
    """

    def __init__(
        self,
        weights: Iterable[nn.Parameter],
        *,
        several: bool,
        early: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._weights = [weight for weight in weights if weight.requires_grad]
        self._buckets = _buckets(self._weights, bucket_bytes) if several else []
        self._missing: list[int] = []
        """Of each bucket: gradients that have not come; empty outside of a last pass."""
        self._sent = 0
        self._flying: deque[tuple[list[nn.Parameter], Tensor, Any]] = deque()
        if several and early:
            for number, bucket in enumerate(self._buckets):
                for weight in bucket:
                    weight.register_post_accumulate_grad_hook(self._came(number))

    def begin(self) -> None:
        """Say that the last pass of a step begins."""
        self._missing = [len(bucket) for bucket in self._buckets]

    def finish(self) -> None:
        """Sum what is left and wait for all; a weight that no row reached gets a gradient of zeros.

        A single process also gets these zeros: its optimizer then steps as with several ranks, and
        has a state for each weight.
        """
        self._missing = []
        fill_missing(self._weights)
        while self._sent < len(self._buckets):
            self._send()
        while self._flying:
            self._land()
        self._sent = 0

    def _came(self, number: int) -> Any:
        def hook(weight: Tensor) -> None:
            if not self._missing:
                return
            if number < self._sent:
                raise StateError(
                    f"a gradient of shape {list(weight.shape)} came again after it was summed over "
                    "ranks: the model runs backward twice in a pass; put the second into the loss"
                )
            self._missing[number] -= 1
            while self._sent < len(self._missing) and self._missing[self._sent] <= 0:
                self._send()
            # What is done makes room for what comes.
            while self._flying and self._flying[0][2].is_completed():
                self._land()

        return hook

    def _send(self) -> None:
        bucket = self._buckets[self._sent]
        flat = torch.cat([gradient_of(weight).reshape(-1) for weight in bucket])
        self._flying.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        self._sent += 1

    def _land(self) -> None:
        bucket, flat, work = self._flying.popleft()
        # On a GPU the device waits, not the host.
        work.wait()
        for weight, part in zip(bucket, flat.split([w.numel() for w in bucket]), strict=True):
            gradient_of(weight).copy_(part.view_as(weight))


def fill_missing(weights: Iterable[nn.Parameter]) -> None:
    """Give each weight that is trained and has no gradient one of zeros."""
    for weight in weights:
        if weight.requires_grad and weight.grad is None:
            weight.grad = torch.zeros_like(weight)


def gradient_of(weight: nn.Parameter) -> Tensor:
    """Its gradient, which is there."""
    assert weight.grad is not None
    return weight.grad


def _buckets(weights: list[nn.Parameter], most: int) -> list[list[nn.Parameter]]:
    """Weights from last to first, each bucket of one dtype."""
    found: list[list[nn.Parameter]] = []
    size = 0
    for weight in reversed(weights):
        fits = found and found[-1][0].dtype == weight.dtype and size + weight.nbytes <= most
        if fits:
            found[-1].append(weight)
        else:
            found.append([weight])
            size = 0
        size += weight.nbytes
    return found
