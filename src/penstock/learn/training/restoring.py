"""Weights and optimizer state of a checkpoint, for a run that is resumed or continues from another
one.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.core.errors import StateError
from penstock.learn.training.checkpoints import OPTIMIZER, SHARDED_OPTIMIZER, STATE, Checkpoint
from penstock.learn.training.optimizers import Optimizers
from penstock.learn.training.run_folder import MODEL
from penstock.learn.training.sharding import share_out
from penstock.models import LanguageModel, ModelSettings
from penstock.models.lora.settings import LoraSettings
from penstock.models.ours.importing import refuse_not_finite
from penstock.models.ours.transformer import Transformer
from penstock.models.own_model import OwnModel
from penstock.models.saving import load_model, saved_settings, stored_weights
from penstock.models.tensor_files import StoredTensors, local_part
from penstock.models.theirs.model import HuggingFaceModel
from penstock.models.theirs.stored_names import stored_by_names

_NAMED = 6
"""Parameters that a message names."""


def load_weights(checkpoint: Checkpoint, model: LanguageModel, cure: str) -> None:
    """Load the weights of a checkpoint into a model; of a sharded one, each rank reads its part.

    Raises:
        StateError: A weight is missing or has another shape, or a setting differs that shapes do
            not show; ends with `cure`.
        CorruptionError: The weights are damaged, or not finite.
    """
    folder, present = checkpoint.part(MODEL), model.state_dict()
    stored, whole = stored_weights(folder), None
    if stored is None and isinstance(model, HuggingFaceModel) and _is_sharded(present):
        stored = _by_names(folder, model)
        if stored is not None:
            # One name of each tied weight.
            present = {name: present[name] for name in stored.shapes}
    if stored is None:
        # Only transformers, or the base of LoRA, knows what the names on the disk stand for.
        saved = load_model(folder, device="cpu")
        whole = saved.state_dict()
        shapes = {name: tuple(one.shape) for name, one in whole.items()}
        settings = saved.settings if isinstance(saved, Transformer) else None, saved.lora
    else:
        shapes, settings = stored.shapes, saved_settings(folder)
    _require_same(checkpoint, shapes, present, cure, _unseen_by_weights(*settings, model))
    if stored is not None and not isinstance(model, OwnModel):
        stored.read_into(present)
    else:
        # A module of the user's own may do more than copy.
        values = whole if stored is None else stored.read()
        assert values is not None
        if _is_sharded(present):
            share_out(values, present)
        else:
            model.load_state_dict(values)
    refuse_not_finite(folder, ((n, local_part(p)) for n, p in model.named_parameters()))


def _by_names(folder: Path, model: HuggingFaceModel) -> StoredTensors | None:
    """Weights in the layout of transformers, if their names are the model's; None: they are not."""
    if model.lora is not None or saved_settings(folder)[1] is not None:
        return None
    return stored_by_names(folder, model.inner, converts=False)


def _is_sharded(tensors: Mapping[str, Tensor]) -> bool:
    return any(hasattr(tensor, "device_mesh") for tensor in tensors.values())


def _require_same(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    present: Mapping[str, Tensor],
    cure: str,
    unseen: Sequence[tuple[str, Any, Any]],
) -> None:
    """Refuse weights with other names or shapes than the model's, and other settings."""
    now = {name: tuple(one.shape) for name, one in present.items()}
    found: list[tuple[str, Any, Any]] = [
        (f"weight {name}", _shown(shapes.get(name)), _shown(now.get(name)))
        for name in sorted(shapes.keys() | now.keys())
    ]
    for what, then, here in [*found, *unseen]:
        if then != here:
            raise StateError(
                f"{checkpoint.folder}: is of another model: {what} is {then} there, {here} "
                f"now; {cure}"
            )


def _shown(shape: tuple[int, ...] | None) -> list[int] | str:
    return "missing" if shape is None else list(shape)


def _unseen_by_weights(
    saved: ModelSettings | None, lora: LoraSettings | None, model: LanguageModel
) -> list[tuple[str, Any, Any]]:
    """Settings that change what a model computes but not the shapes of its weights: (setting,
    saved, present).
    """
    if isinstance(model, OwnModel):
        # The user's module defines the computation; the folder holds only weights.
        return []
    present = model.settings if isinstance(model, Transformer) else None
    found: list[tuple[str, Any, Any]] = [
        (f"model.{name}", getattr(saved, name, None), getattr(present, name, None))
        for name in ("heads", "rope_theta", "norm_eps", "sliding_window")
    ]
    return [*found, ("training.lora", lora, model.lora)]


def take_weights(checkpoint: Checkpoint, model: LanguageModel) -> None:
    """Load the weights of another run's checkpoint.

    Raises:
        StateError: They are not those of the model.
    """
    cure = (
        "give the model as that run had it; or begin with model: from:RUN, which merges LoRA "
        "and fits new tokens, and leave weights out of continue_from.take"
    )
    load_weights(checkpoint, model, cure)


def load_optimizer(checkpoint: Checkpoint, optimizers: Optimizers, *, sharded: bool) -> None:
    """Load the state of a checkpoint's optimizer, cut in any way, into one that is cut in any way.

    Raises:
        StateError: It is of other parameters.
        CorruptionError: It is damaged.
    """
    whole = (checkpoint.folder / OPTIMIZER).exists()
    if whole and not sharded:
        optimizers.load_state_tensors(checkpoint.tensors(OPTIMIZER))
        return
    stored = checkpoint.stored(OPTIMIZER if whole else SHARDED_OPTIMIZER)
    optimizers.fill_state()
    present = optimizers.state_tensors()
    if odd := sorted(stored.shapes.keys() ^ present.keys()):
        where = "the state" if odd[0] in stored.shapes else "the model"
        raise StateError(
            f"optimizer state: {odd[0]} is in {where} only; resume with the model and the "
            "trainable parameters that the state was saved with"
        )
    stored.read_into(present)


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
    whole = (checkpoint.folder / OPTIMIZER).exists()
    stored = checkpoint.stored(OPTIMIZER if whole else SHARDED_OPTIMIZER)
    shapes = stored.shapes
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
    stored.read_into(taken)
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
