"""Looks at the model during training, each with its own interval, by name.

They change nothing of the run: weights, gradients, the loader's place and all random generators stay as they are.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, final

import torch

from penstock.errors import ConfigError, FormatError
from penstock.loader import Loader, Mixture, Source
from penstock.models import LanguageModel, most_packed
from penstock.objectives import Causal
from penstock.shards import open_dataset
from penstock.training.checks import check_ids
from penstock.training.distributed import Ranks
from penstock.training.figure_names import SOURCE
from penstock.training.loss_groups import LossGroups, LossSums, means
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

    `loss` is nats a weighted target; of several sources, the mean of their losses weighted by their shares, which is
    the loss of a target of the mixture. `loss.source.NAME` and `loss.task.NAME` are those of its parts, where there are
    several; of a model with several prediction heads `loss.distance.2` and so on are those of the further ones.
    `bits_per_byte` is all nats over the bytes of the text that the tokens stand for (so tokenizers can be compared),
    given for one source where every token counts 1, all documents are used as they are, and the dataset knows its
    bytes.

    Args:
        data: A dataset's folder, or sources; each document is used once, so each source has `max_epochs` 1.
        sequence_length: Slots of a row.
        tokenizer: The model's, an object with `fingerprint` and `name`; None: the dataset's is not held against it.
        model: Says what rows must have.
        ranks: The processes that look together.
        rows: At most this many; None: all.

    Raises:
        ConfigError: A dataset was made with another tokenizer, or an objective does not go with the model.
    """

    def __init__(
        self,
        data: str | Mixture,
        *,
        sequence_length: int,
        tokenizer: Any,
        model: LanguageModel,
        ranks: Ranks,
        rows: int | None = None,
    ) -> None:
        if isinstance(data, str):
            data = Mixture([Source(data, max_epochs=1, shuffle="none", name="held out")])
        sources = [replace(source, path=open_dataset(source.path)) for source in data.sources]
        for source in sources:
            _check_tokenizer(source, tokenizer)
        self._sources, self._rows, self._ranks = sources, rows, ranks
        self._groups = groups = LossGroups()
        alone = self._alone = most_packed(model, sequence_length) < sequence_length
        # Without `self`: a cycle would keep the ranks, and with them the lock of the run's folder.
        self._loader = lambda: Loader(
            Mixture(sources),
            sequence_length=sequence_length,
            rows_per_step=8 * ranks.place.size,
            packing="none" if alone else "best_fit",
            requirements=model.requirements(),
            data_parallel=ranks.place,
            threads=1,
            companion=groups,
        )
        # What the loader refuses shows now, rather than at the first look.
        check_ids(model, self._loader())

    def __call__(self, model: LanguageModel, stop: Stop = never) -> dict[str, Any]:
        """See the class."""
        nats = weights = 0.0
        taken = 0
        parts = LossSums(self._groups.names, len(model.prediction_weights), model.device)
        with torch.no_grad():
            for step in self._loader():
                for number, row in enumerate(step, taken + len(step) * self._ranks.place.rank):
                    sums = row_loss(
                        model, row, step.loss_denominators, groups=parts.groups(row), num_groups=parts.num_groups
                    )
                    if self._rows is not None and number >= self._rows:
                        # It was run for the other ranks, which gather a sharded model's weights together with this one.
                        continue
                    nats += float(sums.cross_entropy[0])
                    weights += float(sums.weights[0])
                    parts.add(sums)
                taken += len(step) * self._ranks.place.size
                if stop():
                    return {}
                if self._rows is not None and taken >= self._rows:
                    break
        nats, weights = self._ranks.sum([nats, weights])
        return self._figures(nats, weights, parts.take(self._ranks.sum))

    def _figures(self, nats: float, weights: float, parts: dict[str, tuple[float, float]]) -> dict[str, Any]:
        found = means(parts)
        loss = nats / max(weights, 1.0)
        shares = {f"{SOURCE}{source.name}": source.share for source in self._sources}
        if seen := [name for name in shares if name in found]:
            loss = sum(shares[name] * found[name] for name in seen) / sum(shares[name] for name in seen)
        figures: dict[str, Any] = {"loss": loss, "targets": weights, **found}
        if self._alone:
            figures["packing"] = ONE_A_ROW
        text_bytes = _text_bytes(self._sources[0])
        if self._rows is None and len(self._sources) == 1 and text_bytes:
            figures["bits_per_byte"] = nats / math.log(2) / text_bytes
        return figures


def _check_tokenizer(source: Source, tokenizer: Any) -> None:
    theirs = getattr(source.path, "tokenizer", None)
    if theirs is not None and tokenizer is not None and theirs.fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"{source.path.path}: was made with another tokenizer ({theirs.name}) than the model's ({tokenizer.name}); "
            "prepare it with that"
        )


def _text_bytes(source: Source) -> int | None:
    """Bytes of the text that all targets of a source stand for; None where that is not known."""
    manifest = getattr(source.path, "manifest", None)
    # The manifest counts all documents, and each as it was prepared.
    shortened = source.slice != (0.0, 1.0) or source.too_long in ("drop", "truncate")
    if manifest is None or manifest.has_spans or shortened or source.objective != Causal():
        return None
    found: int | None = manifest.text_bytes
    return found


def make_evaluators(
    settings: Mapping[str, EvaluatorSettings],
    datasets: Sequence[Any],
    sequence_length: int,
    model: LanguageModel,
    ranks: Ranks,
) -> dict[str, tuple[int, Evaluator]]:
    """(interval, evaluator) by name.

    Args:
        settings: Section `training.evaluators`.
        datasets: What is trained on, opened: the first ships the tokenizer.
        sequence_length: Slots of a row.
        model: That will be looked at.
        ranks: The processes that train together.

    Raises:
        ConfigError: The data of one was made with another tokenizer, the model cannot write, or a task cannot be given.
    """
    made: dict[str, tuple[int, Evaluator]] = {}
    for name, one in settings.items():
        if one.kind == "loss":
            made[name] = one.every, _held_out(name, one, datasets, sequence_length, model, ranks)
        elif one.kind == "samples":
            from penstock.training.samples import Samples

            made[name] = one.every, Samples(name, one, datasets, sequence_length, model)
        else:
            from penstock.training.task_scores import TaskScore

            made[name] = one.every, TaskScore(name, one, datasets, sequence_length, model, ranks)
    return made


def _held_out(
    name: str,
    settings: EvaluatorSettings,
    datasets: Sequence[Any],
    sequence_length: int,
    model: LanguageModel,
    ranks: Ranks,
) -> HeldOutLoss:
    try:
        return HeldOutLoss(
            settings.mixture,
            sequence_length=sequence_length,
            tokenizer=getattr(datasets[0], "tokenizer", None),
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
