"""Exports a model in the Hugging Face layout (weights, tokenizer, template, stop ids), for
transformers and vLLM.

The folder also works with llama.cpp. `layouts` says which model of transformers a `Transformer`
becomes. Only its first prediction head and the main mixers of stochastic blocks are exported.
Logits are equal up to rounding.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from penstock.chat import Template
from penstock.core.errors import ConfigError, OutputError
from penstock.core.folders import local_path
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.data.stores.files import new_folder, usual_mode
from penstock.media.processor import Processor
from penstock.models.facts import GENERATION, ModelFacts, all_ends, is_length
from penstock.models.four_bits import dequantise
from penstock.models.isolation.lengths import MOST_POSITIONS
from penstock.models.language_model import LanguageModel
from penstock.models.ours.layouts import config_of, layout_of, weights_of
from penstock.models.ours.transformer import Transformer
from penstock.models.settings import ModelSettings
from penstock.models.stored_dtype import (
    StoredDtype,
    cast_weights,
    kept_in_float32,
    stored_dtype,
    with_dtype,
)
from penstock.models.theirs.model import HuggingFaceModel
from penstock.tokenizers import Tokenizer

EXPORT = "export.json"
"""In an exported folder: the names of the files that `export` wrote, so that `overwrite` removes
only those.
"""

_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
"""Template variables that transformers fills in from its tokenizer."""
_PLACES = re.compile(r"(path|file|dir|folder|name)$")


def export(
    model: LanguageModel,
    output: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    template: Template | None = None,
    processor: Processor | None = None,
    stop_ids: Sequence[int] = (),
    context_length: int = 2048,
    facts: ModelFacts | None = None,
    dtype: StoredDtype | None = None,
    overwrite: bool = False,
) -> tuple[str, ...]:
    """Write a folder that transformers' `from_pretrained` loads. It holds no absolute path, so it
    can be moved.

    Args:
        model: The model; its LoRA must be merged first. Matrices in 4 bits are dequantised, in
            place.
        output: Target folder, new or empty; emptied again if writing fails.
        overwrite: Replace an earlier export in the folder, which stays complete if writing fails.
        tokenizer: Its files are exported too.
        processor: Of the model's images; its files are exported too.
        template: Chat template; exported with the variables of its training as defaults.
        stop_ids: Tokens that end a generation; empty: EOS.
        context_length: Maximum tokens of a text, a limit in transformers and vLLM. A limit of the
            base that this does not shrink stays what it is.
        facts: What the base says, and how texts begin; None: what the model's loader found.
        dtype: Dtype of the written weights, which `config.json` names; None: as the model has them.

    Returns:
        Messages about what was left out or may not be readable elsewhere.

    Raises:
        ConfigError: The model has LoRA that is not merged, or a weight that is too large for
            `dtype`.
        OutputError: The folder holds an earlier export and `overwrite` is false, or other files, or
            cannot be made.
        OSError: It cannot be written.
    """
    if model.lora is not None:
        raise ConfigError(
            "export: the model has LoRA that is not merged; call merge_lora(model) first"
        )
    if isinstance(model, Transformer) and model.vision is not None:
        raise ConfigError(
            "export: our vision tower has no layout that transformers knows; train hf:path instead"
        )
    if isinstance(model, Transformer):
        layout_of(model.settings)  # refused before anything is written
    facts = model.facts if facts is None else facts
    stored = stored_dtype(dtype)
    dequantise(model)
    with output_folder(Path(output), overwrite) as output:
        # The model comes last, so that an incomplete folder has none; the processor first, as it
        # has a tokenizer, too.
        if processor is not None:
            processor.save(output)
        if tokenizer is not None:
            export_tokenizer(tokenizer, output, context_length, facts)
        if template is not None:
            (output / "chat_template.jinja").write_text(template_text(template), encoding="utf-8")
        if isinstance(model, Transformer):
            written = _generation(tokenizer, stop_ids, facts) | _cached(model.settings)
            _write_json(output / GENERATION, written)
            ids = _ids(tokenizer, list(stop_ids))
            _export_transformer(model, output, ids, context_length, facts, stored)
        else:
            if not isinstance(model, HuggingFaceModel):
                raise ConfigError(
                    "export: a model of your own has no layout that transformers knows; read "
                    "its weights from RUN/checkpoints/step-…/model/model.safetensors"
                )
            _export_theirs(model, output, stored)
            _shrink(output, context_length, facts)
            _write_json(output / GENERATION, _generation(tokenizer, stop_ids, facts))
        usual_mode(*output.glob("*.safetensors"))
        remove_places(output)
    return tuple(_notices(model, tokenizer, context_length, facts))


def check_output(folder: Path, overwrite: bool) -> tuple[str, ...]:
    """Names of the files of an earlier export that may be replaced; empty if the folder is new or
    empty.

    Raises:
        OutputError: The folder holds an earlier export and `overwrite` is false, or other files.
        ConfigError: It is a URL.
    """
    folder = local_path(folder, "an output folder")
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: is a file; name a folder")
    names = sorted(os.listdir(folder)) if folder.exists() else []
    if not names:
        return ()
    if EXPORT not in names:
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        raise OutputError(f"{folder}: holds other files ({shown}); name an empty or a new folder")
    if not overwrite:
        raise OutputError(
            f"{folder}: holds an earlier export; choose another folder, or set overwrite to "
            "replace it"
        )
    try:
        files = tuple(json.loads((folder / EXPORT).read_bytes())["files"])
        if all((folder / name).resolve().is_relative_to(folder.resolve()) for name in files):
            return files
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise OutputError(
        f"{folder / EXPORT}: is damaged, so the earlier export cannot be replaced; choose "
        "another folder"
    )


@contextmanager
def output_folder(folder: Path, overwrite: bool) -> Iterator[Path]:
    """The folder to write to; in place of an earlier export, one that replaces it once it is
    complete.
    """
    earlier = check_output(folder, overwrite)
    if not earlier:
        with new_folder(folder) as place:
            yield place
            _write_names(place, _files(place))
        return
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        place = Path(temporary)
        yield place
        _replace(folder, place, earlier)


def _replace(folder: Path, place: Path, earlier: Sequence[str]) -> None:
    """Replace the files of an earlier export by those of `place`; can be repeated if it was killed
    meanwhile.
    """
    files = _files(place)
    foreign = [name for name in files if name not in earlier and (folder / name).exists()]
    if foreign:
        raise OutputError(
            f"{folder / foreign[0]}: was not written by the earlier export; choose another folder"
        )
    _write_names(folder, sorted({*earlier, *files}))
    for name in earlier:
        (folder / name).unlink(missing_ok=True)
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(place / name, folder / name)
    _write_names(folder, files)


def _files(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def _write_names(folder: Path, names: Sequence[str]) -> None:
    _write_json(folder / EXPORT, {"files": list(names)})


def _notices(
    model: LanguageModel, tokenizer: Tokenizer | None, context_length: int, facts: ModelFacts
) -> Iterator[str]:
    if facts.context_length is not None and context_length != facts.context_length:
        change = "shrunk" if context_length < facts.context_length else "raised"
        yield (
            f"the context is {change} to {context_length:,} tokens; the base reads "
            f"{facts.context_length:,}"
        )
    if (further := len(model.prediction_weights) - 1) > 0:
        yield f"{further} further prediction heads are left out: the layout does not support them"
    if isinstance(model, Transformer) and model.settings.is_stochastic:
        yield "stochastic blocks are exported with their main mixer; the other choices are left out"
    if isinstance(model, Transformer) and _only_recurrent(model.settings):
        yield (
            "no block has attention, so transformers generates without a cache "
            "(generation_config.json)"
        )
    if tokenizer is not None and facts.begin_ids is not None:
        wanted, can = facts.begin_ids, tokenizer.beginning_with(facts.begin_ids).begin_ids
        if wanted != can:
            has = "with BOS, which the exported tokenizer does not add" if wanted else "without BOS"
            yield f"the model was trained on texts {has}; say so to the programs that use it"
    if tokenizer is not None and "tokenizer.json" not in tokenizer.source_bytes:
        files = ", ".join(tokenizer.source_bytes)
        yield (
            f"the vocabulary is {tokenizer.kind} ({files}), which penstock reads and transformers "
            "may not"
        )


def template_text(template: Template) -> str:
    """A template's text, with defaults for its own variables."""
    own = {name: value for name, value in template.variables.items() if name not in _TOKENS}
    return (
        "".join(f"{{% set {n} = {n} if {n} is defined else {v!r} %}}" for n, v in own.items())
        + template.source
    )


def _export_transformer(
    model: Transformer,
    folder: Path,
    ids: JsonObject,
    context_length: int,
    facts: ModelFacts,
    dtype: torch.dtype | None,
) -> None:
    weights = weights_of(model.settings, model.state_dict())
    save_file(cast_weights(weights, dtype), folder / "model.safetensors", metadata={"format": "pt"})
    config = config_of(model.settings, context_length, dtype or model.compute_dtype)
    _write_json(folder / "config.json", {**config, **facts.dropout, **ids})


def _export_theirs(model: HuggingFaceModel, folder: Path, dtype: torch.dtype | None) -> None:
    if dtype is None:
        model.inner.save_pretrained(folder)
        return
    weights = cast_weights(model.inner.state_dict(), dtype, kept_in_float32(model.inner, dtype))
    model.inner.save_pretrained(folder, state_dict=weights)
    path = folder / "config.json"
    _write_json(path, with_dtype(json.loads(path.read_bytes()), dtype))


def _ids(tokenizer: Tokenizer | None, stop_ids: list[int]) -> JsonObject:
    eos = None if tokenizer is None else tokenizer.eos_id
    return {
        "bos_token_id": None if tokenizer is None else tokenizer.bos_id,
        "eos_token_id": stop_ids or eos,
        "pad_token_id": None if tokenizer is None else tokenizer.pad_id,
    }


def _generation(
    tokenizer: Tokenizer | None, stop_ids: Sequence[int], facts: ModelFacts
) -> JsonObject:
    """What the base says, with every id that ends a text, and the tokenizer's ids where the base
    has none.
    """
    ids = {
        name: value for name, value in _ids(tokenizer, list(stop_ids)).items() if value is not None
    }
    ends = all_ends(
        facts.generation,
        [one for one in [ids.get("eos_token_id")] if isinstance(one, int)] or stop_ids,
    )
    return {**ids, **facts.generation, **({"eos_token_id": ends} if ends else {})}


def _cached(settings: ModelSettings) -> JsonObject:
    """transformers' caches ask attention for the length of a text, so without attention there must
    be no cache.
    """
    return {"use_cache": False} if _only_recurrent(settings) else {}


def _only_recurrent(settings: ModelSettings) -> bool:
    kinds = [settings.mixers(settings.block(layer))[0] for layer in range(settings.layers)]
    return all(kind.is_recurrent for kind in kinds)


def export_tokenizer(
    tokenizer: Tokenizer, folder: Path, context_length: int, facts: ModelFacts
) -> None:
    """Write a tokenizer's files, and the settings that transformers reads next to them.

    Its own encoding then begins a text as the model's data do.
    """
    if facts.begin_ids is not None:
        tokenizer = tokenizer.beginning_with(facts.begin_ids)
    tokenizer.save(folder)
    (folder / "chat_template.jinja").unlink(
        missing_ok=True
    )  # the run's template is written instead
    if "tokenizer.json" not in tokenizer.source_bytes:
        return
    texts = {token_id: text for text, token_id in tokenizer.special_tokens.items()}
    named = {
        "bos_token": tokenizer.bos_id,
        "eos_token": tokenizer.eos_id,
        "pad_token": tokenizer.pad_id,
    }
    own = json.loads(tokenizer.source_bytes.get("tokenizer_config.json", b"{}"))
    # The run's template goes into its own file; there must not be two.
    own.pop("chat_template", None)
    longest = own.get("model_max_length")
    if (
        facts.context_length is None
        or context_length > facts.context_length
        or not is_length(longest)
    ):
        longest = context_length
    elif context_length < facts.context_length:
        longest = min(longest, context_length)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: texts[token_id] for name, token_id in named.items() if token_id in texts},
        **own,
        "model_max_length": longest,
    }
    _write_json(folder / "tokenizer_config.json", config)


def _shrink(folder: Path, context_length: int, facts: ModelFacts) -> None:
    """Write another context length than the base's into the `config.json` of a model of
    transformers.
    """
    if facts.context_length in (None, context_length):
        return
    config = json.loads((folder / "config.json").read_bytes())
    for settings in (config, config.get("text_config") or {}):
        settings.update({name: context_length for name in MOST_POSITIONS if name in settings})
    _write_json(folder / "config.json", config)


def remove_places(folder: Path) -> None:
    """Remove absolute paths from the settings in an exported folder: others have nothing there, and
    need not know.
    """
    for path in folder.glob("*.json"):
        if path.name in ("tokenizer.json", EXPORT):
            continue
        settings = json.loads(path.read_bytes())
        if not isinstance(settings, dict):
            continue
        found = [
            name
            for name, value in settings.items()
            if _PLACES.search(name)
            and isinstance(value, str)
            and (Path(value).is_absolute() or value.startswith("~"))
        ]
        if found:
            _write_json(
                path, {name: value for name, value in settings.items() if name not in found}
            )


def _write_json(path: Path, value: JsonMapping) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
