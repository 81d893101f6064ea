"""The chunked loss against the plain formula on all logits."""

import itertools
import logging
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.core.errors import ConfigError
from penstock.learn.training import cross_entropy
from penstock.learn.training.cross_entropy import chunk_size, chunked_cross_entropy, fused_for
from penstock.learn.training.losses import hidden_loss

VOCAB, WIDTH = 13, 6


def plain(logits, targets, weights, scale, z_loss) -> Tensor:
    """The formula, all at once."""
    entropy = nn.functional.cross_entropy(logits, targets, reduction="none")
    return scale * (weights * (entropy + z_loss * torch.logsumexp(logits, -1) ** 2)).sum()


class Head(nn.Module):
    """A head with more to it than a matrix: a bias, and logits squashed by a tanh, whose backward
    needs its output.
    """

    def __init__(self, vocab: int = VOCAB, width: int = WIDTH, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(
            torch.randn(vocab, width, generator=generator, dtype=torch.float64)
        )
        self.bias = nn.Parameter(torch.randn(vocab, generator=generator, dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        return 5 * torch.tanh(nn.functional.linear(hidden, self.weight, self.bias) / 5)


def inputs(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(VOCAB, (n,), generator=generator)
    return hidden, targets, torch.rand(n, generator=generator, dtype=torch.float64)


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(1, 20),
    chunk=st.integers(1, 25),
    z_loss=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 99),
)
def test_value_and_gradients_are_those_of_the_plain_formula(n, chunk, z_loss, seed):
    hidden, targets, weights = inputs(n, seed)
    head = Head(seed=seed)
    due = plain(head(hidden), targets, weights, 0.7, z_loss)
    expected = torch.autograd.grad(3 * due, [hidden, head.weight, head.bias])
    got, entropy = chunked_cross_entropy(
        head, hidden, targets, weights, scale=0.7, z_loss=z_loss, chunk=chunk
    )
    torch.testing.assert_close(got, due, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        entropy, plain(head(hidden), targets, weights, 1, 0).detach(), rtol=1e-12, atol=1e-12
    )
    for mine, its in zip(
        torch.autograd.grad(3 * got, [hidden, head.weight, head.bias]), expected, strict=True
    ):
        torch.testing.assert_close(mine, its, rtol=1e-11, atol=1e-12)


def test_gradcheck():
    hidden, targets, weights = inputs(7)
    head = Head()

    def of(hidden, weight, bias):
        def logits(states):
            return 5 * torch.tanh(nn.functional.linear(states, weight, bias) / 5)

        return chunked_cross_entropy(
            logits, hidden, targets, weights, scale=0.7, z_loss=0.1, chunk=3
        )[0]

    assert torch.autograd.gradcheck(of, (hidden, head.weight, head.bias))


@pytest.mark.parametrize("frozen", ["head", "hidden"])
def test_only_one_of_head_and_hidden_states_learns(frozen):
    hidden, targets, weights = inputs(9)
    head = Head()
    (head if frozen == "head" else hidden).requires_grad_(False)
    leaves = [p for p in (hidden, *head.parameters()) if p.requires_grad]
    expected = torch.autograd.grad(plain(head(hidden), targets, weights, 1, 0), leaves)
    got = torch.autograd.grad(
        chunked_cross_entropy(head, hidden, targets, weights, chunk=4)[0], leaves
    )
    for mine, its in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-11, atol=1e-12)


def test_without_gradients_the_value_is_the_same():
    hidden, targets, weights = inputs(9)
    head = Head()
    with_gradient = chunked_cross_entropy(head, hidden, targets, weights, z_loss=0.1, chunk=4)
    with torch.no_grad():
        without = chunked_cross_entropy(head, hidden, targets, weights, z_loss=0.1, chunk=4)
    assert not without[0].requires_grad
    torch.testing.assert_close(with_gradient[0].detach(), without[0], rtol=0, atol=0)
    torch.testing.assert_close(with_gradient[1], without[1], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_head_under_autocast_stays_near(dtype):
    head = Head().float()
    hidden, targets, weights = inputs(40)
    hidden = hidden.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        chunked_cross_entropy(head, hidden, targets, weights.float(), chunk=16)[0].backward()
    assert head.weight.grad.dtype == torch.float32
    mine, head.weight.grad = head.weight.grad, None
    plain(head(hidden), targets, weights.float(), 1, 0).backward()
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    assert (mine - head.weight.grad).norm() < tolerance * head.weight.grad.norm()


def row(distances: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, targets and weights of a row, half of it without targets."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(
        distances, tokens, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True
    )
    targets = torch.randint(VOCAB, (distances, tokens), generator=generator)
    weights = torch.rand(distances, tokens, generator=generator, dtype=torch.float64)
    nothing = torch.rand(distances, tokens, generator=generator) < 0.5
    return hidden, targets.masked_fill(nothing, -100), weights.masked_fill(nothing, 0)


def test_distances_are_weighted_and_divided_each_by_its_own():
    hidden, targets, weights = row(2, 30)
    head = Head()
    got = hidden_loss(
        head, hidden, targets, weights, (4.0, 3.0), distance_weights=(1.0, 0.3), z_loss=0.1, chunk=7
    )
    due = sum(
        plain(head(hidden[d]), targets[d].clamp(0), weights[d], w / n, 0.1)
        for d, (w, n) in enumerate([(1.0, 4.0), (0.3, 3.0)])
    )
    torch.testing.assert_close(got.loss, due, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(got.loss, hidden)[0],
        torch.autograd.grad(due, hidden)[0],
        rtol=1e-11,
        atol=1e-12,
    )
    assert got.num_targets == int((weights > 0).sum())
    torch.testing.assert_close(got.weights, weights.sum(1))


@pytest.mark.parametrize("cuts", [(0, 24), (0, 1, 24), (0, 8, 16, 24), tuple(range(25))])
def test_any_split_into_microbatches_adds_up_to_the_same(cuts):
    hidden, targets, weights = row(1, 24)
    head = Head()
    denominator = float(weights.sum())
    whole = hidden_loss(head, hidden, targets, weights, denominator, distance_weights=(1.0,))
    gradient = torch.autograd.grad(whole.loss, [hidden, head.weight])
    parts = [
        hidden_loss(
            head,
            hidden[:, a:b],
            targets[:, a:b],
            weights[:, a:b],
            denominator,
            distance_weights=(1.0,),
            chunk=5,
        )
        for a, b in itertools.pairwise(cuts)
    ]
    torch.testing.assert_close(sum(p.loss for p in parts), whole.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        sum(p.cross_entropy for p in parts), whole.cross_entropy, rtol=1e-12, atol=1e-12
    )
    for mine, its in zip(
        torch.autograd.grad(sum(p.loss for p in parts), [hidden, head.weight]),
        gradient,
        strict=True,
    ):
        torch.testing.assert_close(mine, its, rtol=1e-11, atol=1e-12)


def test_a_row_without_targets_is_zero_and_still_goes_backward():
    hidden, targets, weights = row(1, 8)
    got = hidden_loss(
        Head(), hidden, torch.full_like(targets, -100), weights * 0, 0.0, distance_weights=(1.0,)
    )
    got.loss.backward()
    assert got.loss == 0
    assert got.num_targets == 0
    assert not hidden.grad.any()


@pytest.mark.parametrize(
    ("denominators", "match"), [(5.0, "1 denominators"), ((0.0, 1.0), "denominator 0 is 0.0")]
)
def test_wrong_denominators_are_refused(denominators, match):
    with pytest.raises(ConfigError, match=match):
        hidden_loss(Head(), *row(2, 8), denominators, distance_weights=(1.0, 1.0))


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation made, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        found = [
            x.numel() for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, Tensor)
        ]
        self.elements = max([self.elements, *found])
        return result


def test_the_logits_of_a_row_never_exist_at_once():
    vocab, tokens, chunk = 50, 640, 8
    weight = torch.randn(vocab, WIDTH, requires_grad=True)
    hidden = torch.randn(tokens, WIDTH, requires_grad=True)
    with Largest() as largest:
        targets, weights = torch.randint(vocab, (tokens,)), torch.ones(tokens)
        chunked_cross_entropy(lambda x: x @ weight.T, hidden, targets, weights, chunk=chunk)[
            0
        ].backward()
    assert largest.elements == tokens * WIDTH


# -- the backward pass


class Made(TorchDispatchMode):
    """Operations that made a matrix of some shape."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape, self.names = shape, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and tuple(found.shape) == self.shape:
            self.names.append(func.overloadpacket.__name__)
        return found


def test_the_gradient_of_the_head_is_one_matrix_to_which_each_chunk_adds_its_product():
    weight = nn.Parameter(torch.randn(50, WIDTH))
    hidden = torch.randn(40, WIDTH, requires_grad=True)
    targets, weights = torch.randint(50, (40,)), torch.ones(40)
    with Made((50, WIDTH)) as made:
        loss = chunked_cross_entropy(lambda x: x @ weight.t(), hidden, targets, weights, chunk=10)[
            0
        ]
        loss.backward()
    assert [name for name in made.names if name not in ("detach", "t", "alias")] == [
        "mm",
        *["addmm_"] * 3,
        "mul_",
    ]
    expected = nn.functional.cross_entropy(hidden @ weight.t(), targets, reduction="sum")
    for one, other in zip(
        (hidden.grad, weight.grad), torch.autograd.grad(expected, [hidden, weight]), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_graph_that_is_kept_may_run_backward_again_and_no_other():
    hidden, targets, weights = inputs(9)
    head = Head()
    leaves = [hidden, head.weight, head.bias]
    loss, _ = chunked_cross_entropy(head, hidden, targets, weights, chunk=4)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    twice = torch.autograd.grad(2 * loss, leaves, retain_graph=True)
    last = torch.autograd.grad(3 * loss, leaves)
    for one, two, three in zip(first, twice, last, strict=True):
        assert torch.equal(2 * one, two)
        torch.testing.assert_close(3 * one, three, rtol=1e-12, atol=0)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        torch.autograd.grad(loss, leaves)


# -- what a GPU does


@pytest.mark.parametrize(
    ("gigabytes", "vocabulary", "fused", "expected"),
    [
        (80, 128256, True, 4096),
        (80, 128256, False, 1024),
        (24, 128256, True, 2816),
        (80, 262144, True, 2048),
        (80, 300, True, 8192),
        (1, 262144, False, 256),
    ],
)
def test_chunks_of_a_gpu_fill_some_memory_evenly(
    gigabytes, vocabulary, fused, expected, monkeypatch
):
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(total_memory=gigabytes * 10**9),
    )
    found = chunk_size(
        8192, vocabulary, torch.bfloat16, torch.device("cuda"), print if fused else None
    )
    assert found == expected


def test_chunks_of_a_cpu_are_as_they_were():
    cpu = torch.device("cpu")
    assert chunk_size(9999, 32000, torch.float32, cpu, None) == 256
    assert chunk_size(9999, 300, torch.float32, cpu, None) == (1 << 19) // 300


def test_a_kernel_that_fails_is_replaced_by_torch_with_a_warning(monkeypatch, caplog):
    choose, cuda = fused_for.__wrapped__, torch.device("cuda")
    assert choose(torch.device("cpu"), torch.bfloat16) is None
    assert choose(cuda, torch.float64) is None
    monkeypatch.setattr(cross_entropy, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO):
        assert choose(cuda, torch.bfloat16) is None
    assert "no triton" in caplog.text
    monkeypatch.setattr(cross_entropy, "find_spec", lambda name: name)

    def fail(*given):
        raise RuntimeError("Failed to find C compiler.\nSome trace")

    for trial, reason in (
        (fail, "RuntimeError: Failed to find C compiler."),
        (lambda *given: "the gradient differs", "the gradient differs"),
    ):
        caplog.clear()
        monkeypatch.setattr(cross_entropy, "disagreement", trial)
        assert choose(cuda, torch.bfloat16) is None
        assert f"({reason})" in caplog.text
    monkeypatch.setattr(cross_entropy, "disagreement", lambda *given: "")
    assert choose(cuda, torch.bfloat16).__name__ == "fused_cross_entropy"
