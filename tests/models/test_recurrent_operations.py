"""Recurrent operations over packed rows equal their definitions, token by token and document by
document.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv1d, pad

from makers.recurrences import (
    LENGTHS,
    by_document,
    compare,
    delta_inputs,
    numbers,
    slow_convolution,
    slow_delta_rule,
    slow_linear,
    slow_state_space,
    space_inputs,
)
from penstock.models.recurrent import (
    Borders,
    causal_convolution,
    gated_delta_rule,
    last_inputs,
    linear_scan,
    state_space_scan,
)
from penstock.models.recurrent.borders import MATRIX_COST


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("channels", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize("strength", [1.0, 30.0])
def test_delta_rule(lengths: list[int], channels: bool, strength: float) -> None:
    borders = Borders(np.concatenate([[0], np.cumsum(lengths)]))
    compare(
        lambda *x: gated_delta_rule(*x[:5], borders, x[5]),
        lambda *x: by_document(slow_delta_rule, x[:5], lengths, x[5]),
        delta_inputs(sum(lengths), len(lengths), strength, channels),
    )


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_state_space(lengths: list[int]) -> None:
    borders = Borders(np.concatenate([[0], np.cumsum(lengths)]))
    compare(
        lambda x, dt, b, c, a, state: state_space_scan(x, dt, a, b, c, borders, state),
        lambda x, dt, b, c, a, state: by_document(
            slow_state_space, (x, dt, b, c), lengths, state, a
        ),
        space_inputs(sum(lengths), len(lengths)),
    )


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_linear_scan(lengths: list[int]) -> None:
    borders, total = Borders(np.concatenate([[0], np.cumsum(lengths)])), sum(lengths)
    compare(
        lambda a, b, state: linear_scan(a, b, borders, state),
        lambda a, b, state: by_document(slow_linear, (a, b), lengths, state),
        [
            torch.sigmoid(3 * numbers(1, total, 3, 2)),
            numbers(2, total, 3, 2),
            numbers(3, len(lengths), 3, 2),
        ],
    )


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("taps", [2, 4, 7])
@pytest.mark.parametrize("carried", [False, True], ids=["fresh", "carried"])
def test_convolution(lengths: list[int], taps: int, carried: bool) -> None:
    borders, total = Borders(np.concatenate([[0], np.cumsum(lengths)])), sum(lengths)
    zeros = torch.zeros(len(lengths), taps - 1, 5, dtype=torch.float64)

    def fast(row: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None = None):
        return causal_convolution(row, weight, bias, borders, state), last_inputs(
            row, borders, taps, state
        )

    def slow(row: Tensor, weight: Tensor, bias: Tensor, state: Tensor = zeros):
        return slow_convolution(row, weight, bias, lengths, state)

    start = [numbers(4, len(lengths), taps - 1, 5)] if carried else []
    compare(fast, slow, [numbers(1, total, 5), numbers(2, 5, taps), numbers(3, 5), *start])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=12).filter(any), st.integers(0, 2**31))
def test_any_documents(lengths: list[int], seed: int) -> None:
    borders = Borders(np.concatenate([[0], np.cumsum(lengths)]))
    compare(
        lambda *x: gated_delta_rule(*x[:5], borders, x[5]),
        lambda *x: by_document(slow_delta_rule, x[:5], lengths, x[5]),
        delta_inputs(sum(lengths), len(lengths), 3.0, bool(seed % 2), seed),
    )


@pytest.mark.parametrize("kind", ["delta", "space", "linear", "convolution"])
def test_parts_with_states_equal_the_whole(kind: str) -> None:
    lengths, cut = [30, 7, 45], [11, 7, 20]
    whole = Borders(np.concatenate([[0], np.cumsum(lengths)]))
    starts = np.cumsum([0, *lengths[:-1]])
    first = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, cut, strict=True)])
    second = np.setdiff1d(np.arange(sum(lengths)), first)
    parts = [Borders(np.concatenate([[0], np.cumsum(c)])) for c in (cut, np.subtract(lengths, cut))]
    inputs, run = operation(kind, sum(lengths))

    def together(*x: Tensor):
        return run(x, whole, None)

    def in_parts(*x: Tensor):
        begin, state = run([one[first] for one in x], parts[0], None)
        end, state = run([one[second] for one in x], parts[1], state)
        out = torch.empty(sum(lengths), *begin.shape[1:], dtype=begin.dtype)
        return out.index_copy(0, torch.from_numpy(first), begin).index_copy(
            0, torch.from_numpy(second), end
        ), state

    compare(together, in_parts, inputs, 1e-10, 1e-10)


def operation(kind: str, total: int):
    """Inputs [T, …], and (inputs, borders, state) → outputs and states."""
    if kind == "delta":
        return delta_inputs(total, 1, 2.0, False)[:5], lambda x, borders, state: gated_delta_rule(
            *x, borders, state
        )
    if kind == "space":
        x, dt, b, c, a, _ = space_inputs(total, 1)
        return [x, dt, b, c], lambda x, borders, state: state_space_scan(
            x[0], x[1], a, x[2], x[3], borders, state
        )
    if kind == "linear":
        inputs = [torch.sigmoid(numbers(1, total, 3)), numbers(2, total, 3)]
        return inputs, lambda x, borders, state: linear_scan(*x, borders, state)
    weight, bias = numbers(2, 3, 4), numbers(3, 3)
    return [numbers(1, total, 3)], lambda x, borders, state: (
        causal_convolution(x[0], weight, bias, borders, state),
        last_inputs(x[0], borders, 4, state),
    )


@pytest.mark.parametrize("kind", ["delta", "space", "linear", "convolution"])
def test_gradients_to_other_documents_are_exactly_zero(kind: str) -> None:
    lengths = [20, 3, 1, 40]
    borders = Borders(np.concatenate([[0], np.cumsum(lengths)]))
    inputs, run = operation(kind, sum(lengths))
    leaves = [x.float().requires_grad_() for x in inputs]
    out, _ = (
        run(leaves, borders, None)
        if kind in ("delta", "linear")
        else run([x.double() for x in leaves], borders, None)
    )
    for begin, end in pairwise(borders.cu_seqlens.tolist()):
        gradients = torch.autograd.grad((out[begin:end] ** 2).sum(), leaves, retain_graph=True)
        assert any(gradient[begin:end].any() for gradient in gradients)
        for gradient in gradients:
            assert not torch.cat([gradient[:begin], gradient[end:]]).any()


@pytest.mark.parametrize("strength", [1.0, 10.0, 50.0])
def test_strong_decays_lose_no_digits_in_float32(strength: float) -> None:
    borders = Borders([0, 300])
    inputs = delta_inputs(300, 1, strength, False)
    exact, _ = gated_delta_rule(*inputs[:5], borders)
    found, _ = gated_delta_rule(*(x.float() for x in inputs[:5]), borders)
    assert (found - exact).abs().max() < 1e-5 * exact.std()


def test_chunks_follow_the_documents() -> None:
    def work(length: int) -> float:
        return 4 * (4 * 64 * length * (length + 64) + MATRIX_COST)

    short, long = Borders(np.arange(0, 4097, 8)), Borders([0, 4096])
    assert short.chunks(work).length == 8
    assert long.chunks(work).length == 32


def test_padding_of_the_convolution_is_plain_at_the_start_of_a_row() -> None:
    row, weight = numbers(1, 9, 2), numbers(2, 2, 3)
    found = causal_convolution(row, weight, None, Borders([0, 9]))
    assert torch.equal(found, conv1d(pad(row.T[None], (2, 0)), weight[:, None], groups=2)[0].T)
