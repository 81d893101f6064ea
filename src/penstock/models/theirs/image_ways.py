"""How a model of transformers runs rows with images: the first way that a trial finds exact.

Each document with its images must give the logits that transformers gives it alone, and another
image in another document must not change them.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.core.errors import ConfigError, IsolationError
from penstock.media.rows import BlankImage, RowMedia
from penstock.models.isolation.report import CURE, describe
from penstock.models.new_tokens import NewTokens
from penstock.models.recurrent import Borders
from penstock.models.row_tensors import RowTensors
from penstock.models.theirs.attention import (
    NAME,
    InBatch,
    distance,
    one_line,
    rounding,
    use_attention,
)
from penstock.models.theirs.image_rows import (
    Way,
    image_arguments,
    image_masks,
    image_token,
    needs_cross_attention,
    part_arguments,
    trial_row,
    uses_grids,
)
from penstock.models.theirs.interface import TheirModel
from penstock.models.theirs.recurrence import bordered
from penstock.models.theirs.tower_features import TowerFeatures
from penstock.models.without_dropout import evaluating
from penstock.plan.inputs.blank_images import with_blank
from penstock.plan.inputs.model_input import ModelInput

_log = logging.getLogger("penstock.models")

WAYS: dict[Way, str] = {
    "ours": "our attention",
    "own": "transformers' attention and restarting positions",
    "borders": "our recurrent functions in place of transformers'",
    "masks": "transformers' attention and masks of documents and images",
    "sliding_masks": "transformers' attention and masks of documents, and of images in sliding layers",  # noqa: E501
    "alone": "one document a row",
}

TRIED: tuple[Way, ...] = ("ours", "own", "borders", "masks", "sliding_masks")


@final
class ImageWays:
    """How one model reads images in rows.

    Attributes:
        reason: Why the last way that was tried is not exact.
        features: Features of images that are kept in a folder; None: images are read each time.
    """

    def __init__(self, model: TheirModel) -> None:
        self._model = model
        self._way: Way | None = None
        self.reason = ""
        self.features: TowerFeatures | None = None

    def keep_features(self, folder: str | Path, blank: BlankImage) -> None:
        """Keep the features of images in a folder."""
        self.way(blank)
        self.features = TowerFeatures(self._model, folder, blank)

    def hidden(self, row: RowTensors) -> Tensor:
        """Final hidden states of a row of data with images."""
        model = self._model
        media, slots = row.source.media, len(row.tokens)
        assert media is not None
        way = self.way(media.blank)
        if not len(media) and needs_cross_attention(model.inner):
            # Without an image these layers are left out, which a blank one would not do.
            return pad(
                model.document(row.tokens[: row.source.num_tokens]),
                (0, 0, 0, slots - row.source.num_tokens),
            )
        if not len(media) and torch.is_grad_enabled() and self.features is None:
            # Its vision tower must have gradients on all ranks.
            row = model.row_tensors(with_blank(row.source))
        given = image_arguments(model.inner, row.source, model.device, model.compute_dtype)
        if self.features is not None and media.keys:
            given = self.features.arguments(given, media)
        if way == "ours":
            given["penstock_attend"] = InBatch(row.attend)
        elif way in ("masks", "sliding_masks"):
            given["attention_mask"] = image_masks(
                row.source,
                self._sliding_window,
                model.device,
                model.compute_dtype,
                everywhere=way == "masks",
            )
        elif way == "alone":
            del given["position_ids"]
        elif way == "borders":
            borders = Borders([0, *row.rule.pieces[:, 2]], model.device)
            with bordered(model.inner, borders, operations=model.operations):
                return model.hidden(given)[:, :slots]
        return model.hidden(given)[:, :slots]

    def way(self, blank: BlankImage) -> Way:
        """How rows with images run; found once, by a trial.

        Args:
            blank: The blank image of a loader.

        Raises:
            ConfigError: The images belong to another model.
        """
        model = self._model
        if self._way is None:
            expected, found = image_token(model.inner), int(blank.tokens[0])
            if expected is not None and expected != found:
                raise ConfigError(
                    f"images stand at token {found} in the data, but {describe(model)} reads "
                    f"them at {expected}; prepare the data with the model's own processor"
                )
            if needs_cross_attention(model.inner):
                self._way, self.reason = "alone", "text attends to images in layers of its own"
                # Our attention knows nothing of these layers.
                model.fit.shape, model.fit.reason = None, self.reason
                use_attention(model.inner, model.fit.own)
            elif (trial := model.trial_model) is not model:
                self._way = self._follow(trial, blank)
            else:
                self._way = self._find_way(blank)
            _log.info("%s: rows with images run with %s", describe(model), WAYS[self._way])
        return self._way

    def check(self, row: ModelInput) -> None:
        """Refuse a row with images that cannot be read as its documents alone.

        Raises:
            IsolationError: It holds several documents, which would see each other.
            ConfigError: It holds a prefix tree, and images are read in a way that knows none.
        """
        assert row.media is not None
        way, model = self.way(row.media.blank), self._model
        if way == "alone" and row.num_documents > 1:
            raise IsolationError(
                f"{describe(model)}: documents with images see each other in one row: "
                f"{self.reason}. {CURE}"
            )
        if way != "ours" and row.reach is not None:
            raise ConfigError(
                f"{describe(model)}: reads images with {WAYS[way]}, which knows nothing of the "
                "branches of prefix trees; store each path by itself (answers: "
                "separate; of trajectories: share=False)"
            )

    def _follow(self, trial: TheirModel, blank: BlankImage) -> Way:
        """Read images as another of the same model does."""
        model, way = self._model, trial.images.way(blank)
        self.reason = trial.images.reason
        if trial.fit.shape is None:
            model.fit.shape, model.fit.reason = None, trial.fit.reason
        use_attention(model.inner, NAME if way == "ours" else model.fit.own)
        found: Way = way
        return found

    def _find_way(self, blank: BlankImage) -> Way:
        model = self._model
        row, *alone = trial_row(blank, model.vocab_size)
        other, *_ = trial_row(blank, model.vocab_size, swapped=True)
        ours = model.uses_our_attention
        with evaluating(model.inner):
            use_attention(model.inner, model.fit.own)
            truth = [self._own_logits(one) for one in alone]
            for way in TRIED:
                if way == "ours" and not ours:
                    continue
                use_attention(model.inner, NAME if way == "ours" else model.fit.own)
                self._way = way
                try:
                    found, swapped = (
                        model.logits(self.hidden(model.row_tensors(one)))[0] for one in (row, other)
                    )
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    self.reason = one_line(error)
                    continue
                first = len(alone[0].tokens)
                whole = torch.cat(truth)
                far = distance(found[: len(whole)], whole)
                leak = distance(swapped[first : len(whole)], found[first : len(whole)])
                if far <= rounding(model) and leak <= rounding(model):
                    if way != "ours":
                        model.fit.shape = None
                        model.fit.reason = (
                            model.fit.reason or "images are read otherwise with our attention"
                        )
                    return way
                self.reason = (
                    f"logits differ from those of the document alone by {far:.2g} standard "
                    "deviations"
                )
            model.fit.shape = None
            use_attention(model.inner, model.fit.own)
        return "alone"

    def _own_logits(self, document: ModelInput) -> Tensor:
        """transformers' own logits of one document with its images."""
        model = self._model
        given = image_arguments(model.inner, document, model.device, model.compute_dtype)
        del given["position_ids"]
        logits: Tensor = model.inner(**given).logits[0]
        return logits

    def text_positions(self, places: Tensor, parts: Sequence[RowMedia | None]) -> Tensor:
        """Positions [B, n] of text around images, which counts on from their largest position."""
        found = places.clone()
        for row, media in enumerate(parts):
            if media is not None and media.positions is not None and uses_grids(self._model.inner):
                count = media.positions.shape[2]
                found[row, :count] = torch.from_numpy(media.positions[1, 0])
        return found

    def hidden_of_part(
        self, tokens: Tensor, lengths: Tensor, growth: NewTokens, media: RowMedia
    ) -> Tensor:
        """Final hidden states [1, n, width] of one row's new tokens [1, n], with images among
        them.
        """
        model = self._model
        count = int(lengths[0])
        given = part_arguments(
            model.inner,
            tokens[0, :count],
            growth.positions[0, :count],
            media,
            model.device,
            model.compute_dtype,
        )
        given["penstock_attend"] = growth.attend
        return model.hidden(given)

    @property
    def _sliding_window(self) -> int | None:
        found = getattr(self._model.inner.config.get_text_config(), "sliding_window", None)
        return found if isinstance(found, int) else None
