"""Writes a run's model as other software reads it: whole, or its LoRA alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

from safetensors import SafetensorError

from penstock.core.errors import ConfigError, OutputError
from penstock.core.yaml_files import read_yaml
from penstock.learn.training.run_folder import RUN_FILE, RunFolder
from penstock.media.processor import load_processor
from penstock.models import export, export_adapter, merge_lora
from penstock.models.exporting import check_output
from penstock.models.four_bits import has_four_bits
from penstock.models.lora.export import base_name
from penstock.models.saving import load_model
from penstock.models.stored_dtype import StoredDtype, stored_dtype
from penstock.tokenizers.loading import load_tokenizer
from penstock.use.runs.opening import context_of, template_of


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Facts of an exported model."""

    output: str
    """The folder."""
    step: int | None
    """Steps that the model was trained for; None: unknown."""
    parameters: int
    context_length: int
    """Maximum number of tokens."""
    stop_ids: list[int]
    """Ids that end a text."""
    chat_template: bool
    """Whether the folder has a chat template."""
    notices: list[str]
    """Messages on what was left out, or cannot be read by other software."""
    dtype: str | None = None
    """Dtype that the weights were rounded to; None: they are as trained."""
    base: str | None = None
    """Of an adapter: hub name or folder of the model that it belongs to; None: the whole model is
    exported.
    """


def export_run(
    run: RunFolder | str | Path,
    output: Path,
    context_length: int | None = None,
    *,
    dtype: StoredDtype | None = None,
    overwrite: bool = False,
    adapter: bool = False,
) -> Exported:
    """Write a run's model with its tokenizer, chat template, stop ids and context length; LoRA is
    merged, before weights are rounded to `dtype`.

    With `adapter`, write its LoRA alone, in peft's format.

    Raises:
        OutputError: The folder holds an earlier export and `overwrite` is false, or other files, or
            cannot be written.
        ConfigError: The model cannot be written in the Hugging Face layout, or not in `dtype`.
    """
    run = run if isinstance(run, RunFolder) else RunFolder.open(run)
    check_output(output, overwrite)
    if run.facts.diffusion is not None:
        raise ConfigError(
            f"{run.path}: was trained by diffusion, with attention in both directions, and the "
            "layouts of transformers that can be written are read causally; use the run as it is"
        )
    tokenizer = load_tokenizer(run.tokenizer)
    length = context_length or context_of(run)
    stored_dtype(dtype)  # refused before the model is read
    trained = load_model(run.model, module=getattr(run, "module", None))
    template = None if run.template is None else template_of(run, tokenizer)
    if adapter and trained.lora is None:
        raise ConfigError(
            f"{run.path}: was not trained with LoRA, so it has no adapter; export it without "
            "adapter"
        )
    notices: tuple[str, ...] = ()
    packed = _four_bit_notice(adapter=adapter) if has_four_bits(trained) else ()
    if trained.lora is not None and not adapter:
        merge_lora(trained)
    base: str | None = None
    try:
        if adapter:
            # A model whose vocabulary grew is not the one that the run began with.
            grown = trained.new_rows is not None and trained.new_rows.grown
            base = None if grown else _base_name(run)
            parameters = export_adapter(
                trained,
                output,
                base=base,
                tokenizer=tokenizer,
                template=template,
                context_length=length,
                facts=run.facts,
                dtype=dtype,
                overwrite=overwrite,
            )
            notices = _adapter_notices(output, base)
            base = base or str(output / "base")
        else:
            notices = export(
                trained,
                output,
                tokenizer=tokenizer,
                template=template,
                processor=None if run.processor is None else load_processor(run.processor),
                stop_ids=run.stop_ids,
                context_length=length,
                facts=run.facts,
                dtype=dtype,
                overwrite=overwrite,
            )
            parameters = sum(weight.numel() for weight in trained.parameters())
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"{output}: cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from error
    return Exported(
        output=str(output),
        step=run.step,
        parameters=parameters,
        context_length=length,
        stop_ids=list(run.stop_ids),
        chat_template=run.template is not None,
        notices=[*notices, *packed],
        dtype=dtype,
        base=base,
    )


def _four_bit_notice(*, adapter: bool) -> tuple[str, ...]:
    """What an export of a model with matrices in 4 bits is."""
    if adapter:
        said = (
            "the adapter was trained next to a base in 4 bits, so its logits are those of training "
            "on such a base: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', "
            "bnb_4bit_use_double_quant=True); a base written here has the same matrices, "
            "dequantised"
        )
    else:
        said = (
            "the matrices in 4 bits are dequantised, and LoRA is merged into them: the folder is "
            "as large as that of a model that was never quantised"
        )
    return (said,)


def _adapter_notices(output: Path, base: str | None) -> tuple[str, ...]:
    """How to load an adapter, where the name of its base is no place that all machines know."""
    named = base_name(base)
    if named == base:
        return ()
    place = output / named if base is None else base
    notice = (
        f"adapter_config.json calls the base {named!r}, not by its place, which may change; load "
        f"it so: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({str(place)!r}), "
        f"{str(output)!r})"
    )
    return (notice,)


def _base_name(run: RunFolder) -> str | None:
    """Hub name or folder of the model of transformers that a run began with; None: it was another
    one.
    """
    if run.step is None:
        return None
    _, values = read_yaml(run.path / RUN_FILE)
    model = (values or {}).get("model")
    return model.removeprefix("hf:") if isinstance(model, str) and model.startswith("hf:") else None
