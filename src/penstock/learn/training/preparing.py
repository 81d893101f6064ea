"""A model made ready to train, once its rows have been tried: precision, activation checkpoints,
shards with the weights that were still to come, compiling.

The order is explained in `computing`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.core.errors import StateError
from penstock.learn.training.computing import (
    checkpoint_activations,
    compile_blocks,
    precision_of,
    set_precision,
)
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.processes import in_step
from penstock.learn.training.run_state import fixed_base
from penstock.learn.training.settings import TrainSettings
from penstock.learn.training.sharding import shard, take_share
from penstock.models import LanguageModel
from penstock.models.later_weights import LaterWeights
from penstock.models.lora.lora import drawn_lora, without_lora
from penstock.models.ours.importing import refuse_not_finite
from penstock.models.ours.initial_weights import drawn_weights
from penstock.models.ours.transformer import Transformer
from penstock.models.tensor_files import StoredTensors, local_part

if TYPE_CHECKING:
    from pathlib import Path


def prepare(
    model: LanguageModel,
    references: Sequence[LanguageModel],
    settings: TrainSettings,
    ranks: Ranks,
    later: LaterWeights | None,
) -> str | None:
    """Make a model ready to train, in place; all ranks call it.

    Args:
        model: Its rows have been tried.
        references: Models that it is compared with; they get the same precision.
        settings: How to train.
        ranks: The processes that train together.
        later: Where the weights of a model come from that has none yet; None: it has them.

    Returns:
        See `fixed_base`; None of weights that come later.

    Raises:
        ConfigError: The model does not have what a setting needs.
        CorruptionError: Weights that are read now are damaged, missing or not finite.
        DistributedError: They are so on another rank, which raises the original error.
    """
    dtype = precision_of(settings, model)
    for one in (model, *references):
        set_precision(one, dtype, sharded=bool(settings.shard) and one is model)
    # Every checkpoint of a sharded run holds all weights.
    base = fixed_base(model) if later is None else None
    checkpoint_activations(model, settings)
    if settings.shard:
        shard(model, ranks, settings.shard_over)
    if later is not None:
        fill(model, later, ranks)
    if settings.compile:
        compile_blocks(model)
    return base


@torch.no_grad()
def fill(model: LanguageModel, later: LaterWeights, ranks: Ranks) -> None:
    """Give a sharded model its weights: each rank gets its own part. All ranks call it.

    No rank holds more than its part and one whole weight; where the files have other names than the
    model, the first rank alone holds all weights for a while, in the memory of the CPU.

    Raises:
        CorruptionError, DistributedError: See `prepare`.
    """
    _allocate(model, ranks.device)
    if not ranks.agree(not later.is_resumed):
        return
    if later.load is not None:
        with in_step():
            later.load(model)
        return
    shares = model.state_dict()
    if later.lora_seed is not None:
        # The base has the names that it had before LoRA was added.
        shares = without_lora(shares)
        lora = dict(model.named_parameters())
        for name, values in drawn_lora(model, later.lora_seed):
            take_share(lora[name], values)
    if later.whole is not None:
        _send(later, shares, ranks)
        return
    with in_step():
        if later.stored is not None:
            assert later.folder is not None
            _read(later.folder, later.stored, shares)
            return
        assert isinstance(model, Transformer)
        assert later.seed is not None
        for name, values in drawn_weights(model, later.seed, shares):
            take_share(shares[name], values)
            # Before the next one is drawn.
            del values


def _allocate(model: LanguageModel, device: torch.device) -> None:
    """Memory for this rank's part of each parameter, which is 0 until it is filled. Buffers have
    theirs.
    """
    module: Any = model
    # Swaps what is in a sharded parameter, so that tied ones stay one.
    module._apply(lambda one: torch.zeros_like(one, device=device) if one.is_meta else one)


def _read(folder: "Path", stored: StoredTensors, shares: Mapping[str, Tensor]) -> None:
    """Read this rank's part of each weight."""
    wanted = {name: share for name, share in shares.items() if name in stored.shapes}
    stored.read_into(wanted)
    refuse_not_finite(folder, ((name, local_part(share)) for name, share in wanted.items()))


def _send(later: LaterWeights, shares: Mapping[str, Tensor], ranks: Ranks) -> None:
    """The first rank reads the whole model and sends one weight after the other."""
    whole: dict[str, Tensor] = {}
    with in_step():
        if ranks.is_first:
            assert later.whole is not None
            whole = dict(later.whole())
            if odd := [
                name
                for name, one in whole.items()
                if name not in shares or shares[name].shape != one.shape
            ]:
                raise StateError(f"{later.folder}: {odd[0]} is not a weight of its config.json")
    names = list(ranks.gather(list(whole))[0])
    for name in names:
        share = shares[name]
        if ranks.is_first:
            one = whole.pop(name).to(ranks.device, share.dtype).contiguous()
        else:
            one = torch.empty(share.shape, dtype=share.dtype, device=ranks.device)
        if ranks.several:
            dist.broadcast(one, 0)
        take_share(share, one)
        del one
