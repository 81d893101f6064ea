"""The isolation of documents with images."""

import torch
from torch import Tensor

from penstock.core.errors import IsolationError
from penstock.media.rows import BlankImage
from penstock.models.isolation.calls import (
    Forward,
    TorchModel,
    guarded,
    refuse_uncheckable,
    transformers_forward,
    undisturbed,
    vocabulary_size,
)
from penstock.models.isolation.comparison import largest_difference, spread, tolerance
from penstock.models.isolation.report import CURE, describe
from penstock.models.theirs.image_rows import image_arguments, trial_row, uses_grids
from penstock.models.theirs.tensors import model_inputs
from penstock.plan.inputs.model_input import ModelInput


def try_images(
    model: TorchModel, blank: BlankImage, forward: Forward | None = None, *, seed: int = 0
) -> None:
    """Compare documents with images in a row with the documents alone, and with another image in
    the first of them.

    Raises:
        IsolationError: A document's logits depend on others, or the model reads images otherwise
            than alone.
    """

    refuse_uncheckable(model)
    row, *alone = trial_row(blank, vocabulary_size(model), seed)
    other, *_ = trial_row(blank, vocabulary_size(model), seed, swapped=True)
    with undisturbed(model), torch.no_grad():
        call = guarded(model, forward or transformers_forward, model)
        by_itself = guarded(model, forward or _images_alone, model)
        together, swapped, single = (
            call(row),
            call(other),
            torch.cat([by_itself(one) for one in alone]),
        )
    first, count, scale = len(alone[0].tokens), len(single), spread(single)
    gap = largest_difference(together[:count], single) / scale
    leak = largest_difference(together[first:count], swapped[first:count]) / scale
    if not max(gap, leak) <= tolerance(together.dtype):
        raise IsolationError(
            f"{describe(model)}: documents with images see each other in one row: logits "
            f"differ from those of the document alone by {gap:.3g} standard deviations, and "
            f"by {leak:.3g} with another image in another document. {CURE}"
        )


def _images_alone(model: TorchModel, document: ModelInput) -> Tensor:
    """transformers' own logits of one document with its images."""

    weights = next(model.parameters())
    given = image_arguments(model, document, weights.device, weights.dtype)
    del given["position_ids"]
    logits: Tensor = model(**given).logits[0]
    return logits


def forward_of_images(model: TorchModel, row: ModelInput) -> Tensor:
    """transformers' logits of a row of data with images, whose positions have grids where the
    model's have.
    """

    given = model_inputs(row, next(model.parameters()).device)
    if uses_grids(model) and given["position_ids"].ndim == 2:
        given["position_ids"] = given["position_ids"][None].expand(4, -1, -1)
    logits: Tensor = model(**given).logits[0]
    return logits
