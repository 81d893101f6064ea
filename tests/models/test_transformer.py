"""The transformer: what it is made of, what it depends on, and that a cache changes nothing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from model_makers import VOCABULARY, logits_of, tiny

import penstock as ps
from makers.processes import run_code
from makers.rows import LENGTHS, random_row
from penstock.core.errors import ConfigError
from penstock.models import ModelSettings
from penstock.models.building import build_model

SHAPES: list[dict[str, Any]] = [
    {},
    {"tied": False, "head_width": 6, "mlp_width": 40},
    {"prediction_heads": 3, "layers": 1},
    {"kv_heads": 1, "heads": 2},
    {"sliding_window": 3},
]


@pytest.mark.parametrize("extra", SHAPES)
def test_settings_know_the_number_of_parameters(extra: dict[str, Any]) -> None:
    model = tiny(**extra)
    assert sum(weight.numel() for weight in model.parameters()) == model.settings.num_parameters()


@pytest.mark.parametrize("extra", SHAPES)
@pytest.mark.parametrize("backend", ["per_document", "dense", "flex"])
def test_documents_together_are_documents_apart(extra: dict[str, Any], backend: str) -> None:
    if backend == "flex" and "sliding_window" in extra:
        return  # refused, see below
    model, row = tiny(**extra), random_row()
    together = logits_of(model, row, backend)
    begin = 0
    for length in LENGTHS:
        alone = random_row((length,), padding=0)
        alone = replace(alone, tokens=row.tokens[begin : begin + length])
        torch.testing.assert_close(
            together[:, begin : begin + length], logits_of(model, alone), rtol=0, atol=1e-10
        )
        begin += length


@pytest.mark.parametrize("extra", SHAPES)
@pytest.mark.parametrize(
    ("backend", "prefixes"), [("per_document", (4, 1, 7)), ("dense", (4, 1, 7)), ("auto", None)]
)
def test_a_token_changes_no_logit_of_another_document(
    extra: dict[str, Any], backend: str, prefixes: tuple[int, ...] | None
) -> None:
    if "sliding_window" in extra:
        prefixes = None
    model, row = tiny(**extra), random_row(prefixes=prefixes)
    before = logits_of(model, row, backend)
    for slot in range(row.sequence_length):
        tokens = row.tokens.copy()
        tokens[slot] = (tokens[slot] + 1) % VOCABULARY
        changed = (
            (logits_of(model, replace(row, tokens=tokens), backend) != before)
            .any(-1)
            .any(0)
            .numpy()
        )
        assert changed[slot]
        assert not changed[row.document_ids != row.document_ids[slot]].any()  # type: ignore[index]


def test_it_passes_the_isolation_check() -> None:
    report = ps.check_isolation(
        tiny(torch.float32), forward=lambda model, row: model.logits(model(model.tensors(row)))[0]
    )
    assert report.dependence_checked


def test_a_prefix_is_seen_from_its_beginning() -> None:
    model = tiny()
    causal, both = (
        logits_of(model, random_row(prefixes=prefixes)) for prefixes in (None, (4, 0, 0))
    )
    changed = (causal != both).any(-1)[0]
    assert changed[:3].all()
    assert not changed[7:].any()


@pytest.mark.parametrize("backend", ["per_document", "dense"])
def test_a_window_sees_no_further_than_its_tokens(backend: str) -> None:
    model, row = tiny(layers=1, sliding_window=3), random_row((12,), padding=0)
    before = logits_of(model, row, backend)
    for slot in range(12):
        tokens = row.tokens.copy()
        tokens[slot] = (tokens[slot] + 1) % VOCABULARY
        changed = (logits_of(model, replace(row, tokens=tokens), backend) != before).any(-1)[0]
        assert changed.nonzero().flatten().tolist() == list(range(slot, min(slot + 3, 12)))


def test_a_window_is_refused_by_backends_that_have_none() -> None:
    model = tiny(sliding_window=3)
    with pytest.raises(ConfigError, match=r"'flex'.*'per_document'.*'dense'"):
        model.tensors(random_row(), "flex")
    with pytest.raises(ConfigError, match="exclude each other"):
        model.tensors(random_row(prefixes=(4, 0, 0)))


def test_what_a_row_lacks_or_has_too_much_of_is_refused() -> None:
    model, row = tiny(), random_row()
    unknown = row.tokens.copy()
    unknown[8] = VOCABULARY
    with pytest.raises(ConfigError, match=r"id 61.*slot 8.*below 61"):
        model.tensors(replace(row, tokens=unknown))
    with pytest.raises(ConfigError, match=r"positions.*model's"):
        model.tensors(replace(row, positions=None))
    bare = model.tensors(replace(row, loss_weights=None))
    assert torch.equal(bare.loss_weights != 0, bare.targets != -100)


def test_settings_can_be_read_without_torch() -> None:
    code = (
        "import sys; from penstock.models import LoraSettings, ModelSettings; sys.exit('torch' in "
        "sys.modules)"
    )
    run_code(code, check=True)


def test_heads_share_the_trunk_and_predict_further() -> None:
    """The first head is the plain model; each further one is a block of its own on the same
    trunk.
    """
    plain, several = tiny(layers=3), tiny(layers=3, prediction_heads=2)
    row = random_row(distances=2)
    hidden = several(several.tensors(row))
    assert hidden.shape == (2, row.sequence_length, 32)
    torch.testing.assert_close(hidden[0], plain(plain.tensors(row))[0], rtol=0, atol=1e-12)
    assert (hidden[0] - hidden[1]).abs().max() > 0.1
    hidden[1].sum().backward()
    assert not [
        n
        for n, w in several.named_parameters()
        if w.grad is None and not n.startswith(("blocks.2", "embed"))
    ]
    assert several.blocks[2].mlp.up.weight.grad.abs().max() == 0


def test_weights_are_a_function_of_seed_and_name() -> None:
    first, second, deeper = tiny(), tiny(), tiny(layers=3)
    for name, weight in first.named_parameters():
        assert torch.equal(weight, dict(second.named_parameters())[name])
    assert torch.equal(deeper.blocks[1].mlp.up.weight, first.blocks[1].mlp.up.weight)
    assert not torch.equal(tiny(seed=1).embedding.weight, first.embedding.weight)
    assert abs(first.embedding.weight.std().item() - 0.2) < 0.01
    assert abs(first.blocks[0].mlp.down.weight.std().item() - 0.1) < 0.01


def test_bfloat16_computes_on_float32_weights() -> None:
    model = build_model(ModelSettings(layers=2, width=32, dtype="bfloat16"), vocab_size=VOCABULARY)
    row = model.tensors(random_row())
    hidden = model(row)
    assert hidden.dtype == torch.bfloat16
    logits = model.logits(hidden)
    assert logits.dtype == torch.float32
    logits.sum().backward()
    assert {weight.grad.dtype for weight in model.parameters()} == {torch.float32}  # type: ignore[union-attr]


@pytest.mark.parametrize("extra", SHAPES)
def test_a_cache_gives_the_logits_of_the_whole(extra: dict[str, Any]) -> None:
    """Sequences of different lengths, in uneven steps; one leaves and another takes its place."""
    model = tiny(**extra)
    random = np.random.default_rng(0)
    cache = model.new_cache(3, 16)
    texts: list[list[int]] = [[], [], []]
    for step in range(9):
        if step == 5:
            cache.clear(1)
            texts[1] = []
        lengths = random.integers(0, 4, 3)
        lengths[step % 3] = 1
        lengths = np.minimum(lengths, 16 - np.array([len(text) for text in texts]))
        new = random.integers(0, VOCABULARY, (3, max(lengths)))
        for text, tokens, length in zip(texts, new, lengths, strict=True):
            text.extend(tokens[:length].tolist())
        found = model.extend(torch.from_numpy(new), torch.from_numpy(lengths), cache)
        assert cache.lengths.tolist() == [len(text) for text in texts]
        for text, logits, length in zip(texts, found, lengths, strict=True):
            if length:
                whole = replace(random_row((len(text),), padding=0), tokens=np.array(text))
                torch.testing.assert_close(
                    logits, logits_of(model, whole)[0, -1], rtol=0, atol=1e-10
                )


def test_some_sequences_grow_alone() -> None:
    model = tiny()
    cache, other = model.new_cache(3, 8), model.new_cache(1, 8)
    tokens = torch.arange(5)[None]
    model.extend(torch.arange(6).reshape(3, 2), torch.tensor([2, 2, 2]), cache)
    cache.clear(1)
    found = model.extend(tokens, torch.tensor([5]), cache, torch.tensor([1]))
    torch.testing.assert_close(
        found, model.extend(tokens, torch.tensor([5]), other), rtol=0, atol=1e-12
    )
    assert cache.lengths.tolist() == [2, 5, 2]


def test_cached_keys_are_never_modified() -> None:
    model = tiny()
    cache = model.new_cache(2, 8)
    model.extend(torch.arange(8).reshape(2, 4), torch.tensor([4, 2]), cache)
    before = cache._keys.clone(), cache._values.clone()
    model.extend(torch.arange(6).reshape(2, 3), torch.tensor([1, 3]), cache)
    for was, now in zip(before, (cache._keys, cache._values), strict=True):
        assert torch.equal(now[:, 0, :, :4], was[:, 0, :, :4])
        assert torch.equal(now[:, 1, :, :2], was[:, 1, :, :2])
        assert now[:, 0, :, 4].any()
        assert not now[:, 0, :, 5:].any(), "padding is not stored"


def test_a_cache_refuses_what_does_not_fit() -> None:
    model = tiny()
    cache = model.new_cache(2, 4)
    with pytest.raises(ConfigError, match=r"sequence.*1.*5.*tokens.*capacity.*4"):
        model.extend(torch.zeros(2, 5, dtype=torch.int64), torch.tensor([1, 5]), cache)
    with pytest.raises(ConfigError, match="lengths must be 0 to 2"):
        model.extend(torch.zeros(2, 2, dtype=torch.int64), torch.tensor([1, 3]), cache)
    with pytest.raises(ConfigError, match=r"needs tokens \[B, n\]"):
        model.extend(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([1]), cache)
    with pytest.raises(ConfigError, match="has 0 tokens, cannot keep the first 2"):
        cache.truncate(0, 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"width": 33}, "not a multiple of model.heads"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads must divide heads 4"),
        ({"head_width": 5}, "must be even"),
        ({"layers": 0}, "layers must be a whole number from 1 to 2,147,483,648, got 0"),
        ({"prediction_heads": 2, "prediction_weights": (1.0,)}, "must be 2 numbers"),
        ({"dtype": "float16"}, "must be float32, bfloat16 or float64"),
        ({"rope_theta": 0.0}, "rope_theta must be above 0"),
        ({"vocab_size": 5}, "vocab_size 5 is less than the tokenizer's 61"),
    ],
)
def test_settings_refuse(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelSettings(**wrong).with_vocabulary(VOCABULARY)
