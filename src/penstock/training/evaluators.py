"""Looks at the model during training, each with its own interval, by name.

They change nothing of the run: weights, gradients, the loader's place and all random generators stay as they are.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, final

import torch

from penstock.errors import ConfigError, FormatError
from penstock.loader import Loader, Source
from penstock.models import LanguageModel, most_packed
from penstock.shards import open_dataset
from penstock.training.distributed import Ranks
from penstock.training.losses import row_loss
from penstock.training.settings import EvaluatorSettings

Stop = Callable[[], bool]
"""Whether the run was asked to stop; the same answer on every rank, which all must ask for together."""


ONE_A_ROW = "one document a row: in rows of several the model lets them see each other"
"""Said with figures of a model of which `PackingVerdict` allows no more."""


def never() -> bool:
    """A `Stop` that never says so."""
    return False


class Evaluator(Protocol):
    """One look at a model."""

    def __call__(self, model: LanguageModel, stop: Stop) -> dict[str, Any]:
        """Figures by name, the same on every rank; texts are for people. None of them once `stop` says so."""


@final
class HeldOutLoss:
    """Loss of held-out documents, each once, as the model is trained: packed, documents apart. A model that would let
    them see each other gets one document a row; `packing` says so then.

    `loss` is nats a weighted target; `bits_per_byte` is all nats over the bytes of the text that the tokens stand for
    (so tokenizers can be compared), given where every token counts 1, all rows are used, and the dataset knows them.

    Args:
        data: A dataset's folder.
        sequence_length: Slots of a row.
        tokenizer: The model's, an object with `fingerprint` and `name`; None: the dataset's is not held against it.
        model: Says what rows must have.
        ranks: The processes that look together.
        rows: So many at most; None: all.

    Raises:
        ConfigError: The dataset was made with another tokenizer.
    """

    def __init__(
        self,
        data: str,
        *,
        sequence_length: int,
        tokenizer: Any,
        model: LanguageModel,
        ranks: Ranks,
        rows: int | None = None,
    ) -> None:
        dataset = open_dataset(data)
        theirs = getattr(dataset, "tokenizer", None)
        if theirs is not None and tokenizer is not None and theirs.fingerprint != tokenizer.fingerprint:
            raise ConfigError(
                f"{data}: was made with another tokenizer ({theirs.name}) than the model's ({tokenizer.name}); prepare "
                "it with that"
            )
        self._dataset, self._rows, self._ranks = dataset, rows, ranks
        rows_per_step = 8 * ranks.place.size
        self._alone = most_packed(model, sequence_length) < sequence_length
        self._loader = lambda: Loader(
            Source(dataset, max_epochs=1, shuffle="none", name="held out"),
            sequence_length=sequence_length,
            rows_per_step=rows_per_step,
            packing="none" if self._alone else "best_fit",
            requirements=model.requirements(),
            data_parallel=ranks.place,
            threads=1,
        )

    def __call__(self, model: LanguageModel, stop: Stop = never) -> dict[str, Any]:
        """See the class."""
        nats = weights = 0.0
        taken = 0
        with torch.no_grad():
            for step in self._loader():
                for number, row in enumerate(step, taken + len(step) * self._ranks.place.rank):
                    sums = row_loss(model, row, step.loss_denominators)
                    if self._rows is not None and number >= self._rows:
                        # It was run for the other ranks, which gather a sharded model's weights together with this one.
                        continue
                    nats += float(sums.cross_entropy[0])
                    weights += float(sums.weights[0])
                taken += len(step) * self._ranks.place.size
                if stop():
                    return {}
                if self._rows is not None and taken >= self._rows:
                    break
        nats, weights = self._ranks.sum([nats, weights])
        figures: dict[str, Any] = {"loss": nats / max(weights, 1.0), "targets": weights}
        if self._alone:
            figures["packing"] = ONE_A_ROW
        manifest = getattr(self._dataset, "manifest", None)
        if self._rows is None and manifest is not None and manifest.text_bytes and not manifest.has_spans:
            figures["bits_per_byte"] = nats / math.log(2) / manifest.text_bytes
        return figures


def make_evaluators(
    settings: Mapping[str, EvaluatorSettings], loader: Loader, model: LanguageModel, ranks: Ranks
) -> dict[str, tuple[int, Evaluator]]:
    """(interval, evaluator) by name.

    Raises:
        ConfigError: The data of one was made with another tokenizer, the model cannot write, or a task cannot be given.
    """
    made: dict[str, tuple[int, Evaluator]] = {}
    for name, one in settings.items():
        if one.kind == "loss":
            made[name] = one.every, _held_out(name, one, loader, model, ranks)
        elif one.kind == "samples":
            from penstock.training.samples import Samples

            made[name] = one.every, Samples(name, one, loader, model)
        else:
            from penstock.training.task_scores import TaskScore

            made[name] = one.every, TaskScore(name, one, loader, model, ranks)
    return made


def _held_out(
    name: str, settings: EvaluatorSettings, loader: Loader, model: LanguageModel, ranks: Ranks
) -> HeldOutLoss:
    assert settings.data is not None
    try:
        return HeldOutLoss(
            settings.data,
            sequence_length=loader.settings.sequence_length,
            tokenizer=getattr(loader.datasets[0], "tokenizer", None),
            model=model,
            ranks=ranks,
            rows=settings.rows,
        )
    except (ConfigError, FormatError) as error:
        raise type(error)(f"evaluator {name!r}: {error}") from error


def evaluate(
    evaluators: Mapping[str, tuple[int, Evaluator]], model: LanguageModel, done: int, last: bool, stop: Stop = never
) -> dict[str, Any]:
    """Run those that are due after `done` steps; figures as "name/figure", with the seconds each took.

    Once `stop` says so, what is under way is given up, because a checkpoint has to be written within some seconds.

    The model is in evaluation mode meanwhile: some of transformers have dropout.
    """
    figures: dict[str, Any] = {}
    due = {name: one for name, (every, one) in evaluators.items() if last or done % every == 0}
    if not due:
        return figures
    assert isinstance(model, torch.nn.Module)
    training = model.training
    model.eval()
    try:
        for name, evaluator in due.items():
            if stop():
                break
            began = time.monotonic()
            found = evaluator(model, stop)
            figures |= {f"{name}/{figure}": value for figure, value in found.items()}
            figures[f"{name}/seconds"] = time.monotonic() - began
    finally:
        model.train(training)
    return figures
