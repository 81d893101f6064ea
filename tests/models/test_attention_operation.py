"""The operation that the CPU runs is torch's own attention document by document, and stays whole
when compiled.
"""

from typing import Any

import numpy as np
import torch
from attention_makers import DOCUMENTS, THREE, make_rule, random_heads
from hypothesis import given, settings

from penstock.models.attention import RowAttention
from penstock.models.attention.backends import attend_documents, prepare_operation
from penstock.models.attention.calls import prepare_calls


def gradients(out: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


@settings(deadline=None, max_examples=40)
@given(DOCUMENTS)
def test_operation_is_the_calls(documents: list[tuple[int, int]]) -> None:
    """The calls are what other devices run."""
    rule = make_rule(documents)
    for dtype in (torch.float64, torch.bfloat16):
        q, k, v = random_heads(rule.num_slots, dtype=dtype, gradients=True)
        as_calls = gradients(prepare_calls(rule, q.device, dtype)(q, k, v), q, k, v)
        as_operation = gradients(prepare_operation(rule)(q, k, v), q, k, v)
        for mine, due in zip(as_operation, as_calls, strict=True):
            # In bfloat16 the two parts of a document round their sum in different places.
            atol = 1e-12 if dtype == torch.float64 else 0.05
            torch.testing.assert_close(mine, due, rtol=0, atol=atol)


def test_operation_keeps_the_contracts_of_torch() -> None:
    q, k, v = random_heads(sum(length for length, _ in THREE), gradients=True)
    rule = make_rule(THREE)
    pieces = torch.from_numpy(np.column_stack([rule.pieces, rule.ends]))
    torch.library.opcheck(attend_documents, (q, k, v, pieces))


def test_tensors_in_any_layout() -> None:
    rule = make_rule(THREE)
    made = random_heads(rule.num_slots)
    due = gradients(
        RowAttention.of(rule, device="cpu", dtype=torch.float64)(
            *(x.requires_grad_() for x in made)
        ),
        *made,
    )
    turned = [
        x.detach().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_() for x in made
    ]
    assert turned[0].stride(-1) != 1
    found = gradients(RowAttention.of(rule, device="cpu", dtype=torch.float64)(*turned), *turned)
    for mine, expected in zip(found, due, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


def test_a_compiled_layer_serves_all_rows() -> None:
    """One graph for rows of three documents and a second one for any number of them, never one for
    each row.
    """
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    def layer(x: torch.Tensor, attention: RowAttention) -> torch.Tensor:
        return attention(x, x, x).tanh()

    compiled = torch.compile(layer, backend=count, fullgraph=True)
    generator = np.random.default_rng(0)
    for documents in (3, 3, 4, 5, 6, 7):
        borders = np.sort(generator.choice(np.arange(1, 40), documents - 1, replace=False))
        lengths = np.diff([0, *borders, 40]).tolist()
        rule = make_rule([(length, int(generator.integers(0, length + 1))) for length in lengths])
        attention = RowAttention.of(rule, device="cpu", dtype=torch.float64)
        x = random_heads(40, kv_heads=4, gradients=True)[0]
        for mine, due in zip(
            gradients(compiled(x, attention), x), gradients(layer(x, attention), x), strict=True
        ):
            assert torch.equal(mine, due)
    assert len(graphs) <= 2
