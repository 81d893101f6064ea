"""Trains on whole answers: preferences between them, or rewards.

A loss of whole answers depends on sums of log-probabilities, so they must be known before gradients are: the model runs
once with gradients up to its hidden states, its head runs once without for the log-probabilities, the loss is computed
from these in float64, and its derivative for each token becomes the weight of the token in `chunked_cross_entropy`,
which gives the gradients. Shared beginnings of answers are computed once, in both.
"""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ConfigError, StateError
from penstock.distillation.blocks import no_loss
from penstock.inputs import IGNORE
from penstock.inputs.model_input import ModelInput
from penstock.loader import Step
from penstock.loader.loader import Loader
from penstock.models import LanguageModel, RowTensors
from penstock.models.lora import lora_switched_off
from penstock.models.saving import load_model
from penstock.shards.trees import LABEL, RANK
from penstock.training.distributed import Ranks
from penstock.training.losses import chunked_cross_entropy
from penstock.training.path_losses import Figures, PathScores, policy_loss, preference_loss
from penstock.training.path_settings import OLD_COLUMN, REFERENCE_COLUMN, PolicySettings, PreferenceSettings
from penstock.training.run_folder import RunFolder

if TYPE_CHECKING:
    from penstock.training.settings import EvaluatorSettings, TrainSettings


def log_probabilities(model: LanguageModel, hidden: Tensor, targets: Tensor) -> Tensor:
    """float64 [n] log-probabilities of targets [n] after hidden states [n, width], without gradients."""
    each = torch.zeros(len(targets), dtype=torch.float64, device=targets.device)
    if len(targets):
        with torch.no_grad():
            ones = torch.ones(len(targets), dtype=torch.float64, device=targets.device)
            chunked_cross_entropy(model.logits, hidden.detach(), targets, ones, each=each)
    return -each


@final
class Reference:
    """The log-probabilities of the reference model.

    Args:
        kind: lora, cached or initial; or the path of a model.
        model: The model that is trained, with its initial weights.
        device: Where the reference runs.

    Raises:
        ConfigError: The kind does not fit the model; or the path holds another vocabulary.
    """

    def __init__(self, kind: str, model: LanguageModel, device: torch.device) -> None:
        self.kind, self._model = kind, model
        self._frozen: LanguageModel | None = None
        if kind == "lora" and model.lora is None:
            raise ConfigError("reference: lora: training.lora is not set; set it, or take initial, cached or a path")
        if kind == "initial":
            self._frozen = copy.deepcopy(model)
        elif kind not in ("lora", "cached"):
            self._frozen = load_model(RunFolder.open(kind).model, device)
            if self._frozen.vocab_size != model.vocab_size:
                raise ConfigError(
                    f"reference {kind}: has {self._frozen.vocab_size} ids, the model {model.vocab_size}; take a model "
                    "with the same tokenizer"
                )
        if self._frozen is not None:
            for weight in self._frozen.parameters():
                weight.requires_grad_(False)
            assert isinstance(self._frozen, torch.nn.Module)
            self._frozen.eval()

    @property
    def parameters(self) -> int:
        """Weights that are held besides the model's."""
        return 0 if self._frozen is None else sum(weight.numel() for weight in self._frozen.parameters())

    def fingerprint(self) -> str:
        """Changes when another reference would be used: kind, and sums over the weights."""
        if self._frozen is None:
            return self.kind
        sums = [float(weight.double().sum()) for weight in self._frozen.parameters()]
        return f"{'initial' if self.kind == 'initial' else 'model'} {np.float64(sum(sums)).hex()}"

    def __call__(self, tensors: RowTensors, row: ModelInput, scores: PathScores, backend: str) -> Tensor:
        """float64 [n] of the trained targets of a row."""
        if self.kind == "cached":
            return scores.columns[REFERENCE_COLUMN]
        targets = tensors.targets[0][scores.slots]
        with torch.no_grad():
            if self._frozen is None:
                with lora_switched_off(self._model):
                    hidden = self._model(tensors)[0][scores.slots]
                    return log_probabilities(self._model, hidden, targets)
            own = self._frozen.tensors(row, backend)
            return log_probabilities(self._frozen, self._frozen(own)[0][scores.slots], targets)


def require_token_targets(loader: Loader, who: str) -> None:
    """Refuse data whose answers are compared for a loss of single tokens, which would train the bad ones, too.

    Raises:
        ConfigError: A source has answers with ranks, labels or rewards.
    """
    for source, values in loader.path_values.items():
        if values and loader.has_compared(source):
            raise ConfigError(
                f"source {source!r} has answers with {', '.join(values)}, and {who} would train all of them alike, the "
                "worse ones too; set training.preference (or training.policy), or prepare with answers: best"
            )


@final
class PathTraining:
    """The loss of `training.preference` or `training.policy`, row by row.

    Args:
        model: With its initial weights.
        loader: This rank's.
        settings: How to train.
        device: The model's.
        reference: The reference model, if there is one already.

    Raises:
        ConfigError: The data lack what the loss needs, or another setting excludes it.
    """

    def __init__(
        self,
        model: LanguageModel,
        loader: Loader,
        settings: "TrainSettings",
        device: torch.device,
        reference: Reference | None = None,
    ) -> None:
        chosen = settings.preference or settings.policy
        assert chosen is not None
        self.settings: PreferenceSettings | PolicySettings = chosen
        self._model, self._backend = model, settings.attention
        self._name = "training.preference" if settings.preference is not None else "training.policy"
        self._check(loader, settings)
        self.reference: Reference | None = None
        if chosen.needs_reference:
            kind = chosen.reference if reference is None else reference.kind
            if kind == "auto":
                has = REFERENCE_COLUMN in loader.columns
                kind = "cached" if has else "lora" if model.lora is not None else "initial"
            if kind == "cached" and REFERENCE_COLUMN not in loader.columns:
                raise ConfigError(
                    f"{self._name}: reference cached needs the column {REFERENCE_COLUMN!r} in the data; write it with "
                    "`penstock reference`, or take initial, lora or a model"
                )
            self.reference = reference or Reference(kind, model, device)
        self._columns = [name for name in (REFERENCE_COLUMN, OLD_COLUMN) if name in loader.columns]
        self.divisor, self._point = 1.0, 0.0
        self._sums: Figures = {}

    def _check(self, loader: Loader, settings: "TrainSettings") -> None:
        who, chosen = self._name, self.settings
        if settings.preference is not None and settings.policy is not None:
            raise ConfigError("training.preference and training.policy cannot be combined; choose one")
        for name, used in (
            ("loss", settings.loss is not None),
            ("z_loss", settings.z_loss != 0),
            ("micro_sequences", settings.micro_sequences > 1),
        ):
            if used:
                raise ConfigError(
                    f"{who} and training.{name} cannot be combined: whole answers are compared; leave {name} out"
                )
        needed: tuple[str, ...] = ("advantage", "reward")
        if isinstance(chosen, PreferenceSettings):
            needed = (RANK,) if chosen.of_pairs else (LABEL,)
        for source, values in loader.path_values.items():
            if not set(needed) & set(values or ()):
                found = "no paths" if values is None else f"the values {', '.join(values) or 'none'}"
                raise ConfigError(
                    f"{who} needs paths with {' or '.join(map(repr, needed))}, but source {source!r} has {found}; "
                    "prepare preference records or rollouts, or leave the source out"
                )

    def begin(self, rows: Sequence[ModelInput], step: Step, ranks: Ranks) -> None:
        """Make ready for the rows of a step: its divisor, and kto's reference point."""
        chosen, units = self.settings, step.units
        if isinstance(chosen, PreferenceSettings):
            self.divisor = max(1.0, float(units["pairs" if chosen.of_pairs else "examples"]))
            if "kto" in chosen.weights:
                self._point = self._reference_point(rows, ranks)
        elif chosen.normalise == "token":
            self.divisor = max(1e-12, step.loss_denominator)
        else:
            self.divisor = max(1.0, float(units["paths"])) * (chosen.length or 1)

    def _reference_point(self, rows: Sequence[ModelInput], ranks: Ranks) -> float:
        """The mean of log π − log π_ref over the step's mismatched answers, at least 0."""
        total, count = 0.0, 0.0
        assert self.reference is not None
        for row in rows:
            tensors = self._model.tensors(row, self._backend)
            scores = self._scores(tensors, row)
            mismatched = scores.value(LABEL, "preference.kind kto") < 0
            if not bool(mismatched.any()):
                continue
            with torch.no_grad():
                logs = self._logs(self._model(tensors)[0], tensors, scores)
                ratios = scores.sums(logs) - scores.sums(self.reference(tensors, row, scores, self._backend))
            total, count = total + float(ratios[mismatched].sum()), count + float(mismatched.sum())
        total, count = ranks.sum([total, count])
        if not count:
            raise ConfigError(
                "preference.kind kto needs mismatched answers for its reference point, and a step has none; prepare "
                "the data from records with labels, or take apo_zero_unpaired"
            )
        return max(0.0, total / count)

    def _scores(self, tensors: RowTensors, row: ModelInput) -> PathScores:
        assert row.paths is not None
        trained = (tensors.targets[0] != IGNORE) & (tensors.loss_weights[0] != 0)
        return PathScores.of(row.paths, trained, {name: row.columns[name] for name in self._columns})

    def _logs(self, hidden: Tensor, tensors: RowTensors, scores: PathScores) -> Tensor:
        return log_probabilities(self._model, hidden[scores.slots], tensors.targets[0][scores.slots])

    def loss(self, row: ModelInput, model: LanguageModel | None = None) -> tuple[Tensor, Figures]:
        """A row's share of the step's loss, and sums for figures.

        Returns:
            A scalar to call `backward` on, and figures that are sums over pairs, examples or tokens.
        """
        model = model or self._model
        tensors = model.tensors(row, self._backend)
        hidden = model(tensors)[0]
        scores = self._scores(tensors, row)
        reference = None if self.reference is None else self.reference(tensors, row, scores, self._backend)
        logs = self._logs(hidden, tensors, scores).requires_grad_()
        with torch.enable_grad():
            if isinstance(self.settings, PreferenceSettings):
                found, figures = preference_loss(scores, logs, reference, self.settings, self._point)
                found = found / self.divisor
            else:
                found, figures = policy_loss(scores, logs, reference, self.settings, self.divisor)
        if not torch.is_grad_enabled() or not found.requires_grad:
            return no_loss(model.logits, hidden) + found.detach().to(hidden.dtype), figures
        (derivative,) = torch.autograd.grad(found, logs)
        # As a function of the weights: Σ derivative × log-probability, which has the gradient of the loss.
        used = derivative.nonzero()[:, 0]
        linear, _ = chunked_cross_entropy(
            model.logits,
            hidden.index_select(0, scores.slots[used]),
            tensors.targets[0][scores.slots[used]],
            -derivative[used],
        )
        return linear + (found.detach().to(linear.dtype) - linear.detach()), figures

    def backward(self, row: ModelInput) -> float:
        """Add a row's gradients; return its share of the step's loss."""
        share, figures = self.loss(row)
        for name, value in figures.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        share.backward()
        return float(share.detach())

    def end(self, ranks: Ranks, step: Step) -> dict[str, float]:
        """The step's figures, over all ranks."""
        names = figure_names(self.settings)
        sums = dict(zip(names, ranks.sum([self._sums.get(name, 0.0) for name in names]), strict=True))
        self._sums = {}
        section = self._name.removeprefix("training.")
        means = figure_means(self.settings, sums, step.units)
        if "kto" in getattr(self.settings, "weights", {}):
            means["reference_point"] = self._point
        return {f"{section}.{name}": value for name, value in means.items()}

    def state(self) -> dict[str, Any]:
        """What a checkpoint notes of it."""
        return {"reference": None if self.reference is None else self.reference.fingerprint()}

    def check_state(self, state: dict[str, Any]) -> None:
        """Compare with what a checkpoint noted.

        Raises:
            StateError: The reference model is another one.
        """
        now, then = self.state()["reference"], state.get("reference")
        if now != then:
            raise StateError(
                f"{self._name}: the reference model is {now} now, {then} when the run was saved; restore it, or begin "
                "another run with model: from:RUN"
            )


def figure_names(settings: PreferenceSettings | PolicySettings) -> tuple[str, ...]:
    """Names of the sums that a loss gives."""
    if isinstance(settings, PolicySettings):
        return "clipped", "entropy_estimate", "tokens", "log_ratio", *(("kl",) if settings.kl else ())
    sides = ("chosen_reward", "rejected_reward", "chosen_log_probability", "rejected_log_probability")
    return (*sides, "margin", "accuracy") if settings.of_pairs else (*sides, "chosen_count", "rejected_count")


def figure_means(
    settings: PreferenceSettings | PolicySettings, sums: Figures, units: dict[str, int]
) -> dict[str, float]:
    """Figures from sums over a step or a dataset: means over pairs, examples of each label, or tokens."""
    if isinstance(settings, PolicySettings):
        count = max(sums.pop("tokens"), 1.0)
        return {name: value / count for name, value in sums.items()}
    if settings.of_pairs:
        return {name: value / max(units["pairs"], 1) for name, value in sums.items()}
    counts = {side: sums.pop(f"{side}_count") for side in ("chosen", "rejected")}
    found = {name: value / counts[name.split("_")[0]] for name, value in sums.items() if counts[name.split("_")[0]]}
    if all(counts.values()):
        found["margin"] = found["chosen_reward"] - found["rejected_reward"]
    return found


@final
class HeldOutPreference:
    """Loss, accuracy and margin of held-out answers, compared as in training; each document is used once.

    Args:
        name: Name of the evaluator, for errors.
        settings: The data.
        sequence_length: Slots per row.
        ranks: The processes that evaluate together.
    """

    def __init__(self, name: str, settings: "EvaluatorSettings", sequence_length: int, ranks: Ranks) -> None:
        self._name, self._settings, self._length, self._ranks = name, settings, sequence_length, ranks
        self._paths: PathTraining | None = None

    def begin(self, model: LanguageModel, settings: "TrainSettings", training: PathTraining | None) -> None:
        """Make ready, with the reference model of training.

        Raises:
            ConfigError: `training.preference` is not set, or the data do not fit it.
        """
        if training is None or settings.preference is None:
            raise ConfigError(f"evaluator {self._name!r}: kind preference needs training.preference; set it")
        place, mixture, length = self._ranks.place, self._settings.mixture, self._length
        self._loader = lambda: Loader(
            mixture,
            sequence_length=length,
            rows_per_step=8 * place.size,
            requirements=model.requirements(),
            data_parallel=place,
            threads=1,
        )
        try:
            self._paths = PathTraining(model, self._loader(), settings, self._ranks.device, training.reference)
        except ConfigError as error:
            raise ConfigError(f"evaluator {self._name!r}: {error}") from error

    def __call__(self, model: LanguageModel, stop: Any) -> dict[str, Any]:
        """`loss`, `accuracy`, `margin` and what training reports besides; empty if `stop` became true."""
        paths = self._paths
        assert paths is not None
        names, loss, taken = figure_names(paths.settings), 0.0, 0
        sums: Figures = {}
        units: dict[str, int] = {}
        for step in self._loader():
            rows = list(step)
            with torch.no_grad():
                paths.begin(rows, step, self._ranks)
                for row in rows:
                    share, figures = paths.loss(row, model)
                    loss += float(share) * paths.divisor
                    sums = {name: sums.get(name, 0.0) + value for name, value in figures.items()}
            units = {name: units.get(name, 0) + count for name, count in step.units.items()}
            taken += len(step) * self._ranks.place.size
            if stop():
                return {}
            if self._settings.rows is not None and taken >= self._settings.rows:
                break
        loss, *totals = self._ranks.sum([loss, *(sums.get(name, 0.0) for name in names)])
        assert isinstance(paths.settings, PreferenceSettings)
        count = units.get("pairs" if paths.settings.of_pairs else "examples", 0)
        found = figure_means(paths.settings, dict(zip(names, totals, strict=True)), units)
        return {"loss": loss / max(count, 1), **found}
