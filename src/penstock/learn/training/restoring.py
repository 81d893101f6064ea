"""Weights and optimizer state of a checkpoint, for a run that is resumed or continues from another
one.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from penstock.core.errors import StateError
from penstock.learn.training.checkpoints import OPTIMIZER, SHARDED_OPTIMIZER, STATE, Checkpoint
from penstock.learn.training.optimizers import Optimizers
from penstock.learn.training.run_folder import MODEL
from penstock.learn.training.sharding import share_out
from penstock.models import LanguageModel
from penstock.models.ours.transformer import Transformer
from penstock.models.own_model import OwnModel
from penstock.models.saving import load_model, own_weights

_NAMED = 6
"""Parameters that a message names."""


def matching_weights(checkpoint: Checkpoint, model: LanguageModel, cure: str) -> dict[str, Tensor]:
    """The weights of a checkpoint, all with the names and shapes of a model.

    Raises:
        StateError: One has not, or a setting differs that shapes do not show; ends with `cure`.
    """
    unseen: list[tuple[str, Any, Any]] = []
    if isinstance(model, OwnModel):
        # The user's module defines the computation; the folder holds only weights.
        weights = own_weights(checkpoint.part(MODEL))
    else:
        saved = load_model(checkpoint.part(MODEL), device="cpu")
        weights, unseen = saved.state_dict(), _unseen_by_weights(saved, model)
    present = model.state_dict()
    shapes = [
        (
            f"weight {name}",
            *(list(w[name].shape) if name in w else "missing" for w in (weights, present)),
        )
        for name in sorted(weights.keys() | present.keys())
    ]
    for what, then, now in [*shapes, *unseen]:
        if then != now:
            raise StateError(
                f"{checkpoint.folder}: is of another model: {what} is {then} there, {now} "
                f"now; {cure}"
            )
    return weights


def _unseen_by_weights(saved: LanguageModel, model: LanguageModel) -> list[tuple[str, Any, Any]]:
    """Settings that change what a model computes but not the shapes of its weights: (setting,
    saved, present).
    """
    settings = [one.settings if isinstance(one, Transformer) else None for one in (saved, model)]
    found = []
    for name in ("heads", "rope_theta", "norm_eps", "sliding_window"):
        then, now = (getattr(one, name, None) for one in settings)
        found.append((f"model.{name}", then, now))
    return [*found, ("training.lora", saved.lora, model.lora)]


def take_weights(checkpoint: Checkpoint, model: LanguageModel) -> None:
    """Load the weights of another run's checkpoint.

    Raises:
        StateError: They are not those of the model.
    """
    cure = (
        "give the model as that run had it; or begin with model: from:RUN, which merges LoRA "
        "and fits new tokens, and leave weights out of continue_from.take"
    )
    model.load_state_dict(matching_weights(checkpoint, model, cure))


def take_optimizer(
    checkpoint: Checkpoint,
    optimizers: Optimizers,
    kind: str,
    beside: Sequence[str],
    say: Callable[[str], None],
) -> None:
    """Load an optimizer's state; a parameter that is new or has another shape begins without one,
    and is named.

    Args:
        checkpoint: Of another run, sharded or whole.
        optimizers: Without a state yet.
        kind: Its kind.
        beside: Parameters that are not of the model; they start fresh.
        say: Called with what was taken.

    Raises:
        StateError: The state is of another kind of optimizer.
    """
    then = checkpoint.value(STATE)["optimizer"]
    if then != kind:
        raise StateError(
            f"{checkpoint.folder}: continue_from takes the optimizer's state, and the "
            f"optimizer is {kind} now, {then} then; take that, or leave optimizer out of "
            "continue_from.take"
        )
    optimizers.fill_state()
    present = optimizers.state_tensors()
    sharded = (checkpoint.folder / SHARDED_OPTIMIZER).exists()
    whole = {} if sharded else checkpoint.tensors(OPTIMIZER)
    shapes = (
        checkpoint.shapes(SHARDED_OPTIMIZER)
        if sharded
        else {name: one.shape for name, one in whole.items()}
    )
    names = {_of(key) for key in present}
    reshaped = {
        _of(key)
        for key, one in present.items()
        if tuple(one.shape) != tuple(shapes.get(key, (-1,)))
    }
    fresh = reshaped | (names & set(beside))
    for key, one in present.items():
        if _of(key) in fresh:
            # As before a first step, which `fill_state` has counted.
            one.zero_()
    taken = {key: one for key, one in present.items() if _of(key) not in fresh}
    if sharded:
        checkpoint.read_into(SHARDED_OPTIMIZER, taken)
    else:
        share_out(whole, taken)
    say(
        f"optimizer: the state of {len(names) - len(fresh):,} of {len(names):,} parameters is taken"
    )
    left = {_of(key) for key in shapes} - names
    for what, those in (
        ("begin without a state, new or of another shape", fresh),
        ("are no longer trained", left),
    ):
        if those:
            more = f" and {len(those) - _NAMED:,} more" if len(those) > _NAMED else ""
            say(f"optimizer: parameters that {what}: {', '.join(sorted(those)[:_NAMED])}{more}")


def _of(key: str) -> str:
    return key.rsplit("/", 1)[0]
