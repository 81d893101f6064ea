"""What is said of a training run before it starts: parameters, memory, rows, steps."""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from penstock.core.arrays import Int64
from penstock.learn.training.checks import trial_row
from penstock.learn.training.computing import in_words, kept_bytes
from penstock.learn.training.memory import held_bytes
from penstock.models import ModelSettings
from penstock.models.four_bits import num_weights
from penstock.models.recurrent.choice import recurrent_operations
from penstock.plan.loader.loader import Loader

if TYPE_CHECKING:
    from penstock.learn.distillation.distiller import Distiller
    from penstock.learn.training import Trainer
    from penstock.learn.training.distributed import Ranks


def describe(trainer: "Trainer", model: ModelSettings | str | None) -> list[tuple[str, str]]:
    """Summary of a run as (name, value): parameters, memory, tokens, steps."""
    parameters = num_weights(trainer.model)
    memory = held_bytes(trainer.model, trainer.settings, trainer.ranks.place.size)
    held = trainer.reference_parameters
    loader: Loader = trainer.loader
    if model is None and trainer.settings.beginning is not None:
        model = f"that of {trainer.settings.beginning.run}"
    plan = loader.settings
    first = loader.start.step
    slots = plan.sequence_length * loader.rows_before(trainer.steps)
    of_step = (
        "" if len(plan.ramp.phases) > 1 else f", {plan.sequence_length * plan.ramp.largest:,} slots"
    )
    way = _packing_way(trainer) if loader.needs_isolation else ""
    recurrent = recurrent_operations(trainer.model)
    return [
        (
            "model",
            f"{model.layers} layers of {model.width}"
            if isinstance(model, ModelSettings)
            else str(model),
        ),
        ("parameters", f"{parameters:,}"),
        ("weights, gradients, optimiser", f"{memory / 1e6:,.1f} MB a rank"),
        ("activations of a pass", f"about {_of_a_pass(trainer) / 1e6:,.1f} MB"),
        ("rows", f"{plan.ramp} of {plan.sequence_length} slots a step{of_step}"),
        (
            "steps",
            f"{f'{first + 1:,} to ' if first else ''}{trainer.steps:,}, at most {slots:,} tokens",
        ),
        ("computation", _computation(trainer)),
        *([("documents of a row", way)] if way else []),
        *([("recurrent operations", recurrent.describe())] if recurrent.backends else []),
        *([("reference model", f"{4 * held / 1e6:,.1f} MB a rank")] if held else []),
        *([] if trainer.distiller is None else [("teachers", _teachers(trainer.distiller))]),
        ("ranks", f"{trainer.ranks.place.size}, on {trainer.ranks.device}{_shared(trainer.ranks)}"),
        ("bits", ", ".join(f"{name} {value}" for name, value in trainer.bits.items())),
    ]


@runtime_checkable
class InPasses(Protocol):
    """A model that may take several passes for a row: one of transformers."""

    runs_several_passes: bool

    def packing_cost(self, begins: Int64, ends: Int64) -> str:
        """What a row of documents costs more than one pass, in words."""


def _packing_way(trainer: "Trainer") -> str:
    """How rows of several documents run, and what the first row costs more than one pass."""
    model = trainer.model
    way = model.packing(trainer.loader.settings.sequence_length).way
    # Where a row takes one pass, the plan need not be replayed.
    if not isinstance(model, InPasses) or not model.runs_several_passes:
        return way
    pieces = trainer.loader.explain(trainer.loader.step, row=0)
    begins = np.array([piece.begin for piece in pieces], np.int64)
    ends = begins + np.array([piece.num_tokens for piece in pieces], np.int64)
    return f"{way} (the first row: {model.packing_cost(begins, ends)})"


def _of_a_pass(trainer: "Trainer") -> int:
    """About how many bytes a pass keeps for its backward pass."""
    settings = trainer.settings
    slots = trainer.rows_per_pass * trainer.loader.settings.sequence_length
    each = kept_bytes(trainer.model, settings, trainer.model.compute_dtype)
    return slots * each // (settings.context_parallel * settings.micro_sequences)


def _computation(trainer: "Trainer") -> str:
    """In which dtype, by which attention, in which blocks."""
    model, settings, ranks = trainer.model, trainer.settings, trainer.ranks
    # A part of a row that several ranks share has attention of its own.
    ours = model.uses_our_attention and ranks.context.size == 1
    row = model.tensors(trial_row(trainer.loader), settings.attention) if ours else None
    over = settings.shard_over or ranks.place.size
    return in_words(model, settings, over, "" if row is None else row.attend.describe())


def _shared(ranks: "Ranks") -> str:
    return f"; {ranks.context.size} share each row" if ranks.context.size > 1 else ""


def _teachers(distiller: "Distiller") -> str:
    """The teachers with their losses, in one line."""
    named = (one.settings for one in distiller.teachers)
    found = ", ".join(
        f"{one.model or one.cache} ({one.loss.kind}, weight {one.weight:g})" for one in named
    )
    return found if distiller.settings.combine == "losses" else f"the average of {found}"
