"""Losses of whole answers: functions of the log-probabilities that a row's paths give their trained tokens.

All is float64: sums over thousands of tokens are compared. What each function means, and its source, is in
`path_settings`.
"""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from penstock.inputs.paths import RowPaths
from penstock.shards.trees import LABEL, RANK, pairs_of
from penstock.training.path_settings import OLD_COLUMN, PolicySettings, PreferenceSettings

EPSILON = 1e-4
"""Added to the standard deviation of a group's rewards, as TRL does."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PathScores:
    """What the paths of one row give their trained tokens. n trained slots, E pairs of a path and such a slot, P
    paths."""

    paths: RowPaths
    slots: Tensor
    """int64 [n] the slots whose target is trained."""
    entries: Tensor
    """int64 [E] index in `slots`, path after path; shared slots stand here once for each path."""
    owners: Tensor
    """int64 [E] path of each entry."""
    counts: Tensor
    """float64 [P] trained tokens of each path."""
    columns: dict[str, Tensor]
    """Name → float64 [n], the column's value of each slot's target."""

    @classmethod
    def of(cls, paths: RowPaths, trained: Tensor, columns: dict[str, Any]) -> "PathScores":
        """Find the trained slots of paths.

        Args:
            paths: Of a row of T slots.
            trained: bool [T], whether a slot's target is trained, on the model's device.
            columns: Name → [T].
        """
        device = trained.device
        is_trained = trained.cpu().numpy()
        slots = np.flatnonzero(is_trained)
        # The last slot of a path has no target in it, whatever stands there for another path.
        inner = np.ones(len(paths.slots), np.bool_)
        inner[paths.starts[1:] - 1] = False
        inner &= is_trained[paths.slots]
        owners = paths.owners[inner]
        return cls(
            paths=paths,
            slots=torch.from_numpy(slots).to(device),
            entries=torch.from_numpy(np.searchsorted(slots, paths.slots[inner])).to(device),
            owners=torch.from_numpy(owners).to(device),
            counts=torch.from_numpy(np.bincount(owners, minlength=len(paths)).astype(np.float64)).to(device),
            columns={
                name: torch.from_numpy(np.asarray(values)[slots + 1].astype(np.float64)).to(device)
                for name, values in columns.items()
            },
        )

    def sums(self, logs: Tensor) -> Tensor:
        """[P] sum over each path's trained tokens of float64 [n]."""
        return logs.new_zeros(len(self.paths)).index_add(0, self.owners, logs[self.entries])

    def value(self, name: str, who: str) -> Tensor:
        """float64 [P] a value of each path."""
        return torch.from_numpy(self.paths.value(name, who)).to(self.slots.device)


Figures = dict[str, float]


def preference_loss(
    scores: PathScores, logs: Tensor, reference: Tensor | None, settings: PreferenceSettings, z: float = 0.0
) -> tuple[Tensor, Figures]:
    """Sum over the pairs (or examples) of a row; and sums for figures, not divided.

    Args:
        scores: The row's paths.
        logs: float64 [n] log-probabilities of the trained targets.
        reference: The same by the reference model; None: no kind needs it.
        settings: Kinds and their constants.
        z: kto: the reference point.
    """
    sums = scores.sums(logs)
    ratios = sums if reference is None else sums - scores.sums(reference)
    counts = scores.counts.clamp(min=1)
    if settings.of_pairs:
        better, worse = _pairs(scores).to(logs.device)
        loss = _pair_losses(sums, ratios, counts, better, worse, settings)
        if settings.sft_weight:
            loss = loss - settings.sft_weight * (sums[better] / counts[better])
        rewards = settings.beta * ratios.detach()
        return loss.sum(), {
            "chosen_reward": float(rewards[better].sum()),
            "rejected_reward": float(rewards[worse].sum()),
            "margin": float((rewards[better] - rewards[worse]).sum()),
            "accuracy": float((rewards[better] > rewards[worse]).sum()),
            "chosen_log_probability": float(sums.detach()[better].sum()),
            "rejected_log_probability": float(sums.detach()[worse].sum()),
        }
    labels = scores.value(LABEL, f"preference.kind {settings.kind}")
    loss, figures = sums.new_zeros(()), {}
    for label, name in ((1.0, "chosen"), (0.0, "rejected")):
        mine = labels == label
        signed = ratios[mine] if label else -ratios[mine]
        for kind, weight in settings.weights.items():
            point = z if kind == "kto" else 0.0
            gap = signed - point if label else signed + point
            loss = loss + weight * torch.sigmoid(-settings.beta * gap).sum()
        if label and settings.sft_weight:
            loss = loss - settings.sft_weight * (sums[mine] / counts[mine]).sum()
        figures[f"{name}_reward"] = float(settings.beta * ratios.detach()[mine].sum())
        figures[f"{name}_log_probability"] = float(sums.detach()[mine].sum())
        figures[f"{name}_count"] = float(mine.sum())
    return loss, figures


def _pairs(scores: PathScores) -> Tensor:
    """int64 [2, pairs] better and worse paths of all documents of a row."""
    ranks, documents = scores.paths.value(RANK, "training.preference"), scores.paths.documents
    found = [np.empty((0, 2), np.int64)]
    for document in np.unique(documents[~np.isnan(ranks)]):
        mine = np.flatnonzero(documents == document)
        found.append(mine[pairs_of(ranks[mine])])
    return torch.from_numpy(np.concatenate(found).T.copy())


def _pair_losses(
    sums: Tensor, ratios: Tensor, counts: Tensor, better: Tensor, worse: Tensor, settings: PreferenceSettings
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
            loss = -(1 - smoothing) * logsigmoid(beta * delta) - smoothing * logsigmoid(-beta * delta)
        elif kind == "robust":
            loss = -(1 - smoothing) * logsigmoid(beta * delta) + smoothing * logsigmoid(-beta * delta)
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


def advantages(paths: RowPaths, settings: PolicySettings) -> Any:
    """float64 [P] advantage of each path; NaN: it is not of a group, and not trained."""
    if "advantage" in paths.values:
        return paths.values["advantage"]
    rewards, found = paths.value("reward", "training.policy"), np.full(len(paths), np.nan)
    for document in np.unique(paths.documents[~np.isnan(rewards)]):
        mine = (paths.documents == document) & ~np.isnan(rewards)
        group = rewards[mine]
        centred = group - group.mean()
        if settings.scale == "group":
            centred = centred / ((group.std(ddof=1) if len(group) > 1 else 0.0) + EPSILON)
        found[mine] = centred
    return found


def policy_loss(
    scores: PathScores, logs: Tensor, reference: Tensor | None, settings: PolicySettings, divisor: float
) -> tuple[Tensor, Figures]:
    """A row's share of the step's loss; and sums for figures.

    Args:
        scores: The row's paths.
        logs: float64 [n] log-probabilities of the trained targets.
        reference: The same by the reference model; None: kl is 0.
        settings: Clips, weights, normalisation.
        divisor: Of the whole step: answers (`sequence`), trained tokens of all answers (`token`), or answers × length.
    """
    of_paths = torch.from_numpy(advantages(scores.paths, settings)).to(logs.device)
    known = ~of_paths.isnan()
    keep = known[scores.owners]
    entries, owners = scores.entries[keep], scores.owners[keep]
    gain = of_paths.nan_to_num()[owners]
    new = logs[entries]
    old = new.detach() if OLD_COLUMN not in scores.columns else scores.columns[OLD_COLUMN][entries]
    change = new - old
    if settings.importance == "sequence":
        # One ratio for an answer; its gradient spreads evenly over its tokens.
        means = change.new_zeros(len(scores.paths)).index_add(0, owners, change) / scores.counts.clamp(min=1)
        change = means[owners]
    ratio = change.exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    each = -torch.minimum(ratio * gain, clipped * gain)
    figures = {
        "clipped": float((clipped * gain < ratio * gain).sum()),
        "entropy_estimate": float(-new.detach().sum()),
        "tokens": float(len(entries)),
        "log_ratio": float((new - old).detach().abs().sum()),
    }
    if settings.kl and reference is not None:
        gap = reference[entries] - new
        divergence = gap.exp() - gap - 1
        each = each + settings.kl * divergence
        figures["kl"] = float(divergence.detach().sum())
    if settings.normalise == "sequence":
        each = each / scores.counts.clamp(min=1)[owners]
    return each.sum() / divisor, figures
