"""The mean of several teachers' distributions, against sums in NumPy, and what follows from it."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from loss_makers import ONE_TO_ONE, make_world, pairing_of, teacher_outputs
from test_loss_scores import row_of
from test_mixed_kl import mixed, softmax

from penstock.core.errors import ConfigError
from penstock.learn.distillation.averaged import averaged, require_one_reading
from penstock.learn.distillation.distiller import Distiller, OpenTeacher, wanted_of
from penstock.learn.distillation.outputs import Wanted
from penstock.learn.distillation.settings import (
    DistillationSettings,
    LossSettings,
    TeacherSettings,
)
from penstock.learn.distillation.teachers import document_scores

LENGTHS = (6, 1, 7)
WEIGHTS = (0.2, 0.5, 0.3)
NEAR = 1e-6
"""Weights of chunks and documents are float32; all else is float64."""


class Told:
    """A teacher with given outputs."""

    def __init__(self, outputs):
        self.given = outputs

    def ask(self, rows):
        pass

    def outputs(self, row):
        return self.given

    def close(self):
        pass


def row_with_chunks(lengths=LENGTHS):
    """A row of documents, each token but the first in a chunk of its own."""
    row = row_of(lengths, [4 * length for length in lengths])
    begins = np.cumsum([0, *lengths[:-1]])
    slots = [
        (begin + at, number)
        for number, (begin, length) in enumerate(zip(begins, lengths, strict=True))
        for at in range(1, length)
    ]
    bounds = np.array([[slot, slot + 1] for slot, _ in slots], np.int32)
    return replace(
        row,
        student_bounds=bounds,
        teacher_bounds=bounds,
        weights=np.linspace(0.5, 1.5, len(slots)).astype(np.float32),
        documents=np.array([number for _, number in slots], np.int32),
    )


def outputs_of(row, vocabulary, seed, *, temperature=1.0, sharp=2.0):
    torch.manual_seed(seed)
    slots = len(row.input.tokens)
    boundary = torch.arange(vocabulary) % 3 == 0
    logits = sharp * torch.randn(slots, vocabulary, dtype=torch.float64)
    return teacher_outputs(logits, torch.randint(vocabulary, (slots,)), boundary, temperature)


def distiller_of(world, outputs, weights, loss, row, **settings):
    teachers = [
        TeacherSettings(model=str(number), weight=weight, loss=loss)
        for number, weight in enumerate(weights)
    ]
    found = Distiller(
        DistillationSettings(teachers=teachers, **settings),
        [
            OpenTeacher(settings=one, teacher=Told(told), boundary=world.boundary)
            for one, told in zip(teachers, outputs, strict=True)
        ],
        vocab_size=world.vocab_size,
        device="cpu",
    )
    found.begin([(row,) * len(teachers)], list)
    return found


def learn(world, found, row):
    """Loss and gradients of a row."""
    loss = found.row_loss(world.head, world.hidden, world.targets, (row,) * len(found.teachers))
    leaves = [world.hidden, *world.head.parameters()]
    return loss.item(), torch.autograd.grad(loss, leaves)


def world_of(row):
    """A student of the row."""
    world = make_world(same=True, chunks=ONE_TO_ONE, seed=7)
    slots = len(row.input.tokens)
    hidden = torch.randn(slots, world.hidden.shape[1], dtype=torch.float64).requires_grad_()
    return replace(world, hidden=hidden, targets=torch.randint(world.vocab_size, (slots,)))


def test_the_mean_is_that_of_probabilities_by_document():
    row = row_with_chunks()
    each = [outputs_of(row, 11, seed, temperature=2.0) for seed in range(3)]
    shares = np.random.default_rng(0).random((3, 3))
    found = averaged(each, row, torch.from_numpy(shares))
    begin = 0
    for number, length in enumerate(LENGTHS):
        part = slice(begin, begin + length)
        begin += length
        share = shares[:, number] / shares[:, number].sum()
        for name in ("log_probs", "token_log_probs", "boundary_log_probs"):
            due = sum(
                w * np.exp(getattr(one, name)[part].numpy())
                for w, one in zip(share, each, strict=True)
            )
            np.testing.assert_allclose(getattr(found, name)[part].exp().numpy(), due, rtol=1e-12)
    np.testing.assert_allclose(found.log_probs.exp().sum(-1).numpy(), 1.0, rtol=1e-12)
    assert found.temperature == 2.0


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_one_kl_from_the_mean_by_hand(share, top_k, temperature):
    row = row_with_chunks()
    world = world_of(row)
    each = [outputs_of(row, world.vocab_size, seed, temperature=temperature) for seed in range(3)]
    loss = LossSettings(kind="kl", forward_share=share, top_k=top_k, temperature=temperature)
    found = distiller_of(world, each, WEIGHTS, loss, row, combine="average")
    value, _ = learn(world, found, row)
    logits = world.head(world.hidden).detach().numpy()[:, : world.vocab_size]
    total = 0.0
    for (slot, _), weight in zip(row.student_bounds.tolist(), row.weights.tolist(), strict=True):
        p = sum(
            w * np.exp(one.log_probs[slot - 1].numpy())
            for w, one in zip(WEIGHTS, each, strict=True)
        )
        q = softmax(logits[slot - 1] / temperature)
        if top_k is not None:
            columns = np.argsort(-p)[:top_k]
            p, q = (np.append(x[columns], 1 - x[columns].sum()) for x in (p, q))
        total += weight * mixed(p, q, share) * temperature**2
    assert value == pytest.approx(total / row.weights.sum(), rel=NEAR)
    figures = found.end({"distillation 0": total}, 1.0)
    assert set(found.pending()) == {"distillation 0"}
    assert set(figures) == {"distillation", "chunks"}


def test_forward_losses_have_the_gradient_of_the_mean_and_the_teachers_disagreement():
    """Σ w KL(pᵢ ‖ q) = KL(p ‖ q) + Σ w KL(pᵢ ‖ p); in the other direction they are not the
    same.
    """
    row = row_with_chunks()
    world = world_of(row)
    each = [outputs_of(row, world.vocab_size, seed) for seed in range(3)]

    def both(loss):
        return [
            learn(world, distiller_of(world, each, WEIGHTS, loss, row, combine=combine), row)
            for combine in ("losses", "average")
        ]

    losses, average = both(LossSettings(kind="kl"))
    apart = 0.0
    for (slot, _), weight in zip(row.student_bounds.tolist(), row.weights.tolist(), strict=True):
        p = [np.exp(one.log_probs[slot - 1].numpy()) for one in each]
        mean = sum(w * one for w, one in zip(WEIGHTS, p, strict=True))
        apart += weight * sum(w * mixed(one, mean, 1.0) for w, one in zip(WEIGHTS, p, strict=True))
    assert losses[0] - average[0] == pytest.approx(apart / row.weights.sum(), rel=NEAR)
    for one, other in zip(losses[1], average[1], strict=True):
        torch.testing.assert_close(one, other, rtol=NEAR, atol=1e-9)
    backward, averaged_back = both(LossSettings(kind="kl", reverse=True))
    assert any(
        float((one - other).abs().max()) > 1e-3
        for one, other in zip(backward[1], averaged_back[1], strict=True)
    )


@pytest.mark.parametrize("kind", ["kl", "alm", "uld"])
def test_equal_teachers_are_one(kind):
    row = row_with_chunks()
    world = world_of(row)
    one = outputs_of(row, world.vocab_size, 0)
    loss = LossSettings(kind=kind)
    alone = learn(world, distiller_of(world, [one], (1.0,), loss, row), row)
    many = learn(world, distiller_of(world, [one] * 3, WEIGHTS, loss, row, combine="average"), row)
    assert many[0] == pytest.approx(alone[0], rel=1e-9)
    for mine, its in zip(many[1], alone[1], strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("kind", ["kl", "alm"])
def test_the_best_teacher_of_a_document_is_its_mean(kind):
    row = row_with_chunks()
    world = world_of(row)
    each = [outputs_of(row, world.vocab_size, seed) for seed in range(3)]
    best = torch.stack([document_scores(one, row, "likelihood") for one in each]).argmax(0)
    assert len(set(best.tolist())) > 1
    losses, average = (
        learn(
            world,
            distiller_of(
                world, each, WEIGHTS, LossSettings(kind=kind), row, combine=combine, choose="best"
            ),
            row,
        )
        for combine in ("losses", "average")
    )
    if kind == "kl":
        assert average[0] == pytest.approx(losses[0], rel=1e-9)
    assert all(bool(grad.isfinite().all()) for grad in average[1])


def test_scores_are_shares_of_the_mean():
    row = row_with_chunks()
    world = world_of(row)
    each = [outputs_of(row, world.vocab_size, seed) for seed in range(2)]
    loss = LossSettings(kind="kl")
    given = {"combine": "average", "choose": "by_score", "sharpness": 3.0}
    value, _ = learn(world, distiller_of(world, each, (1.0, 2.0), loss, row, **given), row)
    scores = np.stack([document_scores(one, row, "likelihood").numpy() for one in each])
    scores[:, 1] = 0  # of one token, which none predicts
    shares = softmax(3 * scores.T).T * np.array([[1.0], [2.0]])
    shares /= shares.sum(0)
    logits = world.head(world.hidden).detach().numpy()[:, : world.vocab_size]
    total = 0.0
    for (slot, _), document, weight in zip(
        row.student_bounds.tolist(), row.documents, row.weights.tolist(), strict=True
    ):
        p = sum(
            shares[number, document] * np.exp(one.log_probs[slot - 1].numpy())
            for number, one in enumerate(each)
        )
        total += weight * mixed(p, softmax(logits[slot - 1]), 1.0)
    assert value == pytest.approx(total / row.weights.sum(), rel=NEAR)


@pytest.mark.parametrize("sharpness", [0.0, 2.0])
def test_a_teacher_that_predicts_nothing_of_a_document_gets_none_of_it(sharpness):
    """It reads one token of each, and 0 nats a byte would be the best likelihood."""
    row, short = row_of((4, 3), (8, 6)), row_of((1, 1), (1, 1))
    world = world_of(row)
    each = [outputs_of(one, world.vocab_size, seed) for seed, one in enumerate((short, row))]
    loss = LossSettings(kind="kl")
    for choose, due in (("best", [[0, 0], [1, 1]]), ("by_score", [[0, 0], [2, 2]])):
        found = distiller_of(world, each, [1, 2], loss, row, choose=choose, sharpness=sharpness)
        assert found._shares(each, (short, row)).tolist() == due
        # None predicts anything: no share is NaN.
        assert found._shares([each[0]] * 2, (short, short)).sum(0).isfinite().all()


def test_the_mean_is_by_document_where_documents_see_each_other():
    row = row_with_chunks()
    slots = len(row.input.tokens)
    joined = replace(row, input=replace(row.input, positions=np.arange(slots, dtype=np.int32)))
    each = [outputs_of(row, 11, seed) for seed in range(2)]
    weights = torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.5, 1.0]])
    due, found = (averaged(each, one, weights) for one in (row, joined))
    torch.testing.assert_close(found.log_probs, due.log_probs)


def test_a_row_without_chunks_is_zero_and_reaches_the_head():
    row = row_with_chunks()
    world = world_of(row)
    lists = ("student_bounds", "teacher_bounds", "weights", "documents")
    empty = replace(row, **{name: getattr(row, name)[:0] for name in lists})
    each = [outputs_of(row, world.vocab_size, seed) for seed in range(2)]
    found = distiller_of(world, each, (1.0, 1.0), LossSettings(kind="kl"), row, combine="average")
    loss = found.row_loss(world.head, world.hidden, world.targets, (empty, empty))
    loss.backward()
    assert loss == 0
    assert not world.head.weight.grad.any()


def test_what_is_asked_of_teachers():
    """The most likely tokens of a mean are known only from whole distributions."""
    for loss in (LossSettings(kind="kl", top_k=4), LossSettings(kind="p_kl", top_k=4)):
        assert wanted_of(loss, averaged=True).top_k is None
        assert wanted_of(loss).top_k == 4
    assert wanted_of(LossSettings(kind="alm"), averaged=True) == Wanted(top_k=1, boundary=True)


def teacher(model="a", **more):
    return TeacherSettings(model=model, **more)


@pytest.mark.parametrize(
    ("teachers", "message"),
    [
        (
            [teacher(), TeacherSettings(cache="c")],
            "teacher 1 is a cache, which holds only the most likely tokens",
        ),
        (
            [teacher(), teacher(loss=LossSettings(kind="alm"))],
            "teachers 0 and 1 differ in loss",
        ),
        ([teacher(), teacher(bos=True)], "teachers 0 and 1 differ in bos, None and True"),
        (
            [teacher(multiple=64), teacher()],
            "teachers 0 and 1 differ in multiple, 64 and 1; give both the same, or set combine",
        ),
    ],
)
def test_teachers_that_cannot_be_averaged(teachers, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        DistillationSettings(teachers=teachers, combine="average")
    DistillationSettings(teachers=teachers)


def test_other_refusals():
    with pytest.raises(ConfigError, match="combine must be losses or average, got 'mean'"):
        DistillationSettings(teachers=[teacher()], combine="mean")
    row = row_with_chunks()
    ones = torch.ones(2, 3, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"vocabularies of \[11, 12\] ids cannot be averaged"):
        averaged([outputs_of(row, 11, 0), outputs_of(row, 12, 0)], row, ones)
    full = outputs_of(row, 11, 0)
    top = full.log_probs.topk(3)
    few = replace(full, log_probs=None, top_ids=top.indices, top_log_probs=top.values)
    with pytest.raises(ConfigError, match=r"ask each with Wanted\(top_k=None\)"):
        averaged([few, few], row, ones)
    other = replace(row, input=replace(row.input, tokens=row.input.tokens + 1))
    require_one_reading([row, row])
    with pytest.raises(ConfigError, match="teachers 0 and 2 read other tokens"):
        require_one_reading([row, row, other])


def test_chunks_are_those_of_the_pairing():
    """The maker of this file agrees with the one of the other tests."""
    row = row_with_chunks((4,))
    bounds = pairing_of(((0, 1, 1),) * 3).student_bounds.numpy()
    assert np.array_equal(row.student_bounds, bounds)
