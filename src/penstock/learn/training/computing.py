"""How a model computes while it trains: in which dtype, what its blocks keep, whether they are
compiled.

The order matters. Trials of rows come first, while the model is as it was loaded; then casts, then
checkpoints around them, so that a cast is not kept for the backward pass; then shards, whose hooks
stay outside of both; compiling last, which covers all but the hooks.
"""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from penstock.core.errors import ConfigError
from penstock.learn.training.settings import TrainSettings
from penstock.models import LanguageModel
from penstock.models.activation_checkpointing import checkpoint_blocks
from penstock.models.casting import freeze_in
from penstock.models.four_bits import PACKAGE, compute_four_bits_in, has_four_bits
from penstock.models.ours.experts import Experts
from penstock.models.ours.transformer import Transformer
from penstock.models.own_model import OwnModel
from penstock.models.recurrent.mixers import Mixer
from penstock.models.theirs.model import HuggingFaceModel
from penstock.models.theirs.recurrence import leave_out_of_graphs


def precision_of(settings: TrainSettings, model: LanguageModel) -> torch.dtype:
    """The dtype in which the blocks of a model compute.

    Raises:
        ConfigError: The settings name one that the device or the model does not have.
    """
    asked, own = settings.precision, model.compute_dtype
    if asked == "auto":
        takes = own == torch.float32 and bool(blocks_of(model)) and not isinstance(model, OwnModel)
        on_cuda = model.device.type == "cuda" and _has_bfloat16(model.device)
        return torch.bfloat16 if takes and on_cuda else own
    wanted: torch.dtype = getattr(torch, asked)
    if wanted == torch.bfloat16 and not _has_bfloat16(model.device):
        raise ConfigError(
            f"training.precision: {torch.cuda.get_device_name(model.device)} does not compute in "
            "bfloat16; set it to float32, or take a GPU of 2020 or later (Ampere)"
        )
    return wanted


def blocks_of(model: LanguageModel | nn.Module) -> Sequence[nn.Module]:
    """The blocks of a model, in order; empty: it has none that are known."""
    found: Any = getattr(model, "blocks", ())
    return list(found) if isinstance(found, Sequence | nn.ModuleList) else []


def require_blocks(model: LanguageModel | nn.Module, setting: str) -> Sequence[nn.Module]:
    """The blocks of a model.

    Raises:
        ConfigError: It has none; the message names the setting that needs them.
    """
    if not (blocks := blocks_of(model)):
        raise ConfigError(
            f"training.{setting}: this model has no blocks that are known: of transformers, a "
            "decoder's list of layers; of your own, `blocks`, a ModuleList. Train it without "
            f"{setting}"
        )
    return blocks


def set_precision(model: LanguageModel, dtype: torch.dtype, *, sharded: bool) -> None:
    """Let a model compute in a dtype; frozen weights next to LoRA are kept in it.

    Args:
        model: As it was loaded; trials of its rows are done.
        dtype: Of `precision_of`.
        sharded: Whether its weights will be sharded, and cast when they are gathered.
    """
    if dtype != model.compute_dtype:
        model.compute_in(dtype, casts=not sharded)
    compute_four_bits_in(model, dtype)
    if model.lora is not None:
        freeze_in(model.parameters(), dtype)


def checkpoint_activations(model: LanguageModel, settings: TrainSettings) -> None:
    """Let the blocks of a model run again in the backward pass, as the settings say.

    Raises:
        ConfigError: The model has no blocks.
    """
    if (kind := settings.activation_checkpointing) != "none":
        blocks = require_blocks(model, "activation_checkpointing")
        checkpoint_blocks(blocks, selective=kind == "selective")


def compile_blocks(model: LanguageModel) -> None:
    """Compile each block.

    Attention is a single operation in it. What differs from row to row, the number of documents,
    becomes dynamic when it first changes: with `dynamic=False`, torch would compile a block again
    for each number. Experts of ours are compiled where they run as one product; by themselves, they
    get numbers of tokens that differ too much to be foreseen. Recurrences cut documents into
    chunks. Both stay as they are.

    Raises:
        ConfigError: The model has no blocks.
    """
    for block in require_blocks(model, "compile"):
        for module in block.modules():
            grouped = isinstance(module, Experts) and module.runs_grouped(
                model.compute_dtype, model.device
            )
            if isinstance(module, Experts | Mixer) and not grouped:
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        block.compile()
    if isinstance(model, HuggingFaceModel):
        leave_out_of_graphs(model.inner)


def in_words(model: LanguageModel, settings: TrainSettings, ranks: int, attention: str) -> str:
    """How a model computes, for the start of a run.

    Args:
        model: As it is trained.
        settings: How to train.
        ranks: Processes that hold the weights once, where they are sharded.
        attention: What runs in its rows, in words; empty: its own.
    """
    weights = {weight.dtype for weight in model.parameters() if weight.requires_grad}
    wide = [str(one).removeprefix("torch.") for one in weights - {model.compute_dtype}]
    blocks = blocks_of(model)
    known = f"{len(blocks)} blocks"
    parts = [
        str(model.compute_dtype).removeprefix("torch.")
        + (f" (weights {', '.join(sorted(wide))})" if wide else ""),
        f"attention {attention}" if attention else "attention of the model's own",
        f"{known} compiled" if settings.compile else "",
        f"activation checkpointing {settings.activation_checkpointing}"
        if settings.activation_checkpointing != "none"
        else "",
        f"sharded over {ranks}" if settings.shard else "",
        "base in 4 bits" if has_four_bits(model) else "",
        "" if blocks else "blocks not known: neither compiled, sharded nor checkpointed",
    ]
    return " · ".join(part for part in parts if part)


def numbers_of(model: LanguageModel) -> str:
    """The dtype in which a model computes, and what dequantises its matrices, for the settings that
    change bits.
    """
    dtype = str(model.compute_dtype)
    return f"{dtype}, bitsandbytes {version(PACKAGE)}" if has_four_bits(model) else dtype


def kept_bytes(model: LanguageModel, settings: TrainSettings, dtype: torch.dtype) -> int:
    """About what a pass keeps of each slot for the backward pass: without checkpoints, the inputs
    and outputs of all linear layers; with them, of each block its input, and what attention gave.
    """
    assert isinstance(model, nn.Module)
    blocks, kind = blocks_of(model), settings.activation_checkpointing
    inside = {module for block in blocks for module in block.modules()}
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "in_features")]
    sizes: list[tuple[int, bool]] = [
        (one.in_features + one.out_features, one in inside) for one in layers
    ]
    if kind == "none" or not blocks:
        return max(1, sum(size for size, _ in sizes) * dtype.itemsize)
    outside = sum(size for size, within in sizes if not within)
    # The block that runs again has all of its activations at that time.
    again = sum(size for size, within in sizes if within) // len(blocks)
    width = _width(model, layers)
    each = width * (1 if kind == "full" else 2)
    return max(1, (outside + again + each * len(blocks)) * dtype.itemsize)


def _width(model: LanguageModel, layers: Sequence[Any]) -> int:
    if isinstance(model, Transformer):
        return model.settings.width
    weight = getattr(model.get_input_embeddings(), "weight", None)
    return int(weight.shape[-1]) if weight is not None else max(one.in_features for one in layers)


def _has_bfloat16(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    major, _ = torch.cuda.get_device_capability(device)
    # AMD's numbers are others, and all that torch supports have it.
    return major >= 8 or torch.version.hip is not None
