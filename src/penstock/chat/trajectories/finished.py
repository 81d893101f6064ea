"""A trajectory with its reward, as a dataset stores it; and steps whose ids are given."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from penstock.chat.trajectories.paths import (
    OpenPath,
    PathImage,
    TokenPath,
    common,
    keyed,
    moved,
)
from penstock.chat.trajectories.prompt_images import TrajectoryImages
from penstock.core.errors import ConfigError, ConversationError
from penstock.media.loading import LoadedImage


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTrajectory:
    """A trajectory that is over.

    Raises:
        ConfigError: It has no reply, or a number is not finite.
    """

    paths: tuple[TokenPath, ...]
    """Its token sequences."""
    reward: float | None = None
    """What it earned; None: unknown."""
    advantage: float | None = None
    """How much better it is than others of its group, in place of a reward; None: from rewards."""
    group: str | None = None
    """Trajectories of one group answer one question, and are compared; None: it stands alone."""
    truncated: bool = False
    """Whether its last reply was cut by a limit."""
    temperature: float | None = None
    """Of the sampler; None: unknown."""
    version: int | None = None
    """Version of the policy that sampled it; None: unknown."""
    has_log_probabilities: bool = True
    """Whether its sampled tokens have log-probabilities."""
    step_rewards: tuple[float, ...] = ()
    """Of each reply, where turns are rewarded; empty: none is."""
    step_advantages: tuple[float | tuple[float, ...], ...] = ()
    """Of each reply, or of each token of a reply, where turns have advantages; empty: none has."""

    def __post_init__(self) -> None:
        if not any(path.replies for path in self.paths):
            raise ConfigError("a trajectory without a reply teaches nothing; leave it out")
        for name in ("reward", "advantage", "temperature"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"the {name} of a trajectory is {value}; expected a number")

    @property
    def sampled(self) -> int:
        """Number of tokens that are trained."""
        return int(sum((path.weights > 0).sum() for path in self.paths))


@final
class GivenSteps:
    """Paths of steps whose prompts are given as ids: nothing is rendered.

    A step extends the longest open path that its prompt begins with; otherwise a new path begins.
    So sub-agents, whose steps lie between those of others, each keep their own path.

    Args:
        pictures: Finds images in them; None: there are none.
    """

    def __init__(self, pictures: TrajectoryImages | None = None) -> None:
        self._pictures = pictures
        self._open: list[OpenPath] = []
        self._images: list[LoadedImage] = []
        self._replies = 0

    def add(
        self,
        prompt: Sequence[int],
        ids: Sequence[int],
        logs: Sequence[float],
        weights: Sequence[float],
        images: Sequence[LoadedImage] = (),
    ) -> None:
        """Add a step: what was sent, and what was sampled.

        Args:
            prompt: All of it.
            ids: The sampled tokens.
            logs: Of each, in nats.
            weights: Of each.
            images: Those of its new messages.

        Raises:
            ConversationError: The prompt has other tokens of images than the processor makes for
                these and those before.
        """
        known = [one for one in self._open if [*prompt[: len(one.ids)]] == one.ids]
        if known:
            path = max(known, key=lambda one: len(one.ids))
            mine = [image for image, _ in path.images]
            found = self._find(prompt, [[*mine, *images]])
            begin = len(path.ids)
            path.read(prompt[begin:], moved(found[len(mine) :], -begin))
        else:
            found = self._find(prompt, [images, [*self._images, *images]])
            path = self._nearest(keyed(prompt, found)).branch(prompt, found)
            self._open.append(path)
        if self._pictures is not None:
            self._pictures.refuse_slots(f"step {self._replies}", ids)
        self._images += images
        path.sampled(self._replies, ids, logs, weights)
        self._replies += 1

    def _find(
        self, prompt: Sequence[int], candidates: Sequence[Sequence[LoadedImage]]
    ) -> list[PathImage]:
        """The images of a prompt, which are one of these."""
        if self._pictures is None:
            return []
        slots = [self._pictures.slots(images) for images in candidates]
        fits = slots.index(found) if (found := self._pictures.slots_in(prompt)) in slots else -1
        try:
            return self._pictures.in_ids(prompt, candidates[fits])
        except ConversationError as error:
            raise ConversationError(f"step {self._replies}: its prompt {error}") from error

    def paths(self) -> tuple[TokenPath, ...]:
        """All paths, in the order in which they began."""
        return tuple(path.done() for path in self._open)

    def _nearest(self, keys: Sequence[int]) -> OpenPath:
        """The path with the longest beginning in common."""
        return max(self._open, key=lambda one: common(one.keys, keys), default=OpenPath())
