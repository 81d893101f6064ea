"""Trains on whole answers: preferences between them, or rewards.

A loss of whole answers depends on sums of log-probabilities, so they must be known before gradients
are: the model runs once with gradients up to its hidden states, its head runs once without for the
log-probabilities, the loss is computed from these in float64, and its derivative for each token
becomes the weight of the token in `chunked_cross_entropy`, which gives the gradients. Shared
beginnings of answers are computed once, in both.

Model and reference run without dropout: equal weights give equal log-probabilities, in every kind.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ConfigError, StateError
from penstock.core.json_values import JsonObject
from penstock.data.shards.format.trees import LABEL, POLICY_VERSION
from penstock.learn.training.answer_advantages import HOST_COLUMNS
from penstock.learn.training.cross_entropy import chunked_cross_entropy
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.path_checks import check_answers
from penstock.learn.training.path_counts import StepCounts
from penstock.learn.training.path_losses import (
    Figures,
    PathScores,
    policy_loss,
    preference_loss,
    slot_temperatures,
)
from penstock.learn.training.path_settings import (
    OLD_COLUMN,
    REFERENCE_COLUMN,
    TRAINER_COLUMN,
    PolicySettings,
    PreferenceSettings,
)
from penstock.learn.training.reference_model import (
    Reference,
    Temperatures,
    log_probabilities,
    tempered_heads,
)
from penstock.models import LanguageModel, RowTensors
from penstock.models.head import Head, no_loss
from penstock.models.without_dropout import random_parts, without_dropout
from penstock.plan.inputs import IGNORE
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.loader import Step
from penstock.plan.loader.loader import Loader

if TYPE_CHECKING:
    from penstock.learn.training.settings import TrainSettings

COUNTS_FREELY = ("cpu",)
"""Devices that are asked which tokens a loss leaves as they are, so that the head skips them;
others would have to be waited for, and take all tokens.
"""


def dropout_notice(model: LanguageModel, who: str) -> list[str]:
    """A sentence on what is switched off in a model; none if there is nothing."""
    if not (parts := random_parts(model)):
        return []
    return [
        (
            f"{who} compares log-probabilities, so what is random in the model is off: "
            f"{', '.join(parts)}"
        )
    ]


def _trained(hidden: Tensor, tensors: RowTensors, scores: PathScores) -> tuple[Tensor, Tensor]:
    """Hidden states and targets of the trained slots."""
    return hidden[scores.slots], tensors.targets[0][scores.slots]


@final
class PathTraining:
    """The loss of `training.preference` or `training.policy`, row by row.

    Args:
        model: With its initial weights.
        loader: This rank's.
        settings: How to train.
        device: The model's.
        reference: The reference model, if there is one already.

    Attributes:
        settings: Those of the loss.
        reference: The reference model; None: nothing is compared with one.
        divisor: Of the step that began.
        notices: What the user should know of the run, a sentence each.

    Raises:
        ConfigError: The data lack what the loss needs, or another setting excludes it.
    """

    def __init__(
        self,
        model: LanguageModel,
        loader: Loader,
        settings: "TrainSettings",
        device: torch.device,
        reference: Reference | None = None,
    ) -> None:
        chosen = settings.preference or settings.policy
        assert chosen is not None
        self.settings: PreferenceSettings | PolicySettings = chosen
        self._model, self._backend = model, settings.attention
        self._name = "training.preference" if settings.preference is not None else "training.policy"
        self._check(loader, settings)
        self.reference: Reference | None = None
        if chosen.needs_reference:
            kind = chosen.reference if reference is None else reference.kind
            if kind == "auto":
                has = REFERENCE_COLUMN in loader.columns
                kind = "cached" if has else "lora" if model.lora is not None else "initial"
            if kind == "cached" and REFERENCE_COLUMN not in loader.columns:
                raise ConfigError(
                    f"{self._name}: reference cached needs the column {REFERENCE_COLUMN!r} in "
                    "the data; write it with `penstock reference`, or take initial, lora or "
                    "a model"
                )
            self.reference = reference or Reference(kind, model, device)
        read = [REFERENCE_COLUMN, OLD_COLUMN, TRAINER_COLUMN]
        if isinstance(chosen, PolicySettings):
            read += HOST_COLUMNS
        self._columns = [name for name in read if name in loader.columns]
        self.notices: list[str] = [*dropout_notice(model, self._name), *self._accepted]
        self.divisor = 1.0
        self._point: Tensor | float = 0.0
        self._sums: Figures = {}
        self._version = 0
        self._ages: dict[str, float] = {}

    def _check(self, loader: Loader, settings: "TrainSettings") -> None:
        who, chosen = self._name, self.settings
        if settings.preference is not None and settings.policy is not None:
            raise ConfigError(
                "training.preference and training.policy cannot be combined; choose one"
            )
        for name, used in (
            ("loss", settings.loss is not None),
            ("z_loss", settings.z_loss != 0),
            ("micro_sequences", settings.micro_sequences > 1),
        ):
            if used:
                raise ConfigError(
                    f"{who} and training.{name} cannot be combined: whole answers are "
                    f"compared; leave {name} out"
                )
        self._accepted = check_answers(loader, chosen, who)

    def begin(self, rows: Sequence[ModelInput], step: Step, ranks: Ranks) -> None:
        """Make ready for the rows of a step: its divisor, and kto's reference point."""
        chosen, units = self.settings, step.units
        if isinstance(chosen, PolicySettings):
            self._version = chosen.version + step.index
        counts = StepCounts.of(rows, chosen, self._name, self._version, ranks)
        if isinstance(chosen, PreferenceSettings):
            self.divisor = max(1.0, float(units["pairs" if chosen.of_pairs else "examples"]))
            if "kto" in chosen.weights:
                self._point = self._reference_point(rows, ranks)
            return
        self.divisor = max(
            1.0,
            counts.tokens if chosen.normalise == "token" else counts.answers * (chosen.length or 1),
        )
        self._ages = counts.ages() if POLICY_VERSION in self._columns else {}

    def _reference_point(self, rows: Sequence[ModelInput], ranks: Ranks) -> Tensor:
        """The mean of log π − log π_ref over the step's mismatched answers, at least 0; on the
        device.
        """
        total, count = torch.zeros((), dtype=torch.float64, device=ranks.device), 0.0
        assert self.reference is not None
        for row in rows:
            tensors = self._model.tensors(row, self._backend)
            scores, temperatures = self._scores(tensors, row)
            labels = scores.answers.value(LABEL, "preference.kind kto")
            if not len(mismatched := np.flatnonzero(labels < 0)):
                continue
            with torch.no_grad(), without_dropout(self._model):
                trained = _trained(self._model(tensors)[0], tensors, scores)
                logs = log_probabilities(Head.of_model(self._model), *trained, temperatures)
                theirs = self.reference(tensors, row, scores, self._backend, temperatures)
            ratios = scores.sums(logs) - scores.sums(theirs)
            total = total + ratios[scores.place(mismatched)].sum()
            count += len(mismatched)
        [count] = ranks.sum([count])
        if not count:
            raise ConfigError(
                "preference.kind kto needs mismatched answers for its reference point, and a "
                "step has none; prepare the data from records with labels, or take "
                "apo_zero_unpaired"
            )
        return (ranks.sum_tensor(total) / count).clamp_min(0.0)

    def _scores(self, tensors: RowTensors, row: ModelInput) -> tuple[PathScores, Temperatures]:
        """The trained slots of a row, and the temperature of each."""
        assert row.paths is not None
        trained = row.targets[0] != IGNORE
        if row.loss_weights is not None:
            trained = trained & (row.loss_weights[0] != 0)
        columns: dict[str, object] = {name: row.columns[name] for name in self._columns}
        scores = PathScores.of(row.paths, trained, columns, tensors.tokens.device)
        if isinstance(self.settings, PreferenceSettings):
            # They compare answers of any origin, by the model itself.
            return scores, np.ones(len(scores.slots))
        return scores, slot_temperatures(row.paths, trained)[scores.host.slots]

    def loss(self, row: ModelInput, model: LanguageModel | None = None) -> tuple[Tensor, Figures]:
        """A row's share of the step's loss, and sums for figures.

        Returns:
            A scalar to call `backward` on, and figures that are sums over pairs, examples or
            tokens.
        """
        with without_dropout(model or self._model):
            return self._loss(row, model or self._model)

    def _loss(self, row: ModelInput, model: LanguageModel) -> tuple[Tensor, Figures]:
        tensors = model.tensors(row, self._backend)
        scores, temperatures = self._scores(tensors, row)
        hidden, targets = _trained(model(tensors)[0], tensors, scores)
        reference = None
        if self.reference is not None:
            reference = self.reference(tensors, row, scores, self._backend, temperatures)
        head = Head.of_model(model)
        logs = log_probabilities(head, hidden, targets, temperatures).requires_grad_()
        with torch.enable_grad():
            if isinstance(self.settings, PreferenceSettings):
                found, figures = preference_loss(
                    scores, logs, reference, self.settings, self._point
                )
                found = found / self.divisor
            else:
                found, figures = policy_loss(
                    scores, logs, reference, self.settings, self.divisor, self._version
                )
        if not torch.is_grad_enabled() or not found.requires_grad:
            return no_loss(head, hidden) + found.detach().to(hidden.dtype), figures
        (derivative,) = torch.autograd.grad(found, logs)
        # As a function of the weights: Σ derivative × log-probability, which has the gradient of
        # the loss.
        if hidden.device.type in COUNTS_FREELY:
            used = derivative.nonzero()[:, 0]
            temperatures = temperatures[used.numpy()]
            hidden, targets, derivative = hidden[used], targets[used], derivative[used]
        parts = [
            chunked_cross_entropy(tempered, hidden[at], targets[at], -derivative[at])[0]
            for at, tempered in tempered_heads(head, temperatures, hidden.device)
        ]
        # Where nothing is to be learnt, such as pairs past a hinge, the head needs gradients of
        # zeros all the same.
        linear = reduce(torch.add, parts) if parts else no_loss(head, hidden)
        return linear + (found.detach().to(linear.dtype) - linear.detach()), figures

    def backward(self, row: ModelInput) -> Tensor:
        """Add a row's gradients; return its share of the step's loss, float64 on the device."""
        # Gradient checkpoints run the model again in the backward pass.
        with without_dropout(self._model):
            share, figures = self._loss(row, self._model)
            share.backward()
        for name, value in figures.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        return share.detach().double()

    def pending(self) -> Figures:
        """The step's sums of this rank; then reset them to 0."""
        found, self._sums = self._sums, {}
        return {f"paths.{name}": found.get(name, 0.0) for name in figure_names(self.settings)}

    def pending_same(self) -> Figures:
        """Figures that all ranks have alike: kto's reference point."""
        kto = isinstance(self.settings, PreferenceSettings) and "kto" in self.settings.weights
        return {"paths.reference_point": self._point} if kto else {}

    def end(self, read: Mapping[str, float], step: Step) -> dict[str, float]:
        """The step's figures, from what `pending` and `pending_same` gave, over all ranks."""
        sums = {name: read[f"paths.{name}"] for name in figure_names(self.settings)}
        section = self._name.removeprefix("training.")
        means = figure_means(self.settings, sums, step.units)
        if "paths.reference_point" in read:
            means["reference_point"] = read["paths.reference_point"]
        means |= self._ages
        return {f"{section}.{name}": value for name, value in means.items()}

    def state(self) -> JsonObject:
        """What a checkpoint notes of it."""
        return {"reference": None if self.reference is None else self.reference.fingerprint()}

    def check_state(self, state: dict[str, object]) -> None:
        """Compare with what a checkpoint noted.

        Raises:
            StateError: The reference model is another one.
        """
        now, then = self.state()["reference"], state.get("reference")
        if now != then:
            raise StateError(
                f"{self._name}: the reference model is {now} now, {then} when the run was "
                "saved; restore it, or begin another run with model: from:RUN"
            )


def figure_names(settings: PreferenceSettings | PolicySettings) -> tuple[str, ...]:
    """Names of the sums that a loss gives."""
    if isinstance(settings, PolicySettings):
        capped = ("sampler_gap", "capped") if settings.importance_cap is not None else ()
        return (
            "clipped",
            "entropy_estimate",
            "tokens",
            "log_ratio",
            *capped,
            *(("kl",) if settings.kl else ()),
        )
    sides = (
        "chosen_reward",
        "rejected_reward",
        "chosen_log_probability",
        "rejected_log_probability",
    )
    return (
        (*sides, "margin", "accuracy")
        if settings.of_pairs
        else (*sides, "chosen_count", "rejected_count")
    )


def figure_means(
    settings: PreferenceSettings | PolicySettings, sums: dict[str, float], units: dict[str, int]
) -> dict[str, float]:
    """Figures from sums over a step or a dataset: means over pairs, examples of each label, or
    tokens.
    """
    if isinstance(settings, PolicySettings):
        count = max(sums.pop("tokens"), 1.0)
        return {name: value / count for name, value in sums.items()}
    if settings.of_pairs:
        return {name: value / max(units["pairs"], 1) for name, value in sums.items()}
    counts = {side: sums.pop(f"{side}_count") for side in ("chosen", "rejected")}
    found = {
        name: value / counts[name.split("_")[0]]
        for name, value in sums.items()
        if counts[name.split("_")[0]]
    }
    if all(counts.values()):
        found["margin"] = found["chosen_reward"] - found["rejected_reward"]
    return found
