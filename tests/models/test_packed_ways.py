"""Models that our attention does not fit, in rows of several documents: exact in one of several
ways, or refused.
"""

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from model_makers import logits_of, reading_ids_only

from makers.architectures import make_small
from makers.models import tiny_huggingface
from makers.rows import random_row
from penstock.core.errors import IsolationError
from penstock.models.isolation.lengths import documents_of_a_row
from penstock.models.recurrent import Borders
from penstock.models.recurrent.borders import LIKE_LENGTH, LIKE_SLOTS, document_batches
from penstock.models.text_cache import TextCache
from penstock.models.theirs.cache import TheirCaches
from penstock.models.theirs.model import HuggingFaceModel
from penstock.models.theirs.recurrence import bordered

LENGTHS = (13, 1, 30, 7, 2)
WAYS = {
    "bloom": "positions in its masks",
    "granitemoehybrid": "mamba2_chunk_scan",
    "qwen3_next": "causal_conv1d_fn, torch_chunk_gated_delta_rule",
    "qwen3_5_text": "torch_chunk_gated_delta_rule",
    "kimi_linear": "chunk_kimi_delta_attention",
    "olmo_hybrid": "torch_chunk_gated_delta_rule",
    "mamba": "causal_conv1d_fn, mamba_selective_scan",
    "jamba": "mamba_selective_scan",
    "mamba2": "causal_conv1d_fn, mamba2_chunk_scan",
    "bamba": "mamba2_chunk_scan",
    "falcon_h1": "mamba2_chunk_scan",
    "lfm2": "causal_conv1d_fn",
    "rwkv": "as a batch",
    "xlstm": "as a batch",
    "minimax": "as a batch",
    "recurrent_gemma": "as a batch",
    "biogpt": "positions in its masks",
    "deepseek_v32": "restarting positions",
    "zaya": "as a batch",
}
"""Model type → the way that must be found. Kimi Linear, Qwen 3.5 and OLMo-hybrid have experts or
gates besides.
"""
ONE_OF_EACH = ("bloom", "qwen3_next", "kimi_linear", "mamba", "falcon_h1", "lfm2", "rwkv")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity(50)


def documents(row: Any) -> list[torch.Tensor]:
    return [
        torch.from_numpy(row.tokens[b:e]) for b, e in pairwise(np.cumsum([0, *LENGTHS]).tolist())
    ]


def alone(inner: Any, row: Any) -> torch.Tensor:
    """[n, vocabulary]: transformers' own logits of the documents, one at a time."""
    return torch.cat(
        [inner(input_ids=tokens[None], use_cache=False).logits[0] for tokens in documents(row)]
    )


@pytest.mark.parametrize("kind", WAYS)
def test_rows_are_exact(kind: str) -> None:
    inner, row = make_small(kind), random_row(LENGTHS)
    with torch.no_grad():
        due = alone(copy.deepcopy(inner), row)
    model = HuggingFaceModel(inner)
    assert not model.uses_our_attention
    assert model.packing(row.sequence_length).reason is None
    assert WAYS[kind] in model.packing_way()
    found = logits_of(model, row)[0, : row.num_tokens]
    assert (found - due).abs().max() <= 1e-4 * due.std()


def test_choices_that_depend_on_other_documents() -> None:
    """With two heads, an indexer often scores several keys 0; which of them are read depends on
    what else is there.
    """
    inner, row = make_small("deepseek_v32", index_n_heads=2), random_row(LENGTHS)
    with torch.no_grad():
        due = alone(copy.deepcopy(inner), row)
    model = HuggingFaceModel(inner)
    assert model.packing(row.sequence_length).reason is None
    assert "equal length" in model.packing_way()
    assert (logits_of(model, row)[0, : row.num_tokens] - due).abs().max() <= 1e-4 * due.std()


def gradients(inner: Any, logits: torch.Tensor) -> torch.Tensor:
    inner.zero_grad()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    (logits * weights).sum().backward()
    return torch.cat(
        [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in inner.parameters()]
    )


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_gradients_are_those_of_the_documents(kind: str) -> None:
    inner, row = make_small(kind), random_row(LENGTHS)
    due = gradients(inner, alone(inner, row))
    model = HuggingFaceModel(inner)
    found = gradients(inner, model.logits(model(model.tensors(row)))[0, : row.num_tokens])
    assert (found - due).norm() <= 1e-4 * due.norm()


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba", "lfm2", "bloom"])
def test_gradient_checkpoints_keep_the_borders(kind: str) -> None:
    """Layers that run again in the backward pass, when the row's own block is over."""
    inner, row = make_small(kind), random_row(LENGTHS)
    model = HuggingFaceModel(inner)
    plain = gradients(inner, model.logits(model(model.tensors(row)))[0])
    inner.activation_checkpointing_enable()
    inner.train()
    again = gradients(inner, model.logits(model(model.tensors(row)))[0])
    assert (again - plain).norm() <= 1e-5 * plain.norm()
    assert again.any()


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba", "bloom"])
def test_a_model_outside_rows_is_as_it_was(kind: str) -> None:
    inner, tokens = make_small(kind), torch.arange(40)[None] * 3
    with torch.no_grad():
        before = inner(input_ids=tokens, use_cache=False).logits
        model = HuggingFaceModel(inner)
        logits_of(model, random_row(LENGTHS))
        assert torch.equal(inner(input_ids=tokens, use_cache=False).logits, before)


def test_our_functions_run_single_documents_too() -> None:
    model, row = HuggingFaceModel(make_small("mamba")), random_row((40,), padding=3)
    due = logits_of(model, row)
    model.packing(43)
    called = set()
    original = model.packed.hidden

    def seen(*given: Any) -> Any:
        found = original(*given)
        called.update(model.packed._called)
        return found

    model.packed.hidden = seen  # type: ignore[method-assign]
    found = logits_of(model, row)
    assert "mamba_selective_scan" in called
    assert (found - due)[0, :40].abs().max() <= 1e-4 * due.std()


def test_a_longer_row_may_need_another_way() -> None:
    """Falcon's biases by place are made in bfloat16: exact in short rows only."""
    inner = tiny_huggingface(
        "falcon", alibi=True, new_decoder_architecture=False, max_position_embeddings=2048
    )
    model = HuggingFaceModel(inner)
    assert model.packing(37).reason is None
    assert "as a batch" not in model.packing_way()
    assert model.packing(1008).longest == 1008
    assert "as a batch" in model.packing_way()


def test_a_row_that_no_way_fits_is_refused_and_shorter_ones_are_not() -> None:
    inner = reading_ids_only(
        "falcon", alibi=True, new_decoder_architecture=False, max_position_embeddings=2048
    )
    model = HuggingFaceModel(inner)
    assert model.packing(40).reason is None
    with pytest.raises(IsolationError, match="documents of one row see each other"):
        model.tensors(random_row((500, 7, 400), padding=100))
    due = alone(inner, random_row(LENGTHS))
    found = logits_of(model, random_row(LENGTHS))[0, : sum(LENGTHS)]
    assert (found - due).abs().max() <= 1e-4 * due.std(), "in the way that fits them"


def test_wrong_borders_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in our functions is a refusal of this way, never a wrong number."""

    def one_document(self: Borders, cu_seqlens: Any, device: Any = "cpu") -> None:
        original(self, [0, cu_seqlens[-1]], device)

    original = Borders.__init__
    monkeypatch.setattr(Borders, "__init__", one_document)
    model = HuggingFaceModel(make_small("falcon_h1"))
    assert model.packing(64).reason is None
    assert "as a batch" in model.packing_way()


def test_only_what_a_row_holds_is_replaced() -> None:
    """Calls with other shapes in the block, such as a batch of documents, run as transformers runs
    them.
    """
    inner = make_small("lfm2")
    tokens = torch.arange(20)[None].repeat(2, 1)
    with torch.no_grad():
        due = inner(input_ids=tokens, use_cache=False).logits
        with bordered(inner, Borders([0, 7, 20])) as called:
            found = inner(input_ids=tokens, use_cache=False).logits
    assert torch.equal(found, due)
    assert not called


@given(st.lists(st.integers(0, 60), min_size=1, max_size=30))
def test_batches_hold_each_slot_once(lengths: list[int]) -> None:
    borders = np.cumsum([0, *lengths])
    seen = []
    for slots, inside in document_batches(borders[:-1], borders[1:], int(borders[-1])):
        counts = inside.sum(1)
        assert counts.max() == slots.shape[1]
        assert counts.min() >= min(counts.max() / LIKE_LENGTH, counts.max() - LIKE_SLOTS)
        assert (slots[~inside] == borders[-1]).all()
        for one, count in zip(slots, counts, strict=True):
            assert (np.diff(one[:count]) == 1).all()
            assert one[0] in borders
        seen.extend(slots[inside].tolist())
    assert sorted(seen) == list(range(borders[-1]))


def test_documents_of_a_row_fill_it() -> None:
    model = tiny_huggingface("gpt_oss", max_position_embeddings=64)
    for slots in (70, 100, 333, 2000):
        lengths = documents_of_a_row(model, slots)
        assert lengths is not None
        assert sum(lengths) == slots - 5
        assert max(lengths) <= 64
    assert documents_of_a_row(model, 60) is None


CACHED = {  # model type → (steps, prompts in parts)
    "qwen3_next": (True, True),
    "falcon_h1": (True, True),
    "lfm2": (True, True),
    "bamba": (True, True),
    "bloom": (True, True),
    "rwkv": (True, True),
    "mamba": (True, False),
    "recurrent_gemma": (False, False),
}


@pytest.mark.parametrize("kind", CACHED)
def test_texts_grow_are_cut_back_and_are_copied(kind: str) -> None:
    inner = make_small(kind)
    text = torch.from_numpy(random_row((60,), padding=0).tokens)
    with torch.no_grad():
        due = copy.deepcopy(inner)(input_ids=text[None], use_cache=False).logits[0]
    model = HuggingFaceModel(inner)
    with torch.no_grad():
        caches = TheirCaches(model)
    assert (caches.steps, caches.parts) == CACHED[kind]
    cache = model.new_cache(3, 60)
    assert isinstance(cache, TextCache)

    def read(*parts: tuple[int, int, int]) -> None:
        """(sequence, begin, end) of what each reads next."""
        longest = max(end - begin for _, begin, end in parts)
        tokens = torch.stack(
            [torch.nn.functional.pad(text[b:e], (0, longest - e + b)) for _, b, e in parts]
        )
        counts, places = (
            torch.tensor(x) for x in zip(*((e - b, s) for s, b, e in parts), strict=True)
        )
        for found, (_, _, end) in zip(
            model.extend(tokens, counts, cache, places), parts, strict=True
        ):
            assert (found - due[end - 1]).abs().max() <= 1e-3 * due.std(), end

    read((0, 0, 20))
    for place in range(20, 26):
        read((0, place, place + 1))
    cache.copy(0, 1, 19)
    read((1, 19, 20), (0, 26, 27))
    cache.truncate(0, 24)
    read((0, 24, 40), (1, 20, 21))
    cache.copy(0, 2, 40)
    read((2, 40, 41), (0, 40, 45))
    cache.clear(1)
    read((1, 0, 1), (2, 41, 42))
    read((1, 1, 9))


def test_steps_go_through_the_models_own_cache() -> None:
    """A step costs a step: not the whole text again."""
    inner = make_small("qwen3_next")
    model, read = HuggingFaceModel(inner), []
    cache = model.new_cache(2, 60)
    model.extend(torch.arange(20)[None], torch.tensor([20]), cache, torch.tensor([0]))
    model.inner.model.register_forward_pre_hook(
        lambda _m, _a, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    model.extend(torch.tensor([[5]]), torch.tensor([1]), cache, torch.tensor([0]))
    cache.copy(0, 1, 19)
    model.extend(torch.tensor([[7]]), torch.tensor([1]), cache, torch.tensor([1]))
    assert read == [1, 1]


def test_a_cache_that_is_wrong_from_some_length_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = make_small("bloom")
    inner.config.sliding_window = (
        40  # what the masks were made with stays: only the length to watch is another
    )
    model = HuggingFaceModel(inner)
    cache = model.new_cache(1, 60)
    text = torch.from_numpy(random_row((60,), padding=0).tokens)
    model.extend(text[None, :30], torch.tensor([30]), cache)
    caches = model.generation.own_caches
    assert caches is not None
    assert caches.steps
    original = caches._extend

    def wrong(held: Any, tokens: torch.Tensor) -> torch.Tensor:
        found = original(held, tokens)
        return found if held.count <= 40 else found + torch.randn_like(found)

    monkeypatch.setattr(caches, "_extend", wrong)
    with torch.no_grad():
        for place in range(30, 50):
            found = model.extend(text[None, place : place + 1], torch.tensor([1]), cache)[0]
            due = inner(input_ids=text[None, : place + 1], use_cache=False).logits[0, -1]
            assert (found - due).abs().max() <= 1e-3 * due.std(), place
    assert not caches.steps
