"""Models that are built without weights, and where these come from once the model is divided among
ranks.

A model that fits on no single rank is built with its parameters on the meta device
(`on_meta`); settings, trials and refusals need no weights. Then it is sharded, and each rank fills
its own part: read from files (`stored`), drawn (`seed`), or sent by the first rank, which alone
reads the whole model (`whole`), where only transformers knows what names on the disk stand for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from penstock.core.errors import ConfigError
from penstock.models.facts import ModelFacts, with_facts
from penstock.models.four_bits import is_four_bits
from penstock.models.language_model import LanguageModel
from penstock.models.lora.settings import NewRows
from penstock.models.on_meta import parameters_on_meta
from penstock.models.ours.importing import refusal, stored_llama
from penstock.models.ours.initial_weights import empty_transformer
from penstock.models.ours.transformer import Transformer
from penstock.models.saving import (
    MODEL,
    WEIGHT_SHARDS,
    description_of,
    saved_settings,
    stored_weights,
)
from penstock.models.settings import ModelSettings
from penstock.models.tensor_files import StoredTensors
from penstock.models.theirs.loading import inner_of_settings, read_huggingface, refuse_folder
from penstock.models.theirs.model import HuggingFaceModel
from penstock.models.theirs.stored_names import INNER, stored_by_names, tied_names


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LaterWeights:
    """Where the weights of a model without weights come from."""

    folder: Path | None = None
    """The folder that has them; None: they are drawn."""
    stored: StoredTensors | None = None
    """Files that have them by the model's own names."""
    whole: Callable[[], Mapping[str, Tensor]] | None = None
    """Reads all of them, by the model's own names; called on one rank."""
    seed: int | None = None
    """They are drawn with this seed."""
    lora_seed: int | None = None
    """LoRA is drawn with this seed; None: the model has none."""
    load: Callable[[LanguageModel], None] | None = None
    """Loads others in their place, into the sharded model; called on all ranks."""
    is_resumed: bool = False
    """A checkpoint gives all of them before they are used."""

    def made_from(self, model: LanguageModel) -> str:
        """Digest of what must be the same on all ranks: names, shapes, and the seed, or samples of
        what is stored.
        """
        whole = blake2b(digest_size=6)
        for name, weight in sorted(model.state_dict().items()):
            whole.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        whole.update(repr((self.seed, self.lora_seed)).encode())
        if self.stored is not None:
            whole.update(self.stored.sampled())
        return whole.hexdigest()


class WholeFirstError(Exception):
    """Why the weights of a model must be whole on each rank before they are divided."""


def drawn_later(
    settings: ModelSettings, *, vocab_size: int, device: torch.device, seed: int
) -> tuple[Transformer, LaterWeights]:
    """A transformer of ours without weights, which are to be drawn; arguments as of `build_model`.

    Raises:
        ConfigError: The vocabulary does not fit.
        WholeFirstError: It reads images.
    """
    settings = settings.with_vocabulary(vocab_size)
    model = _transformer(
        settings, device, torch.float64 if settings.dtype == "float64" else torch.float32
    )
    return model, LaterWeights(seed=seed)


def load_later(
    folder: str | Path, *, device: torch.device, dtype: torch.dtype | None = None
) -> tuple[LanguageModel, LaterWeights]:
    """A model without weights that are in a folder, as `load_model` and `load_huggingface` make it.

    Args:
        folder: Of `save_model`, or in the Hugging Face layout.
        device: Where its weights will be.
        dtype: float32: a model of transformers, whatever is stored; None: as stored, but at least
            float32, and what has the settings of a `Transformer` becomes one.

    Raises:
        ConfigError, FormatError, CorruptionError: As `load_model`, without what only weights show.
        WholeFirstError: It must be loaded whole.
    """
    folder = Path(folder)
    if dtype is not None:
        return _load_theirs(folder, device, dtype)
    if not (folder / MODEL).is_file():
        if (folder / "config.json").is_file() and refusal(folder) is None:
            found = _stored_transformer(folder, *stored_llama(folder), device)
            return with_facts(found[0], ModelFacts.of_folder(folder)), found[1]
        return _load_theirs(folder, device, None)
    described = description_of(folder)
    if described.get("lora") is not None:
        raise WholeFirstError("its weights have LoRA, which is merged or removed first")
    model: LanguageModel
    if described["kind"] == "huggingface":
        model, later = _load_theirs(folder, device, None)
    elif described["kind"] == "transformer":
        settings, stored = saved_settings(folder)[0], stored_weights(folder)
        assert settings is not None, "it is a transformer"
        assert stored is not None, "it has no LoRA"
        model, later = _stored_transformer(folder, settings, stored, device)
    else:
        raise WholeFirstError("it is a module of your own")
    if described.get("new_rows") is not None:
        model.new_rows = NewRows(**described["new_rows"])
    return model, later


def _stored_transformer(
    folder: Path, settings: ModelSettings, stored: StoredTensors, device: torch.device
) -> tuple[Transformer, LaterWeights]:
    kept = {stored.dtype_of(name) for name in stored.shapes}
    if len(kept) > 1:
        # Whole, all are rounded to the dtype of the embedding first.
        raise WholeFirstError("its files hold weights of several dtypes")
    model = _transformer(settings, device, torch.promote_types(kept.pop(), torch.float32))
    stored.require_shapes({name: tuple(one.shape) for name, one in model.state_dict().items()})
    return model, LaterWeights(folder=folder, stored=stored)


def _transformer(settings: ModelSettings, device: torch.device, dtype: torch.dtype) -> Transformer:
    if settings.vision is not None:
        raise WholeFirstError("it has a vision tower")
    model = empty_transformer(settings, "meta", dtype)
    model.home = device
    return model


def _load_theirs(
    folder: Path, device: torch.device, dtype: torch.dtype | None
) -> tuple[HuggingFaceModel, LaterWeights]:
    """A model of transformers, in the layout of a hub or with `weights.shards`."""
    if not (folder / "config.json").is_file():
        raise WholeFirstError("it is not in a folder")
    config = refuse_folder(folder)
    if is_four_bits(config):
        raise WholeFirstError("its weights are in 4 bits")
    if {"vision_config", "audio_config"} & set(config):
        raise WholeFirstError("it reads images or sounds")
    with parameters_on_meta():
        inner = inner_of_settings(folder, dtype)
    cut = dtype is None and (folder / WEIGHT_SHARDS).is_dir()
    if cut:
        stored = stored_weights(folder)
        assert stored is not None
        stored.require_shapes(
            {INNER + name: tuple(one.shape) for name, one in inner.state_dict().items()}
        )
    else:
        stored = stored_by_names(folder, inner, converts=dtype is None)
        if stored is not None and _twice(inner, stored):
            # transformers ties them if they are equal.
            raise WholeFirstError("its files hold tied weights twice")
    for name, weight in inner.named_parameters():
        kept = stored.dtype_of(INNER + name) if cut and stored is not None else weight.dtype
        weight.data = weight.data.to(torch.promote_types(kept, torch.float32))
    try:
        model = HuggingFaceModel(inner.train(), home=device)
    except ConfigError as error:
        raise WholeFirstError(str(error)) from None
    if model.trial_model.uses_our_attention != model.uses_our_attention:
        raise WholeFirstError(f"it does not run without weights: {model.fit.reason}")
    later = LaterWeights(folder=folder, stored=stored)
    if stored is None:
        later = replace(later, whole=partial(_whole, folder, dtype, sorted(_names(inner))))
    return with_facts(model, ModelFacts.of_folder(folder)), later


def _twice(inner: nn.Module, stored: StoredTensors) -> bool:
    return any(
        sum(INNER + name in stored.shapes for name in names) > 1 for names in tied_names(inner)
    )


def _names(inner: nn.Module) -> set[str]:
    """Names of parameters, one of those that are tied."""
    return {name for name, _ in inner.named_parameters()}


def _whole(folder: Path, dtype: torch.dtype | None, expected: list[str]) -> dict[str, Tensor]:
    """All weights of a folder of transformers, by their names behind the door."""
    inner = read_huggingface(folder, dtype)
    if sorted(_names(inner)) != expected:
        raise ConfigError(
            f"{folder}: its files hold weights that config.json says are tied, with other values; "
            "set tie_word_embeddings to false there"
        )
    buffers = dict(inner.named_buffers())
    kept = {name: buffers[name] for name in inner.state_dict().keys() & buffers.keys()}
    return {INNER + name: one.detach() for name, one in [*inner.named_parameters(), *kept.items()]}
