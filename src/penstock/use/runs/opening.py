"""Models from what a user names (a folder, a run, a hub name, code, settings), and engines that
generate with them.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from penstock.chat import load_template
from penstock.chat.calls import allowed_controls
from penstock.core.errors import ConfigError, FormatError
from penstock.core.folders import may_be_of_hub
from penstock.core.suggestions import suggests
from penstock.data.prepare.chat_notices import info_of
from penstock.data.shards import ChatInfo
from penstock.learn.generation import Engine
from penstock.learn.generation.images import ImageReader
from penstock.learn.training.distributed import local_device
from penstock.learn.training.run_folder import RUN_FILE, RunFolder
from penstock.media.images import ImageSettings
from penstock.media.processor import load_processor
from penstock.models.building import build_model as build
from penstock.models.facts import with_facts
from penstock.models.four_bits import num_weights
from penstock.models.lora.lora import settle_parts
from penstock.models.own_code import is_own_code
from penstock.models.saving import load_model as load_folder
from penstock.models.settings import ModelSettings
from penstock.models.tree_readers import reads_trees
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.loading import load_tokenizer
from penstock.use.runs.keywords import ModelKeywords
from penstock.use.runs.run_document import check_names

if TYPE_CHECKING:
    from penstock.models import LanguageModel

_log = logging.getLogger("penstock.runs")


@suggests
def load_model(
    path: str | Path,
    *,
    device: "torch.device | str" = "cpu",
    dtype: "torch.dtype | None" = None,
    module: "torch.nn.Module | None" = None,
) -> "LanguageModel":
    """Load a model from a run (its newest checkpoint), a model folder of penstock, or a model of
    transformers.

    Args:
        path: A folder, or the name of a model on the Hugging Face hub.
        device: Device of the model.
        dtype: Dtype of the weights; None: as stored. Training keeps weights in float32 or wider.
        module: A torch module of your own, into which the folder's weights are loaded.

    Raises:
        FormatError: There is no model at the path, or its weights are quantised.
        CorruptionError: Its weights are damaged.
        ConfigError: transformers has no causal model for it, or cannot run it.
    """
    folder = Path(path)
    if (folder / RUN_FILE).is_file():
        run = RunFolder.open(folder)
        model = with_facts(load_folder(run.model, device, dtype, module=module), run.facts)
    elif folder.exists():
        model = load_folder(folder, device, dtype, module=module)
    elif not may_be_of_hub(str(path)):
        raise FormatError(
            f"{path}: there is no such folder; give a run, a model's folder, or owner/name on "
            "the hub"
        )
    else:
        from penstock.models.theirs.loading import load_huggingface

        model = load_huggingface(path, device=device, dtype=dtype)
    model.origin = str(path)
    return model


def build_model(
    *,
    vocab_size: int,
    device: "torch.device | str" = "cpu",
    seed: int = 0,
    **settings: Unpack[ModelKeywords],
) -> "LanguageModel":
    """Build a transformer with freshly initialised weights.

    Args:
        vocab_size: Number of ids of the tokenizer, `Dataset.tokenizer.vocab_size`.
        device: Device of the model.
        seed: Seed of the weights, which are the same on every device.
        settings: See `ModelSettings`: layers, width, heads and so on.

    Raises:
        ConfigError: A setting is unknown or out of range.
    """
    check_names("ps.build_model", settings, ModelKeywords, "vocab_size", "device", "seed")
    given = dict(settings)
    return build(
        ModelSettings.of({"vocab_size": vocab_size, **given}),
        vocab_size=vocab_size,
        device=device,
        seed=seed,
    )


def model_section(path: str | Path) -> str:
    """The value of `model` in a run file for a model named in Python.

    Raises:
        ConfigError: There is no such folder, and it cannot be a name on the hub.
    """
    text = str(path)
    if text.startswith(("hf:", "from:")) or is_own_code(text):
        return text
    if Path(path).exists():
        return f"from:{text}"
    if not may_be_of_hub(text):
        raise ConfigError(
            f"model {text!r}: there is no such folder; give that of a run or a model, or owner/name"
        )
    return f"hf:{text}"


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model from its folder, ready to use."""

    run: RunFolder
    """The run that it comes from."""
    model: Any
    """The model, in evaluation mode; None: it was opened without its weights."""
    tokenizer: Tokenizer
    template: Any
    """Chat template; None if there is none."""
    context_length: int
    begin_ids: tuple[int, ...]
    """The ids before a text."""
    row_length: int
    """Slots of a row for held-out data: as in training, unless the context was given."""

    @property
    def reads_trees(self) -> bool:
        """Whether the model reads prefix trees, as far as is known."""
        if self.model is None:
            return reads_trees(self.run.model) is True
        return self.model.requirements().trees is True


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A model with an engine that generates texts."""

    name: str
    step: int | None
    engine: Any
    tokenizer: Tokenizer
    template: Any
    """Chat template; None if there is none."""
    begin_ids: tuple[int, ...] = ()
    """The ids before a text."""
    images: Any = None
    """An `ImageReader` for images that messages themselves hold; None: the model reads no
    images.
    """
    parameters: int | None = None
    """Number of the model's weights; None: unknown."""


def load_opened(
    run: RunFolder | str | Path,
    *,
    context_length: int | None = None,
    device: str = "auto",
    threads: int | None = None,
    module: "torch.nn.Module | None" = None,
) -> Opened:
    """Open the model of a run, or of a folder in the Hugging Face layout.

    Args:
        run: The run, or its folder.
        context_length: Maximum number of tokens that the model sees; None: what its base reads, or,
            of a model without a base, its training length.
        device: cpu, cuda, …; auto: a GPU if there is one.
        threads: Torch's threads on the CPU; None: unchanged.
        module: Your own torch module, into which the run's weights are loaded.

    Raises:
        FormatError: There is no model.
        ConfigError: The model's context is unknown, or there is no such device.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    opened = open_without_weights(run, context_length)
    weights = load_folder(opened.run.model, local_device(device), module=module)
    model = with_facts(weights, opened.run.facts)
    if model.lora is not None:
        # Otherwise each token would make the whole embedding again.
        settle_parts(model)
    # Some models of transformers have dropout.
    model.eval()
    return replace(opened, model=model)


def open_without_weights(run: RunFolder | str | Path, context_length: int | None = None) -> Opened:
    """All of a run, or of a folder in the Hugging Face layout, but its weights: for a model that
    computes elsewhere; arguments and errors as of `load_opened`.
    """
    found = run if isinstance(run, RunFolder) else RunFolder.open(run)
    length = context_length or context_of(found)
    tokenizer = load_tokenizer(found.tokenizer)
    return Opened(
        run=found,
        model=None,
        tokenizer=tokenizer,
        template=None if found.template is None else template_of(found, tokenizer),
        context_length=length,
        begin_ids=found.facts.begin(tokenizer),
        row_length=context_length or found.trained_length or length,
    )


def writer_of(found: Opened, slots: int) -> Writer:
    """Build an engine for an opened model."""
    images = reader_of(found)
    template = "" if found.template is None else found.template.source
    engine = Engine(
        found.model,
        found.tokenizer,
        context_length=found.context_length,
        stop_ids=found.run.stop_ids,
        allowed_controls=allowed_controls(template, found.tokenizer.special_tokens),
        slots=slots,
        images=None if images is None else images.blank,
    )
    return Writer(
        name=found.run.name,
        step=found.run.step,
        engine=engine,
        tokenizer=found.tokenizer,
        template=found.template,
        begin_ids=found.begin_ids,
        images=images,
        parameters=num_weights(found.model),
    )


def reader_of(found: Opened) -> "ImageReader | None":
    """What reads the images of prompts, if the model has a processor and reads images with it."""
    if found.run.processor is None:
        return None

    try:
        settings = ImageSettings(**found.run.image_settings)
        reader = ImageReader(load_processor(found.run.processor), settings)
        found.model.expect_images(reader.blank)
    except ConfigError as error:
        # Text can be written without.
        _log.warning("%s: images in prompts are refused: %s", found.run.path, error)
        return None
    return reader


def template_of(run: RunFolder, tokenizer: Tokenizer) -> Any:
    """The chat template with the variables used when the conversations were prepared."""
    chat = ChatInfo.load(run.path)
    assert run.template is not None
    return load_template(
        run.template, tokenizer=tokenizer, **({} if chat is None else chat.variables)
    )


def chat_of(opened: Opened) -> ChatInfo | None:
    """The chat template and its facts, for a dataset of what the model sampled, so that a run on it
    keeps them; None: it has no template. A folder of transformers stores a template alone.
    """
    template = opened.template
    stored = ChatInfo.load(opened.run.path)
    if stored is not None or template is None:
        return stored
    return info_of(template, opened.run.stop_ids)


def context_of(run: RunFolder) -> int:
    """Maximum number of tokens that a run's model, or a model in the Hugging Face layout, reads.

    Raises:
        ConfigError: It does not say.
    """
    found = run.context_length
    if found is None:
        raise ConfigError(f"{run.path}: does not say how many tokens it reads; set context_length")
    return found
