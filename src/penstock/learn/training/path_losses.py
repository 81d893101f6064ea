"""Losses of whole answers: functions of the log-probabilities that a row's answers give their
trained tokens. An answer has one path, or several, as a trajectory whose history was rewritten.

All is float64: sums over thousands of tokens are compared. What each function means, and its
source, is in `path_settings`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from penstock.core.arrays import Array, Bool, Float64, Int64
from penstock.core.errors import ConfigError
from penstock.data.shards.format.trees import (
    LABEL,
    RANK,
    TEMPERATURE,
    odd_weight,
    pairs_of,
)
from penstock.learn.training.answer_advantages import HOST_COLUMNS, PolicyTokens
from penstock.learn.training.path_settings import (
    OLD_COLUMN,
    TRAINER_COLUMN,
    PolicySettings,
    PreferenceSettings,
)
from penstock.plan.inputs import IGNORE
from penstock.plan.inputs.answers import RowAnswers
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.paths import RowPaths
from penstock.plan.inputs.torch_tensors import on_device

Figures = dict[str, Tensor | float]
"""Sums by name, which stay on the device until a step is read."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class PathPlaces:
    """Where the trained tokens of a row's answers are, in NumPy; see `PathScores`."""

    slots: Int64
    entries: Int64
    owners: Int64
    columns: dict[str, Float64]
    """Name → float64 [E]: the columns that are read on the host."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PathScores:
    """Log-probabilities of the answers of one row: n trained slots, A answers, E pairs of an answer
    and a slot.
    """

    answers: RowAnswers
    host: PathPlaces
    """The same places on the host, so that no device is asked for numbers."""
    slots: Tensor
    """int64 [n] the slots whose target is trained."""
    entries: Tensor
    """int64 [E] index in `slots`; a slot stands here once for each answer that shares it, however
    many of the answer's paths do.
    """
    owners: Tensor
    """int64 [E] answer of each entry."""
    counts: Tensor
    """float64 [A] trained tokens of each answer."""
    columns: dict[str, Tensor]
    """Name → float64 [n], the column's value of each slot's target."""

    @classmethod
    def of(
        cls,
        paths: RowPaths,
        trained: Bool,
        columns: Mapping[str, object],
        device: torch.device | None = None,
    ) -> "PathScores":
        """Find the trained slots of paths.

        Args:
            paths: Of a row of T slots.
            trained: bool [T], whether a slot's target is trained.
            columns: Name → [T].
            device: The model's; None: the CPU.
        """
        device = device or torch.device("cpu")
        trained = np.asarray(trained, np.bool_)
        answers = RowAnswers.of(paths)
        slots = np.flatnonzero(trained)
        inner, owners = answers.entries(trained)
        counts = np.bincount(owners, minlength=len(answers)).astype(np.float64)
        of_slots = {
            name: np.asarray(values)[slots + 1].astype(np.float64)
            for name, values in columns.items()
        }
        entries = np.searchsorted(slots, inner)
        read = {name: of_slots.pop(name)[entries] for name in HOST_COLUMNS if name in of_slots}
        host = PathPlaces(slots, entries, owners, read)
        return cls(
            answers=answers,
            host=host,
            slots=on_device(slots, device),
            entries=on_device(host.entries, device),
            owners=on_device(owners, device),
            counts=on_device(counts, device),
            columns={name: on_device(values, device) for name, values in of_slots.items()},
        )

    def place(self, array: Array) -> Tensor:
        """An array of the host on the model's device."""
        return on_device(array, self.slots.device)

    def sums(self, logs: Tensor) -> Tensor:
        """[A] sum over each answer's trained tokens of float64 [n]."""
        return logs.new_zeros(len(self.answers)).index_add(0, self.owners, logs[self.entries])

    def value(self, name: str, who: str) -> Tensor:
        """float64 [A] a value of each answer."""
        return self.place(self.answers.value(name, who))


def trained_tokens(row: ModelInput, who: str) -> tuple[RowAnswers, Int64, Int64]:
    """The answers of a row, and of each of their trained tokens the slot that it is the target of
    and the answer, int64 [E]; a loss weight says whether a token is trained, and no more.

    Args:
        row: With paths.
        who: The setting that trains it, for errors.

    Raises:
        ConfigError: A loss weight is neither 0 nor 1; a shared token may have the sum of those of
            its answers.
    """
    assert row.paths is not None
    targets = row.targets[0]
    weights = (
        (targets != IGNORE).astype(np.float32) if row.loss_weights is None else row.loss_weights[0]
    )
    answers = RowAnswers.of(row.paths)
    each, owners = answers.entries((targets != IGNORE) & (weights != 0))
    slots, times = np.unique(each, return_counts=True)
    if (odd := odd_weight(weights[slots], times)) is not None:
        raise ConfigError(
            f"{who}: a token of the data has loss weight {odd:g}, but whole answers are "
            "compared, and weights other than 0 (not trained) and 1 have no meaning there; "
            "prepare the data with weights 0 and 1"
        )
    return answers, each, owners


def preference_loss(
    scores: PathScores,
    logs: Tensor,
    reference: Tensor | None,
    settings: PreferenceSettings,
    z: float | Tensor = 0.0,
) -> tuple[Tensor, Figures]:
    """Sum over the pairs (or examples) of a row; and sums for figures, not divided.

    Args:
        scores: The row's answers.
        logs: float64 [n] log-probabilities of the trained targets.
        reference: The same by the reference model; None: no kind needs it.
        settings: Kinds and their constants.
        z: kto: the reference point.
    """
    sums = scores.sums(logs)
    ratios = sums if reference is None else sums - scores.sums(reference)
    counts = scores.counts.clamp(min=1)
    if settings.of_pairs:
        better, worse = (scores.place(side) for side in _pairs(scores))
        loss = _pair_losses(sums, ratios, counts, better, worse, settings)
        if settings.sft_weight:
            loss = loss - settings.sft_weight * (sums[better] / counts[better])
        rewards = settings.beta * ratios.detach()
        return loss.sum(), {
            "chosen_reward": rewards[better].sum(),
            "rejected_reward": rewards[worse].sum(),
            "margin": (rewards[better] - rewards[worse]).sum(),
            "accuracy": (rewards[better] > rewards[worse]).sum(dtype=torch.float64),
            "chosen_log_probability": sums.detach()[better].sum(),
            "rejected_log_probability": sums.detach()[worse].sum(),
        }
    labels = scores.answers.value(LABEL, f"preference.kind {settings.kind}")
    loss = sums.new_zeros(())
    figures: dict[str, Tensor | float] = {}
    for label, name in ((1.0, "chosen"), (0.0, "rejected")):
        at = np.flatnonzero(labels == label)
        mine = scores.place(at)
        signed = ratios[mine] if label else -ratios[mine]
        for kind, weight in settings.weights.items():
            point = z if kind == "kto" else 0.0
            gap = signed - point if label else signed + point
            loss = loss + weight * torch.sigmoid(-settings.beta * gap).sum()
        if label and settings.sft_weight:
            loss = loss - settings.sft_weight * (sums[mine] / counts[mine]).sum()
        figures[f"{name}_reward"] = settings.beta * ratios.detach()[mine].sum()
        figures[f"{name}_log_probability"] = sums.detach()[mine].sum()
        figures[f"{name}_count"] = float(len(at))
    return loss, figures


def _pairs(scores: PathScores) -> Int64:
    """int64 [2, pairs] better and worse answers of all documents of a row."""
    ranks = scores.answers.value(RANK, "training.preference")
    documents = scores.answers.documents
    found = [np.empty((0, 2), np.int64)]
    for document in np.unique(documents[~np.isnan(ranks)]):
        mine = np.flatnonzero(documents == document)
        found.append(mine[pairs_of(ranks[mine])])
    return np.concatenate(found).T


def _pair_losses(
    sums: Tensor,
    ratios: Tensor,
    counts: Tensor,
    better: Tensor,
    worse: Tensor,
    settings: PreferenceSettings,
) -> Tensor:
    """[pairs] weighted over kinds."""
    beta, smoothing = settings.beta, settings.label_smoothing
    delta = ratios[better] - ratios[worse]
    by_token = ratios / counts
    delta_by_token = by_token[better] - by_token[worse]
    means = sums / counts
    total = torch.zeros_like(delta)
    for kind, weight in settings.weights.items():
        if kind == "dpo":
            loss = -logsigmoid(beta * delta)
        elif kind == "cdpo":
            loss = -(1 - smoothing) * logsigmoid(beta * delta) - smoothing * logsigmoid(
                -beta * delta
            )
        elif kind == "robust":
            loss = -(1 - smoothing) * logsigmoid(beta * delta) + smoothing * logsigmoid(
                -beta * delta
            )
            loss = loss / (1 - 2 * smoothing)
        elif kind == "hinge":
            loss = torch.relu(1 - beta * delta)
        elif kind == "ipo":
            loss = (delta_by_token - 1 / (2 * beta)).square()
        elif kind == "ipo_sum":
            loss = (delta - 1 / (2 * beta)).square()
        elif kind == "sigmoid_norm":
            loss = -logsigmoid(beta * delta_by_token)
        elif kind == "simpo":
            loss = -logsigmoid(beta * (means[better] - means[worse]) - settings.gamma)
        else:
            # log odds: m − log(1 − exp(m)).
            odds = means - torch.log(-torch.expm1(means.clamp(max=-1e-12)))
            loss = -beta * logsigmoid(odds[better] - odds[worse])
        total = total + weight * loss
    return total


def slot_temperatures(paths: RowPaths, trained: Array) -> Array:
    """float64 [T] temperature at which each slot's target was sampled; 1 where the data do not say.

    Args:
        paths: Of a row of T slots.
        trained: bool [T], whether a slot's target is trained.

    Raises:
        ConfigError: A temperature is not above 0, or paths of different temperatures share a
            trained token.
    """
    found = np.ones(len(trained))
    if TEMPERATURE not in paths.values:
        return found
    # The last slot of a path has no target in it.
    inner = np.ones(len(paths.slots), np.bool_)
    inner[paths.starts[1:] - 1] = False
    inner &= trained[paths.slots]
    slots, each = (
        paths.slots[inner],
        np.nan_to_num(paths.values[TEMPERATURE][paths.owners[inner]], nan=1.0),
    )
    if not (each > 0).all():
        raise ConfigError(
            f"an answer has temperature {each.min():g}; expected above 0, as ratios need "
            "probabilities"
        )
    found[slots] = each
    if (found[slots] != each).any():
        raise ConfigError(
            "answers that were sampled at different temperatures share a token; give their "
            f"log-probabilities as the column {OLD_COLUMN!r}, or build_tree(share=False)"
        )
    return found


def policy_loss(
    scores: PathScores,
    logs: Tensor,
    reference: Tensor | None,
    settings: PolicySettings,
    divisor: float,
    version: int = 0,
) -> tuple[Tensor, Figures]:
    """A row's share of the step's loss; and sums for figures.

    Args:
        scores: The row's answers.
        logs: float64 [n] log-probabilities of the trained targets, at the temperature of their
            answers.
        reference: The same by the reference model; None: kl is 0.
        settings: Clips, weights, normalisation.
        divisor: Of the whole step: answers (`sequence`), trained tokens of all answers (`token`),
            or answers × length.
        version: Of the policy before the step.
    """
    host = scores.host
    tokens = PolicyTokens.of(scores.answers, host.owners, host.columns, settings, version)
    entries, owners = scores.place(host.entries[tokens.kept]), scores.place(tokens.owners)
    gain, counts = scores.place(tokens.gains), scores.place(tokens.counts).clamp(min=1)
    new = logs[entries]

    def shared(change: Tensor) -> Tensor:
        """A change of each token, or for importance sequence its mean over the answer, as the
        change of each.
        """
        if settings.importance == "token":
            return change
        # Its gradient spreads evenly over the answer's tokens.
        sums = change.new_zeros(len(scores.answers)).index_add(0, owners, change)
        return (sums / counts)[owners]

    column = old_column(settings, scores.columns)
    old = new.detach() if column is None else scores.columns[column][entries]
    ratio = shared(new - old).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    if settings.kind == "cispo":
        each = -clipped.detach() * gain * new
        active = clipped != ratio
    else:
        each = -torch.minimum(ratio * gain, clipped * gain)
        active = clipped * gain < ratio * gain
    figures: Figures = {
        "clipped": active.sum(dtype=torch.float64),
        "entropy_estimate": -new.detach().sum(),
        "tokens": float(len(entries)),
        "log_ratio": (new - old).detach().abs().sum(),
    }
    if settings.importance_cap is not None:
        gap = old - scores.columns[OLD_COLUMN][entries]
        weight = shared(gap).exp()
        each = each * weight.clamp(max=settings.importance_cap)
        figures["sampler_gap"] = gap.detach().abs().sum()
        figures["capped"] = (weight > settings.importance_cap).sum(dtype=torch.float64)
    if settings.kl and reference is not None:
        gap = reference[entries] - new
        divergence = gap.exp() - gap - 1
        each = each + settings.kl * divergence
        figures["kl"] = divergence.detach().sum()
    if settings.normalise == "sequence":
        each = each / counts[owners]
    return each.sum() / divisor, figures


def old_column(settings: PolicySettings, columns: Collection[str]) -> str | None:
    """The column with log π_old; None: it is the model itself."""
    if TRAINER_COLUMN in columns:
        return TRAINER_COLUMN
    return OLD_COLUMN if OLD_COLUMN in columns and settings.importance_cap is None else None
