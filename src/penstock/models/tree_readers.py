"""Whether a model reads prefix trees, found out without its weights: by its settings, or by a trial
of its code on the twin, which has weights of its own.
"""

from pathlib import Path

import torch

from penstock.core.errors import PenstockError
from penstock.models.on_meta import parameters_on_meta
from penstock.models.ours.importing import plain_settings, refusal
from penstock.models.saving import LORA_ALONE, MODEL, description_of, saved_settings
from penstock.models.theirs.loading import inner_of_settings
from penstock.models.theirs.model import HuggingFaceModel


def reads_trees(folder: Path) -> bool | None:
    """Whether the model of a folder reads prefix trees, as `requirements()` of the loaded one says.

    Returns:
        None: it cannot be said, as of a module of your own, or of a model that transformers does
            not know.
    """
    described = description_of(folder) if (folder / MODEL).is_file() else None
    if described is not None:
        if described["kind"] == LORA_ALONE:
            return reads_trees(folder / described["base"]["folder"])
        settings = saved_settings(folder)[0]
        if settings is not None:
            return settings.requirements().trees
        if described["kind"] != "huggingface":
            return None
    try:
        if described is None and refusal(folder) is None:
            return plain_settings(folder).requirements().trees
        with parameters_on_meta():
            inner = inner_of_settings(folder, None)
        return HuggingFaceModel(inner.train(), home=torch.device("cpu")).requirements().trees
    except PenstockError:
        return None
