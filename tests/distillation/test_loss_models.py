"""The losses on models and rows as a run has them: one model on both sides, documents packed,
padding behind.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from loss_makers import identity
from teacher_makers import make_teacher_row, tiny_teacher

from penstock.learn.distillation.blocks import Pairing
from penstock.learn.distillation.losses import distillation_loss
from penstock.learn.distillation.outputs import Wanted, outputs_of
from penstock.learn.distillation.settings import LossSettings
from penstock.learn.distillation.token_losses import Projector

SIZE, LENGTHS = 60, (7, 1, 12)


def row_with_chunks(longest):
    """Each document but its first token, in chunks of one token, or of up to `longest`."""
    row = make_teacher_row(LENGTHS)
    bounds, documents, begin = [], [], 0
    for number, length in enumerate(LENGTHS):
        at, width = begin + 1, 1
        while at < begin + length:
            end = min(at + width, begin + length)
            bounds.append((at, end))
            documents.append(number)
            at, width = end, width % longest + 1
        begin += length
    table = np.array(bounds, np.int32)
    return replace(
        row,
        student_bounds=table,
        teacher_bounds=table,
        weights=np.ones(len(table), np.float32),
        documents=np.array(documents, np.int32),
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(
    ("kind", "top_k"),
    [
        ("kl", None),
        ("kl", 8),
        ("p_kl", None),
        ("p_kl", 8),
        ("h_kl", None),
        ("alm", None),
        ("uld", None),
        ("uld", 8),
    ],
)
def test_a_model_has_nothing_to_learn_from_itself(kind, top_k, temperature):
    if kind == "alm":
        temperature = 1.0
    model = tiny_teacher(torch.float64)
    row = row_with_chunks(1 if kind == "kl" else 3)
    boundary = torch.arange(SIZE) % 3 == 0
    wanted = Wanted(
        temperature=temperature, top_k=top_k if kind in ("kl", "p_kl") else None, boundary=True
    )
    outputs = outputs_of(model, row.input, wanted, vocab_size=SIZE, boundary=boundary, block=5)
    hidden = model(model.tensors(row.input))[0]
    tokens = torch.from_numpy(row.input.tokens).long()
    settings = LossSettings(kind=kind, top_k=top_k, temperature=temperature)
    given = {
        "projector": Projector(identity(SIZE)),
        "pairs": torch.arange(0, SIZE, 2)[:, None].expand(-1, 2),
        "boundary": boundary,
        "targets": tokens.roll(-1),
        "vocab_size": SIZE,
    }
    loss, total = distillation_loss(
        model.logits, hidden, outputs, Pairing.of(row), settings, **given
    )
    assert 0 <= float(total) <= 1e-12
    loss.backward()
    found = [p.grad for p in model.parameters()]
    assert all(g is None or float(g.abs().max()) <= 1e-12 for g in found)
    # Another model has a lot to learn.
    other = tiny_teacher(torch.float64, seed=1)
    states = other(other.tensors(row.input))[0]
    assert (
        distillation_loss(other.logits, states, outputs, Pairing.of(row), settings, **given)[1]
        > 1e-3
    )


def test_weights_of_a_pairing_may_be_told():
    row = row_with_chunks(2)
    assert torch.equal(Pairing.of(row).weights, torch.ones(len(row.weights)))
    reported = torch.arange(len(row.weights), dtype=torch.float64)
    pairing = Pairing.of(row, "cpu", reported)
    assert torch.equal(pairing.weights, reported)
    assert pairing.student_bounds.dtype == torch.int64
    assert len(pairing) == len(row.weights)
