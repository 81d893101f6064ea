"""What is nearly impossible to the teacher counts as its logits say, and not as rounding or a floor
would have it.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from loss_makers import STUDENT_VOCAB, TEACHER_VOCAB, World, gradients, make_world, projection_of

from penstock.learn.distillation.divergences import kl_to_logs
from penstock.learn.distillation.settings import LossSettings
from penstock.learn.distillation.token_losses import Projector

VOCAB = 13
CASES = [
    ({"kind": "p_kl", "reverse": True}, ((0, 1, 1), (0, 1, 1))),
    ({"kind": "p_kl", "reverse": True}, ((0, 1, 1), (0, 2, 3), (1, 1, 2))),
    ({"kind": "p_kl", "reverse": True, "temperature": 0.5}, ((0, 2, 1),)),
    ({"kind": "h_kl", "reverse": True}, ((0, 1, 1), (0, 2, 3), (1, 1, 2))),
]


def far_world(options, chunks, *, dtype, far, holes=()) -> World:
    """One vocabulary; to the teacher all but four tokens are `far` nats less likely; student's
    `holes` have no word.
    """
    world, exact = (
        make_world(
            same=True, chunks=chunks, dtype=each, temperature=options.get("temperature", 1.0)
        )
        for each in (dtype, torch.float64)
    )
    # What is drawn depends on the precision.
    world.pairs = exact.pairs
    with torch.no_grad():
        world.hidden.copy_(exact.hidden)
        for mine, theirs in zip(world.head.parameters(), exact.head.parameters(), strict=True):
            mine.copy_(theirs)
    logits = torch.randn(
        len(world.outputs.log_probs), VOCAB, generator=torch.Generator().manual_seed(1)
    ).to(dtype)
    logits[:, 4:] -= far
    world.outputs.log_probs.copy_(torch.log_softmax(logits.double(), -1))
    indices = np.arange(VOCAB, dtype=np.int32)[:, None].copy()
    indices[list(holes)] = -1
    weights = (indices >= 0).astype(np.float32)
    world.projector = Projector(projection_of(indices, weights, VOCAB, VOCAB))
    return world


@pytest.mark.parametrize(("options", "chunks"), CASES, ids=str)
@pytest.mark.parametrize("far", [5, 60, 90, 200, 2000])
@pytest.mark.parametrize("holes", [(), (2, 7)])
def test_single_precision_equals_double(options, chunks, far, holes):
    """Value and gradient: below 1e-30 a floor decided, below 1e-38 single precision has no number
    any more.
    """
    found = {}
    for dtype in (torch.float32, torch.float64):
        world = far_world(options, chunks, dtype=dtype, far=far, holes=holes)
        loss, total = world.loss(LossSettings(**options))
        found[dtype] = [total, *gradients(loss, [world.hidden, *world.head.parameters()])]
    for single, double in zip(found[torch.float32], found[torch.float64], strict=True):
        torch.testing.assert_close(
            single.double(), double, rtol=2e-4, atol=2e-5 * float(double.abs().max())
        )


@pytest.mark.parametrize(("options", "chunks"), CASES, ids=str)
def test_the_farther_the_more(options, chunks):
    """In proportion: of a student that gives these tokens the probability m, each nat counts m."""
    losses = [
        float(
            far_world(options, chunks, dtype=torch.float64, far=far).loss(LossSettings(**options))[
                1
            ]
        )
        for far in (100, 300, 500)
    ]
    first, second = np.diff(losses)
    assert first > 1
    assert second == pytest.approx(first, rel=1e-6)


@pytest.mark.parametrize("far", [1.0, 100.0, 1000.0])
def test_gradient_equals_differences(far):
    torch.manual_seed(0)
    logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    log_p = torch.log_softmax(torch.randn(3, 7, dtype=torch.float64) - far * torch.arange(7), -1)

    def loss(logits):
        return kl_to_logs(torch.softmax(logits, -1), log_p)

    assert torch.autograd.gradcheck(loss, (logits,))
    q = torch.softmax(logits, -1)
    expected = (q * (q.log() - log_p)).sum(-1)
    torch.testing.assert_close(loss(logits), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_sides_are_equal(dtype):
    """To the bit but for numbers that have lost their digits."""
    logits = (
        30 * torch.randn(50, 40, dtype=dtype, generator=torch.Generator().manual_seed(0))
    ).requires_grad_()
    logs = torch.log_softmax(logits, -1)
    value = kl_to_logs(logs.exp(), logs.detach())
    assert float(value.detach().max()) < 1e-35
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert float(gradient.abs().max()) < 1e-35


def test_impossible_tokens_are_far_and_finite():
    log_p = torch.tensor([[0.0, -torch.inf]])
    q = torch.tensor([[0.5, 0.5]], requires_grad=True)
    value = kl_to_logs(q, log_p)
    assert float(value.detach()) == pytest.approx(0.5 * 1e4, rel=1e-3)
    assert bool(torch.autograd.grad(value.sum(), q)[0].isfinite().all())


@pytest.mark.parametrize("reverse", [False, True])
def test_a_bucket_that_can_hold_nothing_is_left_out(reverse):
    """h_kl, where the side that is compared with has no other tokens: it was 69 nats away there,
    the log of a floor.
    """
    world = make_world(seed=2)
    common = TEACHER_VOCAB if reverse else STUDENT_VOCAB
    if not reverse:
        logits = torch.randn(len(world.outputs.log_probs), STUDENT_VOCAB + 2, dtype=torch.float64)
        world.outputs = replace(world.outputs, log_probs=torch.log_softmax(logits, -1))
    pairs = torch.arange(common)[:, None].expand(-1, 2)
    loss, total = world.loss(LossSettings(kind="h_kl", reverse=reverse), pairs=pairs)
    expected = 0.0
    logits = world.head(world.hidden)[:, : world.vocab_size]
    bounds = (
        world.pairing.student_bounds.tolist(),
        world.pairing.teacher_bounds.tolist(),
        world.pairing.weights,
    )
    for (first, last), (begin, end), weight in zip(*bounds, strict=True):
        q, p = (
            logits[first - 1 : last - 1].softmax(-1).mean(0),
            world.outputs.log_probs[begin - 1 : end - 1].exp().mean(0),
        )
        (a, b), others = ((q, p) if reverse else (p, q)), (q[common:].sum() + p[common:].sum())
        a, b = a[:common], b[:common]
        expected = expected + weight * ((b - a + a * (a / b).log()).sum() + others)
    torch.testing.assert_close(total, expected.detach())
    of = [world.hidden, *world.head.parameters()]
    for mine, theirs in zip(gradients(loss, of), gradients(expected, of), strict=True):
        torch.testing.assert_close(mine, theirs)
