"""Compiled blocks: 50 different rows take at most two graphs for each kind of block, without
breaks.
"""

import sys
from collections.abc import Iterator
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import torch
from varlen_twin import varlen_on_the_cpu

from makers.architectures import make_small
from makers.models import tiny_huggingface, tiny_model
from makers.rows import random_row
from penstock.learn.training.computing import compile_blocks
from penstock.learn.training.losses import row_loss
from penstock.models.attention import RowAttention
from penstock.models.attention.calls import prepare_calls
from penstock.models.isolation.documents import try_isolation
from penstock.models.ours.micro_sequences import backward_in_parts
from penstock.models.settings import BlockSettings
from penstock.models.theirs.model import HuggingFaceModel
from penstock.plan.inputs import AttentionRule

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of torch._dynamo itself
]
SLOTS = 48
MOST = {"per_document": 1, "varlen": 2}
"""Graphs of a kind of block: FlashAttention is told the longest document, which torch's compiler
takes for any number from the second row on.
"""

MIXED = {"near": BlockSettings(sliding_window=5), "far": BlockSettings()}
OURS: dict[str, tuple[dict[str, Any], int]] = {
    "equal heads": ({"kv_heads": 4}, 1),
    "grouped heads": ({}, 1),
    "windows": ({"blocks": MIXED, "pattern": ("near", "far"), "layers": 12}, 2),
    "soft cap": ({"attention_softcap": 2.0}, 1),
}
"""Settings of our transformer, and its kinds of blocks."""

NEAR_FAR = ["sliding_attention", "sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8}
THEIRS: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({}, 1),
    "qwen3": ({"head_dim": 8}, 1),
    "mistral": ({"sliding_window": 6}, 1),
    "gemma3_text": (
        {"head_dim": 8, "sliding_window": 6, "layer_types": NEAR_FAR * 4, "num_hidden_layers": 12},
        2,
    ),
    "mixtral": ({"num_local_experts": 4, "sliding_window": None, **EXPERTS}, 1),
    "gpt_oss": (
        {
            "num_local_experts": 4,
            "sliding_window": 6,
            "layer_types": NEAR_FAR[1:] * 2,
            "num_hidden_layers": 4,
            **EXPERTS,
        },
        2,
    ),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def rows(count: int) -> Iterator[Any]:
    """Rows of the same length with different documents; some have one document, or no padding."""
    random = np.random.default_rng(0)
    for number in range(count):
        documents = int(random.integers(1, 9))
        padding = int(random.integers(0, 6))
        inner = np.sort(random.choice(np.arange(1, SLOTS - padding), documents - 1, replace=False))
        lengths = np.diff([0, *inner, SLOTS - padding]).tolist()
        yield random_row(lengths, padding=padding, seed=number)


def graphs_of(model: Any, blocks: Any, backend: str, count: int = 50) -> int:
    """Graphs after training on different rows; without breaks."""
    graphs = []

    def counted(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    for block in blocks:
        block.compile(backend=counted)
    for row in rows(count):
        row_loss(model, model.tensors(row, backend), float(SLOTS)).loss.backward()
        model.zero_grad()
    assert not sys.modules["torch._dynamo"].utils.counters["graph_break"]
    return len(graphs)


@pytest.mark.parametrize("backend", ["per_document", "varlen"])
@pytest.mark.parametrize("kind", OURS)
def test_our_transformer(kind: str, backend: str, monkeypatch: Any) -> None:
    settings, kinds = OURS[kind]
    if "soft" in kind and backend == "varlen":
        pytest.skip("varlen has no soft cap")
    model = tiny_model(61, **settings)
    with varlen_on_the_cpu(monkeypatch):
        assert graphs_of(model, model.blocks, backend) <= MOST[backend] * kinds


@pytest.mark.parametrize("backend", ["per_document", "varlen"])
@pytest.mark.parametrize("kind", THEIRS)
def test_models_of_transformers(kind: str, backend: str, monkeypatch: Any) -> None:
    settings, kinds = THEIRS[kind]
    model = HuggingFaceModel(tiny_huggingface(kind, **settings).train())
    # Trials of short rows, before anything is compiled.
    assert model.packing(SLOTS).reason is None
    with varlen_on_the_cpu(monkeypatch):
        found = graphs_of(model, model.blocks, backend, 20)
    assert model.uses_our_attention
    assert found <= MOST[backend] * kinds


@pytest.mark.parametrize("backend", ["per_document", "varlen"])
@pytest.mark.parametrize("kind", ["windows", "gpt_oss"])
def test_compiled_blocks_give_the_gradients_of_plain_ones(
    kind: str, backend: str, monkeypatch: Any
) -> None:
    """Through autograd's own graphs, too."""
    if kind in OURS:
        model: Any = tiny_model(61, **OURS[kind][0])
    else:
        model = HuggingFaceModel(tiny_huggingface(kind, **THEIRS[kind][0]).train())
        assert model.packing(SLOTS).reason is None
    found = []
    with varlen_on_the_cpu(monkeypatch):
        for compiled in (False, True):
            for block in model.blocks if compiled else ():
                block.compile(backend="aot_eager")
            for row in rows(4):
                model.zero_grad()
                row_loss(model, model.tensors(row, backend), float(SLOTS)).loss.backward()
                found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for mine, due in zip(found[:4], found[4:], strict=True):
        for one, expected in zip(mine, due, strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["ours", "llama"])
def test_parts_of_rows_leave_compiled_blocks_to_keep_keys(kind: str) -> None:
    """What is kept by layer is kept outside of graphs: their number does not grow with layers."""
    counts, found = [], []
    for layers in (2, 10):
        sys.modules["torch._dynamo"].reset()
        graphs: list[Any] = []

        def counted(graph: Any, _: Any, kept: list[Any] = graphs) -> Any:
            kept.append(graph)
            return graph

        if kind == "ours":
            model = tiny_model(61, layers=layers)
        else:
            model = HuggingFaceModel(tiny_huggingface(kind, num_hidden_layers=layers))
            assert model.packing(SLOTS).reason is None
        for compiled in (False, True):
            for block in model.blocks if compiled else ():
                block.compile(backend=counted)
            model.zero_grad()
            for row in rows(4):
                backward_in_parts(model, model.tensors(row), 4, loss_of_part)
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for mine, due in zip(found.pop(), found.pop(), strict=True):
            torch.testing.assert_close(mine, due)
        counts.append(len(graphs))
    assert counts[0] > 0
    assert counts[1] == counts[0]


def loss_of_part(hidden: Any, _: Any, weights: Any) -> torch.Tensor:
    return (hidden[0].square().mean(-1) * weights[0]).sum()


def test_calls_are_left_out_of_graphs() -> None:
    """What `per_document` runs on CUDA differs from row to row: a graph before it, one behind."""
    graphs = []

    def counted(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    def layer(x: torch.Tensor, attention: RowAttention) -> torch.Tensor:
        return attention(x.sin(), x, x).tanh()

    compiled = torch.compile(layer, backend=counted)
    for row in rows(20):
        rule = AttentionRule.of(row)
        x = torch.randn(SLOTS, 2, 8, requires_grad=True)
        attention = RowAttention(
            backend="per_document",
            slots=SLOTS,
            device=torch.device("cpu"),
            dtype=x.dtype,
            _attend=prepare_calls(rule, x.device, x.dtype),
        )
        torch.testing.assert_close(compiled(x, attention), layer(x, attention))
    assert len(graphs) <= 4


@pytest.mark.parametrize("kind", ["ours", "bamba", "qwen3_next"])
def test_recurrences_and_experts_are_left_out_of_graphs(kind: str, monkeypatch: Any) -> None:
    """What they do differs too much from row to row."""
    graphs: list[Any] = []

    def counted(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(
        torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend=counted)
    )
    if kind == "ours":
        blocks = {
            "delta": BlockSettings(mixer="gated_delta"),
            "mamba": BlockSettings(mixer="mamba"),
            "full": BlockSettings(experts=3),
        }
        model: Any = tiny_model(61, layers=9, blocks=blocks, pattern=("delta", "mamba", "full"))
    else:
        model = HuggingFaceModel(make_small(kind).train())
        assert "our attention, and our recurrent" in model.packing(SLOTS).way
    model.begin_step(seed=0, number=0, tokens=1)
    compile_blocks(model)
    counts = []
    for row in rows(12):
        row_loss(model, model.tensors(row), float(SLOTS)).loss.backward()
        counts.append(len(graphs))
    assert counts[-1] == counts[1] <= 12


def test_trials_and_generation_take_no_graphs() -> None:
    model, graphs = tiny_model(61, dtype=torch.float64), []

    def counted(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    for block in model.blocks:
        block.compile(backend=counted)
    try_isolation(model, lambda model, row: model.logits(model(model.tensors(row)))[0])
    cache = model.new_cache(1, 8)
    for width in (4, 1, 1):
        model.extend(torch.ones(1, width, dtype=torch.int64), torch.tensor([width]), cache)
    assert not graphs
    model(model.tensors(next(rows(1))))
    assert len(graphs) == 1
