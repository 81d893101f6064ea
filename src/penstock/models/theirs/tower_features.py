"""Features of images that a frozen tower of a model of transformers gives, kept in a folder."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from penstock.core.errors import ConfigError
from penstock.media.rows import BlankImage, RowMedia
from penstock.models.image_features import FeatureCache, as_outputs, features_of
from penstock.models.isolation.report import describe
from penstock.models.theirs.interface import TheirModel
from penstock.models.without_dropout import evaluating
from penstock.plan.inputs.torch_tensors import on_device


@final
class TowerFeatures:
    """The features of one model's tower.

    Args:
        model: The model.
        folder: The folder that keeps features.
        blank: The blank image of a loader.

    Attributes:
        cache: The folder.

    Raises:
        ConfigError: The model takes pixels only, or the tower is trained.
    """

    def __init__(self, model: TheirModel, folder: str | Path, blank: BlankImage) -> None:
        self._model = model
        tower = getattr(model.inner, "get_image_features", None)
        body = getattr(model.inner, "model", None)
        if (
            tower is None
            or body is None
            or "mm_encoder_outputs" not in inspect.signature(body.forward).parameters
        ):
            raise ConfigError(
                f"{describe(model)}: training.feature_cache needs a model that takes features "
                "of images in place of pixels, which this one does not; leave it out"
            )
        text = {id(weight) for weight in model.inner.get_decoder().parameters()}
        text |= {id(weight) for weight in model.inner.get_output_embeddings().parameters()}
        weights = {
            name: weight
            for name, weight in model.inner.named_parameters()
            if id(weight) not in text
        }
        with torch.no_grad(), evaluating(model.inner):
            outputs = self._outputs(blank.arrays)
        self.cache, self._like = FeatureCache(folder, weights), outputs

    def arguments(self, given: dict[str, object], media: RowMedia) -> dict[str, Any]:
        """Arguments with kept features in place of pixels."""
        slots = np.diff(
            np.searchsorted(media.slots, [*media.begins, np.iinfo(np.int32).max])
        ).tolist()
        parts = self.cache.rows(
            media.keys, slots, lambda: features_of(self._outputs(media.arrays)), self._model.device
        )
        kept = {name: value for name, value in given.items() if name != "pixel_values"}
        return {**kept, "mm_encoder_outputs": {"image": as_outputs(self._like, parts)}}

    def _outputs(self, arrays: Mapping[str, object]) -> object:
        """What the vision tower and its projector give for arrays of images."""
        tower = self._model.inner.model.get_image_features
        known = inspect.signature(tower).parameters
        given = {
            name: on_device(np.asarray(array), self._model.device)
            for name, array in arrays.items()
            if name in known
        }
        moved = {
            name: value.to(self._model.compute_dtype) if value.is_floating_point() else value
            for name, value in given.items()
        }
        return tower(**moved, return_dict=True)
