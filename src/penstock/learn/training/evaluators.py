"""Evaluators that run during training, each with a name and an interval: held-out loss, samples,
task scores.

They change nothing in the run: weights, gradients, the loader's position and all random generators
stay as they are.

For task scores, each rank answers its share of the problems, so an evaluation takes as long as the
largest share. The scores of the problems are then summed over ranks, so all ranks have the same
figures, equal to the last bit to those of a single process with the same answers. The weights of a
sharded model are gathered by all ranks together, so there every rank answers all problems. Answers
are not saved; run `penstock eval` on a checkpoint of the run to see them.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, final

import numpy as np
from torch.distributed.tensor import DTensor

from penstock.chat import load_template
from penstock.core.errors import ConfigError, FormatError, StateError
from penstock.core.json_values import JsonObject
from penstock.data.shards import ChatInfo, Corpus
from penstock.learn.evaluation.results import weighted_mean
from penstock.learn.evaluation.subject import Subject
from penstock.learn.evaluation.tasks import make_task
from penstock.learn.generation import Engine, Sampling, Unmasker
from penstock.learn.generation.session import end_ids
from penstock.learn.training.agreement import digest_of
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.evaluator_settings import EvaluatorSettings
from penstock.learn.training.held_out_loss import HeldOutLoss
from penstock.learn.training.held_out_preference import HeldOutPreference
from penstock.learn.training.own import EvaluatorOfOwn
from penstock.learn.training.stop import Stop, Watched, never
from penstock.models import LanguageModel
from penstock.models.without_dropout import evaluating
from penstock.tokenizers import Tokenizer

PROBLEMS_AT_ONCE = 32
"""Problems that a rank answers between two checks of whether the run was asked to stop."""


def shipped(
    name: str, datasets: Sequence[Corpus], cannot: str, stop_ids: Sequence[int] = ()
) -> tuple[Tokenizer, list[ChatInfo], tuple[int, ...]]:
    """What datasets ship for generation: the first one's tokenizer, the facts of all chats, and the
    stop ids.

    Args:
        name: Name of the evaluator, for errors.
        datasets: The training data.
        cannot: What is impossible without a tokenizer, for errors.
        stop_ids: Those of the model's base.

    Raises:
        ConfigError: The first dataset stores no tokenizer.
    """
    tokenizer = datasets[0].loaded_tokenizer
    if tokenizer is None:
        raise ConfigError(f"evaluator {name!r}: the first source stores no tokenizer, so {cannot}")
    chats = [dataset.chat for dataset in datasets if dataset.chat is not None]
    return (
        tokenizer,
        chats,
        end_ids(tokenizer, (*stop_ids, *(stop for chat in chats for stop in chat.stop_ids))),
    )


@final
class Samples:
    """One generated text per prompt, with the same seeds each time.

    Args:
        name: Name of the evaluator, for errors.
        settings: Prompts and sampling settings.
        datasets: The training data; the first dataset ships the tokenizer.
        sequence_length: Slots per row: the maximum tokens of a text, prompt included, unless the
            base reads more.
        model: The model that will generate.

    Raises:
        ConfigError: There is no tokenizer, the model cannot generate, or a prompt fills a whole
            row.
    """

    def __init__(
        self,
        name: str,
        settings: EvaluatorSettings,
        datasets: Sequence[Corpus],
        sequence_length: int,
        model: LanguageModel,
    ) -> None:
        facts = model.facts.with_data(datasets)
        tokenizer, _, self._stop_ids = shipped(
            name, datasets, "nothing can be written", facts.stop_ids
        )
        self._tokenizer, self._settings = tokenizer, settings
        self._length = facts.context_length or sequence_length
        self._prompts = [
            [*facts.begin(tokenizer), *tokenizer.encode(text).tolist()] for text in settings.prompts
        ]
        # Raises now, rather than after hours of training.
        model.new_cache(1, 2)
        for text, ids in zip(settings.prompts, self._prompts, strict=True):
            if not 0 < len(ids) < self._length:
                raise ConfigError(
                    f"evaluator {name!r}: prompt {text[:40]!r} has {len(ids)} tokens; a text "
                    f"needs 1 to {self._length - 1} to begin with"
                )

    def __call__(self, model: LanguageModel, stop: Callable[[], bool]) -> JsonObject:
        """Prompt and generated text, by prompt number. Takes a second or two, so `stop` is
        ignored.
        """
        chosen = Sampling(
            temperature=self._settings.temperature, max_tokens=self._settings.max_tokens
        )
        if model.facts.diffusion is not None:
            unmasker = Unmasker(
                model, self._tokenizer, context_length=self._length, stop_ids=self._stop_ids
            )
            written = unmasker.generate_all(self._prompts, chosen)
        else:
            engine = Engine(
                model, self._tokenizer, context_length=self._length, stop_ids=self._stop_ids
            )
            written = engine.generate_all(self._prompts, replace(chosen, min_tokens=1))
        texts = zip(self._settings.prompts, written, strict=True)
        return {str(number): prompt + one.text for number, (prompt, one) in enumerate(texts)}


@final
class TaskScore:
    """`score`, the mean over the problems, with its `standard_error`; NaN if the model's outputs
    are.

    Args:
        name: Name of the evaluator, for errors.
        settings: The task and its settings.
        datasets: The training data: the first dataset ships the tokenizer; chats give the template
            and the stop ids.
        sequence_length: Slots per row: the maximum tokens of a text, unless the base reads more.
        model: Model to evaluate.
        ranks: The processes that train together.

    Raises:
        ConfigError: There is no tokenizer, no such task or no data for it, or chats are requested
            without a template.
        RecordError: The data does not have the task's format.
    """

    def __init__(
        self,
        name: str,
        settings: EvaluatorSettings,
        datasets: Sequence[Corpus],
        sequence_length: int,
        model: LanguageModel,
        ranks: Ranks,
    ) -> None:
        assert settings.task is not None
        facts = model.facts.with_data(datasets)
        tokenizer, chats, stop_ids = shipped(name, datasets, "no task can be given", facts.stop_ids)
        if settings.task.chat and not chats:
            raise ConfigError(f"evaluator {name!r}: no source is of chats; set task.chat to false")
        template = (
            load_template(chats[0].template, tokenizer=tokenizer, **chats[0].variables)
            if chats
            else None
        )
        self._subject = lambda model: Subject(
            model,
            tokenizer,
            context_length=facts.context_length or sequence_length,
            stop_ids=stop_ids,
            template=template,
            begin_ids=facts.begin(tokenizer),
        )
        # Raises now, rather than after hours of training.
        self._subject(model)
        if settings.writes:
            model.new_cache(1, 2)
        self._task, self._ranks = make_task(settings.task), ranks
        self._problems = self._task.problems()
        if not self._problems:
            raise ConfigError(f"evaluator {name!r}: the task has no problems; check task.data")
        self.made_from = {"problems": digest_of(self._problems)}
        """Digest of the problems, for comparing ranks."""

    def __call__(self, model: LanguageModel, stop: Stop = never) -> JsonObject:
        """See the class."""
        together = any(isinstance(weights, DTensor) for weights in model.parameters())
        rank, shares = (0, 1) if together else (self._ranks.place.rank, self._ranks.place.size)
        mine = self._problems[rank::shares]
        subject = self._subject(model)
        places = {problem.name: place for place, problem in enumerate(self._problems)}
        found = np.zeros((2, len(places)))
        # The same number of rounds on every rank, that of the largest share, because all must call
        # `stop` together.
        for begin in range(0, math.ceil(len(places) / shares), PROBLEMS_AT_ONCE):
            part = mine[begin : begin + PROBLEMS_AT_ONCE]
            try:
                for answer in self._task.answer(subject, part):
                    found[:, places[answer.problem]] = answer.score, answer.weight
            except StateError:
                # The model's outputs are NaN. That is a figure, and no reason to end the run, which
                # its own check of loss and gradients does; and all ranks must go on together.
                found[:, [places[problem.name] for problem in part]] = math.nan
            if stop(min((begin + PROBLEMS_AT_ONCE) * shares / len(places), 1.0)):
                return {}
        numbers = found.ravel().tolist()
        scores, weights = np.reshape(
            numbers if together else self._ranks.sum(numbers), found.shape
        ).tolist()
        score, error = weighted_mean(scores, weights)
        return {"score": score} | ({} if math.isnan(error) else {"standard_error": error})


class Evaluator(Protocol):
    """One evaluation of a model."""

    def __call__(self, model: LanguageModel, stop: Stop) -> JsonObject:
        """Figures by name, the same on every rank; texts are for people. Empty if `stop` became
        true.
        """


def make_evaluators(
    settings: Mapping[str, EvaluatorSettings],
    datasets: Sequence[Corpus],
    sequence_length: int,
    model: LanguageModel,
    ranks: Ranks,
) -> dict[str, tuple[int, Evaluator]]:
    """(interval, evaluator) by name.

    Args:
        settings: Section `training.evaluators`.
        datasets: The training data, opened; the first dataset ships the tokenizer.
        sequence_length: Slots per row.
        model: Model to evaluate.
        ranks: The processes that train together.

    Raises:
        ConfigError: Held-out data was prepared with another tokenizer, the model cannot generate,
            or a task cannot be set up.
    """
    made: dict[str, tuple[int, Evaluator]] = {}
    for name, one in settings.items():
        if one.kind == "loss":
            made[name] = one.every, _held_out(name, one, datasets, sequence_length, model, ranks)
        elif one.kind == "preference":
            made[name] = one.every, HeldOutPreference(name, one, sequence_length, ranks)
        elif one.kind == "own":
            made[name] = one.every, EvaluatorOfOwn(name, one.function, ranks)
        elif one.kind == "samples":
            made[name] = one.every, Samples(name, one, datasets, sequence_length, model)
        else:
            made[name] = one.every, TaskScore(name, one, datasets, sequence_length, model, ranks)
    return made


def _held_out(
    name: str,
    settings: EvaluatorSettings,
    datasets: Sequence[Corpus],
    sequence_length: int,
    model: LanguageModel,
    ranks: Ranks,
) -> HeldOutLoss:
    try:
        return HeldOutLoss(
            settings.mixture,
            sequence_length=sequence_length,
            tokenizer=datasets[0].tokenizer,
            model=model,
            ranks=ranks,
            rows=settings.rows,
            worst=settings.worst,
        )
    except (ConfigError, FormatError) as error:
        raise type(error)(f"evaluator {name!r}: {error}") from error


def scheduled(evaluators: Mapping[str, tuple[int, Evaluator]], done: int, last: bool) -> list[str]:
    """Names of the evaluators that run after `done` steps."""
    return [name for name, (every, _) in evaluators.items() if last or done % every == 0]


def evaluate(
    evaluators: Mapping[str, tuple[int, Evaluator]],
    names: Sequence[str],
    model: LanguageModel,
    stop: Callable[[], bool] = never,
    say: Callable[[str], None] | None = None,
) -> tuple[JsonObject, list[str]]:
    """Run some evaluators.

    When `stop` becomes true, the running evaluation is dropped, because a checkpoint must be
    written within seconds. The model is in evaluation mode meanwhile, because some models of
    transformers have dropout.

    Args:
        evaluators: (interval, evaluator) by name.
        names: Those that run.
        model: What they evaluate.
        stop: Asked between rows and problems.
        say: Shows a line about one that takes long; None: nothing does.

    Returns:
        Figures as "name/figure", with the seconds each took, and the names of those that were not
        finished.
    """
    figures: JsonObject = {}
    if not names:
        return figures, []
    with evaluating(model):
        for place, name in enumerate(names):
            began = time.monotonic()
            found = (
                {}
                if stop()
                else evaluators[name][1](model, Watched(name, say or (lambda _: None), stop))
            )
            if not found and stop():
                return figures, list(names[place:])
            figures |= {f"{name}/{figure}": value for figure, value in found.items()}
            missing = [f"{name}/{figure}" for figure, value in found.items() if value != value]
            if missing and say is not None:
                say(f"{', '.join(missing)}: NaN, as the model's outputs are not finite")
            figures[f"{name}/seconds"] = time.monotonic() - began
    return figures, []
