"""Answers and tokens of a step that whole answers are trained on, counted over all ranks before any
gradient: the denominators of a policy, and how old its tokens are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self, final

import numpy as np

from penstock.core.arrays import Int64
from penstock.core.errors import ConfigError
from penstock.data.shards.format.trees import POLICY_VERSION, TURN_REWARDS
from penstock.learn.training.answer_advantages import HOST_COLUMNS, PolicyTokens
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.path_losses import trained_tokens
from penstock.learn.training.path_settings import PolicySettings, PreferenceSettings
from penstock.learn.training.processes import in_step
from penstock.plan.inputs.answers import RowAnswers
from penstock.plan.inputs.model_input import ModelInput


@final
@dataclass(slots=True)
class StepCounts:
    """Sums over the rows of a step, of all ranks."""

    answers: float = 0.0
    tokens: float = 0.0
    """Trained tokens; a shared one once for each answer."""
    behind: float = 0.0
    """Sum of the staleness of tokens, with those that are masked for it."""
    masked: float = 0.0
    largest: float = 0.0
    """Staleness of the oldest token."""
    fault: ConfigError | None = field(default=None)

    @classmethod
    def of(
        cls,
        rows: Sequence[ModelInput],
        settings: PolicySettings | PreferenceSettings,
        who: str,
        version: int,
        ranks: Ranks,
    ) -> Self:
        """Count this rank's rows, then over all ranks.

        Args:
            rows: Of this rank.
            settings: Those of the loss.
            who: The section's name, for errors.
            version: Of the policy that is trained now.
            ranks: The processes of the run.

        Raises:
            ConfigError: A loss weight is neither 0 nor 1, or what a policy reads is wrong. Raised
                on all ranks, none of which may wait for another.
        """
        found, aged = cls(), False
        for row in rows:
            aged |= POLICY_VERSION in row.columns
            try:
                found._add(row, settings, who, version)
            except ConfigError as error:
                found.fault = error
                break
        found.answers, found.tokens, found.behind, found.masked, ages, faults = ranks.sum(
            [
                found.answers,
                found.tokens,
                found.behind,
                float(found.masked),
                float(aged),
                float(found.fault is not None),
            ]
        )
        if faults:
            with in_step():
                if found.fault is not None:
                    raise found.fault
        if ages and ranks.several:
            found.largest = -float(ranks.least(-int(found.largest)))
        return found

    def _add(
        self,
        row: ModelInput,
        settings: PolicySettings | PreferenceSettings,
        who: str,
        version: int,
    ) -> None:
        answers, slots, owners = trained_tokens(row, who)
        if isinstance(settings, PreferenceSettings):
            return
        if TURN_REWARDS in row.columns:
            _refuse_rewards_elsewhere(row, answers, slots)
        columns = {
            name: row.columns[name][slots + 1].astype(np.float64)
            for name in HOST_COLUMNS
            if name in row.columns
        }
        tokens = PolicyTokens.of(answers, owners, columns, settings, version)
        self.answers += int(np.count_nonzero(tokens.counts))
        self.tokens += len(tokens.kept)
        self.behind += float(tokens.staleness.sum())
        self.masked += tokens.masked
        self.largest = max(self.largest, float(tokens.staleness.max(initial=0)))

    def ages(self) -> dict[str, float]:
        """Figures of the staleness of a step's tokens, equal on all ranks."""
        count = max(self.tokens + self.masked, 1.0)
        return {
            "staleness.mean": self.behind / count,
            "staleness.largest": self.largest,
            "staleness.masked": self.masked / count,
        }


def _refuse_rewards_elsewhere(row: ModelInput, answers: RowAnswers, trained: Int64) -> None:
    """Refuse a reward of a turn at a token that is not trained, which no policy would see.

    Args:
        row: With the column.
        answers: Of the row.
        trained: Slots whose target is trained.
    """
    # The first token of a branch is no target there: its number belongs to its original.
    inside = np.zeros(len(row.tokens), np.bool_)
    inside[answers.slots + 1] = True
    inside[trained + 1] = False
    rewards = row.columns[TURN_REWARDS]
    if (wrong := rewards[inside & ~np.isnan(rewards)]).size:
        raise ConfigError(
            f"training.policy: the column {TURN_REWARDS!r} is {wrong[0]:g} at a token that is not "
            "trained; give the reward of a turn at its last sampled token, and NaN at all others"
        )
