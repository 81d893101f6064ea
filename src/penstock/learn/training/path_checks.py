"""What the data of a run must have for a loss of whole answers, checked before it begins."""

from collections.abc import Iterator

from penstock.core.errors import ConfigError
from penstock.data.shards.format.trees import (
    ADVANTAGE,
    LABEL,
    POLICY_VERSION,
    RANK,
    REWARD,
    TOKEN_ADVANTAGES,
    TRUNCATED,
    TURN_REWARDS,
)
from penstock.learn.training.path_settings import (
    OLD_COLUMN,
    REFERENCE_COLUMN,
    TRAINER_COLUMN,
    PolicySettings,
    PreferenceSettings,
)
from penstock.plan.loader.loader import Loader


def require_token_targets(
    loader: Loader, who: str, cure: str = "set training.preference (or training.policy)"
) -> None:
    """Refuse data whose answers are compared for a loss of single tokens, which would train the bad
    ones, too.

    Raises:
        ConfigError: A source has answers with ranks, labels or rewards.
    """
    for source, values in loader.path_values.items():
        if values and loader.has_compared(source):
            raise ConfigError(
                f"source {source!r} has answers with {', '.join(values)}, and {who} would "
                f"train all of them alike, the worse ones too; {cure}, or prepare with "
                "answers: best"
            )


def check_answers(
    loader: Loader, settings: PolicySettings | PreferenceSettings, who: str
) -> list[str]:
    """Check that each source has what the loss reads; gives notices of what the settings accept.

    Args:
        loader: Of the run.
        settings: Those of the loss.
        who: The section's name, for errors.

    Raises:
        ConfigError: A source lacks it, its answers were filtered, or two columns exclude each
            other.
    """
    notices: list[str] = []
    needed: tuple[str, ...] = (ADVANTAGE, REWARD)
    if isinstance(settings, PreferenceSettings):
        needed = (RANK,) if settings.of_pairs else (LABEL,)
    else:
        notices += _check_sampling(loader, settings)
        notices += _check_columns(loader, settings)
    by_token = isinstance(settings, PolicySettings) and {TOKEN_ADVANTAGES, TURN_REWARDS} & set(
        loader.columns
    )
    for source, values in loader.path_values.items():
        if values is not None and by_token:
            continue
        if not set(needed) & set(values or ()):
            found = "no paths" if values is None else f"the values {', '.join(values) or 'none'}"
            raise ConfigError(
                f"{who} needs paths with {' or '.join(map(repr, needed))}, but source "
                f"{source!r} has {found}; prepare preference records or rollouts, or "
                "leave the source out"
            )
    return notices


def _check_sampling(loader: Loader, settings: PolicySettings) -> Iterator[str]:
    for source, dataset in zip(loader.mixture.sources, loader.datasets, strict=True):
        who = f"training.policy: source {source.name!r}"
        if settings.truncated == "mask" and TRUNCATED not in (
            loader.path_values[source.name] or ()
        ):
            raise ConfigError(
                f"{who} does not say which answers were cut (the value {TRUNCATED!r} of "
                "paths), which truncated: mask needs; sample with `penstock rollouts` of "
                "this version, or leave truncated out"
            )
        for part in dataset.parts:
            filters = part.sampling
            if not filters:
                continue
            shown = ", ".join(f"{name} {value}" for name, value in filters.items())
            if settings.filtered == "refuse":
                raise ConfigError(
                    f"{who} was sampled with {shown}, so its tokens were drawn with other "
                    "probabilities than those that ratios compare; sample with temperature "
                    "alone, or set policy.filtered: accept"
                )
            yield (
                f"{who} was sampled with {shown}; its answers are taken as if they had been "
                "sampled without"
            )
    if settings.importance_cap is not None and OLD_COLUMN not in loader.columns:
        raise ConfigError(
            "training.policy.importance_cap needs the sampler's log-probabilities, the "
            f"column {OLD_COLUMN!r}; sample with `penstock rollouts`, or leave importance_cap "
            "out"
        )


def _check_columns(loader: Loader, settings: PolicySettings) -> Iterator[str]:
    read = (
        REFERENCE_COLUMN, OLD_COLUMN, TRAINER_COLUMN, TOKEN_ADVANTAGES, TURN_REWARDS, POLICY_VERSION
    )  # fmt: skip
    for source, column in loader.columns_lacked:
        # Its fill would be taken for what was sampled.
        if column in read:
            raise ConfigError(
                f"training.policy: source {source!r} lacks the column {column!r}, which another "
                "source has; give it to all (penstock.shards.extend_dataset), or train them apart"
            )
    columns = [name for name in (TOKEN_ADVANTAGES, TURN_REWARDS) if name in loader.columns]
    if len(columns) > 1:
        raise ConfigError(
            f"training.policy: the data have the columns {TOKEN_ADVANTAGES!r} and "
            f"{TURN_REWARDS!r}, and each says what a token's advantage is; leave one out"
        )
    if settings.max_staleness is not None and POLICY_VERSION not in loader.columns:
        raise ConfigError(
            "training.policy.max_staleness needs the version of the policy that sampled each "
            f"token, the column {POLICY_VERSION!r}; write it with the answers "
            "(run.rollouts(version=…)), or leave max_staleness out"
        )
    rewarded = any(REWARD in (values or ()) for values in loader.path_values.values())
    if columns and rewarded:
        yield (
            f"training.policy takes advantages from the column {columns[0]!r}, in place of the "
            f"value {REWARD!r} of answers"
        )
