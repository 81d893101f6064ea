"""Sources without a trainable token: each step would have a loss denominator of 0, for ever.

One step without a target may happen, where weights of 0 meet in it. Two things may not: a source without a document
that has a target, found in the lengths when the loader is made; and an iteration in which a whole epoch of a source
passed while no step had a target, or which has gone from the first step to the last without any. The second rule finds
what lengths do not say, such as an objective that writes no targets. Both depend on the plan alone.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, final

from penstock.core.arrays import Int64
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    # The plan itself asks `require_targets`.
    from penstock.loader.plan import PlanState
    from penstock.loader.steps import StepState

_FIRST_LOOK, _LONGEST_LOOK = 1 << 10, 1 << 20
"""Documents that are looked at together: few at first, as nearly always one of them will do."""


def require_targets(
    where: str, lengths: Any, documents: tuple[int, int], longest: int | None, *, by_weights: bool
) -> None:
    """Refuse a source if its lengths say that none of its documents can be trained.

    Reads lengths up to the first document that can; all of them only where none can.

    Args:
        where: The source, for the message.
        lengths: Tokens and trained tokens of all documents [n, 2]; [n, 1] where all but the first are trained. An array
            or `LazyNumbers`.
        documents: The first of its documents, and the one after the last.
        longest: Documents of more tokens are dropped; None: none are.
        by_weights: Whether targets are the trained tokens; else any document with tokens may have some.

    Raises:
        ConfigError: None can.
    """
    (begin, end), count = documents, _FIRST_LOOK
    while begin < end:
        part = lengths[begin : min(begin + count, end)]
        usable = part[:, 0] > 0
        if by_weights:
            usable = part[:, 1] > 0 if part.shape[1] > 1 else part[:, 0] > 1
        if longest is not None:
            usable &= part[:, 0] <= longest
        if usable.any():
            return
        begin, count = begin + count, min(2 * count, _LONGEST_LOOK)
    reasons = "is empty, has one token only, or has loss weight 0 on all others" if by_weights else "is empty"
    if longest is not None:
        reasons += f", or is longer than {longest} tokens with too_long='drop'"
    raise ConfigError(
        f"{where}: nothing can be trained: each of its {end - documents[0]} documents {reasons}; prepare it with other "
        "loss weights or longer documents, or leave the source out"
    )


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
        self, names: Sequence[str], sizes: Annotated[Int64, "sources"], begin: "StepState", first_step: int = 0
    ) -> None:
        self._names, self._sizes = names, sizes
        self._from_start, self._steps, self._any = begin.step == first_step, 0, False
        # Windows up to this one may hold rows with targets; `_since` is the beginning of the first that does not.
        self._window, self._since = begin.window_start.window, None if begin.rows_used else begin.window_start

    def see(self, after: "StepState", denominators: Sequence[float]) -> None:
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
                f"nothing was trained: none of the {self._steps} steps of {', '.join(self._names)} had a target; look "
                "at the objectives and loss weights with `penstock inspect`"
            )

    def _refuse_epoch(self, since: "PlanState", now: "PlanState", step: int) -> None:
        # The first document may have begun before, so one more than an epoch.
        passed = now.cursors["position"] - since.cursors["position"] > self._sizes
        if passed.any():
            names = [name for name, whole in zip(self._names, passed, strict=True) if whole]
            raise ConfigError(
                f"source {', '.join(map(repr, names))}: nothing can be trained: up to step {step} all documents were "
                "taken, and no step had a target; its objective writes none, or loss weights of 0 leave none: look at "
                "it with `penstock inspect`, or leave the source out"
            )
