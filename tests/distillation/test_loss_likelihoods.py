"""Approximate likelihood matching: probabilities of chunks, numbers at the ends of the range,
joined chunks.
"""

import math
from dataclasses import replace

import pytest
import torch
from loss_makers import CHUNKS, make_world, pairing_of

from penstock.learn.distillation.blocks import chunk_blocks
from penstock.learn.distillation.losses import (
    MARGIN,
    MOST_TOKENS,
    ChunkLikelihood,
    binary_kl,
    merge_chunks,
)
from penstock.learn.distillation.settings import LossSettings

NO_GAPS = ((0, 1, 1), (0, 1, 2), (0, 2, 3), (0, 3, 1), (0, 2, 2))


def test_chunk_probabilities_multiply_to_the_documents():
    """Chunks that cover a document: the sum of their log-probabilities is the document's, on both
    sides.
    """
    world = make_world(chunks=NO_GAPS)
    settings = LossSettings(kind="alm", debias=False)
    measure = ChunkLikelihood(
        settings, world.outputs, targets=world.targets, boundary=None, vocab_size=13
    )
    logits = world.head(world.hidden)[:, :13].detach()
    student = teacher = 0.0
    for block in chunk_blocks(world.pairing, 3, logits.device):
        mine = measure._student(logits[block.slots], block)
        student, teacher = student + mine.sum(), teacher + measure._teacher(block, mine).sum()
    last, teacher_last = (
        int(b.max()) for b in (world.pairing.student_bounds, world.pairing.teacher_bounds)
    )
    logs = torch.log_softmax(logits, -1)
    expected = sum(logs[slot - 1, world.targets[slot - 1]] for slot in range(1, last))
    torch.testing.assert_close(student, expected)
    torch.testing.assert_close(teacher, world.outputs.token_log_probs[1:teacher_last].sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reverse", [False, True])
def test_binary_kl_at_the_ends_of_the_range(dtype, reverse):
    ends = [0.0, -1e-12, -1e-7, -1e-3, -math.log(2), -0.7, -5.0, -100.0, -1e4]
    for mine in ends:
        for other in ends:
            log_p = torch.tensor([mine], dtype=dtype)
            log_q = torch.tensor([other], dtype=dtype, requires_grad=True)
            value = binary_kl(log_q, log_p) if reverse else binary_kl(log_p, log_q)
            (gradient,) = torch.autograd.grad(value.sum(), log_q)
            assert bool(value.isfinite()), (mine, other)
            assert bool(gradient.isfinite()), (mine, other)
            assert float(value.detach()) >= 0
            if mine == other:
                assert float(value.detach()) == 0
                assert float(gradient.abs()) <= torch.finfo(dtype).eps


def test_binary_kl_is_exact_in_the_middle():
    p, q = 0.3 * math.exp(-MARGIN), 0.8 * math.exp(-MARGIN)
    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    found = binary_kl(*(torch.tensor([x], dtype=torch.float64).log() for x in (0.3, 0.8)))
    assert float(found) == pytest.approx(expected, rel=1e-12)


def boundaries(pairing, unlikely):
    """Boundary log-probabilities of a teacher that hardly sees one after the chunks `unlikely`."""
    found = torch.full((int(pairing.teacher_bounds.max()) + 1,), math.log(0.5))
    for chunk in unlikely:
        found[pairing.teacher_bounds[chunk, 1] - 1] = math.log(0.05)
    return found


def test_chunks_are_joined_until_a_boundary():
    pairing = pairing_of(NO_GAPS)
    found = merge_chunks(pairing, boundaries(pairing, (0, 1, 3)), 0.1)
    assert found.student_bounds.tolist() == [[1, 5], [5, 10]]
    assert found.teacher_bounds.tolist() == [[1, 7], [7, 10]]
    assert found.weights.tolist() == [1 + 1.5 + 2, 1 + 1.5]


def test_what_ends_the_row_or_has_a_gap_after_it_stays():
    pairing = pairing_of(((0, 1, 1), (1, 1, 1), (0, 2, 1)))
    found = merge_chunks(pairing, boundaries(pairing, (0, 1, 2)), 0.1)
    assert found.student_bounds.tolist() == [[1, 2], [3, 6]]


@pytest.mark.parametrize("side", ["student_bounds", "teacher_bounds"])
def test_a_gap_on_one_side_is_a_gap(side):
    pairing = pairing_of(((0, 1, 1), (0, 1, 1), (0, 1, 1)))
    getattr(pairing, side)[1:] += 1
    found = merge_chunks(pairing, boundaries(pairing, (0, 1, 2)), 0.1)
    assert found.student_bounds.diff()[:, 0].tolist() == [1, 2]


def test_nothing_is_joined_at_likely_boundaries_and_nothing_of_nothing():
    pairing = pairing_of(CHUNKS)
    found = merge_chunks(pairing, boundaries(pairing, ()), 0.1)
    assert torch.equal(found.student_bounds, pairing.student_bounds)
    assert len(merge_chunks(pairing_of(()), torch.zeros(3), 0.1)) == 0


def test_text_without_boundaries_is_not_one_chunk():
    pairing = pairing_of(((0, 3, 2),) * 50)
    found = merge_chunks(pairing, boundaries(pairing, range(50)), 0.1)
    lengths = found.student_bounds.diff()[:, 0]
    assert int(lengths.max()) <= MOST_TOKENS + 2
    assert len(found) == 3
    assert int(lengths.sum()) == 150
    # A block may be smaller than such a chunk: it is taken whole.
    assert [len(block.weights) for block in chunk_blocks(found, 10, lengths.device)] == [1, 1, 1]


def test_joining_is_what_the_loss_does():
    world = make_world(chunks=NO_GAPS)
    settings = LossSettings(kind="alm", merge_below=0.3)
    quiet = boundaries(world.pairing, (0, 1, 3)).double() + math.log(0.9)
    world.outputs = replace(world.outputs, boundary_log_probs=quiet)
    joined = merge_chunks(world.pairing, quiet, 0.3)
    assert len(joined) == 2
    apart = replace(settings, merge_below=0.0)
    torch.testing.assert_close(world.loss(settings)[1], world.loss(apart, pairing=joined)[1])
    assert world.loss(settings)[1] != world.loss(apart)[1]


def test_a_student_that_never_ends_a_chunk_pays_for_it():
    """Two students with the same probability of the chunk; one would go on without a boundary."""
    world = make_world(chunks=((0, 1, 1),))
    other = world.boundary & False
    other[3] = True
    settings = LossSettings(kind="alm", merge_below=0.0)
    assert world.loss(settings)[1] != world.loss(settings, boundary=other)[1]
    unbiased = replace(settings, debias=False)
    assert world.loss(unbiased)[1] == world.loss(unbiased, boundary=other)[1]
