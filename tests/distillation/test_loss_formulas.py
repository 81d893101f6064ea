"""Each divergence against its plain formula, and its gradient against differences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_makers import (
    KINDS,
    ONE_TO_ONE,
    STUDENT_VOCAB,
    TEACHER_VOCAB,
    gradients,
    make_world,
    plain_loss,
    random_projection,
)

from penstock.learn.distillation.settings import LossSettings
from penstock.learn.distillation.token_losses import Projector

OPTIONS = (
    {"kind": "kl"},
    {"kind": "kl", "reverse": True, "temperature": 1.7},
    {"kind": "kl", "top_k": 4, "temperature": 0.6},
    {"kind": "kl", "top_k": 4, "reverse": True},
    {"kind": "kl", "forward_share": 0.3, "temperature": 1.7},
    {"kind": "kl", "forward_share": 0.3, "top_k": 4},
    {"kind": "p_kl", "forward_share": 0.8},
    {"kind": "p_kl", "temperature": 1.7},
    {"kind": "p_kl", "top_k": 4, "reverse": True},
    {"kind": "p_kl", "top_k": 4, "chunk": "first"},
    {"kind": "h_kl"},
    {"kind": "h_kl", "reverse": True, "chunk": "first", "temperature": 1.7},
    {"kind": "h_kl", "top_k": 2},
    {"kind": "alm"},
    {"kind": "alm", "debias": False, "binary_temperature": 1.0},
    {"kind": "alm", "reverse": True, "binary_temperature": 5.0, "merge_below": 0.4},
    {"kind": "uld"},
    {"kind": "uld", "top_k": 3, "chunk": "first", "temperature": 1.7},
)


def world_for(options, **more):
    same = options["kind"] == "kl"
    more = ({"same": True, "chunks": ONE_TO_ONE} if same else {}) | more
    return make_world(temperature=options.get("temperature", 1.0), **more)


@st.composite
def chunks_of(draw, one_to_one):
    most = 1 if one_to_one else 4
    length = st.integers(1, most)
    return tuple(
        draw(st.lists(st.tuples(st.integers(0, 2), length, length), min_size=1, max_size=7))
    )


@st.composite
def loss_settings(draw):
    kind = draw(st.sampled_from(KINDS))
    options = {
        "kind": kind,
        "reverse": draw(st.booleans()),
        "top_k": draw(st.none() | st.integers(1, 15)),
    }
    if kind != "uld" and (share := draw(st.none() | st.floats(0, 1))) is not None:
        options |= {"reverse": False, "forward_share": share}
    options["chunk"] = draw(st.sampled_from(("mean", "first")))
    if kind == "alm":
        options["debias"], options["merge_below"] = (
            draw(st.booleans()),
            draw(st.sampled_from((0.0, 0.1, 0.5))),
        )
        options["binary_temperature"] = draw(st.sampled_from((1.0, 10.0, 100.0)))
    else:
        options["temperature"] = draw(st.sampled_from((0.5, 1.0, 3.0)))
    return options


@settings(deadline=None, max_examples=60)
@given(st.data(), loss_settings(), st.integers(0, 1000), st.integers(1, 12))
def test_loss_and_gradient_equal_the_plain_formula(data, options, seed, block):
    chunks = data.draw(chunks_of(options["kind"] == "kl"))
    world = world_for(options, seed=seed, chunks=chunks)
    loss_is = LossSettings(**options)
    found, total = world.loss(loss_is, scale=0.3, block=block)
    expected = plain_loss(world, loss_is)
    torch.testing.assert_close(found, 0.3 * expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-7, atol=1e-9)
    of = [world.hidden, *world.head.parameters()]
    for one, other in zip(gradients(2 * found, of), gradients(0.6 * expected, of), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradient_equals_differences(options):
    world = world_for(options, seed=3)
    loss_is = LossSettings(**options)

    def loss(hidden, weight, bias):
        world.head = lambda states: 3 * torch.tanh((states @ weight.T + bias) / 3)
        return world.loss(loss_is, hidden=hidden, block=3)[0]

    inputs = tuple(
        x.detach().clone().requires_grad_()
        for x in (world.hidden, world.head.weight, world.head.bias)
    )
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-6, atol=1e-7, rtol=1e-5, fast_mode=True)


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 5}, {"reverse": True, "temperature": 2.0}], ids=str
)
def test_projection_is_learnt_too(options):
    world = make_world(seed=5, temperature=options.get("temperature", 1.0))
    learnt = Projector(random_projection(STUDENT_VOCAB, TEACHER_VOCAB, 5), learnable=True).double()
    loss_is = LossSettings(kind="p_kl", **options)
    world.loss(loss_is, projector=learnt)[0].backward()
    (found,) = (p.grad for p in learnt.parameters())
    world.matrix = learnt(torch.eye(STUDENT_VOCAB, dtype=torch.float64))
    (expected,) = torch.autograd.grad(plain_loss(world, loss_is), list(learnt.parameters()))
    assert float(expected.abs().max()) > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
