"""Both directions of KL with shares, and the most likely columns of a teacher, against formulas in
NumPy, in float64, written apart: plain sums, and those of NeMo-RL's distillation loss.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from loss_makers import CHUNKS, ONE_TO_ONE, make_world, only

from penstock.learn.distillation.settings import LossSettings

SHARES = (0.0, 0.25, 0.5, 1.0)


def softmax(logits):
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def kl(p, q):
    return float(np.sum(p * (np.log(p) - np.log(q))))


def mixed(p, q, share):
    """`mixed_kl_weight` is the weight of the forward direction."""
    return share * kl(p, q) + (1 - share) * kl(q, p)


def nemo(student, teacher, top_k, share):
    """NeMo-RL's DistillationLossFn of kl_type mixed without zero_outside_topk, of one position:
    both softmaxes are over the teacher's k largest logits alone.
    """
    columns = np.argsort(-teacher)[:top_k]
    p, q = softmax(teacher[columns]), softmax(student[columns])
    return float(np.sum(share * p * np.log(p / q) + (1 - share) * q * np.log(q / p)))


def inside(p, q, columns):
    """Total probability of some columns on both sides."""
    return float(p[columns].sum()), float(q[columns].sum())


def binary(one, other, share):
    return mixed(np.array([one, 1 - one]), np.array([other, 1 - other]), share)


def sides(world):
    """Student's logits and the teacher's at each chunk of one token."""
    logits = world.head(world.hidden).detach().numpy()[:, : world.vocab_size]
    logs = world.outputs.log_probs.numpy()
    p = world.pairing
    ours, theirs = ((b[:, 0] - 1).numpy() for b in (p.student_bounds, p.teacher_bounds))
    return logits[ours], logs[theirs], p.weights.numpy()


def listed(world, top_k):
    """The world whose teacher gives its k most likely tokens only, as a cache does."""
    top = world.outputs.log_probs.topk(top_k)
    outputs = replace(world.outputs, log_probs=None, top_ids=top.indices, top_log_probs=top.values)
    return replace(world, outputs=outputs)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", ["kl", "p_kl"])
def test_over_the_whole_vocabulary_it_is_that_of_nemo(kind, share):
    world = make_world(same=True, chunks=ONE_TO_ONE, seed=3)
    found = world.loss(LossSettings(kind=kind, forward_share=share))[1]
    expected = sum(
        weight * nemo(student, teacher, world.vocab_size, share)
        for student, teacher, weight in zip(*sides(world), strict=True)
    )
    assert float(found) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("top_k", [1, 4, 9])
@pytest.mark.parametrize("from_list", [False, True])
@pytest.mark.parametrize("kind", ["kl", "p_kl"])
def test_a_top_k_is_that_of_nemo_and_what_it_leaves_out(kind, share, top_k, from_list):
    """By the chain rule: KL with one bucket for the rest is the KL of whether a token is in the
    top-k, plus that inside it, weighted by the probability of being there.
    """
    world = make_world(same=True, chunks=ONE_TO_ONE, seed=4)
    if from_list:
        found = listed(world, 9).loss(LossSettings(kind=kind, forward_share=share, top_k=top_k))[1]
    else:
        found = world.loss(LossSettings(kind=kind, forward_share=share, top_k=top_k))[1]
    expected = 0.0
    for student, teacher, weight in zip(*sides(world), strict=True):
        p, q = np.exp(teacher), softmax(student)
        in_p, in_q = inside(p, q, np.argsort(-teacher)[:top_k])
        ahead, back = (nemo(student, teacher, top_k, direction) for direction in (1.0, 0.0))
        expected += weight * (
            binary(in_p, in_q, share) + share * in_p * ahead + (1 - share) * in_q * back
        )
    assert float(found) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("share", [None, 0.0, 0.4, 1.0])
@pytest.mark.parametrize("chunk", ["mean", "first"])
@pytest.mark.parametrize("top_k", [2, 5])
def test_projected_columns_of_a_cached_teacher(share, chunk, top_k):
    """p_kl with a teacher's lists: chunks of several tokens on both sides, and a student's
    vocabulary whose distribution is projected onto the listed columns alone.
    """
    world = make_world(seed=5)
    few = listed(world, 5)
    settings = LossSettings(kind="p_kl", top_k=top_k, forward_share=share, chunk=chunk)
    found = float(few.loss(settings)[1])
    matrix = world.matrix.numpy()
    student = softmax(world.head(world.hidden).detach().numpy()[:, : world.vocab_size])
    ids, logs = few.outputs.top_ids.numpy(), few.outputs.top_log_probs.numpy()
    expected = 0.0
    for bounds, theirs, weight in zip(
        world.pairing.student_bounds.tolist(),
        world.pairing.teacher_bounds.tolist(),
        world.pairing.weights.tolist(),
        strict=True,
    ):
        ours, slots = (np.arange(begin - 1, end - 1) for begin, end in (bounds, theirs))
        if chunk == "first":
            ours, slots = ours[:1], slots[:1]
        tables = [dict(zip(ids[s][:top_k], np.exp(logs[s][:top_k]), strict=True)) for s in slots]
        # Only what every slot lists is compared; all else is in the rest.
        columns = [c for c in ids[slots[0]][:top_k] if all(c in table for table in tables)]
        p = np.array([np.mean([table[c] for table in tables]) for c in columns])
        q = (student[ours].mean(0) @ matrix)[columns]
        reached = np.array([matrix[:, c].any() for c in columns], bool)
        lost = p[~reached].sum()
        p_all = np.append(p[reached], 1 - p.sum())
        q_all = np.append(q[reached], 1 - q.sum()) * (1 - lost)
        ahead = float(np.sum(q_all - p_all + p_all * np.log(p_all / q_all)))
        back = float(np.sum(p_all - q_all + q_all * np.log(q_all / p_all)))
        expected += weight * (ahead if share is None else share * ahead + (1 - share) * back)
    assert found == pytest.approx(expected, rel=1e-6)
    assert found > 1e-3


@pytest.mark.parametrize("kind", ["kl", "p_kl", "h_kl", "alm"])
@pytest.mark.parametrize("top_k", [None, 4])
def test_the_ends_are_the_directions_to_the_last_bit(kind, top_k):
    world = make_world(same=kind == "kl", chunks=ONE_TO_ONE if kind == "kl" else CHUNKS)
    for share, reverse in ((1.0, False), (0.0, True)):
        one = LossSettings(kind=kind, top_k=top_k, forward_share=share)
        other = LossSettings(kind=kind, top_k=top_k, reverse=reverse)
        assert torch.equal(world.loss(one)[1], world.loss(other)[1])
        for mine, its in zip(world.gradients(one), world.gradients(other), strict=True):
            assert torch.equal(mine, its)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mixed_kl_of_a_sure_teacher_is_finite(dtype):
    world = make_world(same=True, chunks=ONE_TO_ONE, sharp=60.0, dtype=dtype)
    for options in ({}, {"top_k": 3}):
        settings = LossSettings(kind="kl", forward_share=0.5, **options)
        for one in range(len(ONE_TO_ONE)):
            assert float(only(world, slice(one, one + 1)).loss(settings)[1]) >= 0
        assert all(bool(g.isfinite().all()) for g in world.gradients(settings))
