"""Who may see several documents in a row, and what is remembered of a text: B1 to B3 in the model
itself.
"""

import copy
import logging
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from model_makers import VOCABULARY, logits_of, reading_ids_only, tiny

from makers.models import tiny_huggingface
from makers.rows import random_row
from penstock.core.errors import IsolationError
from penstock.models.isolation.check import check_isolation
from penstock.models.language_model import most_packed, require_packed_rows
from penstock.models.text_cache import TextCache
from penstock.models.theirs.model import HuggingFaceModel

LIMIT = 24
"""Tokens at which the rotary embeddings below change."""
ROTARY: dict[str, dict[str, Any]] = {
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        "max_position_embeddings": LIMIT,
    },
    "longrope": {
        "rope_parameters": {
            "rope_type": "longrope",
            "factor": 2.0,
            "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4,
            "original_max_position_embeddings": LIMIT,
            "rope_theta": 10000.0,
        },
        "max_position_embeddings": 64,
    },
}


def rotary(kind: str) -> Any:
    return tiny_huggingface("llama", **ROTARY[kind])


def alone(inner: Any, tokens: Any) -> torch.Tensor:
    """[n, vocabulary] of a document, in a model that never read another."""
    with torch.no_grad():
        return copy.deepcopy(inner)(
            input_ids=torch.as_tensor(tokens)[None], use_cache=False
        ).logits[0]


@pytest.mark.parametrize("kind", ROTARY)
def test_a_row_is_packed_as_long_as_no_document_changes_the_others(kind: str) -> None:
    inner = rotary(kind)
    model = HuggingFaceModel(copy.deepcopy(inner))
    # Padding that is longer than any document counts for nothing, nor does a longer document
    # before.
    for lengths, padding in (((20, 3, LIMIT), 40), ((40,), 20), ((30,), 3), ((5,), 59)):
        row = random_row(lengths, padding=padding)
        found = logits_of(model, row)[0]
        for begin, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
            due = alone(inner, row.tokens[begin : begin + length])
            torch.testing.assert_close(found[begin : begin + length], due, rtol=0, atol=1e-4)
    with pytest.raises(IsolationError, match=rf"\({kind}\).*changes.*{LIMIT}"):
        model.tensors(random_row((20, LIMIT + 1)))


@pytest.mark.parametrize("kind", ROTARY)
def test_training_is_refused_where_a_document_can_be_too_long(kind: str) -> None:
    model = HuggingFaceModel(rotary(kind))
    require_packed_rows(model, LIMIT)
    with pytest.raises(IsolationError, match=rf"{LIMIT + 1}\..*sequence_length.*{LIMIT}"):
        require_packed_rows(model, LIMIT + 1)
    assert most_packed(model, 64) == LIMIT
    require_packed_rows(model, 64, LIMIT)
    with pytest.raises(IsolationError, match=rf"more than {LIMIT} .*rows have 64"):
        require_packed_rows(model, 64, LIMIT + 1)


@pytest.mark.parametrize("kind", ROTARY)
def test_a_text_that_grows_beyond_the_rotary_limit_is_right(kind: str) -> None:
    """By keys up to it, and by reading it again after; also where it is cut back, and next to
    another.
    """
    inner = rotary(kind)
    model = HuggingFaceModel(copy.deepcopy(inner))
    assert not isinstance(model.new_cache(2, LIMIT), TextCache)
    cache = model.new_cache(2, 64)
    texts = [list(range(1, 20)), [5, 4]]
    model.extend(torch.tensor([texts[0], texts[1] + [0] * 17]), torch.tensor([19, 2]), cache)
    for step in range(12):
        if step == 9:
            # A chat that goes on from an earlier turn.
            texts[0] = texts[0][:22]
            cache.truncate(0, 22)
        for text in texts:
            text.append((7 * step + len(text)) % VOCABULARY)
        found = model.extend(
            torch.tensor([[text[-1]] for text in texts]), torch.tensor([1, 1]), cache
        )
        for text, logits in zip(texts, found, strict=True):
            torch.testing.assert_close(logits, alone(inner, text)[-1], rtol=0, atol=1e-4)


def test_sequences_that_do_not_grow_are_no_error() -> None:
    """As with a cache of keys, a row of no tokens has no meaning in the result."""
    model = HuggingFaceModel(tiny_huggingface("mamba"))
    cache = model.new_cache(2, 8)
    assert isinstance(cache, TextCache)
    found = model.extend(torch.zeros((2, 0), dtype=torch.int64), torch.tensor([0, 0]), cache)
    due = model.extend(torch.tensor([[1], [2]]), torch.tensor([1, 1]), cache)
    assert (found.shape, found.dtype) == (due.shape, due.dtype)


def test_tables_of_positions_are_not_read_beyond_their_end() -> None:
    """A short text that is read next to a long one is padded beyond the context."""
    inner = tiny_huggingface(
        "gpt2", n_embd=32, n_layer=2, n_head=4, max_position_embeddings=16, attn_pdrop=0.0
    )
    model = HuggingFaceModel(copy.deepcopy(inner))
    assert model.uses_our_attention
    cache = model.new_cache(2, 16)
    long, short = list(range(10)), list(range(20, 32))
    model.extend(torch.tensor([[0] * 12, short]), torch.tensor([0, 12]), cache)
    found = model.extend(torch.tensor([long, [3] + [0] * 9]), torch.tensor([10, 1]), cache)
    torch.testing.assert_close(found[0], alone(inner, long)[-1], rtol=0, atol=1e-4)
    torch.testing.assert_close(found[1], alone(inner, [*short, 3])[-1], rtol=0, atol=1e-4)


MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}


@pytest.mark.parametrize(
    ("kind", "extra", "cause"),
    [
        ("falcon_h1", MAMBA2 | {"head_dim": 8, "mamba_d_ssm": 64}, None),
        ("diffllama", {}, None),
        ("bamba", MAMBA2 | {"attn_layer_indices": [1]}, None),
        ("mamba", {}, None),
        (
            "recurrent_gemma",
            {
                "head_dim": 8,
                "lru_width": 32,
                "attention_window_size": 6,
                "block_types": ["recurrent", "attention"],
            },
            "its layers are of different kinds, and ValueError: it returns no cache",
        ),
    ],
)
def test_a_model_that_keeps_more_than_keys_writes_with_its_own_cache_or_without_one(
    kind: str, extra: dict[str, Any], cause: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    inner = tiny_huggingface(kind, **extra)
    model = HuggingFaceModel(copy.deepcopy(inner))
    assert not model.uses_our_attention
    cache, text = model.new_cache(2, 12), [3, 1, 4, 1, 5]
    with caplog.at_level(logging.WARNING, "penstock.models"):
        found = [model.extend(torch.tensor([text, [0] * 5]), torch.tensor([5, 0]), cache)[0]]
        for token in (9, 2, 6):
            text.append(token)
            found.append(
                model.extend(torch.tensor([[token]]), torch.tensor([1]), cache, torch.tensor([0]))[
                    0
                ]
            )
    torch.testing.assert_close(torch.stack(found), alone(inner, text)[4:], rtol=0, atol=1e-3)
    warned = [record.getMessage() for record in caplog.records if record.name == "penstock.models"]
    assert len(warned) == (cause is not None)
    if cause is None:
        return
    [said] = warned
    assert f"({kind}, attention" in said
    assert "Each new token reads the whole text again, which is exact but slow" in said
    assert re.search(cause, said)


def test_what_is_refused_is_said_once_and_rows_of_one_document_are_right(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner = reading_ids_only("rwkv", attention_hidden_size=32)
    model = HuggingFaceModel(copy.deepcopy(inner))
    with caplog.at_level(logging.WARNING, "penstock.models"):
        assert [most_packed(model, 64), most_packed(model, 32)] == [0, 0]
    [said] = [record.getMessage() for record in caplog.records if record.name == "penstock.models"]
    assert said.startswith(
        "scores one document per row, which is exact but slower: RwkvForCausalLM (rwkv"
    )
    row = random_row((17,), padding=15)
    found = logits_of(model, row)[0, :17]
    torch.testing.assert_close(found, alone(inner, row.tokens[:17]), rtol=0, atol=1e-4)
    with pytest.raises(IsolationError, match="documents of one row see each other"):
        model.tensors(random_row())
    # Where they are meant to see each other, they are one document.
    row = random_row((17,), padding=0)
    together = replace(row, source_ids=np.zeros(3, np.int32))
    torch.testing.assert_close(
        logits_of(model, together)[0], alone(inner, row.tokens), rtol=0, atol=1e-4
    )


def test_our_own_transformer_takes_any_row() -> None:
    assert most_packed(tiny(), 1 << 20) == 1 << 20
    require_packed_rows(tiny(sliding_window=3), 1 << 20)


def test_longer_documents_are_tried_where_settings_name_a_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A leak that begins where a window ends shows only in rows that are long enough."""
    inner = tiny_huggingface(
        "qwen3", head_dim=8, sliding_window=50, use_sliding_window=True, max_window_layers=0
    )
    whole = type(inner).forward

    def leaking(self: Any, *args: Any, **given: Any) -> Any:
        found = whole(self, *args, **given)
        if found.logits.shape[1] > 50:
            found.logits = found.logits + found.logits[:, :1]
        return found

    monkeypatch.setattr(type(inner), "forward", leaking)
    check_isolation(inner)
    check_isolation(inner, sequence_length=50)
    with pytest.raises(IsolationError, match=r"logits of document \d of 3 differ"):
        check_isolation(inner, sequence_length=64)


def test_nan_is_called_nan() -> None:
    inner = tiny_huggingface("llama")
    with torch.no_grad():
        inner.model.norm.weight[3] = torch.nan
    with pytest.raises(IsolationError, match=r"NaN \(NaN.*model\.norm\.w"):
        check_isolation(inner)
