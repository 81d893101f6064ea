"""Models of transformers behind our door: the same numbers, documents apart, a cache; or said what
cannot be.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_makers import VOCABULARY, logits_of, reading_ids_only

from makers.models import tiny_huggingface
from makers.rows import LENGTHS, random_row
from penstock.core.errors import ConfigError, IsolationError
from penstock.models import Transformer
from penstock.models.building import build_model
from penstock.models.saving import load_model
from penstock.models.theirs.attention import values_alone
from penstock.models.theirs.loading import load_huggingface
from penstock.models.theirs.model import HuggingFaceModel

OURS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 3},
    "qwen3": {"head_dim": 8},
    "phi3": {},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.5},
    "gpt_neox": {},
    "olmo2": {},
    "gemma2": {
        "head_dim": 8,
        "sliding_window": 4,
        "attn_logit_softcapping": 1.5,
        "attention": "eager",
    },
    "exaone4": {
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""Kinds whose attention ours stands in for."""
THEIRS: dict[str, dict[str, Any]] = {
    "falcon": {"num_kv_heads": 2, "alibi": True, "new_decoder_architecture": False},
}
"""Kinds that run as transformers runs them: with positions that are places in the row."""


def make(kind: str, *, attention: str = "sdpa", **settings: Any) -> Any:
    return tiny_huggingface(kind, attention=attention, pad_token_id=None, **settings).double()


@pytest.mark.parametrize("kind", OURS)
def test_a_packed_row_gives_the_logits_of_each_document_alone(kind: str) -> None:
    inner, row = make(kind, **OURS[kind]), random_row()
    documents = [
        torch.from_numpy(tokens)[None] for tokens in np.split(row.tokens, np.cumsum(LENGTHS))[:-1]
    ]
    with torch.no_grad():
        due = [inner(document, use_cache=False).logits[0] for document in documents]
    model = HuggingFaceModel(inner)
    assert model.uses_our_attention
    found = logits_of(model, row)[0, : row.num_tokens]
    # Gemma 2's own softmax is in float32.
    torch.testing.assert_close(
        found, torch.cat(due).to(found), rtol=0, atol=2e-6 if kind == "gemma2" else 1e-9
    )


@pytest.mark.parametrize("kind", OURS)
def test_a_cache_gives_the_logits_of_the_whole(kind: str) -> None:
    model = HuggingFaceModel(make(kind, **OURS[kind]))
    tokens = torch.from_numpy(random_row((12, 12), padding=0).tokens).reshape(2, 12)
    cache = model.new_cache(2, 12)
    model.extend(tokens[:, :6], torch.tensor([6, 3]), cache)
    model.extend(torch.stack([tokens[0, 6:8], tokens[1, 3:5]]), torch.tensor([1, 2]), cache)
    found = model.extend(torch.stack([tokens[0, 7:8], tokens[1, 5:6]]), torch.tensor([1, 1]), cache)
    for text, length, logits in zip(tokens, (8, 6), found, strict=True):
        whole = replace(random_row((length,), padding=0), tokens=text[:length].numpy())
        torch.testing.assert_close(logits, logits_of(model, whole)[0, -1], rtol=0, atol=1e-9)


def test_a_token_changes_no_logit_of_another_document() -> None:
    model, row = HuggingFaceModel(make("llama")), random_row(prefixes=(4, 1, 7))
    before = logits_of(model, row)
    assert (before != logits_of(model, random_row())).any(), "prefixes are honoured"
    for slot in range(row.sequence_length):
        tokens = row.tokens.copy()
        tokens[slot] = (tokens[slot] + 1) % VOCABULARY
        changed = (logits_of(model, replace(row, tokens=tokens)) != before).any(-1)[0].numpy()
        assert changed[slot]
        assert not changed[row.document_ids != row.document_ids[slot]].any()  # type: ignore[index]


def test_gradients_are_those_of_transformers() -> None:
    row = random_row((9,), padding=0)
    inner = make("llama")
    inner(torch.from_numpy(row.tokens)[None], use_cache=False).logits[0].sin().sum().backward()
    due = [weight.grad.clone() for weight in inner.parameters()]
    model = HuggingFaceModel(inner)
    inner.zero_grad()
    model.logits(model(model.tensors(row)))[0].sin().sum().backward()
    for weight, gradient in zip(inner.parameters(), due, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", THEIRS)
def test_what_our_attention_cannot_do_runs_as_transformers_does(kind: str) -> None:
    inner, row = make(kind, **THEIRS[kind]).float(), random_row((9,), padding=0)
    with torch.no_grad():
        due = inner(torch.from_numpy(row.tokens)[None], use_cache=False).logits
    model = HuggingFaceModel(inner)
    assert not model.uses_our_attention
    assert inner.config._attn_implementation == THEIRS[kind].get("attention", "sdpa")
    torch.testing.assert_close(logits_of(model, row), due, rtol=0, atol=1e-5)
    assert model.requirements().prefix is False
    tensors = model.tensors(row)
    with pytest.raises(ConfigError, match=r"micro_sequences.*1"):
        model.run(tensors.tokens, tensors.positions, lambda layer, q, k, v: v)


@pytest.mark.parametrize("kind", ["llama", "granite", "gemma2"])
@pytest.mark.parametrize("known", [True, False])
def test_a_head_that_is_more_than_a_matrix_is_found_out(
    kind: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where scaled and capped logits are not understood, they are taken from the model itself,
    small as the difference is.
    """
    if not known:
        monkeypatch.setattr("penstock.models.theirs.decoder.CHANGES", {})
    extra = {**OURS, **THEIRS}[kind]
    inner = make(kind, **extra)
    for parameter in inner.parameters():
        parameter.data *= 0.1
    model = HuggingFaceModel(inner)
    width = model(model.tensors(random_row())).shape[-1]
    assert width == (32 if known or kind == "llama" else VOCABULARY)


def test_run_file_names_a_folder(tmp_path: Path) -> None:
    make("llama").float().save_pretrained(tmp_path)
    model = build_model(f"hf:{tmp_path}", vocab_size=VOCABULARY)
    assert model.compute_dtype == torch.float32
    assert model.vocab_size == VOCABULARY
    with pytest.raises(ConfigError, match=r"embeddings.*61.*tokenizer.*62"):
        build_model(f"hf:{tmp_path}", vocab_size=62)
    with pytest.raises(ConfigError, match="no causal model of transformers there"):
        load_huggingface(tmp_path / "absent")
    with pytest.raises(ConfigError, match="hf:path"):
        build_model("llama", vocab_size=61)


@pytest.mark.parametrize(
    ("kind", "due"), [("llama", Transformer), ("mistral", Transformer), ("olmo2", HuggingFaceModel)]
)
def test_a_folder_is_loaded_as_what_it_can_be(tmp_path: Path, kind: str, due: type) -> None:
    """In several files, as large models are."""
    inner = make(kind, **OURS[kind]).float()
    inner.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    model, row = load_model(tmp_path), random_row()
    assert type(model) is due
    torch.testing.assert_close(
        logits_of(model, row), logits_of(HuggingFaceModel(inner), row), rtol=0, atol=1e-4
    )


def test_a_model_that_leaks_is_refused() -> None:
    """It carries a state through the row, whatever the documents are."""
    model = HuggingFaceModel(reading_ids_only("rwkv", attention_hidden_size=32))
    assert not model.uses_our_attention
    with pytest.raises(IsolationError, match="documents of one row see each other"):
        model.tensors(random_row())
    assert logits_of(model, random_row((9,), padding=4)).shape == (1, 13, VOCABULARY), (
        "one document a row is fine"
    )


BEHIND_THE_HEAD: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 1.5, "attention": "eager"},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
    "llama": {},
}


@pytest.mark.parametrize("kind", BEHIND_THE_HEAD)
def test_what_comes_behind_the_output_matrix_is_known(kind: str) -> None:
    """So a row has hidden states, not logits, which a loss makes in chunks; with the bits of the
    whole model.
    """
    inner = make(kind, **BEHIND_THE_HEAD[kind])
    model = HuggingFaceModel(inner)
    tokens = torch.arange(9)
    with torch.no_grad():
        due = inner(tokens[None], use_cache=False, penstock_attend=values_alone).logits
        hidden = inner.base_model(
            input_ids=tokens[None], use_cache=False, penstock_attend=values_alone
        ).last_hidden_state
        assert torch.equal(model.logits(hidden), due)
        found = model(model.tensors(random_row()))
    assert found.shape[-1] == inner.config.hidden_size
