"""The loss of whole rows through a real model: the plain formula on all logits, and any cut of a
step.
"""

import numpy as np
import pytest
import torch

from makers.models import tiny_model
from makers.rows import make_row
from penstock import ModelInput
from penstock.learn.training.losses import loss, row_loss
from penstock.plan.inputs import IGNORE

VOCAB, DISTANCES = 37, 2


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def model(**extra):
    return tiny_model(VOCAB, dtype=torch.float64, seed=3, width=16, heads=2, kv_heads=None, **extra)


def document(length: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, targets [D, n] and weights [D, n]; about half of the targets count."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, VOCAB, length)
    targets = np.full((DISTANCES, length), IGNORE)
    for d in range(1, DISTANCES + 1):
        targets[d - 1, : max(0, length - d)] = tokens[d:]
    weights = (
        random.random((DISTANCES, length))
        * (random.random((DISTANCES, length)) < 0.5)
        * (targets != IGNORE)
    )
    return tokens, np.where(weights > 0, targets, IGNORE), weights.astype(np.float32)


def pack(documents) -> ModelInput:
    tokens, targets, weights = (
        np.concatenate(parts, axis=-1) for parts in zip(*documents, strict=True)
    )
    return make_row(
        [len(tokens) for tokens, _, _ in documents],
        tokens=tokens,
        targets=targets,
        loss_weights=weights,
    )


def gradients(net, rows, denominators, **options) -> tuple[float, list[torch.Tensor]]:
    net.zero_grad()
    values = [loss(net, row, denominators, **options) for row in rows]
    for value in values:
        value.backward()
    return sum(value.item() for value in values), [p.grad.clone() for p in net.parameters()]


def plain(net, row, denominators, z_loss) -> torch.Tensor:
    tensors = net.tensors(row)
    logits = net.logits(net(tensors))
    entropy = torch.nn.functional.cross_entropy(
        logits.mT, tensors.targets, reduction="none", ignore_index=IGNORE
    )
    each = tensors.loss_weights * (entropy + z_loss * torch.logsumexp(logits, -1) ** 2)
    shares = torch.tensor(
        [w / n for w, n in zip(net.prediction_weights, denominators, strict=True)],
        dtype=torch.float64,
    )
    return (each.sum(1) * shares).sum()


@pytest.mark.parametrize("tied", [True, False])
def test_it_is_the_plain_formula(tied):
    net = model(tied=tied, prediction_heads=2, prediction_weights=(1.0, 0.3))
    row = pack([document(n, n) for n in (9, 4, 14)])
    denominators = (5.0, 4.0)
    due = plain(net, row, denominators, 0.1)
    due.backward()
    expected = [p.grad.clone() for p in net.parameters()]
    value, got = gradients(net, [row], denominators, z_loss=0.1, chunk=5)
    assert value == pytest.approx(due.item(), rel=1e-10)
    for mine, its in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-8, atol=1e-10)


def test_packing_and_microbatches_change_nothing():
    net = model(prediction_heads=2)
    documents = [document(n, n) for n in (9, 4, 14, 6)]
    denominators = tuple(float(x) for x in sum(weights.sum(1) for _, _, weights in documents))
    whole = gradients(net, [pack(documents)], denominators)
    for rows in (
        [pack(documents[:1]), pack(documents[1:])],
        [pack([d]) for d in documents],
        [pack(documents[::-1])],
    ):
        value, got = gradients(net, rows, denominators)
        assert value == pytest.approx(whole[0], rel=1e-10)
        for mine, its in zip(got, whole[1], strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-8, atol=1e-10)


def test_the_sums_are_those_of_metrics():
    net = model(prediction_heads=2)
    row = pack([document(20, 1)])
    found = row_loss(net, row, (2.0, 3.0))
    assert found.loss.item() == pytest.approx(
        float(found.cross_entropy[0] / 2 + found.cross_entropy[1] / 3)
    )
    assert found.weights.tolist() == pytest.approx(row.loss_weights.sum(1).tolist())
    assert found.num_targets == int((row.loss_weights > 0).sum())


def test_a_frozen_model_can_be_evaluated():
    net = model(prediction_heads=2)
    row = pack([document(20, 1)])
    with torch.no_grad():
        without = row_loss(net, row, (2.0, 3.0))
    assert not without.loss.requires_grad
    assert without.loss.item() == pytest.approx(
        row_loss(net, row, (2.0, 3.0)).loss.item(), rel=1e-12
    )
