"""Muon of which each rank orthogonalises its share of the matrices.

torch's Muon on sharded weights gathers a matrix several times in each of its Newton-Schulz steps,
and every rank then does all the work. Here momentum is kept by shards. Matrices of one shape are
stacked: in one exchange each rank gets its share of them whole, in bfloat16, as the iteration reads
them, and in another it sends back the rows of the others. Without shards, each rank orthogonalises
its share, and one gather gives all to all. Stacks are exchanged while others are computed.

Each matrix goes through the same operations as in `torch.optim.Muon`, so updates are equal to its
bit for bit.

Sources: Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon); the scale of updates by
Moonshot (arXiv:2502.16982); division among ranks as nanochat's DistMuonAdamW does it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Muon

from penstock.models.tensor_files import local_part

_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The latter is its name before torch 2.13."""


@final
class DividedMuon(Muon):
    """`torch.optim.Muon` by several ranks, which all call `step` together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all matrices."""
        assert closure is None
        stacks: dict[Any, _Stack] = {}
        first = 0
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                split = _split_of(weight)
                stack = stacks.setdefault((id(group), weight.shape, split), _Stack(split, group))
                stack.weights.append(weight)
                stack.updates.append(self._update(weight, group))
        for stack in stacks.values():
            stack.send(first)
            first += len(stack.weights)
        for stack in stacks.values():
            stack.orthogonalise()
        for stack in stacks.values():
            stack.apply()

    def _update(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        """This rank's rows of the Nesterov momentum, in bfloat16."""
        assert weight.grad is not None
        state, gradient = self.state[weight], local_part(weight.grad)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight.grad)
        momentum = local_part(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]).bfloat16()


def _flat(matrices: Sequence[Tensor]) -> Tensor:
    """All elements, one matrix after the other."""
    return torch.cat([one.flatten() for one in matrices]) if matrices else torch.empty(0)


@final
@dataclass(frozen=True, slots=True)
class _Split:
    """The ranks that divide the work, and whether each holds rows of a matrix, or all of it."""

    group: Any
    by_rows: bool


def _split_of(weight: Tensor) -> _Split:
    if not isinstance(weight, DTensor):
        return _Split(dist.group.WORLD, by_rows=False)
    mesh = weight.device_mesh
    [dim] = [dim for dim, one in enumerate(weight.placements) if one == Shard(0)]
    return _Split(mesh.get_group(dim), by_rows=True)


@final
@dataclass(slots=True)
class _Stack:
    """Matrices of one shape."""

    split: _Split
    settings: dict[str, Any]
    weights: list[Tensor] = field(default_factory=list)
    updates: list[Tensor] = field(default_factory=list)
    """Of each matrix this rank's rows, or all; first of its momentum, then orthogonal."""
    _owners: list[int] = field(default_factory=list)
    """Which rank orthogonalises each."""
    _received: Tensor | None = None
    _work: Any = None

    @property
    def _rank(self) -> int:
        return dist.get_rank(self.split.group)

    @property
    def _size(self) -> int:
        return dist.get_world_size(self.split.group)

    def _of(self, rank: int) -> list[int]:
        """Which matrices a rank orthogonalises."""
        return [place for place, owner in enumerate(self._owners) if owner == rank]

    def _rows(self) -> list[int]:
        """Rows of a matrix that each rank holds, as FSDP cuts it."""
        rows = self.weights[0].shape[0]
        each = -(-rows // self._size)
        return [max(min(rows - rank * each, each), 0) for rank in range(self._size)]

    def send(self, first: int) -> None:
        """Send each rank the rows of the matrices that it orthogonalises.

        Args:
            first: The rank that gets the first matrix, so that small stacks do not all go to one.
        """
        self._owners = [(first + place) % self._size for place in range(len(self.weights))]
        if not self.split.by_rows:
            return
        mine, width = len(self._of(self._rank)), self.weights[0].shape[1]
        given = [_flat([self.updates[at] for at in self._of(rank)]) for rank in range(self._size)]
        self._exchange(given, [mine * rows * width for rows in self._rows()])

    def _exchange(self, given: Sequence[Tensor], sizes: list[int]) -> None:
        """Begin to send each rank its part, and to receive parts of these sizes."""
        like = self.updates[0]
        sent = torch.cat([part.to(like) for part in given])
        self._received = sent.new_empty(sum(sizes))
        self._work = dist.all_to_all_single(
            self._received,
            sent,
            sizes,
            [len(part) for part in given],
            group=self.split.group,
            async_op=True,
        )

    def _take(self) -> Tensor:
        """What was received."""
        self._work.wait()
        assert self._received is not None
        received, self._received, self._work = self._received, None, None
        return received

    def orthogonalise(self) -> None:
        """Orthogonalise this rank's share, and begin to give it to the others."""
        mine, width = self._of(self._rank), self.weights[0].shape[1]
        if not self.split.by_rows:
            most = max(len(self._of(rank)) for rank in range(self._size))
            found = self.updates[0].new_zeros(most, *self.weights[0].shape)
            for place, at in enumerate(mine):
                found[place] = self._orthogonal(self.updates[at])
            self._received = found.new_empty(self._size * found.numel())
            self._work = _gather(
                self._received, found.flatten(), group=self.split.group, async_op=True
            )
            return
        rows = self._rows()
        parts = self._take().split([len(mine) * count * width for count in rows])
        blocks = [
            part.view(len(mine), count, width) for part, count in zip(parts, rows, strict=True)
        ]
        whole = [
            self._orthogonal(torch.cat([one[at] for one in blocks])) for at in range(len(mine))
        ]
        cut = [one.split(rows) for one in whole]
        given = [_flat([one[rank] for one in cut]) for rank in range(self._size)]
        held = rows[self._rank] * width
        self._exchange(given, [len(self._of(rank)) * held for rank in range(self._size)])

    def apply(self) -> None:
        """Add the orthogonal updates to the weights."""
        received = self._take()
        if self.split.by_rows:
            parts = iter(received.view(len(self.weights), *self.updates[0].shape))
        else:
            shares = received.view(self._size, -1, *self.weights[0].shape)
            parts = iter(
                shares[rank, at] for rank in range(self._size) for at in range(len(self._of(rank)))
            )
        rate, decay = self.settings["lr"], self.settings["weight_decay"]
        # A matrix's update has the same root mean square as under AdamW.
        scale = 0.2 * max(self.weights[0].shape) ** 0.5
        for rank in range(self._size):
            for at in self._of(rank):
                weight = local_part(self.weights[at])
                weight.mul_(1 - rate * decay)
                weight.add_(next(parts), alpha=-rate * scale)

    def _orthogonal(self, update: Tensor) -> Tensor:
        return orthogonal(
            update,
            self.settings["ns_coefficients"],
            self.settings["ns_steps"],
            self.settings["eps"],
        )


def orthogonal(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """The Newton-Schulz iteration of torch's Muon, of one matrix in bfloat16 [n, m]."""
    a, b, c = coefficients
    high = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if high else matrix
    found = found / found.norm().clamp(min=eps)
    for _ in range(steps):
        gram = found @ found.T
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.addmm(found, update, found, beta=a)
    return found.T if high else found
