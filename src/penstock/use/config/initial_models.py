"""The model that a run begins with: new, of transformers, from another run, or given.

One place decides whether it gets its weights before it is divided among processes, or after
(`penstock.models.later_weights`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.learn.training import RunFolder, TrainSettings
from penstock.learn.training.memory import check_memory
from penstock.models import ModelSettings, merge_lora
from penstock.models.building import HUGGING_FACE, build_model
from penstock.models.facts import with_facts
from penstock.models.later_weights import LaterWeights, WholeFirstError, drawn_later, load_later
from penstock.models.lora.lora import remove_lora
from penstock.models.own_code import is_own_code
from penstock.models.saving import load_model
from penstock.models.theirs.loading import load_huggingface
from penstock.use.config.run_file import DataSettings
from penstock.use.config.vocabularies import fit_vocabulary, tokenizer_of, vocabulary_size

if TYPE_CHECKING:
    from penstock.learn.training.distributed import Ranks
    from penstock.models import LanguageModel

GIVEN = "given"
"""Name of a model that was passed as a Python object."""
TRAINED = "from:"
"""Prefix of `model` that names a run or a model folder to take the initial weights from."""


def initial_model(
    data: DataSettings,
    start: ModelSettings | str,
    training: TrainSettings,
    ranks: "Ranks",
    say: Callable[[str], None],
    *,
    given: "LanguageModel | None",
    merged: bool,
) -> tuple["LanguageModel", LaterWeights | None]:
    """The model of a run, and where its weights come from if it has none yet.

    Ranks do not talk to each other here.

    Args:
        data: The data, opened.
        start: The section `model`, or `GIVEN`.
        training: How to train.
        ranks: The processes of this training.
        say: Called with each notice.
        given: A model as a Python object, with its weights.
        merged: Whether LoRA of another run is merged; else it is removed, for a run that is
            resumed, which needs the original base.

    Raises:
        ConfigError: There is no such model, it does not fit the data, or the memory.
        FormatError, CorruptionError: See `load_model`.
    """
    reason = "" if given is not None else _why_whole(start, training)
    check_memory(
        start,
        vocabulary_size(data),
        training,
        data.loader,
        device=ranks.device,
        ranks=ranks.data.size,
        shares=(training.shard_over or ranks.place.size) if reason is None else 1,
    )
    if given is not None:
        model = _fit(given, ranks)
        named = "model" if model.origin is None else f"the model {model.origin}"
        fit_vocabulary(model, data, tokenizer_of(model.origin), name=named, say=say)
        return model, None
    if training.shard:
        try:
            if reason is not None:
                raise WholeFirstError(reason)
            return _without_weights(data, start, training, ranks.device, say)
        except WholeFirstError as error:
            say(
                "weights: each process holds the whole model until it is divided "
                f"(training.shard): {error}"
            )
    packs = training.lora is not None and training.lora.quantize is not None
    # Whole matrices stay on the CPU, as stored, until they are in 4 bits.
    device = torch.device("cpu") if packs else ranks.device
    return _make_model(data, start, training, device, say, merged=merged), None


def _why_whole(start: ModelSettings | str, training: TrainSettings) -> str | None:
    """Why a model must have its weights from the beginning, by what the settings say; None: they
    may come later.
    """
    paths, lora = training.preference or training.policy, training.lora
    reasons = {
        "it is not sharded": not training.shard,
        "embeddings or modules are trained next to LoRA": lora is not None
        and bool(lora.train_embeddings or lora.modules_to_save),
        "its base is held in 4 bits": lora is not None and lora.quantize is not None,
        "the reference is a copy of it": paths is not None
        and paths.needs_reference
        and (paths.reference == "initial" or (paths.reference == "auto" and lora is None)),
        "it is a module of your own": isinstance(start, str) and is_own_code(start),
        "packages compute its recurrences, which are tried": training.recurrent_backends
        != ("torch",),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _without_weights(
    data: DataSettings,
    start: ModelSettings | str,
    training: TrainSettings,
    device: torch.device,
    say: Callable[[str], None],
) -> tuple["LanguageModel", LaterWeights]:
    """The model without weights, and where they come from.

    Raises:
        WholeFirstError: It needs them from the beginning.
    """
    if isinstance(start, ModelSettings):
        return drawn_later(
            start, vocab_size=vocabulary_size(data), device=device, seed=training.seed
        )
    model: LanguageModel
    if start.startswith(TRAINED):
        origin = start.removeprefix(TRAINED)
        run = RunFolder.open(origin)
        model, later = load_later(run.model, device=device)
        model = with_facts(model, run.facts)
    elif start.startswith(HUGGING_FACE):
        origin = start.removeprefix(HUGGING_FACE)
        model, later = load_later(origin, device=device, dtype=torch.float32)
    else:
        raise WholeFirstError("it is of an unknown kind")
    model.origin = origin
    tokenizer = tokenizer_of(origin)
    if tokenizer is not None and vocabulary_size(data) > model.vocab_size:
        raise WholeFirstError("its vocabulary grows")
    fit_vocabulary(model, data, tokenizer, name=f"the model {start}", say=say)
    return model, later


def _fit(model: "LanguageModel", ranks: "Ranks") -> "LanguageModel":
    """Move a model passed from Python to this rank's device, with weights in at least float32."""
    for weight in model.parameters():
        # In half precision an optimiser step is often smaller than the spacing of numbers, and
        # would be lost.
        weight.data = weight.data.to(ranks.device, torch.promote_types(weight.dtype, torch.float32))
    assert isinstance(model, torch.nn.Module)
    return model.to(ranks.device).train()


def is_gone(model: ModelSettings | str) -> bool:
    """Whether the model is `from:` a path that no longer exists."""
    return (
        isinstance(model, str)
        and model.startswith(TRAINED)
        and not Path(model.removeprefix(TRAINED)).exists()
    )


def _make_model(
    data: DataSettings,
    model: ModelSettings | str,
    training: TrainSettings,
    device: torch.device,
    say: Callable[[str], None],
    *,
    merged: bool = True,
) -> "LanguageModel":
    """Build the model with its initial weights; `merged`: as for `_trained_model`."""
    packs = training.lora is not None and training.lora.quantize is not None
    made: LanguageModel
    if isinstance(model, str) and model.startswith(TRAINED):
        path = model.removeprefix(TRAINED)
        made = _trained_model(path, device, merged=merged, widens=not packs)
    elif isinstance(model, str) and model.startswith(HUGGING_FACE):
        folder = model.removeprefix(HUGGING_FACE)
        if packs:
            made = load_huggingface(folder, device=device)
        else:
            made = build_model(model, vocab_size=1, device=device)
        made.origin = folder
    else:
        return build_model(
            model, vocab_size=vocabulary_size(data), device=device, seed=training.seed
        )
    fit_vocabulary(made, data, tokenizer_of(made.origin), name=f"the model {model}", say=say)
    return made


def _trained_model(
    path: str, device: torch.device, *, merged: bool = True, widens: bool = True
) -> "LanguageModel":
    """Load a trained model to continue with other data or another schedule. Weights in float32, or
    (`widens=False`) as stored.

    LoRA is merged, or (`merged=False`) removed for a run that is resumed, which needs the original
    base.
    """
    run = RunFolder.open(path)
    model = with_facts(load_model(run.model, device), run.facts)
    model.origin = path
    if model.lora is not None:
        (merge_lora if merged else remove_lora)(model)
    if widens:
        widen(model)
    return model


def widen(model: "LanguageModel") -> None:
    """Keep all weights in at least float32."""
    for weight in model.parameters():
        weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
