"""The evaluator `preference`: loss, accuracy and margin of held-out answers, compared as in
training.
"""

from typing import TYPE_CHECKING, Any, final

import torch

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonObject
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.path_losses import Figures
from penstock.learn.training.path_settings import PreferenceSettings
from penstock.learn.training.path_training import PathTraining, figure_means, figure_names
from penstock.learn.training.step_sums import StepSums
from penstock.models import LanguageModel
from penstock.plan.loader.agreement import check_ranks
from penstock.plan.loader.loader import Loader

if TYPE_CHECKING:
    from penstock.learn.training.evaluator_settings import EvaluatorSettings
    from penstock.learn.training.settings import TrainSettings


@final
class HeldOutPreference:
    """Loss, accuracy and margin of held-out answers, compared as in training; each document is used
    once.

    Args:
        name: Name of the evaluator, for errors.
        settings: The data.
        sequence_length: Slots per row.
        ranks: The processes that evaluate together.
    """

    def __init__(
        self, name: str, settings: "EvaluatorSettings", sequence_length: int, ranks: Ranks
    ) -> None:
        self._name, self._settings, self._length, self._ranks = (
            name,
            settings,
            sequence_length,
            ranks,
        )
        self._paths: PathTraining | None = None

    def begin(
        self, model: LanguageModel, settings: "TrainSettings", training: PathTraining | None
    ) -> None:
        """Make ready, with the reference model of training.

        Raises:
            ConfigError: `training.preference` is not set, or the data do not fit it.
        """
        if training is None or settings.preference is None:
            raise ConfigError(
                f"evaluator {self._name!r}: kind preference needs training.preference; set it"
            )
        place, mixture, length = self._ranks.place, self._settings.mixture, self._length
        self._loader = lambda: Loader(
            mixture,
            sequence_length=length,
            rows_per_step=8 * place.size,
            requirements=model.requirements(),
            data_parallel=place,
            threads=1,
        )
        loader = self._loader()
        try:
            check_ranks(loader)
            self._paths = PathTraining(
                model, loader, settings, self._ranks.device, training.reference
            )
        except ConfigError as error:
            raise ConfigError(f"evaluator {self._name!r}: {error}") from error

    def __call__(self, model: LanguageModel, stop: Any) -> JsonObject:
        """`loss`, `accuracy`, `margin` and what training reports besides; empty if `stop` became
        true.
        """
        paths = self._paths
        assert paths is not None
        names, taken = figure_names(paths.settings), 0
        loss = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        sums: Figures = {}
        units: dict[str, int] = {}
        for step in self._loader():
            rows = list(step)
            with torch.no_grad():
                paths.begin(rows, step, self._ranks)
                for row in rows:
                    share, figures = paths.loss(row, model)
                    loss += share.double() * paths.divisor
                    sums = {name: sums.get(name, 0.0) + value for name, value in figures.items()}
            units = {name: units.get(name, 0) + count for name, count in step.units.items()}
            taken += len(step) * self._ranks.place.size
            if stop(taken / self._settings.rows if self._settings.rows else None):
                return {}
            if self._settings.rows is not None and taken >= self._settings.rows:
                break
        pending = StepSums(self._ranks)
        pending.add({"loss": loss, **{name: sums.get(name, 0.0) for name in names}})
        read = pending.take()
        assert isinstance(paths.settings, PreferenceSettings)
        count = units.get("pairs" if paths.settings.of_pairs else "examples", 0)
        found = figure_means(paths.settings, {name: read[name] for name in names}, units)
        return {"loss": read["loss"] / max(count, 1), **found}
