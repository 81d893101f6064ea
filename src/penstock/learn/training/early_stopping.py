"""The end of a run whose held-out loss no longer improves.

An evaluator with `patience: n` ends the run once n of its evaluations in a row gave no lower loss
than the best before. What it waits for is saved in checkpoints, so a run that is killed and resumed
ends at the same step; one that is resumed with more patience goes on.
"""

from collections.abc import Mapping
from typing import Any, final

from penstock.core.json_values import JsonObject
from penstock.learn.training.evaluator_settings import EvaluatorSettings


@final
class EarlyStopping:
    """What the evaluators of a run that have `patience` wait for.

    Args:
        evaluators: The settings of all evaluators, by name.

    Attributes:
        seen: For checkpoints: of each such evaluator its best loss, the steps after which it was
            that, and how many evaluations came since.
    """

    def __init__(self, evaluators: Mapping[str, EvaluatorSettings]) -> None:
        found = {name: one.patience for name, one in evaluators.items()}
        self._patience = {name: most for name, most in found.items() if most is not None}
        self.seen: dict[str, JsonObject] = {}

    def see(self, step: int, figures: Mapping[str, Any]) -> None:
        """Take the figures of an evaluation, the same on all ranks.

        Args:
            step: Steps that the run has done.
            figures: By `name/figure`.
        """
        for name in self._patience:
            loss = figures.get(f"{name}/loss")
            if loss is None:
                continue
            before = self.seen.get(name)
            if before is None or loss < before["loss"]:
                self.seen[name] = {"loss": loss, "step": step, "since": 0}
            else:
                self.seen[name] = {**before, "since": before["since"] + 1}

    @property
    def over(self) -> str | None:
        """Why the run ends, in a sentence; None: it does not."""
        for name, most in self._patience.items():
            one = self.seen.get(name)
            if one is not None and one["since"] >= most:
                return (
                    f"{name}: no lower loss in {one['since']} evaluations, so the run ends; the "
                    f"best was {one['loss']:.4f} after step {one['step']:,}. To go on, give more "
                    "patience"
                )
        return None
