"""The isolation check passes models that keep documents apart and refuses those that do not,
whatever the leak.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import make_model

import penstock as ps
from makers.models import tiny_huggingface
from penstock.core.errors import IsolationError
from penstock.integrations.huggingface import model_inputs

WINDOW = {"sliding_window": 6}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}

APART: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "sdpa", {}),
    ("llama", "eager", {}),
    ("mistral", "sdpa", WINDOW),
    ("mistral", "eager", WINDOW),
    ("qwen2", "sdpa", {}),
    ("qwen3", "sdpa", {"head_dim": 8}),
    ("gemma2", "eager", {"head_dim": 8, **WINDOW}),
    ("gemma3_text", "sdpa", {"head_dim": 8, **WINDOW}),
    (
        "llama4_text",
        "sdpa",
        {
            "head_dim": 8,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 8,
        },
    ),
    ("gpt_neox", "sdpa", {}),
    ("gpt2", "sdpa", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    ("olmo2", "sdpa", {}),
    ("mixtral", "sdpa", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    (
        "qwen3_moe",
        "sdpa",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    ),
]

LEAKING: list[tuple[str, str, dict[str, Any]]] = [
    ("opt", "sdpa", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    ("bloom", "eager", {"n_layer": 2, "n_head": 4}),
    (
        "gpt_oss",
        "eager",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, **WINDOW},
    ),
    ("mamba", "eager", {}),
    (
        "jamba",
        "sdpa",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    ("bamba", "sdpa", {"attn_layer_indices": [1], **MAMBA}),
    ("lfm2", "sdpa", {"layer_types": ["conv", "full_attention"]}),
]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


@pytest.mark.parametrize(
    ("kind", "attention", "settings"), APART, ids=lambda v: v if isinstance(v, str) else ""
)
def test_models_that_keep_documents_apart_pass(
    kind: str, attention: str, settings: dict[str, Any]
) -> None:
    report = ps.check_isolation(make_model(kind, attention, **settings))
    assert report.dependence_checked
    assert report.difference < 1e-4
    assert f"({kind}, attention '{attention}')" in report.model


@pytest.mark.parametrize(
    ("kind", "attention", "settings"), LEAKING, ids=lambda v: v if isinstance(v, str) else ""
)
def test_models_that_leak_are_refused(kind: str, attention: str, settings: dict[str, Any]) -> None:
    with pytest.raises(IsolationError, match=rf"{kind}.*'{attention}'\).*documents"):
        ps.check_isolation(make_model(kind, attention, **settings))


def test_a_model_that_refuses_packed_rows_by_itself() -> None:
    sizes = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    model = make_model(
        "qwen3_next",
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        **sizes,
    )
    with pytest.raises(IsolationError, match=r"documents.*\(.*packed.*sequences"):
        ps.check_isolation(model)


def test_a_mistake_in_a_forward_of_ones_own_is_called_that() -> None:
    model = make_model("llama")
    message = r"forward= failed on .*'dict' object has no attribute.*ps\.to_torch\(row\)"
    with pytest.raises(IsolationError, match=message):
        ps.check_isolation(model, forward=lambda model, row: model(ps.to_torch(row).tokens))


@pytest.mark.parametrize(
    "changed",
    [
        {"use_cache": True},
        {"attention_mask": torch.ones(1, 37, dtype=torch.long)},
        {"position_ids": None},
    ],
    ids=["cache", "mask of ones", "no positions"],
)
def test_what_turns_the_separation_off_is_found(changed: dict[str, Any]) -> None:
    """Why `model_inputs` gives what it gives, and nothing else."""

    def forward(model: Any, row: Any) -> Any:
        given = dict(changed)
        if "attention_mask" in given:
            given["attention_mask"] = given["attention_mask"][:, : row.sequence_length]
        return model(**{**model_inputs(row), **given}).logits[0]

    with pytest.raises(IsolationError, match="documents of one row see each other"):
        ps.check_isolation(make_model(), forward=forward)


class Whisper(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A Llama in which every token also hears, very softly, the first token of the row; or, deaf,
    hears nothing.
    """

    def __init__(self, loudness: float, dtype: Any = torch.float32, deaf: bool = False) -> None:
        super().__init__()
        self.inner, self.loudness, self.deaf = make_model().to(dtype), loudness, deaf

    def get_input_embeddings(self) -> Any:
        return self.inner.get_input_embeddings()

    def forward(self, row: Any) -> Any:
        arguments = model_inputs(row)
        hidden = self.get_input_embeddings()(arguments.pop("input_ids"))
        if not self.deaf:
            hidden = self.inner.model(inputs_embeds=hidden, **arguments).last_hidden_state
        return self.inner.lm_head(hidden + self.loudness * hidden[:, :1])[0]


def whisper(model: Any, row: Any) -> Any:
    return model(row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_softest_leak_is_found_by_gradients(dtype: Any) -> None:
    """Far below rounding in the logits, yet refused."""
    ps.check_isolation(Whisper(0.0, dtype), forward=whisper)
    with pytest.raises(IsolationError, match=r"document 2.*document 1"):
        ps.check_isolation(Whisper(1e-12, dtype), forward=whisper)


def test_a_model_without_context_cannot_be_checked() -> None:
    with pytest.raises(IsolationError, match="the check is meaningless"):
        ps.check_isolation(Whisper(0.0, deaf=True), forward=whisper)


def test_projections_that_start_at_zero_do_not_hide_a_leak() -> None:
    """Only attention mixes tokens; with its output at zero, a leak would be there after the first
    update only.
    """
    model = make_model("bloom", "eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "dense" in name:
                parameter.zero_()
    with pytest.raises(IsolationError, match="see each other"):
        ps.check_isolation(model)
    assert not any(p.any() for name, p in model.named_parameters() if "dense" in name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_passes(dtype: Any) -> None:
    report = ps.check_isolation(make_model().to(dtype))
    assert report.difference <= report.tolerance


def test_the_model_and_the_generators_are_left_as_they_were() -> None:
    model = make_model(attention_dropout=0.1)
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    weights = [p.clone() for p in model.parameters()]
    state = torch.random.get_rng_state()
    ps.check_isolation(model)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not model.get_input_embeddings()._forward_hooks


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        {
            "rope_type": "longrope",
            "factor": 2.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 64,
            "rope_theta": 10000.0,
        },
    ],
)
def test_rotary_embeddings_that_a_long_document_changes_are_refused(rope: dict[str, Any]) -> None:
    model = tiny_huggingface(rope_parameters=rope)
    ps.check_isolation(model, sequence_length=64)
    with pytest.raises(IsolationError, match=r"changes.*64.*tokens.*65"):
        ps.check_isolation(model, sequence_length=65)
    with pytest.raises(IsolationError, match="documents of one row see each other"):
        # It is so: a short document's logits change with a long one beside it.
        ps.check_isolation(model, lengths=(20, 100))


def our_logits(model: Any, row: Any) -> Any:
    return model.logits(model(model.tensors(row)))[0]


def without_trees(model: Any, row: Any) -> Any:
    """Takes a tree for one document after another, as a model does that only knows `cu_seqlens`."""
    return our_logits(model, replace(row, reach=None))


def one_document(model: Any, row: Any) -> Any:
    """Takes a tree for one document, in which branches see each other."""
    borders = row.cu_seqlens
    if row.reach is not None:
        borders = np.array([0, borders[1], row.num_tokens, row.sequence_length], np.int32)
    return our_logits(model, replace(row, cu_seqlens=borders, reach=None))


def test_a_prefix_tree_is_tried() -> None:
    model = ps.build_model(layers=2, width=32, heads=2, vocab_size=100)
    report = ps.check_isolation(model, forward=our_logits, trees=True)
    assert report.difference < 1e-4
    for wrong in (without_trees, one_document):
        ps.check_isolation(model, forward=wrong)
        with pytest.raises(IsolationError, match="branches of a prefix tree"):
            ps.check_isolation(model, forward=wrong, trees=True)
