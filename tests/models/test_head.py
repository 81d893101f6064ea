"""The head of a pass: each weight is cast once, whatever the number of chunks, distances and
losses, and its gradient is that of a head that is cast each time.
"""

from typing import Any

import pytest
import torch
from model_makers import tiny
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from makers.models import tiny_huggingface
from makers.rows import random_row
from penstock.learn.distillation.blocks import Pairing
from penstock.learn.distillation.losses import distillation_loss
from penstock.learn.distillation.outputs import Shapes, TeacherOutputs, Wanted
from penstock.learn.distillation.settings import LossSettings
from penstock.learn.training.cross_entropy import chunked_cross_entropy
from penstock.learn.training.losses import hidden_loss, row_loss
from penstock.learn.training.reference_model import log_probabilities
from penstock.models import LoraSettings, add_lora
from penstock.models.head import Head, cast, no_loss
from penstock.models.lora.settings import NewRows
from penstock.models.theirs.model import HuggingFaceModel

VOCABULARY, WIDTH = 61, 32


class Casts(TorchDispatchMode):
    """Casts of float32 matrices as large as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].shape == (VOCABULARY, WIDTH):
            self.casts += args[0].dtype == torch.float32
        return found


def ours(**settings: Any) -> Any:
    return tiny(torch.float32, **settings)


def theirs(kind: str = "llama", **settings: Any) -> Any:
    return HuggingFaceModel(tiny_huggingface(kind, **settings).train())


def with_new_rows(model: Any) -> Any:
    model.new_rows = NewRows(first=50, end=VOCABULARY, grown=False)
    add_lora(model, LoraSettings(rank=2, train_embeddings="new"))
    return model


def with_whole_head() -> Any:
    model = ours(tied=False)
    add_lora(model, LoraSettings(rank=2, modules_to_save=("unembedding",)))
    return model


MODELS = {
    "ours": ours,
    "ours, untied": lambda: ours(tied=False),
    "ours, new rows next to LoRA": lambda: with_new_rows(ours()),
    "ours, two distances": lambda: ours(prediction_heads=2),
    "ours, soft cap": lambda: ours(logit_softcap=5.0),
    "ours, whole head next to LoRA": with_whole_head,
    "llama": theirs,
    "llama, tied": lambda: theirs(tie_word_embeddings=True),
    "llama, new rows next to LoRA": lambda: with_new_rows(theirs()),
    "gemma2": lambda: theirs("gemma2", head_dim=8, final_logit_softcapping=5.0),
    "cohere": lambda: theirs("cohere"),
}


def setting(model: Any, distances: int = 1) -> tuple[Any, Tensor, list[float]]:
    """A row, its hidden states without the model behind them, and denominators."""
    row = model.tensors(random_row((20, 3, 9), distances=distances))
    with torch.no_grad():
        hidden = model(row)
    return row, hidden.detach().requires_grad_(), [7.0] * distances


def trained(model: Any) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def gradients(model: Any, loss: Tensor, hidden: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    hidden.grad = None
    loss.backward()
    found = {name: one.grad for name, one in trained(model).items() if one.grad is not None}
    assert hidden.grad is not None
    return {"hidden": hidden.grad, **found}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MODELS)
def test_a_pass_casts_the_head_once_and_gradients_stay(kind: str, dtype: torch.dtype) -> None:
    model = MODELS[kind]()
    model.compute_in(dtype)
    distances = len(model.prediction_weights)
    row, hidden, denominators = setting(model, distances)
    with Casts() as counted:
        found = hidden_loss(
            Head.of_model(model),
            hidden,
            row.targets,
            row.loss_weights,
            denominators,
            distance_weights=model.prediction_weights,
            z_loss=1e-3,
            chunk=4,
        ).loss
        mine = gradients(model, found, hidden)
    # Next to trained rows, the frozen original is cast as well, and put together with them.
    assert counted.casts == (dtype == torch.bfloat16)
    expected = torch.zeros(())
    for distance, at in enumerate(row.places):
        logits = model.logits(hidden[distance][at])
        entropy = nn.functional.cross_entropy(logits, row.targets[distance][at], reduction="none")
        terms = entropy + 1e-3 * logits.logsumexp(-1).square()
        weight = model.prediction_weights[distance] / denominators[distance]
        expected = expected + weight * (terms * row.loss_weights[distance][at]).sum()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
    plain = gradients(model, expected, hidden)
    assert mine.keys() == plain.keys()
    for name, one in plain.items():
        assert mine[name].dtype == one.dtype
        assert (mine[name] - one).norm() <= tolerance * one.norm(), name


def test_the_gradient_is_the_float32_sum_of_the_chunks() -> None:
    model = ours(tied=False)
    model.compute_in(torch.bfloat16)
    row, hidden, _ = setting(model)
    at = row.places[0]
    states, targets, weights = hidden[0][at].detach(), row.targets[0][at], row.loss_weights[0][at]
    head, chunk = Head.of_model(model), 5
    chunked_cross_entropy(head, states.clone().requires_grad_(), targets, weights, chunk=chunk)[
        0
    ].backward()
    matrix = model.unembedding.weight
    found, matrix.grad = matrix.grad, None
    total = torch.zeros_like(matrix)
    for begin in range(0, len(at), chunk):
        part = slice(begin, begin + chunk)
        logs = model.logits(states[part]).detach().log_softmax(-1)
        gradient = logs.exp() * weights[part][:, None]
        gradient.scatter_add_(1, targets[part][:, None], -weights[part][:, None])
        total += gradient.bfloat16().t() @ states[part]
    assert torch.equal(found, total)


def test_losses_of_a_pass_share_the_copy() -> None:
    model = ours()
    model.compute_in(torch.bfloat16)
    row, hidden, _ = setting(model)
    shapes = Shapes(
        slots=hidden.shape[1], vocab_size=VOCABULARY, wanted=Wanted(), dtype=torch.float32
    )
    outputs = TeacherOutputs.make(shapes, lambda _, shape, dtype: torch.zeros(shape, dtype=dtype))
    bounds = torch.tensor([[1, 2], [5, 6], [8, 9]])
    pairing = Pairing(student_bounds=bounds, teacher_bounds=bounds, weights=torch.ones(3))
    with Casts() as counted:
        head = Head.of_model(model)
        cross_entropy = hidden_loss(
            head, hidden, row.targets, row.loss_weights, 7.0, distance_weights=(1.0,), chunk=4
        ).loss
        taught, _ = distillation_loss(
            head,
            hidden[0],
            outputs,
            pairing,
            LossSettings(kind="kl"),
            vocab_size=VOCABULARY,
            block=1,
        )
        at = row.places[0]
        temperatures = torch.tensor([1.0, 0.5] * len(at))[: len(at)].numpy()
        logs = log_probabilities(head, hidden[0][at], row.targets[0][at], temperatures)
        found = gradients(model, cross_entropy + taught + no_loss(head, hidden[0]), hidden)
    assert counted.casts == 1
    scores = model.logits(hidden[0][at]).double() / torch.from_numpy(temperatures)[:, None]
    expected = scores.log_softmax(-1).gather(1, row.targets[0][at][:, None])[:, 0]
    torch.testing.assert_close(logs, expected.detach(), rtol=1e-5, atol=1e-5)
    alone = [
        gradients(model, loss, hidden)
        for loss in (
            hidden_loss(
                model.logits, hidden, row.targets, row.loss_weights, 7.0, distance_weights=(1.0,)
            ).loss,
            distillation_loss(
                model.logits,
                hidden[0],
                outputs,
                pairing,
                LossSettings(kind="kl"),
                vocab_size=VOCABULARY,
            )[0],
        )
    ]
    for name, one in found.items():
        expected = alone[0][name] + alone[1][name]
        assert (one - expected).norm() <= 0.01 * expected.norm(), name


def test_a_new_pass_casts_the_weights_as_they_are_then() -> None:
    model = ours()
    model.compute_in(torch.bfloat16)
    row = model.tensors(random_row((9, 4)))
    before = row_loss(model, row, 1.0).loss
    with torch.no_grad():
        model.embedding.weight.mul_(2)
    assert row_loss(model, row, 1.0).loss != before
    assert cast(model.embedding.weight, torch.bfloat16) is not cast(
        model.embedding.weight, torch.bfloat16
    )


def test_no_loss_gives_every_weight_of_the_head_zeros() -> None:
    model = ours(tied=False)
    model.compute_in(torch.bfloat16)
    hidden = torch.zeros(0, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    (no_loss(Head.of_model(model), hidden) + 1).backward()
    grad = model.unembedding.weight.grad
    assert grad.dtype == torch.float32
    assert not grad.any()
    with torch.no_grad():
        assert no_loss(model.logits, hidden) == 0


def test_a_head_that_does_more_than_a_product_is_never_taken_for_one() -> None:
    """Each has one leaf, and a product of it at its end or beginning."""
    states = torch.randn(6, WIDTH, requires_grad=True)
    square = nn.Parameter(torch.randn(WIDTH, WIDTH))
    targets, weights = torch.randint(WIDTH, (6,)), torch.rand(6)
    heads = {
        "twice": lambda x: x @ square.t() @ square.t(),
        "changed": lambda x: (x * 2) @ square.t(),
        "halved": lambda x: x @ (square / 2).t(),
        "plain": lambda x: x @ square,
        "mixed": lambda x: (x @ square) @ square.t(),
    }
    for name, head in heads.items():
        found = torch.autograd.grad(
            chunked_cross_entropy(head, states, targets, weights, chunk=4)[0], [states, square]
        )
        entropy = nn.functional.cross_entropy(head(states), targets, reduction="none")
        expected = torch.autograd.grad((entropy * weights).sum(), [states, square])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)
