"""Memory of a run: what cannot fit is refused, and rows are joined as far as there is room."""

import os
from dataclasses import replace

import torch

from penstock.core.errors import ConfigError
from penstock.learn.training.computing import blocks_of, kept_bytes, precision_of
from penstock.learn.training.settings import Checkpointing, TrainSettings
from penstock.models import LanguageModel, ModelSettings
from penstock.models.four_bits import four_bit_bytes, has_four_bits
from penstock.models.language_model import require_packed_rows
from penstock.models.own_model import OwnModel
from penstock.plan.loader import PlanSettings
from penstock.plan.loader.loader import Loader

SLOTS_CPU, SLOTS_GPU = 2048, 16384
"""Slots of a pass from which on a larger one is hardly faster: on the CPU by `bench_training.py`
(1.15 times the speed of passes of 256 slots at 1.3 million parameters, 1.07 at 10 million); on a
GPU a usual choice, not measured.
"""

MEMORY_SHARE = 0.25
"""Share of the device's memory that the activations of joined rows may need, as `kept_bytes`
estimates them.
"""


def check_memory(
    model: ModelSettings | str,
    vocab_size: int,
    training: TrainSettings,
    plan: PlanSettings,
    *,
    device: torch.device,
    ranks: int,
    shares: int = 1,
) -> None:
    """Refuse a model, or the rows of a step, that cannot fit into all memory of the machine.
    Allocates nothing.

    Args:
        model: The section `model`; of folders nothing is known yet.
        vocab_size: Ids of the data.
        training: How to train.
        plan: The rows.
        device: Of this rank.
        ranks: Those that get different rows.
        shares: Ranks that divide a model which gets its weights only then; 1: each rank holds it
            whole at first.

    Raises:
        ConfigError: It does not fit.
    """
    here = device_memory(torch.device("cpu"))
    distances = 1
    if isinstance(model, ModelSettings):
        distances = model.prediction_heads
        count = model.with_vocabulary(vocab_size).num_parameters()
        # Of LoRA, or until they are sharded, only the weights; otherwise also gradients and the
        # optimizer's state.
        whole_first = training.lora is not None or (training.shard and shares == 1)
        needed = count * (4 if whole_first else 16) // shares
        _compare(
            "model",
            f"{count:,} parameters"
            + (f", divided among {shares} processes," if shares > 1 else ""),
            needed,
            device_memory(device),
            "make layers or width smaller",
        )
    slots = -(-plan.ramp.largest // ranks) * plan.sequence_length
    _compare(
        "data.loader",
        f"a step of {plan.ramp.largest:,} rows of {plan.sequence_length:,} slots",
        slots * (12 + 8 * distances),
        here,
        "lower rows_per_step or sequence_length",
    )


def _compare(where: str, what: str, needed: int, there: int, cure: str) -> None:
    if needed > there:
        raise ConfigError(
            f"{where}: {what} need {needed / 1e9:,.1f} GB, and there are {there / 1e9:,.1f}; {cure}"
        )


def held_bytes(model: LanguageModel, settings: TrainSettings, ranks: int) -> int:
    """What a rank holds all the time: weights, gradients and the optimizer's state, of which each
    rank has its share where they are sharded.

    Args:
        model: The model.
        settings: How to train.
        ranks: Processes.
    """
    # Matrices in 4 bits are no parameters. A frozen weight has no gradient and no state; a trained
    # one has four numbers of 32 bits.
    count = four_bit_bytes(model) + sum(
        weight.numel() * (16 if weight.requires_grad else weight.element_size())
        for weight in model.parameters()
    )
    return count // (settings.shard_over or ranks) if settings.shard else count


def check_room(
    model: LanguageModel, settings: TrainSettings, device: torch.device, ranks: int, length: int
) -> None:
    """Refuse rows of which not even one fits into the device next to the weights.

    Args:
        model: As it was loaded.
        settings: How to train.
        device: Where the model is trained.
        ranks: Processes.
        length: Slots of a row.

    Raises:
        ConfigError: A row does not fit; says which settings would make it fit.
    """
    dtype, held = precision_of(settings, model), held_bytes(model, settings, ranks)
    slots = -(-length // (settings.context_parallel * settings.micro_sequences))

    def needed(kind: Checkpointing) -> int:
        return held + slots * kept_bytes(
            model, replace(settings, activation_checkpointing=kind), dtype
        )

    there, now = device_memory(device), settings.activation_checkpointing
    if needed(now) <= there:
        return
    kinds: tuple[Checkpointing, ...] = ("selective", "full")
    enough = next(
        (kind for kind in kinds if blocks_of(model) and needed(kind) <= there < needed(now)), None
    )
    cures = [
        f"set training.activation_checkpointing to {enough} ({needed(enough) / 1e9:,.1f} GB)"
        if enough and settings.micro_sequences == 1
        else "",
        "share rows among processes (training.context_parallel)",
        ""
        if settings.shard or has_four_bits(model)
        else "share weights among them (training.shard)",
        "hold the frozen weights in 4 bits (training.lora.quantize: nf4)"
        if model.lora is not None and not has_four_bits(model)
        else "",
        "lower data.loader.sequence_length",
    ]
    raise ConfigError(
        f"training: a row of {length:,} slots and the weights need about {needed(now) / 1e9:,.1f} "
        f"GB of {device}, and there are {there / 1e9:,.1f}: {held / 1e9:,.1f} for weights, "
        f"gradients and optimizer, the rest for activations; {', or '.join(filter(None, cures))}"
    )


def no_room(error: torch.OutOfMemoryError, settings: TrainSettings, rows: int) -> ConfigError:
    """The error of a step for which the device had too little memory, with what lowers it."""
    kinds = {"none": "selective, then full", "selective": "full"}
    more = kinds.get(settings.activation_checkpointing)
    cures = [
        f"lower training.rows_per_pass (now {rows})" if rows > 1 else "",
        f"set training.activation_checkpointing to {more}" if more else "",
        "share weights among processes (training.shard: true)" if not settings.shard else "",
        "lower data.loader.sequence_length",
    ]
    found = str(error).partition(". ")[0]
    return ConfigError(
        f"training: the device has too little memory for a step ({found}); "
        f"{', or '.join(filter(None, cures))}. What was saved is kept: resume=True (--resume) goes "
        "on from it"
    )


def rows_per_pass(
    model: LanguageModel, loader: Loader, settings: TrainSettings, *, taught: bool
) -> int:
    """Rows that the model processes in one pass: those of the settings, or a choice by row length,
    model and device.

    The choice is one row with teachers, micro-sequences, or a model or loss of the user's own,
    which may count on it; and where joined rows would cost more: with attention over all pairs of
    slots.

    Args:
        model: The model.
        loader: This rank's loader.
        settings: How to train.
        taught: Whether there are teachers.

    Raises:
        IsolationError: The settings ask for several, and the model would let documents of a row see
            each other.
    """
    ramp, ranks = loader.settings.ramp, loader.data_parallel.size
    slots, rows = loader.settings.sequence_length, ramp.largest // ranks
    asked = settings.rows_per_pass
    if asked is not None:
        count = min(asked, rows)
        if count > 1:
            require_packed_rows(model, count * slots, slots)
        return count
    own = isinstance(model, OwnModel) or settings.loss is not None
    pairs = settings.attention == "dense" or not model.divisible_rows
    if own or pairs or taught or settings.micro_sequences > 1:
        return 1
    on_cpu = model.device.type == "cpu"
    dtype = precision_of(settings, model)
    room = MEMORY_SHARE * device_memory(model.device) // kept_bytes(model, settings, dtype)
    most = max(
        1, min(SLOTS_CPU if on_cpu else SLOTS_GPU, int(room)) * settings.context_parallel // slots
    )
    # Passes of about the same size; a compiled model must see only one.
    count = -(-rows // -(-rows // most))
    while settings.compile and ramp.divisor // ranks % count:
        count -= 1
    return count if count == 1 or model.packing(count * slots).longest >= slots else 1


def device_memory(device: torch.device) -> int:
    """All memory of a device, in bytes: what is free changes from run to run."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
