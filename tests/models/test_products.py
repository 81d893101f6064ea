"""Products by oneDNN against torch's own: equal numbers where it is asked for, the same bits
elsewhere.
"""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import linear

from penstock.models import products
from penstock.models.products import LEAST_PRODUCTS, LEAST_WEIGHTS, onednn_is_faster, product

here = hasattr(torch.ops.mkldnn, "_linear_pointwise")
needs_onednn = pytest.mark.skipif(not here, reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def _asked_again() -> Iterator[None]:
    onednn_is_faster.cache_clear()
    yield
    onednn_is_faster.cache_clear()


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@needs_onednn
@given(
    rows=st.lists(st.integers(0, 5), min_size=0, max_size=3),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 300),
)
@settings(max_examples=60, deadline=None)
def test_equals_linear(rows: list[int], inputs: int, outputs: int) -> None:
    x, weight = numbers(*rows, inputs), numbers(outputs, inputs)
    expected = linear(x.double(), weight.double())
    found = products._onednn(x, weight)
    assert found.shape == expected.shape
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-4)


@needs_onednn
def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = numbers(8, 576), numbers(576, 576)
    alone = torch.cat([products._onednn(row[None], weight) for row in x])
    assert torch.allclose(products._onednn(x, weight), alone, rtol=1e-5, atol=1e-4)


@needs_onednn
def test_rows_that_do_not_lie_side_by_side() -> None:
    x, weight = numbers(4, 3, 576)[:, -1], numbers(576, 576)
    assert torch.equal(products._onednn(x, weight), products._onednn(x.contiguous(), weight))


def called(monkeypatch: pytest.MonkeyPatch, maker: str = "AMD") -> list[tuple[int, ...]]:
    """Shapes of the weights that oneDNN gets, on a processor of that maker."""
    seen: list[tuple[int, ...]] = []

    def fake(x: Tensor, weight: Tensor) -> Tensor:
        seen.append((*weight.shape,))
        return linear(x, weight)

    monkeypatch.setattr(products, "maker", lambda: maker)
    monkeypatch.setattr(products, "disagreement", lambda: 0.0)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(products, "_onednn", fake)
    return seen


def test_only_large_products_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = called(monkeypatch)
    large, small = nn.Parameter(numbers(512, 512)), nn.Parameter(numbers(128, 128))
    assert large.numel() >= LEAST_WEIGHTS > small.numel()
    rows = LEAST_PRODUCTS // small.numel()
    with torch.inference_mode():
        product(numbers(1, 512), large)
        product(numbers(rows, 128), small)
        assert seen == [(512, 512), (128, 128)]
        product(numbers(rows - 1, 128), small)
        product(numbers(1, 512).double(), large.double())
        product(numbers(1, 512), large.detach().T)
    with torch.no_grad():
        product(numbers(1, 512), large)
    product(numbers(1, 512), large).sum().backward()
    assert len(seen) == 2
    assert large.grad is not None


@pytest.mark.parametrize("maker", ["Intel", ""])
def test_never_on_other_processors(monkeypatch: pytest.MonkeyPatch, maker: str) -> None:
    seen = called(monkeypatch, maker)
    with torch.inference_mode():
        product(numbers(1, 512), numbers(512, 512))
    assert not seen


def test_not_where_the_trial_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen = called(monkeypatch)
    monkeypatch.setattr(products, "disagreement", lambda: 3e-3)
    with torch.inference_mode():
        product(numbers(1, 512), numbers(512, 512))
    assert not seen
    assert "differ from torch's by 0.003" in caplog.text


def test_not_where_torch_lacks_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    called(monkeypatch)

    def gone() -> float:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")

    monkeypatch.setattr(products, "disagreement", gone)
    assert not onednn_is_faster()


@needs_onednn
def test_the_trial_finds_rounding_alone_and_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products.disagreement() < products.TOLERANCE
    monkeypatch.setattr(
        products, "_onednn", lambda x, weight: linear(x.bfloat16(), weight.bfloat16()).float()
    )
    assert products.disagreement() > products.TOLERANCE
