"""Products by oneDNN equal those of torch, with their gradients, and take only what they should."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from penstock.learn.training.cross_entropy import chunked_cross_entropy
from penstock.models import products

SIZES = st.integers(1, 40)


@pytest.fixture(autouse=True)
def on_any_processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """oneDNN for everything, also where it is not the faster one."""
    for name in ("SMALLEST", "SMALLEST_READ", "SMALLEST_WRITTEN"):
        monkeypatch.setattr(products, name, 0)
    monkeypatch.setattr(products, "maker", lambda: "AMD")
    products.uses_onednn.cache_clear()
    if not products.uses_onednn():
        pytest.skip("this torch has no oneDNN")
    yield
    products.uses_onednn.cache_clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that oneDNN gets."""
    seen: list[tuple[int, ...]] = []
    by_onednn = products.by_onednn

    def count(x: Tensor, weight: Tensor) -> Tensor:
        seen.append((*x.shape, len(weight)))
        return by_onednn(x, weight)

    monkeypatch.setattr(products, "by_onednn", count)
    return seen


def near(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=60)
@given(
    rows=st.sampled_from([(1,), (7,), (33,), (2, 9), (1, 3, 5)]),
    inputs=SIZES,
    outputs=SIZES,
    biased=st.booleans(),
    layout=st.sampled_from(["plain", "transposed", "part"]),
    expanded=st.booleans(),
)
def test_product_equals_torch(
    rows: tuple[int, ...], inputs: int, outputs: int, biased: bool, layout: str, expanded: bool
) -> None:
    generator = torch.Generator().manual_seed(inputs * 41 + outputs)
    x = torch.randn(*rows, inputs + 3, generator=generator)
    x = x[..., 2:-1] if layout == "part" else x[..., :inputs].contiguous()
    weight = torch.randn(outputs, inputs, generator=generator)
    if layout == "transposed":
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
        weight = weight.t().contiguous().t()
    bias = torch.randn(outputs, generator=generator) if biased else None
    found = []
    for linear in (products.linear, functional.linear):
        given = [one.detach().requires_grad_() for one in (x, weight, bias) if one is not None]
        out = linear(*given)
        # A sum's gradient is one number, expanded.
        (out.sum() if expanded else out.square().sum()).backward()
        found.append([out, *(one.grad for one in given)])
    assert found[0][0].shape == found[1][0].shape
    assert all(map(near, *found))
    with torch.inference_mode():
        assert near(products.linear(x, weight, bias), functional.linear(x, weight, bias))


@given(inner=st.integers(1, 50), m=st.integers(1, 30), n=st.integers(1, 30), part=st.integers(1, 9))
def test_sum_of_products_equals_torch(inner: int, m: int, n: int, part: int) -> None:
    generator = torch.Generator().manual_seed(inner)
    left, right = (torch.randn(inner, size, generator=generator) for size in (m, n))
    total = torch.randn(m, n, generator=generator)
    expected = total + left.t() @ right
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "PART", part)
        assert near(products.add_product(total, left, right), expected)
        assert near(products.add_product(None, left, right), left.t() @ right)
    assert near(total, expected)
    assert near(products.product(left.t(), right.t()), left.t() @ right)


def test_second_derivatives_are_right() -> None:
    x, weight = (torch.randn(n, 5).requires_grad_() for n in (6, 7))
    found = []
    for linear in (products.linear, functional.linear):
        [first] = torch.autograd.grad(
            linear(x, weight).tanh().square().sum(), [x], create_graph=True
        )
        found.append(torch.autograd.grad(first.square().sum(), [x, weight]))
    assert all(map(near, *found))


def test_only_training_in_float32_takes_it(calls: list[tuple[int, ...]]) -> None:
    x, weight = torch.randn(6, 5), torch.randn(7, 5, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(products.linear(x, weight), functional.linear(x, weight))
    products.linear(x, weight.detach())
    products.linear(x.double(), weight.double())
    products.linear(x.bfloat16(), weight.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert products.linear(x, weight).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="shapes"):
        products.linear(x[:, :4], weight)
    assert not calls
    products.linear(x, weight).sum().backward()
    assert calls == [(6, 5, 7), (7, 6, 5)]


def test_generation_takes_it_where_rows_or_weights_are_many(
    calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "SMALLEST_READ", 100)
    monkeypatch.setattr(products, "SMALLEST_WRITTEN", 400)
    with torch.inference_mode():
        products.linear(torch.randn(1, 10), torch.randn(10, 10))
        products.linear(torch.randn(5, 2, 8), torch.randn(5, 8))
        assert calls == [(1, 10, 10), (5, 2, 8, 5)]
        products.linear(torch.randn(9, 8), torch.randn(5, 8))
        products.linear(torch.randn(1, 10), torch.randn(10, 20)[:, ::2])
        products.linear(torch.randn(1, 10).double(), torch.randn(10, 10).double())
    assert len(calls) == 2


def test_compiled_it_is_torchs(calls: list[tuple[int, ...]]) -> None:
    """And one graph without a break, whatever the shapes."""
    torch._dynamo.reset()
    compiled = torch.compile(products.linear, backend="eager", fullgraph=True)
    weight = torch.randn(7, 5, requires_grad=True)
    for rows in (3, 6, 9):
        compiled(torch.randn(rows, 5), weight).sum().backward()
    with torch.inference_mode():
        compiled(torch.randn(3, 5), weight)
    torch._dynamo.reset()
    assert not calls


@pytest.mark.parametrize("maker", ["Intel", ""])
def test_other_processors_keep_mkl(maker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "maker", lambda: maker)
    products.uses_onednn.cache_clear()
    assert not products.uses_onednn()


def test_a_torch_without_the_operation_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(x: Tensor, weight: Tensor) -> Tensor:
        raise AttributeError("no attribute '_linear_pointwise'")

    monkeypatch.setattr(products, "by_onednn", gone)
    products.uses_onednn.cache_clear()
    assert not products.uses_onednn()
    assert "_linear_pointwise" in caplog.text


def test_the_trial_finds_less_precise_products(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not products._disagreement()
    monkeypatch.setattr(
        products, "by_onednn", lambda x, weight: (x.bfloat16() @ weight.bfloat16().t()).float()
    )
    assert "fp32_precision" in products._disagreement()


def test_small_products_are_torchs(
    calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "SMALLEST", 6 * 5 * 7 + 1)
    products.linear(torch.randn(6, 5), torch.randn(7, 5, requires_grad=True)).sum().backward()
    assert not calls


def test_wrong_product_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "by_onednn", lambda x, weight: (x @ weight.t()) * 1.01)
    products.uses_onednn.cache_clear()
    assert not products.uses_onednn()


def test_linear_layers_keep_weights_and_hooks(calls: list[tuple[int, ...]]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False))
    before, seen = dict(model.named_parameters()), []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.shape))
    expected = model(torch.ones(2, 4))
    products.replace_linear(model)
    assert near(model(torch.ones(2, 4)), expected)
    assert dict(model.named_parameters()) == before
    assert len(seen) == len(calls) == 2


def test_head_of_a_loss_takes_it(calls: list[tuple[int, ...]]) -> None:
    hidden, head = torch.randn(50, 8), torch.randn(30, 8)
    targets, weights = torch.arange(50) % 30, torch.rand(50)
    found = []
    for linear in (products.linear, functional.linear):
        given = [one.clone().requires_grad_() for one in (hidden, head)]
        loss, _ = chunked_cross_entropy(
            lambda x, linear=linear, head=given[1]: linear(x, head),
            given[0], targets, weights, chunk=20,
        )  # fmt: skip
        loss.backward()
        found.append([loss, *(one.grad for one in given)])
    assert all(map(near, *found))
    # Of each chunk its logits, and the gradients of the states and of the head.
    assert calls[:4] == [(1, 8, 30), (20, 8, 30), (20, 30, 8), (30, 20, 8)]
