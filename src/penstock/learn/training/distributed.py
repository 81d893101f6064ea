"""The processes that train together: this process's rank, sums over all ranks, and weights sharded
among them.

Each rank's loss is already divided by the denominator of the whole step, so gradients are *summed*
over ranks. Without sharding, each rank has all weights, and gradients are summed once a step, in
buckets of one dtype. Every rank gets the same sum; only the number of ranks decides the order of
additions.

With sharding (FSDP2), weights, gradients and optimizer states are split among the ranks and
gathered where needed.
"""

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from penstock.core.errors import ConfigError, OutputError, StateError
from penstock.core.folders import local_path, lock_folder
from penstock.learn.training.computing import require_blocks
from penstock.learn.training.run_folder import LOCK
from penstock.learn.training.settings import check_device
from penstock.plan.loader.agreement import torch_gather
from penstock.plan.loader.data_parallel import DataParallel

BUCKET_BYTES = 32 << 20
"""Maximum bytes of gradients summed in one call, unless a single gradient is larger."""


TIMEOUT = timedelta(minutes=60)
"""How long a rank waits for another in a collective: rank 0 may write a large checkpoint meanwhile,
and NCCL's own 10 minutes would end the run.
"""

_groups = 0
"""Process groups that this process has begun."""


def _begin_group(device: torch.device) -> None:
    """A process group of all ranks; its names in the store are its own.

    A second group in the same processes (two runs, one after the other) would else read the
    addresses of the first, which has ended, and wait for it.
    """
    global _groups
    store, rank, size = next(rendezvous("env://"))
    _groups += 1
    names = PrefixStore(f"penstock-{_groups}", store)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=names,
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
        # Known from the start, so that communicators are made at once and on the right GPU.
        device_id=device if on_gpu else None,
    )


@final
class Ranks:
    """This process among those that torchrun started; a single process without torchrun.

    Use as a context manager: it leaves the process group at the end of the block.

    Args:
        device: Of this process.
        context_parallel: Processes that share each row: those with neighbouring ranks.

    Attributes:
        place: Rank and size among all processes.
        data: Among those that get different rows.
        context: Among those that share a row.
        context_group: Their process group; None: this process has rows of its own.

    Raises:
        ConfigError: `context_parallel` does not divide the number of processes.
    """

    def __init__(self, device: torch.device, context_parallel: int = 1) -> None:
        self.place = DataParallel.from_env()
        self.device = device
        rank, size = self.place.rank, self.place.size
        if size % context_parallel:
            raise ConfigError(
                f"training.context_parallel is {context_parallel}, which does not divide the "
                f"number of processes, {size}; start a multiple of {context_parallel} with "
                "torchrun"
            )
        self.data = DataParallel(rank // context_parallel, size // context_parallel)
        self.context = DataParallel(rank % context_parallel, context_parallel)
        self.context_group: Any = None
        self._host_group: Any = None
        self._mine = False
        self._lock: weakref.finalize[[int], Ranks] | None = None

    def __enter__(self) -> "Ranks":
        if self.place.size > 1 and not dist.is_initialized():
            _begin_group(self.device)
            self._mine = True
        if self.several and dist.get_backend() != "gloo":
            # Numbers of the host go by the network, past the device and what it still computes.
            self._host_group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        if self.context.size > 1:
            self.context_group, _ = dist.new_subgroups(self.context.size)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock()
        if self._mine and dist.is_initialized():
            dist.destroy_process_group()
        elif self.context_group is not None and dist.is_initialized():
            dist.destroy_process_group(self.context_group)

    @property
    def is_first(self) -> bool:
        """Whether this process writes what only one may write."""
        return self.place.rank == 0

    @property
    def several(self) -> bool:
        """Whether there are other processes."""
        return self.place.size > 1

    def hold(self, run: Path) -> None:
        """Lock a run's folder against other trainings until this one ends.

        Raises:
            OutputError: Another process trains into the folder, or it cannot be created.
        """
        if self._lock is not None:
            self._lock()
        local_path(run, "a run's folder")
        try:
            run.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{run}: cannot be written: {error.strerror}") from error
        self._lock = weakref.finalize(
            self, os.close, lock_folder(run, run / LOCK, doing="training")
        )

    def barrier(self) -> None:
        """Wait until all ranks arrive."""
        if self.several:
            dist.barrier()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over all ranks, in float64; numbers of the host, so no device waits."""
        if not self.several:
            return list(values)
        total = np.array(values, np.float64)
        dist.all_reduce(torch.from_numpy(total), group=self._host_group)
        found: list[float] = total.tolist()
        return found

    def sum_tensor(self, value: Tensor) -> Tensor:
        """A tensor of the device summed over all ranks; it stays there."""
        if not self.several:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total

    def sum_of_rows(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the ranks with different rows, in float64; ranks that share rows
        have the same.
        """
        return [value / self.context.size for value in self.sum(values)]

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        if not self.several:
            return value
        found = np.array([value], np.int64)
        dist.all_reduce(torch.from_numpy(found), dist.ReduceOp.MIN, group=self._host_group)
        return int(found[0])

    def gather(self, value: object) -> list[Any]:
        """The values of all ranks, in order."""
        gather = torch_gather() if self.several else None
        return [value] if gather is None else list(gather(value))

    def differ(self, number: int) -> bool:
        """Whether not all ranks have the same number; the same answer on all ranks."""
        return self.agree(self.sum([number])[0] != number * self.place.size)

    def agree(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; the same answer on all ranks."""
        return self.sum([float(flag)])[0] > 0

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum the gradients of all ranks, in place. A parameter that no row reached gets a gradient
        of zeros.

        A single process also gets these zeros: its optimizer then steps as with several ranks, and
        has a state for each parameter.
        """
        bucket: list[Tensor] = []
        for parameter in with_gradients(parameters):
            assert parameter.grad is not None
            if not self.several:
                continue
            if bucket and (
                bucket[0].dtype != parameter.grad.dtype or _bytes(bucket) > BUCKET_BYTES
            ):
                _sum_bucket(bucket)
                bucket = []
            bucket.append(parameter.grad)
        if bucket:
            _sum_bucket(bucket)


def with_gradients(parameters: Iterable[torch.nn.Parameter]) -> Iterator[torch.nn.Parameter]:
    """The trained parameters; one that no row reached gets a gradient of zeros."""
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            yield parameter


def local_device(name: str) -> torch.device:
    """The device that a name means in this process: `auto` is this rank's GPU if there is one, else
    the CPU.

    Raises:
        ConfigError: The machine has no such device.
    """
    check_device("device", name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    device = torch.device(name)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError):
        # A torch built without CUDA raises AssertionError.
        count = torch.cuda.device_count()
        here = f"cpu and {count} of cuda" if count else "cpu"
        raise ConfigError(
            f"device {name!r}: not found; torch finds {here}; give one of these, or auto"
        ) from None
    return device


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _sum_bucket(gradients: Sequence[Tensor]) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def shard(model: nn.Module, ranks: Ranks) -> None:
    """Shard a model in place, block by block; call it when all ranks have the same weights.

    Gradients are summed over ranks, not averaged, because each rank's loss is divided by the whole
    step's denominator.

    Raises:
        ConfigError: There is only one process, or the model has no `blocks`.
    """
    if not ranks.several:
        raise ConfigError(
            "training.shard needs several processes; start them with torchrun, or set it to false"
        )
    blocks = require_blocks(model, "shard")
    # Before FSDP's own hook, which prepares the backward pass by the output.
    model.register_forward_hook(_ask_for_gradients)
    # Imported late, as in the functions below: it takes seconds, and most commands that open a run
    # need none of it.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.place.size,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded: list[Any] = [model, *blocks]
    for module in sharded:
        module.set_gradient_divide_factor(1.0)
        # Otherwise the factor becomes a scaled sum, which gloo does not support.
        module.set_force_sum_reduction_for_comms(True)


def _ask_for_gradients(_: nn.Module, __: object, hidden: object) -> None:
    """Let hidden states have a gradient even where all that made them is frozen.

    FSDP reduces gradients once the backward pass reaches the model's output. If only the head is
    trained, none would reach it, and the head would get no gradient at all.
    """
    if torch.is_grad_enabled() and isinstance(hidden, Tensor) and not hidden.requires_grad:
        hidden.requires_grad_()


def sharded_again(model: nn.Module) -> None:
    """Shard what a forward pass has gathered and no backward pass will shard again.

    Until then `model.parameters()` gives gathered copies of embedding, norm and head: an optimizer
    that is made of those trains nothing of them.
    """
    reshard = getattr(model, "reshard", None)
    if reshard is not None:
        reshard()


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights on the CPU of the first rank (empty on others); every rank must call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: Any = get_model_state_dict(model, options=options)
    return dict(weights)


def load_whole_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Load unsharded weights, which every rank has, into a sharded model."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, {**weights}, options=StateDictOptions(full_state_dict=True))


@torch.no_grad()
def share_out(whole: Mapping[str, torch.Tensor], shares: Mapping[str, torch.Tensor]) -> None:
    """Copy into each tensor of `shares` its part of the whole tensor of the same name; every rank
    has all of `whole`.

    Raises:
        StateError: A name is not in `whole`.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, share in shares.items():
        if name not in whole:
            raise StateError(
                f"optimizer state: {name} is missing; resume with the optimizer that it was "
                "saved with"
            )
        if isinstance(share, DTensor):
            share.copy_(
                distribute_tensor(whole[name].to(share.device), share.device_mesh, share.placements)
            )
        else:
            share.copy_(whole[name])
