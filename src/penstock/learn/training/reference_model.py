"""Log-probabilities of targets at their temperatures, by the model that is trained or by its
reference.

A policy's probabilities are softmax(logits / temperature), as its answers were sampled. Targets of
one temperature go through the head together; the usual temperature, 1, costs nothing.
"""

import copy
from collections.abc import Iterator
from typing import final

import numpy as np
import torch
from torch import Tensor

from penstock.core.arrays import Float64
from penstock.core.errors import ConfigError
from penstock.learn.training.cross_entropy import chunked_cross_entropy
from penstock.learn.training.path_losses import PathScores
from penstock.learn.training.path_settings import REFERENCE_COLUMN
from penstock.learn.training.run_folder import RunFolder
from penstock.models import LanguageModel, RowTensors
from penstock.models.head import Head
from penstock.models.lora.lora import lora_switched_off
from penstock.models.saving import load_model
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.torch_tensors import on_device

Temperatures = Float64
"""[n] of each target."""


def tempered_heads(
    head: Head, temperatures: Temperatures, device: torch.device
) -> Iterator[tuple[Tensor, Head]]:
    """Of each temperature: int64 indices of its targets on a device, and the head that gives logits
    / temperature.
    """
    for temperature in np.unique(temperatures).tolist():
        at = on_device(np.flatnonzero(temperatures == temperature), device)
        yield at, head.divided(temperature)


def log_probabilities(
    head: Head, hidden: Tensor, targets: Tensor, temperatures: Temperatures
) -> Tensor:
    """float64 [n] log-probabilities of targets [n] after hidden states [n, width], without
    gradients.
    """
    each = torch.zeros(len(targets), dtype=torch.float64, device=targets.device)
    with torch.no_grad():
        for at, logits_of in tempered_heads(head, temperatures, hidden.device):
            part = each.new_zeros(len(at))
            chunked_cross_entropy(
                logits_of, hidden.detach()[at], targets[at], torch.ones_like(part), each=part
            )
            each[at] = -part
    return each


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
            raise ConfigError(
                "reference: lora: training.lora is not set; set it, or take initial, cached "
                "or a path"
            )
        if kind == "initial":
            self._frozen = copy.deepcopy(model)
        elif kind not in ("lora", "cached"):
            self._frozen = load_model(RunFolder.open(kind).model, device)
            if self._frozen.vocab_size != model.vocab_size:
                raise ConfigError(
                    f"reference {kind}: has {self._frozen.vocab_size} ids, the model "
                    f"{model.vocab_size}; take a model with the same tokenizer"
                )
        if self._frozen is not None:
            for weight in self._frozen.parameters():
                weight.requires_grad_(False)
            assert isinstance(self._frozen, torch.nn.Module)
            self._frozen.eval()

    @property
    def frozen(self) -> LanguageModel | None:
        """The model, if it is another object than the one that is trained."""
        return self._frozen

    @property
    def parameters(self) -> int:
        """Weights that are held besides the model's."""
        return (
            0
            if self._frozen is None
            else sum(weight.numel() for weight in self._frozen.parameters())
        )

    def fingerprint(self) -> str:
        """Changes when another reference would be used: kind, and sums over the weights."""
        if self._frozen is None:
            return self.kind
        sums = [float(weight.double().sum()) for weight in self._frozen.parameters()]
        return f"{'initial' if self.kind == 'initial' else 'model'} {np.float64(sum(sums)).hex()}"

    def __call__(
        self,
        tensors: RowTensors,
        row: ModelInput,
        scores: PathScores,
        backend: str,
        temperatures: Temperatures,
    ) -> Tensor:
        """float64 [n] of the trained targets of a row, [n] temperatures."""
        if self.kind == "cached":
            return scores.columns[REFERENCE_COLUMN]
        targets = tensors.targets[0][scores.slots]
        with torch.no_grad():
            if self._frozen is None:
                with lora_switched_off(self._model):
                    hidden = self._model(tensors)[0][scores.slots]
                    head = Head.of_model(self._model)
                    return log_probabilities(head, hidden, targets, temperatures)
            own = self._frozen.tensors(row, backend)
            hidden, head = self._frozen(own)[0][scores.slots], Head.of_model(self._frozen)
            return log_probabilities(head, hidden, targets, temperatures)
