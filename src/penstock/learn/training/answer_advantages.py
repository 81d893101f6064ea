"""Advantages of the tokens of sampled answers, and which of them a policy learns from.

All of it is known on the host before a step begins, so that denominators and refusals need no
device. In order: the column `advantages`, a number of each token; the column `turn_rewards`, from
which those of a token follow; the value `advantage` of an answer; its `reward`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Self, final

import numpy as np

from penstock.core.arrays import Bool, Float64, Int64
from penstock.core.errors import ConfigError
from penstock.data.shards.format.trees import (
    ADVANTAGE,
    POLICY_VERSION,
    REWARD,
    TOKEN_ADVANTAGES,
    TRUNCATED,
    TURN_REWARDS,
)
from penstock.learn.training.path_settings import PolicySettings
from penstock.plan.inputs.answers import RowAnswers

HOST_COLUMNS = (TOKEN_ADVANTAGES, TURN_REWARDS, POLICY_VERSION)
"""Columns that a policy reads on the host."""
EPSILON = 1e-4
"""Added to the standard deviation of a group's rewards, as TRL does."""
ROUNDING = 1e-5
"""Relative: columns are float32, values of paths float64."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyTokens:
    """The tokens of a row that a policy learns from. K of E entries, A answers."""

    kept: Annotated[Int64, "kept"]
    """[K] which entries they are."""
    owners: Annotated[Int64, "kept"]
    """[K] answer of each."""
    gains: Annotated[Float64, "kept"]
    """[K] advantage of each."""
    counts: Annotated[Float64, "answers"]
    """[A] how many each answer has."""
    staleness: Annotated[Float64, "tokens"]
    """Versions by which each token is behind, those that are masked for it too; empty: the data
    have no versions.
    """
    masked: int
    """Tokens that are left out because they are too stale."""

    @classmethod
    def of(
        cls,
        answers: RowAnswers,
        owners: Annotated[Int64, "entries"],
        columns: Mapping[str, Float64],
        settings: PolicySettings,
        version: int,
    ) -> Self:
        """Find them.

        Args:
            answers: Of the row.
            owners: [E] answer of each trained token.
            columns: Name → [E], those of `HOST_COLUMNS` that the data have.
            settings: How advantages are made, and what is masked.
            version: Of the policy that is trained now.

        Raises:
            ConfigError: Advantages of tokens and of their answer differ, or a token is too stale,
                or newer than the policy.
        """
        gains = token_advantages(answers, owners, columns, settings)
        known = ~np.isnan(gains)
        behind, masked = np.empty(0), 0
        if POLICY_VERSION in columns:
            behind = _staleness(columns[POLICY_VERSION][known], version)
            if settings.max_staleness is not None:
                late = behind > settings.max_staleness
                masked = int(np.count_nonzero(late))
                if masked and settings.stale == "refuse":
                    _refuse_stale(behind, settings.max_staleness, version)
                known[np.flatnonzero(known)[late]] = False
        kept = np.flatnonzero(known)
        return cls(
            kept=kept,
            owners=owners[kept],
            gains=gains[kept],
            counts=np.bincount(owners[kept], minlength=len(answers)).astype(np.float64),
            staleness=behind,
            masked=masked,
        )


def token_advantages(
    answers: RowAnswers,
    owners: Annotated[Int64, "entries"],
    columns: Mapping[str, Float64],
    settings: PolicySettings,
) -> Annotated[Float64, "entries"]:
    """[E] advantage of each trained token; NaN: it is not trained. See `PolicyTokens.of`."""
    if TOKEN_ADVANTAGES in columns:
        gains = _of_tokens(answers, owners, columns[TOKEN_ADVANTAGES], settings)
    elif TURN_REWARDS in columns:
        gains = _of_turns(answers, owners, columns[TURN_REWARDS], settings)
    else:
        return advantages(answers, settings)[owners]
    if settings.truncated == "mask":
        gains[_cut(answers)[owners]] = np.nan
    return gains


def advantages(answers: RowAnswers, settings: PolicySettings) -> Annotated[Float64, "answers"]:
    """[A] advantage of each answer, by the values of paths; NaN: it is not of a group, or masked,
    and not trained.
    """
    given = answers.has(ADVANTAGE)
    numbers = answers.value(ADVANTAGE if given else REWARD, "training.policy")
    found = np.full(len(answers), np.nan)
    for document in np.unique(answers.documents[~np.isnan(numbers)]):
        mine = (answers.documents == document) & ~np.isnan(numbers)
        group = numbers[mine]
        dead = not group.any() if given else _alike(group)
        if dead and settings.dead_groups == "leave_out":
            continue
        found[mine] = group if given else _centred(group, settings)
    if settings.truncated == "mask":
        found[_cut(answers)] = np.nan
    return found


def _alike(rewards: Float64) -> bool:
    # Not by the deviation, in which equal rewards may leave rounding.
    return bool(rewards.min() == rewards.max())


def _centred(rewards: Float64, settings: PolicySettings) -> Float64:
    """Rewards less their mean, and by `scale` divided by their deviation."""
    group = np.zeros(len(rewards)) if _alike(rewards) else rewards - rewards.mean()
    if settings.scale == "group":
        group = group / ((group.std(ddof=1) if len(group) > 1 else 0.0) + EPSILON)
    return group


def _cut(answers: RowAnswers) -> Bool:
    """[A] answers that `max_tokens` or the context cut."""
    found: Bool = answers.value(TRUNCATED, "training.policy.truncated") > 0
    return found


def _of_tokens(
    answers: RowAnswers, owners: Int64, column: Float64, settings: PolicySettings
) -> Float64:
    gains = column.copy()
    if answers.has(ADVANTAGE):
        said = answers.value(ADVANTAGE, "training.policy")[owners]
        odd = np.abs(gains - said) > ROUNDING * np.maximum(np.abs(said), 1)
        if odd.any():
            raise ConfigError(
                f"training.policy: an answer has advantage {said[odd][0]:g}, but one of its tokens "
                f"has {gains[odd][0]:g} in the column {TOKEN_ADVANTAGES!r}; give one of the two"
            )
    if settings.dead_groups == "leave_out":
        documents = answers.documents[owners]
        alive = np.unique(documents[np.nan_to_num(gains) != 0])
        gains[~np.isin(documents, alive)] = np.nan
    return gains


def _of_turns(
    answers: RowAnswers, owners: Int64, rewards: Float64, settings: PolicySettings
) -> Float64:
    """Rewards of turns are centred over all turns of the group, and a token has the sum over its
    own and the later turns of its answer.
    """
    gains, documents = np.full(len(owners), np.nan), answers.documents[owners]
    given = ~np.isnan(rewards)
    for document in np.unique(documents[given]):
        mine = documents == document
        group = rewards[mine & given]
        if _alike(group) and settings.dead_groups == "leave_out":
            continue
        steps = np.zeros(len(owners))
        steps[mine & given] = _centred(group, settings)
        for answer in np.unique(owners[mine]):
            at = np.flatnonzero(owners == answer)
            gains[at] = np.cumsum(steps[at][::-1])[::-1]
    return gains


def _staleness(versions: Float64, version: int) -> Float64:
    """Versions by which tokens are behind."""
    behind = version - versions
    # Also NaN.
    if (wrong := versions[~(behind >= 0) | (versions < 0)]).size:
        raise ConfigError(
            f"training.policy: a token was sampled by version {wrong[0]:g} of the policy (the "
            f"column {POLICY_VERSION!r}), but version {version} is trained now; set policy.version "
            "to the version of the weights before the run's first step"
        )
    return behind


def _refuse_stale(behind: Float64, bound: int, version: int) -> None:
    raise ConfigError(
        f"training.policy: a token is {behind.max():g} versions behind the policy (version "
        f"{version}), and policy.max_staleness is {bound}; sample again, raise max_staleness, or "
        "leave such tokens out with stale: mask"
    )
