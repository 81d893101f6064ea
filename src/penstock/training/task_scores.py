"""The score on a real task of the model that is being trained.

Each rank answers its share of the problems, so a look takes as long as the largest share; every problem's score is then
summed over the ranks, so all have the same figures, to the last bit those of a single process with the same answers. A
sharded model's weights are gathered by all ranks together: there each answers all problems. Nothing is kept of the
answers; `penstock eval` on a checkpoint of the run tells more.
"""

import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np
from torch.distributed.tensor import DTensor

from penstock.chat import load_template
from penstock.errors import ConfigError
from penstock.evaluation.results import weighted_mean
from penstock.evaluation.subject import Subject
from penstock.evaluation.tasks import make_task
from penstock.models import LanguageModel
from penstock.training.distributed import Ranks
from penstock.training.evaluators import Stop, never
from penstock.training.samples import shipped
from penstock.training.settings import EvaluatorSettings

PROBLEMS_AT_ONCE = 32
"""That a rank answers between two looks at whether the run was asked to stop."""


@final
class TaskScore:
    """`score`, the mean over the problems, with its `standard_error`.

    Args:
        name: Of the evaluator, for errors.
        settings: The task.
        datasets: What is trained on: the first ships the tokenizer, chats tell the template and what ends a text.
        sequence_length: Tokens of a text at most.
        model: That will answer.
        ranks: The processes that train together.

    Raises:
        ConfigError: There is no tokenizer, no such task, no data for it, or chats are wanted of a model without them.
        RecordError: The data are not the task's.
    """

    def __init__(
        self,
        name: str,
        settings: EvaluatorSettings,
        datasets: Sequence[Any],
        sequence_length: int,
        model: LanguageModel,
        ranks: Ranks,
    ) -> None:
        assert settings.task is not None
        tokenizer, chats, stop_ids = shipped(name, datasets, "no task can be given")
        if settings.task.chat and not chats:
            raise ConfigError(f"evaluator {name!r}: no source is of chats; set task.chat to false")
        template = load_template(chats[0].template, tokenizer=tokenizer, **chats[0].variables) if chats else None
        self._subject = lambda model: Subject(
            model, tokenizer, context_length=sequence_length, stop_ids=stop_ids, template=template
        )
        # All that can be wrong shows now, rather than after hours of training.
        self._subject(model)
        if settings.writes:
            model.new_cache(1, 2)
        self._task, self._ranks = make_task(settings.task), ranks
        self._problems = self._task.problems()
        if not self._problems:
            raise ConfigError(f"evaluator {name!r}: the task has no problems; check task.data")

    def __call__(self, model: LanguageModel, stop: Stop = never) -> dict[str, Any]:
        """See the class."""
        together = any(isinstance(weights, DTensor) for weights in model.parameters())
        rank, shares = (0, 1) if together else (self._ranks.place.rank, self._ranks.place.size)
        mine = self._problems[rank::shares]
        subject = self._subject(model)
        places = {problem.name: place for place, problem in enumerate(self._problems)}
        found = np.zeros((2, len(places)))
        # As often on each rank as on the one with the largest share, since all must ask together.
        for begin in range(0, math.ceil(len(places) / shares), PROBLEMS_AT_ONCE):
            for answer in self._task.answer(subject, mine[begin : begin + PROBLEMS_AT_ONCE]):
                found[:, places[answer.problem]] = answer.score, answer.weight
            if stop():
                return {}
        numbers = found.ravel().tolist()
        scores, weights = np.reshape(numbers if together else self._ranks.sum(numbers), found.shape).tolist()
        score, error = weighted_mean(scores, weights)
        return {"score": score} | ({} if math.isnan(error) else {"standard_error": error})
