"""Saves and loads models: `model.safetensors`, `model.json` with the settings, and LoRA in
`lora.safetensors`.

A folder may hold LoRA alone, with the place and the checksum of the base that it belongs to:
checkpoints of a run are small so, and share one base. Weights that ranks have cut among them are in
`weights.shards/`, a file of each rank (`tensor_files`).

Saving is exact: weights are stored in their own dtype. Models of transformers are stored in their
own layout, with a `model.json` that says so. Safe writing (temporary folder, fsync, rename,
checksum) is the task of checkpoints.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.core import formats
from penstock.core.errors import CorruptionError, FormatError
from penstock.core.json_values import JsonObject
from penstock.data.stores.files import usual_mode
from penstock.models.facts import ModelFacts, with_facts
from penstock.models.four_bits import make_four_bits, scales, write_four_bits
from penstock.models.language_model import LanguageModel
from penstock.models.lora.lora import add_lora, lora_weights, without_lora
from penstock.models.lora.settings import LoraSettings, NewRows
from penstock.models.ours.importing import import_llama, refusal, refuse_not_finite
from penstock.models.ours.initial_weights import empty_transformer
from penstock.models.ours.transformer import Transformer
from penstock.models.own_model import PREFIX, OwnModel, load_own, own_description
from penstock.models.settings import ModelSettings
from penstock.models.tensor_files import StoredTensors
from penstock.models.theirs.attention import one_line
from penstock.models.theirs.loading import inner_of_settings, load_huggingface
from penstock.models.theirs.model import HuggingFaceModel
from penstock.models.theirs.stored_names import INNER

MODEL, WEIGHTS, LORA = "model.json", "model.safetensors", "lora.safetensors"
WEIGHT_SHARDS = "weights.shards"
"""Folder of weights with a file of each rank, in place of `WEIGHTS`, or of what transformers
writes.
"""
LORA_ALONE = "lora"
"""Kind of a folder that has no weights but LoRA's."""


def save_model(
    model: LanguageModel,
    output: str | Path,
    weights: Mapping[str, Tensor] | None = None,
    *,
    base: "Base | None" = None,
    with_lora: bool = True,
    with_weights: bool = True,
) -> None:
    """Write a model to a folder, which is created if it is missing.

    Args:
        model: The model.
        output: Target folder.
        weights: All weights, such as a copy of them; None: the model's.
        base: Where the model without its LoRA is already; the folder then holds the LoRA alone.
        with_lora: Whether the LoRA is written too.
        with_weights: Whether the weights are written too; else only what they belong to: ranks
            write them, to `weights.shards`.
    """
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    if weights is None:
        # Asked for, a sharded model gives back what a pass has gathered: a thread must not ask.
        weights = model.state_dict() if with_weights else {}
    described: JsonObject = {**formats.MODEL.fields()}
    if base is None:
        described |= _save_base(model, output, without_lora(weights) if with_weights else None)
    else:
        described |= {
            "kind": LORA_ALONE,
            "base": {"folder": base.folder, "checksum": base.checksum},
        }
    if model.new_rows is not None:
        described |= {"new_rows": asdict(model.new_rows)}
    if model.lora is not None and with_lora:
        save_file(lora_weights(weights), output / LORA)
        described |= {"lora": asdict(model.lora)}
    usual_mode(*output.glob("*.safetensors"))
    (output / MODEL).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The model that LoRA was added to, in a folder of its own."""

    folder: str
    """Its place, relative to the folder of the LoRA."""
    checksum: str
    """See `base_checksum`."""


def base_checksum(weights: Mapping[str, Tensor]) -> str:
    """Checksum of a model's weights without LoRA: their names, dtypes, shapes and bytes. About 1
    GB/s.
    """
    whole = hashlib.sha256()
    for name, weight in sorted(without_lora(weights).items()):
        whole.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        whole.update(weight.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


def _save_base(model: LanguageModel, folder: Path, base: Mapping[str, Tensor] | None) -> JsonObject:
    """Write the weights without LoRA, if they are given; what `model.json` says of them."""
    if isinstance(model, Transformer):
        if base is not None:
            save_file(dict(base), folder / WEIGHTS)
        return {"kind": "transformer", "settings": asdict(model.settings)}
    if isinstance(model, OwnModel):
        return _save_own(model, base, folder)

    assert isinstance(model, HuggingFaceModel)
    if base is not None:
        names = {name.removeprefix(INNER): weight for name, weight in base.items()}
        model.inner.save_pretrained(folder, state_dict=names)
        write_four_bits(model.inner, folder)
    else:
        model.inner.config.save_pretrained(folder)
        if model.inner.can_generate():
            model.inner.generation_config.save_pretrained(folder)
    return {"kind": "huggingface"}


def _save_own(model: OwnModel, weights: Mapping[str, Tensor] | None, folder: Path) -> JsonObject:
    """Write the weights of a user module; returns its entry in `model.json`."""
    if weights is not None:
        # A file holds no weight twice; one that has two names is written under both.
        save_file(
            {name.removeprefix(PREFIX): weight.clone() for name, weight in weights.items()},
            folder / WEIGHTS,
        )
    return own_description(model)


def load_model(
    folder: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    module: torch.nn.Module | None = None,
) -> LanguageModel:
    """Read a model that `save_model` wrote, or a folder in the Hugging Face layout.

    Plain Llama and Mistral models in that layout become a `Transformer`, without transformers.

    Args:
        folder: Where the model is.
        device: Target device.
        dtype: Dtype of weights and computation; None: as stored.
        module: Your own module, whose weights are in the folder; None: made by the code that the
            folder names.

    Raises:
        FormatError: There is no model, its format is unknown, or its weights are quantised.
        CorruptionError: The weights do not fit the settings, or are not finite.
        ConfigError: transformers has no causal model for it, or cannot run it.
    """
    folder = Path(folder)
    if not (folder / MODEL).is_file():
        if not (folder / "config.json").is_file():
            raise FormatError(
                f"{folder}: has neither {MODEL} nor config.json; give the folder of a model"
            )

        if refusal(folder) is None:
            return import_llama(folder, device, dtype)
        return _load_huggingface(folder, device, dtype)
    described = description_of(folder)
    model: LanguageModel
    if described["kind"] == LORA_ALONE:
        model = _load_base(folder, described["base"], device, dtype)
    elif described["kind"] == "huggingface":
        model = _load_huggingface(folder, device, dtype)
    elif described["kind"] == "own":
        model = _load_own(folder, described, module, device, dtype)
    else:
        model = _load_transformer(folder, described["settings"], device, dtype)
    if described.get("new_rows") is not None:
        model.new_rows = NewRows(**described["new_rows"])
    if described.get("lora") is not None:
        _load_lora(model, folder, described["lora"])
    return model


def _load_base(
    folder: Path, written: JsonObject, device: torch.device | str, dtype: torch.dtype | None
) -> LanguageModel:
    """The model that the LoRA of a folder belongs to."""
    place = folder / written["folder"]
    try:
        # On the CPU and as stored, because the checksum is of these bytes.
        model = load_model(place)
    except FormatError as error:
        raise CorruptionError(
            f"{folder}: holds LoRA alone, and the model that it belongs to cannot be read: {error}"
        ) from None
    if base_checksum(model.state_dict()) != written["checksum"]:
        raise CorruptionError(
            f"{place}: is not the model that the LoRA of {folder} was trained on: its weights "
            "have another checksum; copy both again, from the same run"
        )
    return model if (str(device), dtype) == ("cpu", None) else load_model(place, device, dtype)


def base_written(folder: Path) -> str | None:
    """Checksum of the base of a folder with LoRA alone; None: the folder holds its base itself."""
    described = description_of(folder)
    return described["base"]["checksum"] if described["kind"] == LORA_ALONE else None


def _load_lora(model: LanguageModel, folder: Path, written: JsonObject) -> None:
    add_lora(model, LoraSettings.of(written))
    try:
        kept, stored = lora_weights(model.state_dict()), load_file(folder / LORA)
        with torch.no_grad():
            for name, weight in kept.items():
                weight.copy_(stored[name])
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise CorruptionError(
            f"{folder / LORA}: {one_line(error)}; copy the model again, or take another checkpoint"
        ) from None


def _load_huggingface(
    folder: Path, device: torch.device | str, dtype: torch.dtype | None
) -> LanguageModel:
    if (folder / WEIGHT_SHARDS).is_dir():
        return _load_cut(folder, device, dtype)
    return load_huggingface(folder, device=device, dtype=dtype)


def _load_cut(
    folder: Path, device: torch.device | str, dtype: torch.dtype | None
) -> HuggingFaceModel:
    """A model of transformers whose weights are in `weights.shards`, by the names of its module."""
    inner, weights = inner_of_settings(folder, None), _read_weights(folder)
    try:
        for name, weight in inner.named_parameters():
            weight.data = weight.data.to(weights[INNER + name].dtype)
        inner.load_state_dict({name.removeprefix(INNER): one for name, one in weights.items()})
    except (KeyError, RuntimeError) as error:
        raise CorruptionError(
            f"{folder / WEIGHT_SHARDS}: {one_line(error)}; take another checkpoint"
        ) from None
    refuse_not_finite(folder, inner.named_parameters())
    model = HuggingFaceModel(inner.to(device=device, dtype=dtype).train())
    return with_facts(model, ModelFacts.of_folder(folder))


def _load_own(
    folder: Path,
    described: JsonObject,
    module: torch.nn.Module | None,
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> LanguageModel:
    model = load_own(folder, described, module)
    weights = _read_weights(folder)
    if not (folder / WEIGHT_SHARDS).is_dir():
        weights = {f"{PREFIX}{name}": weight for name, weight in weights.items()}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CorruptionError(
            f"{folder / WEIGHTS}: is of another module: {one_line(error)}"
        ) from None
    refuse_not_finite(folder, model.named_parameters())
    return model.to(device=device, dtype=dtype)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Whole weights of a folder, by the names that they are stored with.

    Raises:
        CorruptionError: They cannot be read.
    """
    if (folder / WEIGHT_SHARDS).is_dir():
        return StoredTensors((folder / WEIGHT_SHARDS).iterdir()).read()
    try:
        return load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CorruptionError(
            f"{folder / WEIGHTS}: {one_line(error)}; copy the model again, or take another "
            "checkpoint"
        ) from None


def stored_weights(folder: Path) -> StoredTensors | None:
    """The weights of a folder that `save_model` wrote, by their names in the model; None: only
    `load_model` knows them, as in the layout of transformers, or of LoRA next to its base.

    Raises:
        CorruptionError: They cannot be read.
    """
    if (folder / WEIGHT_SHARDS).is_dir():
        return StoredTensors((folder / WEIGHT_SHARDS).iterdir())
    kind = description_of(folder)["kind"]
    if kind not in ("transformer", "own") or (folder / LORA).is_file():
        return None
    return StoredTensors([folder / WEIGHTS], PREFIX if kind == "own" else "")


def saved_settings(folder: Path) -> tuple[ModelSettings | None, LoraSettings | None]:
    """The settings of a `Transformer`, if it is one, and of the LoRA, of a folder that `save_model`
    wrote.
    """
    described = description_of(folder)
    lora = described.get("lora")
    own = described["kind"] == "transformer"
    return (
        _settings(folder, described["settings"]) if own else None,
        None if lora is None else LoraSettings.of(lora),
    )


def description_of(folder: Path) -> JsonObject:
    """What the `model.json` of a folder says.

    Raises:
        CorruptionError: It is damaged.
        FormatError: Its format or the kind of its model is unknown.
    """
    path = folder / MODEL
    try:
        described: JsonObject = json.loads(path.read_text(encoding="utf-8"))
        _, kind = described["format"], described["kind"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptionError(f"{path}: {error!r}; copy the model again") from None
    formats.MODEL.check(described, path, cure="save the model again")
    if kind not in (known := ("transformer", "huggingface", "own", LORA_ALONE)):
        raise FormatError(
            f"{path}: the model's kind is {kind!r}, expected one of {', '.join(known)}; use "
            "the version that wrote it"
        )
    return described


def _settings(folder: Path, written: JsonObject) -> ModelSettings:
    known = {field.name for field in fields(ModelSettings)}
    if unknown := sorted(set(written) - known):
        raise FormatError(
            f"{folder / MODEL}: unknown settings {', '.join(unknown)}; use the version that "
            "wrote it"
        )
    return ModelSettings.of(written)


def _load_transformer(
    folder: Path, written: JsonObject, device: torch.device | str, dtype: torch.dtype | None
) -> Transformer:
    settings = _settings(folder, written)
    if dtype == torch.float32:
        settings = replace(settings, dtype="float32")
    try:
        weights = _read_weights(folder)
        stored = weights["embedding.weight"].dtype
        model = empty_transformer(settings, device, dtype or stored)
        make_four_bits(model, weights)
        model.load_state_dict(weights)
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise CorruptionError(
            f"{folder / WEIGHTS}: {one_line(error)}; copy the model again, or take another "
            "checkpoint"
        ) from None
    refuse_not_finite(folder, (*model.named_parameters(), *scales(model)))
    return model
