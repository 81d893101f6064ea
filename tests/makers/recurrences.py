"""Recurrences by their definitions, token by token and document by document, and inputs for
them.
"""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv1d, normalize, softplus

LENGTHS = ([13, 1, 18, 64, 65, 40, 3], [150], [1] * 9 + [70], [0, 5, 0, 0, 33, 0], [8] * 12)
HEADS, WIDTH, VALUES = 2, 8, 12


def slow_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
):
    """One document: [n, …] each, and its state [heads, d_k, d_v]."""
    out = []
    for t in range(len(q)):
        decay = log_decay[t].exp()
        state = state * (decay[..., None, None] if decay.ndim == 1 else decay[..., None])
        error = (v[t] - (state * k[t][..., None]).sum(-2)) * beta[t][:, None]
        state = state + k[t][..., None] * error[:, None]
        out.append((state * q[t][..., None]).sum(-2) * q.shape[-1] ** -0.5)
    return out, state


def slow_state_space(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, state: Tensor):
    out, each = [], x.shape[1] // b.shape[1]
    for t in range(len(x)):
        keys, queries = (value[t].repeat_interleave(each, 0) for value in (b, c))
        state = (
            state * (dt[t] * a).exp()[:, None, None]
            + (x[t] * dt[t][:, None])[..., None] * keys[:, None]
        )
        out.append((state * queries[:, None]).sum(-1))
    return out, state


def slow_linear(a: Tensor, b: Tensor, state: Tensor):
    out = []
    for t in range(len(a)):
        state = a[t] * state + b[t]
        out.append(state)
    return out, state


def by_document(slow, inputs, lengths, state, *shared):
    """`slow` on each document alone: rows of outputs, and the states."""
    borders = np.concatenate([[0], np.cumsum(lengths)])
    found = [
        slow(*(x[begin:end] for x in inputs), *shared, state[number])
        for number, (begin, end) in enumerate(pairwise(borders.tolist()))
    ]
    return torch.stack([one for out, _ in found for one in out]), torch.stack(
        [state for _, state in found]
    )


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def compare(
    fast, slow, inputs: list[Tensor], forward: float = 1e-10, gradient: float = 1e-8
) -> None:
    """Outputs, states and the gradients of all inputs."""
    results = []
    for function in (fast, slow):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out, state = function(*leaves)
        loss = (out * numbers(100, *out.shape)).sum() + (state * numbers(101, *state.shape)).sum()
        results.append((out, state, torch.autograd.grad(loss, leaves)))
    (out, state, found), (true_out, true_state, expected) = results
    assert (out - true_out).abs().max() < forward
    assert (state - true_state).abs().max() < forward
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= gradient * other.norm().clamp(min=1e-12)


def delta_inputs(
    total: int, documents: int, strength: float, channels: bool, seed: int = 0
) -> list[Tensor]:
    shape = (total, HEADS, WIDTH) if channels else (total, HEADS)
    decay = -strength * torch.rand(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return [
        numbers(seed + 1, total, HEADS, WIDTH),
        normalize(numbers(seed + 2, total, HEADS, WIDTH), dim=-1),
        numbers(seed + 3, total, HEADS, VALUES),
        decay,
        2 * torch.sigmoid(numbers(seed + 4, total, HEADS)),
        numbers(seed + 5, documents, HEADS, WIDTH, VALUES),
    ]


def space_inputs(total: int, documents: int) -> list[Tensor]:
    return [
        numbers(1, total, 4, 6),
        softplus(numbers(2, total, 4)),
        numbers(3, total, 2, 5),
        numbers(4, total, 2, 5),
        -numbers(5, 4).exp(),
        numbers(6, documents, 4, 6, 5),
    ]


def slow_convolution(row: Tensor, weight: Tensor, bias: Tensor, lengths: list[int], state: Tensor):
    out, last, begin = [], [], 0
    for number, length in enumerate(lengths):
        held = torch.cat([state[number], row[begin : begin + length]])
        if length:
            out.append(conv1d(held.T[None], weight[:, None], bias, groups=len(weight))[0].T)
        last.append(held[len(held) - weight.shape[1] + 1 :])
        begin += length
    return torch.cat(out), torch.stack(last)
