"""What every divergence keeps: 0 where both sides agree, never below, whatever the blocks,
microbatches and padding.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_makers import (
    CHUNKS,
    KINDS,
    ONE_TO_ONE,
    WIDTH,
    gradients,
    make_world,
    only,
    teacher_outputs,
)
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.core.errors import ConfigError
from penstock.learn.distillation.settings import LossSettings

EQUAL_CHUNKS = ((1, 1, 1), (0, 2, 2), (0, 1, 1), (1, 4, 4), (0, 1, 1), (0, 3, 3))
VARIANTS = [
    {"kind": kind, **more}
    for kind in KINDS
    for more in (
        {},
        {"reverse": True},
        {"forward_share": 0.3},
        {"top_k": 4},
        {"chunk": "first"},
        {"top_k": 4, "reverse": True},
        {"top_k": 4, "forward_share": 0.3},
    )
    if kind != "uld" or "forward_share" not in more
]

IDENTICAL = [
    (options, listed, temperature)
    for options in VARIANTS
    for listed in ([False] if options["kind"] in ("h_kl", "uld") else [False, True])
    for temperature in ([1.0] if options["kind"] == "alm" else [0.3, 1.0, 4.0])
]
"""Options, whether the teacher gives its likeliest tokens only, temperature."""


def chunks_for(kind, chunks=CHUNKS):
    return ONE_TO_ONE if kind == "kl" else chunks


@pytest.mark.parametrize(("options", "listed", "temperature"), IDENTICAL, ids=str)
def test_identical_models_have_neither_loss_nor_gradient(options, listed, temperature):
    kind = options["kind"]
    world = make_world(
        same=True,
        model=True,
        chunks=chunks_for(kind, EQUAL_CHUNKS),
        temperature=temperature,
        top_k=6 if listed else None,
    )
    loss_is = LossSettings(temperature=temperature, **options)
    loss, total = world.loss(loss_is)
    assert 0 <= float(total) <= 1e-12
    assert 0 <= float(loss.detach()) <= 1e-12
    assert max(float(g.abs().max()) for g in world.gradients(loss_is)) <= 1e-12
    # And the same with anything changed is far from it.
    world.hidden.data += 0.1
    assert world.loss(loss_is)[1] > 1e-9


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(VARIANTS),
    st.integers(0, 10**6),
    st.sampled_from((0.1, 2.0, 8.0)),
    st.booleans(),
)
def test_is_never_negative_in_single_precision(options, seed, sharp, model):
    kind = options["kind"]
    same = kind == "kl" or model
    chunks = chunks_for(kind, EQUAL_CHUNKS if model else CHUNKS)
    world = make_world(
        seed=seed, same=same, model=model, chunks=chunks, sharp=sharp, dtype=torch.float32
    )
    for one in range(len(chunks)):
        value = only(world, slice(one, one + 1)).loss(LossSettings(**options))[1]
        assert float(value) >= 0
        assert not model or float(value) <= 1e-4
    gradient = world.gradients(LossSettings(**options))
    assert all(bool(g.isfinite().all()) for g in gradient)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [None, 1, 5, 13])
def test_projected_kl_of_one_vocabulary_is_kl(reverse, temperature, top_k):
    world = make_world(same=True, chunks=ONE_TO_ONE, temperature=temperature)
    options = {"temperature": temperature, "reverse": reverse, "top_k": top_k}
    results = [world.loss(LossSettings(kind=kind, **options)) for kind in ("kl", "p_kl")]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-10, atol=1e-10)
    found = [world.gradients(LossSettings(kind=kind, **options)) for kind in ("kl", "p_kl")]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_kl_is_that_of_torch():
    world = make_world(same=True, chunks=ONE_TO_ONE, temperature=2.0)
    slots, of_teacher = (
        b[:, 0] - 1 for b in (world.pairing.student_bounds, world.pairing.teacher_bounds)
    )
    log_q = torch.log_softmax(world.head(world.hidden)[slots, : world.vocab_size] / 2, -1)
    each = torch.nn.functional.kl_div(
        log_q, world.outputs.log_probs[of_teacher], reduction="none", log_target=True
    )
    reference = 4 * (each.sum(-1) * world.pairing.weights).sum()
    torch.testing.assert_close(world.loss(LossSettings(kind="kl", temperature=2.0))[0], reference)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_blocks_and_microbatches_change_nothing(options):
    world = make_world(same=options["kind"] == "kl", chunks=chunks_for(options["kind"]))
    loss_is = LossSettings(**options, merge_below=0.0)
    whole, reference = world.loss(loss_is, block=1000, scale=0.1)
    expected = gradients(whole, [world.hidden, *world.head.parameters()])
    for block in (1, 2, 5):
        loss, total = world.loss(loss_is, block=block, scale=0.1)
        torch.testing.assert_close(total, reference)
        found = gradients(loss, [world.hidden, *world.head.parameters()])
        torch.testing.assert_close(found, expected)
    halves = [only(world, part) for part in (slice(0, 3), slice(3, None))]
    torch.testing.assert_close(sum(half.loss(loss_is)[1] for half in halves), reference)
    summed = [
        sum(pair)
        for pair in zip(*(half.gradients(loss_is, scale=0.1) for half in halves), strict=True)
    ]
    torch.testing.assert_close(summed, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_temperature_squared_multiply(kind):
    temperature = 1.0 if kind == "alm" else 2.0
    world = make_world(same=kind == "kl", chunks=chunks_for(kind), temperature=temperature)
    loss_is = LossSettings(kind=kind, temperature=temperature, merge_below=0.0)
    ones = replace(world.pairing, weights=torch.ones_like(world.pairing.weights))
    each = [
        only(replace(world, pairing=ones), slice(i, i + 1)).loss(loss_is)[1]
        for i in range(len(ones))
    ]
    reference = (torch.stack(each) * world.pairing.weights).sum()
    torch.testing.assert_close(world.loss(loss_is)[1], reference)
    assert len(set(map(float, each))) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_logits_beyond_the_tokenizer_count_for_nothing(kind):
    world = make_world(same=kind == "kl", chunks=chunks_for(kind))
    before = world.loss(LossSettings(kind=kind))[1]
    world.head.bias.data[world.vocab_size :] += 50
    assert world.loss(LossSettings(kind=kind))[1] == before
    assert world.gradients(LossSettings(kind=kind))[2][world.vocab_size :].abs().max() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_only_predictors_of_chunks_have_a_gradient(kind):
    world = make_world(same=kind == "kl", chunks=chunks_for(kind))
    (found, *_) = world.gradients(LossSettings(kind=kind, debias=False))
    predictors = {
        slot - 1
        for begin, end in world.pairing.student_bounds.tolist()
        for slot in range(begin, end)
    }
    assert set(found.abs().sum(-1).nonzero()[:, 0].tolist()) == predictors


@pytest.mark.parametrize("kind", KINDS)
def test_without_chunks_everything_has_a_zero_gradient(kind):
    world = make_world(same=kind == "kl", chunks=())
    loss, total = world.loss(LossSettings(kind=kind))
    assert (float(loss.detach()), float(total)) == (0.0, 0.0)
    loss.backward()
    for tensor in (world.hidden, *world.head.parameters()):
        assert tensor.grad is not None
        assert not tensor.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_gives_the_same_sums(kind):
    world = make_world(same=kind == "kl", chunks=chunks_for(kind))
    loss, total = world.loss(LossSettings(kind=kind), scale=0.5)
    with torch.no_grad():
        found, again = world.loss(LossSettings(kind=kind), scale=0.5)
    assert not found.requires_grad
    torch.testing.assert_close((found, again), (loss.detach(), total))


def test_half_precision_hidden_states():
    world = make_world(same=True, chunks=ONE_TO_ONE, dtype=torch.float32)
    world.head.to(torch.bfloat16)
    hidden = world.hidden.detach().bfloat16().requires_grad_()
    loss, _ = world.loss(LossSettings(kind="kl"), hidden=hidden)
    assert loss.dtype == torch.float32
    (found,) = gradients(loss, [hidden])
    assert found.dtype == torch.bfloat16
    assert bool(found.any())


def test_longer_chunks_from_likeliest_tokens_are_compared_on_what_all_slots_list():
    """Identical models stay at 0 whatever each slot lists; and with everything listed it is the
    full comparison.
    """
    world = make_world(chunks=CHUNKS)
    teacher_vocab = world.outputs.log_probs.shape[1]
    top = world.outputs.log_probs.topk(teacher_vocab)
    listed = replace(world.outputs, log_probs=None, top_ids=top.indices, top_log_probs=top.values)
    full = world.loss(LossSettings(kind="p_kl"))[1]
    torch.testing.assert_close(world.loss(LossSettings(kind="p_kl"), outputs=listed)[1], full)
    few = replace(listed, top_ids=top.indices[:, :4], top_log_probs=top.values[:, :4])
    # Fewer buckets tell less apart.
    assert 0 < world.loss(LossSettings(kind="p_kl"), outputs=few)[1] < full


@pytest.mark.parametrize("reverse", [False, True])
def test_all_tokens_listed_are_the_full_distribution(reverse):
    world = make_world(same=True, chunks=ONE_TO_ONE)
    top = world.outputs.log_probs.topk(world.vocab_size)
    listed = replace(world.outputs, log_probs=None, top_ids=top.indices, top_log_probs=top.values)
    loss_is = LossSettings(kind="kl", reverse=reverse)
    torch.testing.assert_close(world.loss(loss_is, outputs=listed), world.loss(loss_is))


def test_a_teacher_so_sure_that_its_rest_rounds_to_nothing():
    world = make_world(same=True, chunks=ONE_TO_ONE, dtype=torch.float32)
    logits = torch.zeros(world.outputs.log_probs.shape)
    logits[:, :2] = 30.0
    outputs = teacher_outputs(
        logits, torch.zeros(len(logits), dtype=torch.int64), world.boundary, top_k=2
    )
    assert not (1 - outputs.top_log_probs.exp().sum(-1)).any()
    for reverse in (False, True):
        value = world.loss(LossSettings(kind="kl", reverse=reverse), outputs=outputs)[1]
        assert 0 < float(value) < 20 * float(world.pairing.weights.sum())


def test_minus_infinity_of_a_teacher_is_a_probability_of_zero():
    world = make_world(same=True, chunks=ONE_TO_ONE)
    logits = torch.randn(world.outputs.log_probs.shape, dtype=torch.float64)
    logits[:, 3] = -torch.inf
    outputs = teacher_outputs(logits, torch.zeros(len(logits), dtype=torch.int64), world.boundary)
    for kind in ("kl", "p_kl", "h_kl", "uld"):
        loss_is = LossSettings(kind=kind)
        assert bool(world.loss(loss_is, outputs=outputs)[1].isfinite())
        assert all(bool(g.isfinite().all()) for g in world.gradients(loss_is, outputs=outputs))


def test_refusals():
    world = make_world()
    listed = make_world(top_k=3)
    for kind, changes, message in (
        ("kl", {}, "chunk has 3 tokens"),
        ("p_kl", {"projector": None}, "needs a projection"),
        ("p_kl", {"vocab_size": 12}, "projection is for 13 student tokens, the student has 12"),
        ("h_kl", {"pairs": None}, "needs the common vocabulary"),
        ("h_kl", {"outputs": listed.outputs}, "full distribution"),
        ("uld", {"outputs": listed.outputs}, "full distribution"),
        ("uld", {"vocab_size": 99}, "logits for 16 ids, its tokenizer has 99"),
        ("alm", {"targets": None}, "pass targets"),
        ("alm", {"boundary": None}, "a bool for each of the student's 13 ids, got none"),
        (
            "alm",
            {"outputs": replace(world.outputs, boundary_log_probs=None)},
            "but its outputs have none",
        ),
        (
            "uld",
            {"outputs": replace(world.outputs, temperature=2.0)},
            "have temperature 2.0, the loss expects 1.0",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            world.loss(LossSettings(kind=kind), **changes)
    world.pairing.teacher_bounds[0, 0] = 0
    with pytest.raises(ConfigError, match="begins at slot 0"):
        world.loss(LossSettings(kind="uld"))
    one_to_one = make_world(chunks=ONE_TO_ONE)
    with pytest.raises(ConfigError, match=r"teacher.*11.*tokens.*student.*13"):
        one_to_one.loss(LossSettings(kind="kl"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"binary_temperature": float("inf")}, "binary_temperature must be above 0"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"threshold": 0.0}, "threshold must be in"),
        ({"merge_below": 1.0}, "merge_below must be in"),
        ({"kind": "alm", "temperature": 2.0}, "at temperature 1, got 2.0"),
        ({"kind": "mse"}, "kind must be one of"),
        ({"chunk": "last"}, "chunk must be one of"),
        ({"forward_share": 1.5}, r"forward_share must be in \[0, 1\], got 1.5"),
        ({"forward_share": 0.5, "reverse": True}, "leave out reverse: forward_share 0 is the"),
        ({"kind": "uld", "forward_share": 0.5}, "uld is a distance, which has no direction"),
    ],
)
def test_settings_refuse(wrong, message):
    with pytest.raises(ConfigError, match=message):
        LossSettings(**wrong)


class Shapes(TorchDispatchMode):
    """Remembers the shape of everything that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, torch.Tensor):
                self.made.add(tuple(one.shape))
        return result


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_the_logits_of_a_row_never_exist(options):
    kind, block = options["kind"], 4
    world = make_world(
        same=kind == "kl", chunks=chunks_for(kind, CHUNKS * 6) * (7 if kind == "kl" else 1)
    )
    with Shapes() as shapes:
        world.gradients(LossSettings(**options, merge_below=0.0), block=block)
    tall = [
        shape
        for shape in shapes.made
        if len(shape) == 2 and shape[1] > WIDTH and shape[0] > 2 * block
    ]
    heads = {tuple(p.shape) for p in world.head.parameters()} | {tuple(world.head.weight.T.shape)}
    assert len(world.hidden) > 40
    assert set(tall) <= heads
