"""Weights, gradients and optimizer states split among ranks (FSDP2), gathered where needed.

Each block of a model is one unit: its weights are gathered for its forward and its backward pass,
while the unit before it still computes. What lies outside the blocks (embedding, last norm, head)
is the root's unit, which stays gathered from the forward to the end of the backward pass, because
losses call the head between the two.

**Precision.** Weights are kept in float32. A model that computes in bfloat16 gets them gathered in
bfloat16, half the bytes; gradients are summed over ranks in float32.

**Passes.** Where a step takes several passes and there is room for the gradients of whole weights,
they are summed over ranks in the last pass only.

**Hybrid sharding.** With `shard: N`, N neighbouring ranks, as those of one machine, hold the
weights once, and all such groups hold the same: gathers stay within a group, and only sums of
gradients cross between groups.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch import distributed as dist

from penstock.core.errors import ConfigError, StateError
from penstock.learn.training.computing import require_blocks
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.gradient_sums import GradientSums, fill_missing
from penstock.learn.training.memory import device_memory
from penstock.models import LanguageModel
from penstock.models.four_bits import has_four_bits
from penstock.models.tensor_files import local_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AHEAD = 1
"""Units whose weights are gathered while one computes: enough to hide a gather behind a block's
matrices, and each more holds another block's weights.
"""
GRADIENTS_SHARE = 0.4
"""Share of a device's memory that gradients of whole weights may need between the passes of a
step.
"""
_Pass = TypeVar("_Pass")


def shard(model: LanguageModel, ranks: Ranks, over: int | None = None) -> None:
    """Shard a model in place, block by block; call it when all ranks have the same weights.

    Gradients are summed over ranks, not averaged, because each rank's loss is divided by the whole
    step's denominator. A single process may shard too: it holds the only part.

    Args:
        model: Its weights are float32 (float64), whatever it computes in.
        ranks: The processes that train together.
        over: Neighbouring ranks that hold the weights once; None: all.

    Raises:
        ConfigError: The model has no `blocks`, or matrices in 4 bits, or the ranks cannot be
            divided so.
    """
    if has_four_bits(model):
        raise ConfigError(
            "training.shard: the matrices of the model are in 4 bits, which are not divided among "
            "ranks; leave shard out (each rank then holds all of them), or take a base in bfloat16"
        )
    blocks = require_blocks(model, "shard")
    module: Any = model
    ranks.begin_group()
    # Before FSDP's own hook, which prepares the backward pass by the output.
    module.register_forward_hook(_ready_for_hooks)
    # Imported late, as in the functions below: it takes seconds, and most commands that open a run
    # need none of it.
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    narrow = model.compute_dtype if model.compute_dtype.itemsize < 4 else None
    policy = MixedPrecisionPolicy(
        param_dtype=narrow,
        reduce_dtype=None if narrow is None else torch.float32,
        # Models cast by themselves, and rows hold more than tensors.
        cast_forward_inputs=False,
    )
    mesh = _mesh(ranks, over)
    units: list[Any] = [*blocks, module]
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
        unit.set_gradient_divide_factor(1.0)
        # Otherwise the factor becomes a scaled sum, which gloo does not support.
        unit.set_force_sum_reduction_for_comms(True)
        if hasattr(unit, "set_reduce_scatter_unused_params"):
            # A weight that the rows of one rank do not reach, and those of another do.
            unit.set_reduce_scatter_unused_params(True, recurse=False)
    # Writing texts leaves out the heads of further distances.
    _gather_ahead(module, list(blocks), len(model.prediction_weights) - 1)
    module.extend = _extend_together(module)


def _mesh(ranks: Ranks, over: int | None) -> "DeviceMesh":
    from torch.distributed.device_mesh import init_device_mesh

    size, kind = ranks.place.size, ranks.device.type
    if over is None or over == size:
        return init_device_mesh(kind, (size,), mesh_dim_names=("shard",))
    if size % over:
        raise ConfigError(
            f"training.shard is {over}, which does not divide the number of processes, {size}; "
            f"start a multiple of {over} with torchrun, or set it to true: over all"
        )
    return init_device_mesh(kind, (size // over, over), mesh_dim_names=("replicate", "shard"))


def _gather_ahead(root: Any, blocks: list[Any], left_out: int) -> None:
    """Let each unit ask for the weights of the next ones before it computes, in both directions.

    The last `left_out` blocks do not run in every forward pass, so nobody asks for them ahead.

    By default FSDP asks in the forward pass only when it comes to a unit, so that the GPU waits for
    the CPU, and in the backward pass by the order of the last forward pass, which several passes
    before one reduction confuse.
    """
    always = blocks[: len(blocks) - left_out]
    root.set_modules_to_forward_prefetch(always[:AHEAD])
    root.set_modules_to_backward_prefetch(blocks[::-1][:AHEAD])
    for place, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(always[place + 1 : place + 1 + AHEAD])
        # An empty list would mean the default.
        before = blocks[max(place - AHEAD, 0) : place][::-1]
        block.set_modules_to_backward_prefetch(before or [root])


def _ready_for_hooks(_: nn.Module, __: object, hidden: object) -> object:
    """Hidden states on which FSDP can hang its work: no view, and with a gradient even where all
    that made them is frozen.

    FSDP reduces gradients once the backward pass reaches the model's output. If only the head is
    trained, none would reach it, and the head would get no gradient at all.
    """
    if not isinstance(hidden, Tensor) or not torch.is_grad_enabled():
        return None
    hidden = hidden if hidden._base is None else hidden.clone()
    return hidden if hidden.requires_grad else hidden.requires_grad_()


def _extend_together(model: Any) -> Any:
    """The model's `extend`, which all ranks call with the same tokens: weights are gathered for it
    as for a forward pass.

    All ranks get rank 0's logits. Otherwise a last bit that differs between two devices could end a
    text on one rank only, and the others would wait for it.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    register_fsdp_forward_method(model, "extend")
    gathered = model.extend

    def extend(*args: Any, **kwargs: Any) -> Tensor:
        logits: Tensor = gathered(*args, **kwargs).contiguous()
        dist.broadcast(logits, 0)
        return logits

    return extend


@final
class GradientSync:
    """When gradients are summed over ranks: in the last pass of a step. Where weights are sharded
    and there is no room to keep the gradients of whole ones until then, in each pass.

    Args:
        model: Sharded or not.
        sums: Sums the gradients of a model that is not sharded; None: nobody does.
    """

    def __init__(self, model: LanguageModel, sums: GradientSums | None = None) -> None:
        self._model: Any = model if is_sharded(model) else None
        self._sums = sums
        self.waits = self._keeps = False
        if self._model is not None:
            weights = list(model.parameters())
            room = GRADIENTS_SHARE * device_memory(model.device)
            gradients = sum(4 * weight.numel() for weight in weights if weight.requires_grad)
            whole = sum(model.compute_dtype.itemsize * weight.numel() for weight in weights)
            self.waits = gradients <= room
            self._keeps = gradients + whole <= room

    def over(self, passes: Iterable[_Pass]) -> Iterator[_Pass]:
        """The passes of a step, of which each ends in one backward pass."""
        each = list(passes)
        for number, one in enumerate(each, 1):
            if self._model is not None:
                self._prepare(last=number == len(each))
            elif self._sums is not None and number == len(each):
                self._sums.begin()
            yield one

    def finish(self) -> None:
        """Sum what is not summed yet; a weight that no row reached gets a gradient of zeros."""
        if self._model is not None:
            # A block that drew another mixer leaves some without.
            fill_missing(self._model.parameters())
        elif self._sums is not None:
            self._sums.finish()

    def _prepare(self, *, last: bool) -> None:
        if self.waits:
            self._model.set_requires_gradient_sync(last)
        else:
            # Within a group of hybrid sharding each pass, between groups once.
            self._model.set_requires_all_reduce(last)
        self._model.set_is_last_backward(last)
        if self._keeps:
            # The next pass begins with weights that are still gathered.
            self._model.set_reshard_after_backward(last)


def is_sharded(model: Any) -> bool:
    """Whether `shard` has split the model's weights."""
    return hasattr(model, "reshard")


def sharded_again(model: Any) -> None:
    """Shard what a forward pass has gathered and no backward pass will shard again.

    Until then `model.parameters()` gives gathered copies of embedding, norm and head: an optimizer
    that is made of those trains nothing of them.
    """
    if is_sharded(model):
        model.reshard()


@torch.no_grad()
def share_out(whole: Mapping[str, torch.Tensor], shares: Mapping[str, torch.Tensor]) -> None:
    """Copy into each tensor of `shares` its part of the whole tensor of the same name; every rank
    has all of `whole`.

    Raises:
        StateError: A name is not in `whole`.
    """
    for name, share in shares.items():
        if name not in whole:
            raise StateError(
                f"weights: {name} is missing; resume with the model that they were saved with"
            )
        take_share(share, whole[name])


@torch.no_grad()
def take_share(share: Tensor, whole: Tensor) -> None:
    """Copy into a tensor, which may be sharded, what this rank holds of the whole one."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(share, DTensor):
        share.copy_(whole)
        return
    shape, begins = compute_local_shape_and_global_offset(
        whole.shape, share.device_mesh, share.placements
    )
    for dim, (begin, size) in enumerate(zip(begins, shape, strict=True)):
        whole = whole.narrow(dim, begin, size)
    local_part(share).copy_(whole)
