"""Whether the files of a folder hold the weights of a model of transformers by its own names.

Then a part of a weight can be read alone. Elsewhere names or values on the disk are others (experts
that transformers fuses, renamed modules), and only transformers knows how to turn one into the
other.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.models.ours.importing import is_harmless, weight_files
from penstock.models.tensor_files import StoredTensors

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

INNER = "inner."
"""What the names of weights of a model of transformers begin with behind the door."""


def tied_names(inner: "nn.Module") -> list[list[str]]:
    """The names of each parameter, of which a tied one has several."""
    found: dict[int, list[str]] = {}
    for name, weight in inner.named_parameters(remove_duplicate=False):
        found.setdefault(id(weight), []).append(name)
    return list(found.values())


def stored_by_names(
    folder: Path, inner: "PreTrainedModel", *, converts: bool
) -> StoredTensors | None:
    """The weights in a folder by their names behind the door; None: only transformers can read
    them.

    Args:
        folder: In the Hugging Face layout.
        inner: The model of transformers that it describes; its weights are not read.
        converts: Whether stored values are cast to the dtype of the model before they are cast to
            that of training, so that rounding would differ.

    Raises:
        CorruptionError: A file cannot be read, or is missing.
    """
    files = weight_files(folder)
    if not all(path.is_file() for path in files):
        return None
    stored = StoredTensors(files, INNER)
    shapes = {INNER + name: tuple(one.shape) for name, one in inner.state_dict().items()}
    parameters = {name for names in tied_names(inner) for name in names}
    for names in tied_names(inner):
        if not any(INNER + name in stored.shapes for name in names):
            return None
    if any(name.removeprefix(INNER) not in parameters for name in shapes.keys() - stored.shapes):
        return None
    left_over = {name.removeprefix(INNER) for name in stored.shapes.keys() - shapes.keys()}
    if not all(is_harmless(name) for name in left_over):
        return None
    known = stored.shapes.keys() & shapes.keys()
    if any(stored.shapes[name] != shapes[name] for name in known):
        return None
    if converts and any(stored.dtype_of(name) != _dtype(inner, name) for name in known):
        return None
    if _changed(inner, [name.removeprefix(INNER) for name in known]):
        return None
    return stored.chosen({name: name for name in known})


def _dtype(inner: "PreTrainedModel", name: str) -> torch.dtype:
    found: torch.dtype = inner.state_dict()[name.removeprefix(INNER)].dtype
    return found


def _changed(inner: "PreTrainedModel", names: Iterable[str]) -> bool:
    """Whether transformers would rename or convert weights of these names when it reads them."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        # Of another version: nobody can say.
        return True
    for change in get_model_conversion_mapping(inner):
        for name in names:
            renamed, pattern = change.rename_source_key(name)
            if renamed != name or (pattern is not None and hasattr(change, "operations")):
                return True
    return False
