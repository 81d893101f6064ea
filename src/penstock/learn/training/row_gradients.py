"""The gradients of one row: its loss of whatever kind, and the backward pass.

A row's loss is one of four: cross entropy, of the whole row or of its parts in turn; cross entropy
and that of a teacher; that of preferences or policies; a loss of the user's own.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.learn.training.distributed import Ranks
from penstock.learn.training.loss_groups import LossSums, inner_of
from penstock.learn.training.losses import hidden_loss, row_loss
from penstock.learn.training.own import LossOfOwn, whole_gradients
from penstock.learn.training.path_training import PathTraining
from penstock.learn.training.settings import TrainSettings
from penstock.models import LanguageModel, RowTensors
from penstock.models.head import Head
from penstock.models.ours.micro_sequences import backward_in_parts
from penstock.models.row_tensors import target_places
from penstock.models.without_dropout import without_dropout
from penstock.plan.inputs import RowSlice
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.torch_tensors import on_device

if TYPE_CHECKING:
    from penstock.learn.distillation.distiller import Distiller


@final
class RowGradients:
    """Adds the gradients of rows to the weights.

    Args:
        model: The model.
        settings: How to train.
        ranks: The processes that train together.
        sums: Where the losses of a step are summed by source and task.
        distiller: The teachers; None: there are none.
        paths: Training on paths; None: on tokens.
        own_loss: A loss of the user's own; None: one of ours.
    """

    def __init__(
        self,
        model: LanguageModel,
        settings: TrainSettings,
        ranks: Ranks,
        *,
        sums: LossSums,
        distiller: "Distiller | None",
        paths: PathTraining | None,
        own_loss: LossOfOwn | None,
    ) -> None:
        self._model, self._settings, self._ranks, self.sums = model, settings, ranks, sums
        self._distiller, self._paths, self._own_loss = distiller, paths, own_loss

    def add(self, row: ModelInput, denominators: Sequence[float]) -> Tensor:
        """Add a row's gradients; return its sum of weight × nats at distance 1, or its share of the
        user's loss: float64 and still on the device.
        """
        if self._own_loss is not None:
            return self._backward_own(self._own_loss, row, denominators)
        if self._paths is not None:
            return self._paths.backward(row)
        z_loss, parts = self._settings.z_loss, self._settings.micro_sequences
        tensors, groups = self.part_of(row) if self._ranks.context.size > 1 else self._whole(row)
        count = self.sums.num_groups
        if self._distiller is not None:
            # The student is compared with its teachers, which have no dropout.
            with without_dropout(self._model):
                return self._backward_taught(
                    self._distiller, tensors, inner_of(row), denominators, groups
                )
        if parts == 1:
            found = row_loss(
                self._model, tensors, denominators, z_loss=z_loss, groups=groups, num_groups=count
            )
            found.loss.backward()
            self.sums.add(found)
            return found.cross_entropy[0]
        sums: list[Tensor] = []
        size = row.sequence_length // parts
        begins = iter(range(row.sequence_length - size, -1, -size))
        places = target_places(row)

        head = Head.of_model(self._model)

        def loss_of(hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
            # Parts run from last to first.
            begin = next(begins)
            mine = (at[(at >= begin) & (at < begin + size)] - begin for at in places)
            found = hidden_loss(
                head,
                hidden,
                targets,
                weights,
                denominators,
                z_loss=z_loss,
                distance_weights=self._model.prediction_weights,
                groups=None if groups is None else groups[:, begin : begin + size],
                num_groups=count,
                places=[on_device(at, tensors.tokens.device) for at in mine],
            )
            self.sums.add(found)
            sums.append(found.cross_entropy[0])
            return found.loss

        backward_in_parts(self._model, tensors, parts, loss_of)
        return reduce(torch.add, sums)

    def _whole(self, row: ModelInput) -> tuple[RowTensors, Tensor | None]:
        """A row, and the groups of its slots."""
        return self._model.tensors(row, self._settings.attention), self.sums.groups(row)

    def part_of(self, row: ModelInput) -> tuple[RowTensors, Tensor | None]:
        """This rank's part of a row that several share, and the groups of its slots."""
        context = self._ranks.context
        part = RowSlice.of(replace(row, distillation=None), context.rank, context.size)
        # Slots past the end of the row have no targets, so any group does.
        groups = self.sums.groups(row, np.minimum(part.index, row.sequence_length - 1))
        return self._model.slice_tensors(
            part, self._ranks.context_group, self._settings.attention
        ), groups

    def _backward_own(
        self, loss: LossOfOwn, row: ModelInput, denominators: Sequence[float]
    ) -> Tensor:
        given = row if row.distillation is None else replace(row, distillation=inner_of(row))
        tensors = self._model.tensors(given, self._settings.attention)
        # A step without a target has denominators of 0, by which a loss must be able to divide.
        denominators = [one or 1.0 for one in denominators]
        if self._settings.shard:
            share = whole_gradients(loss, self._model, tensors, denominators)
        else:
            share = loss(self._model, tensors, denominators)
        if share.requires_grad:
            share.backward()
        return share.detach().double()

    def _backward_taught(
        self,
        distiller: "Distiller",
        tensors: RowTensors,
        seen: Any,
        denominators: Sequence[float],
        groups: Tensor | None,
    ) -> Tensor:
        """Like `_backward`, with the teachers' part of the loss; the model runs once."""
        hidden, head = self._model(tensors), Head.of_model(self._model)
        factor = distiller.settings.cross_entropy
        # With factor 0 the cross entropy is only reported.
        with nullcontext() if factor else torch.no_grad():
            found = hidden_loss(
                head, hidden, tensors.targets, tensors.loss_weights, denominators,
                z_loss=self._settings.z_loss, distance_weights=self._model.prediction_weights,
                groups=groups, num_groups=self.sums.num_groups, places=tensors.places,
            )  # fmt: skip
        self.sums.add(found)
        taught = distiller.row_loss(head, hidden[0], tensors.targets[0], seen)
        (taught + factor * found.loss if factor else taught).backward()
        return found.cross_entropy[0]
