"""From a run's folder, or one in the Hugging Face layout, to a model that can be served. Needs torch."""

import json
from pathlib import Path
from typing import Any

from penstock.chat import load_template
from penstock.errors import ConfigError
from penstock.serving.served_model import ServedModel
from penstock.serving.settings import ServeSettings


def load_served_model(
    path: str | Path,
    settings: ServeSettings,
    *,
    context_length: int | None = None,
    device: str = "cpu",
    dtype: str | None = None,
) -> ServedModel:
    """Load what `penstock train` or `penstock export` wrote, with an engine for it.

    Args:
        path: A run, or a folder in the Hugging Face layout.
        settings: Say how many sequences run side by side.
        context_length: Tokens of prompt and reply together; None: those of the rows it was trained on.
        device: Where it runs.
        dtype: Of the weights; None: as they are stored.

    Raises:
        FormatError: There is no model.
        ConfigError: A setting does not fit the model.
    """
    import torch

    from penstock.generation import Engine
    from penstock.models import load_model
    from penstock.tokenizers import load_tokenizer
    from penstock.training.run_folder import open_run

    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}")
    run = open_run(path)
    tokenizer = load_tokenizer(run.tokenizer)
    length = context_length or _trained_length(run.path)
    model = load_model(run.model, device, None if dtype is None else getattr(torch, dtype))
    return ServedModel(
        name=settings.model_name or run.path.resolve().name,
        engine=Engine(model, tokenizer, context_length=length, stop_ids=run.stop_ids, slots=settings.sequences),
        tokenizer=tokenizer,
        template=None if run.template is None else load_template(run.template, tokenizer=tokenizer),
        context_length=length,
        vocab_size=model.vocab_size,
    )


def _trained_length(folder: Path) -> int:
    """Slots of the rows that a run was trained on, or positions that a model in the Hugging Face layout tells."""
    import yaml

    told: Any
    if (folder / "config.json").is_file():
        told = json.loads((folder / "config.json").read_bytes()).get("max_position_embeddings")
    else:
        told = yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))
        for name in ("data", "loader", "sequence_length"):
            told = told.get(name) if isinstance(told, dict) else None
    if not isinstance(told, int) or told < 2:
        raise ConfigError(f"{folder}: does not say how long its sequences are; give --context-length")
    return told
