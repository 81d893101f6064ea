"""Steps without a target: one may happen, where weights of 0 meet in it; an epoch of them may not.

An iteration ends with an error when a whole epoch of a source passed while no step had a target, or
when it has gone from the first step to the last without any: what lengths do not say (`untrained`),
such as an objective that writes no targets. It depends on the plan alone.
"""

from collections.abc import Sequence
from typing import Annotated, final

from penstock.core.arrays import Int64
from penstock.core.errors import ConfigError
from penstock.plan.loader.plan import PlanState
from penstock.plan.loader.step_planner import StepState


@final
class TargetWatch:
    """Sees the steps of one iteration, in order.

    Args:
        names: Of the sources.
        sizes: Documents of an epoch of each.
        begin: State at which the iteration begins.
        first_step: Number of the loader's first step.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: Annotated[Int64, "sources"],
        begin: StepState,
        first_step: int = 0,
    ) -> None:
        self._names, self._sizes = names, sizes
        self._from_start, self._steps, self._any = begin.step == first_step, 0, False
        # Windows up to this one may hold rows with targets; `_since` is the beginning of the first
        # that does not.
        self._window, self._since = (
            begin.window_start.window,
            None if begin.rows_used else begin.window_start,
        )

    def see(self, after: StepState, denominators: Sequence[float]) -> None:
        """Note a step.

        Raises:
            ConfigError: No step had a target while a source went through all its documents.
        """
        start, self._steps = after.window_start, self._steps + 1
        if any(denominators):
            self._any, self._window, self._since = True, start.window, None
        elif self._since is None:
            self._since = start if start.window > self._window else None
        else:
            self._refuse_epoch(self._since, start, after.step)

    def end(self) -> None:
        """Note that there are no more steps.

        Raises:
            ConfigError: There were some from the very first on, and none had a target.
        """
        if self._from_start and self._steps and not self._any:
            raise ConfigError(
                f"nothing was trained: none of the {self._steps} steps of "
                f"{', '.join(self._names)} had a target; look at the objectives and loss "
                "weights with `penstock inspect`"
            )

    def _refuse_epoch(self, since: PlanState, now: PlanState, step: int) -> None:
        # The first document may have begun before, so one more than an epoch.
        passed = now.cursors["position"] - since.cursors["position"] > self._sizes
        if passed.any():
            names = [name for name, whole in zip(self._names, passed, strict=True) if whole]
            raise ConfigError(
                f"source {', '.join(map(repr, names))}: nothing can be trained: up to step "
                f"{step} all documents were taken, and no step had a target; its objective "
                "writes none, or loss weights of 0 leave none: look at it with `penstock "
                "inspect`, or leave the source out"
            )
