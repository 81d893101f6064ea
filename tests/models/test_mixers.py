"""Recurrent blocks of our transformer: documents apart, caches exact, and what they cannot do
said.
"""

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_makers import VOCABULARY, logits_of, tiny

from makers.models import tiny_model
from makers.rows import LENGTHS, random_row
from makers.tokenizers import byte_tokenizer
from penstock import check_isolation
from penstock.core.errors import ConfigError
from penstock.learn.generation import Engine, Sampling
from penstock.models import ModelSettings
from penstock.models.exporting import export
from penstock.models.lora.lora import add_lora
from penstock.models.lora.settings import LoraSettings
from penstock.models.saving import load_model, save_model
from penstock.models.settings import BlockSettings

BLOCKS: dict[str, dict[str, Any]] = {
    "delta": {"mixer": "gated_delta"},
    "kimi": {"mixer": "kimi_delta", "heads": 2, "head_width": 6, "convolution": 3},
    "mamba": {"mixer": "mamba", "state_width": 5, "head_width": 10},
    "near": {"sliding_window": 3, "qk_norm": True},
    "full": {"qk_norm": True},
}
PATTERNS = [
    ("delta",),
    ("kimi", "full"),
    ("mamba", "near"),
    ("delta", "kimi", "mamba", "near", "full"),
]


def model_of(pattern: tuple[str, ...], **settings: Any) -> Any:
    blocks = {name: BlockSettings(**BLOCKS[name]) for name in pattern}
    return tiny(layers=max(2, len(pattern)), blocks=blocks, pattern=pattern, **settings)


@pytest.mark.parametrize("pattern", PATTERNS, ids="-".join)
def test_documents_of_a_row_are_apart(pattern: tuple[str, ...]) -> None:
    model, row = model_of(pattern), random_row()
    whole = logits_of(model, row)[0]
    for begin, end in pairwise(np.cumsum([0, *LENGTHS]).tolist()):
        alone = random_row((end - begin,), padding=0)
        alone.tokens[:] = row.tokens[begin:end]
        torch.testing.assert_close(whole[begin:end], logits_of(model, alone)[0], rtol=0, atol=1e-9)
    report = check_isolation(model, forward=lambda m, row: m.logits(m(m.tensors(row)))[0])
    assert report.dependence_checked


@pytest.mark.parametrize("pattern", PATTERNS, ids="-".join)
def test_a_cache_gives_the_logits_of_the_whole(pattern: tuple[str, ...]) -> None:
    """Ragged parts, steps, rows that wait, and a sequence in another's place."""
    model, tokens = (
        model_of(pattern),
        torch.from_numpy(random_row((24, 24), padding=0).tokens).reshape(2, 24),
    )
    due = [logits_of(model, _alone(text))[0] for text in tokens]
    cache = model.new_cache(3, 24)

    def read(*parts: tuple[int, int, int, int]) -> None:
        """(text, sequence, begin, end) of each row."""
        longest = max(end - begin for *_, begin, end in parts)
        rows = torch.stack(
            [torch.nn.functional.pad(tokens[t, b:e], (0, longest - e + b)) for t, _, b, e in parts]
        )
        counts, places = (
            torch.tensor([e - b for *_, b, e in parts]),
            torch.tensor([s for _, s, *_ in parts]),
        )
        for found, (text, _, begin, end) in zip(
            model.extend(rows, counts, cache, places), parts, strict=True
        ):
            if end > begin:
                torch.testing.assert_close(found, due[text][end - 1], rtol=0, atol=1e-9)

    read((0, 2, 0, 7), (1, 0, 0, 3))
    read((1, 0, 3, 4), (0, 2, 7, 8))
    read((0, 2, 8, 8), (1, 0, 4, 9))
    cache.copy(2, 1, 8)
    read((0, 1, 8, 12), (0, 2, 8, 9))
    cache.clear(0)
    read((1, 0, 0, 1), (0, 1, 12, 24))
    read((1, 0, 1, 2), (0, 2, 9, 10))


def _alone(text: torch.Tensor) -> Any:
    row = random_row((len(text),), padding=0)
    row.tokens[:] = text.numpy()
    return row


def test_states_are_not_cut_back() -> None:
    model = model_of(("delta", "full"))
    cache = model.new_cache(2, 16)
    model.extend(torch.arange(8)[None], torch.tensor([8]), cache, torch.tensor([0]))
    assert [cache.kept(0, length) for length in (0, 5, 8)] == [0, 0, 8]
    for change in (lambda: cache.truncate(0, 5), lambda: cache.copy(0, 1, 5)):
        with pytest.raises(ConfigError, match=r"recurrent.*states.*after.*8.*5"):
            change()
    cache.truncate(0, 8)
    cache.truncate(0, 0)


def test_an_engine_writes_what_single_prompts_give() -> None:
    """With prompts that share beginnings, and slots that are used again."""
    tokenizer = byte_tokenizer("<bos>")
    blocks = {name: BlockSettings(**BLOCKS[name]) for name in ("delta", "mamba", "full")}
    model = tiny_model(
        tokenizer.vocab_size, layers=3, blocks=blocks, pattern=tuple(blocks), dtype=torch.float64
    )
    shared = list(range(1, 30))
    prompts = [[*shared, 40], [*shared, 40], [*shared, 41, 42], [7, 8], shared[:20], shared]
    sampling = Sampling(max_tokens=9, temperature=0.0)

    def write(texts: list[list[int]], sequences: int) -> list[tuple[int, ...]]:
        engine = Engine(model, tokenizer, context_length=64, slots=sequences, prompt_part=8)
        return [tuple(found.tokens) for found in engine.generate_all(texts, sampling)]

    due = [write([prompt], 1)[0] for prompt in prompts]
    assert write(prompts, 3) == due
    assert write(prompts, 1) == due


def test_it_is_saved_counted_and_initialised(tmp_path: Path) -> None:
    model = model_of(tuple(BLOCKS), dtype=torch.float32)
    assert sum(weight.numel() for weight in model.parameters()) == model.settings.num_parameters()
    assert all(weight.isfinite().all() for weight in model.parameters())
    save_model(model, tmp_path)
    again = load_model(tmp_path)
    assert again.settings == model.settings
    torch.testing.assert_close(
        logits_of(again, random_row()), logits_of(model, random_row()), rtol=0, atol=0
    )
    assert ModelSettings.of(json.loads(json.dumps(asdict(model.settings)))) == model.settings
    # Weights depend on their own names alone.
    other = tiny(
        layers=1,
        blocks={"delta": BlockSettings(**BLOCKS["delta"])},
        pattern=("delta",),
        dtype=torch.float32,
    )
    for name, weight in other.blocks[0].named_parameters():
        if "output" not in name and "down" not in name:
            assert torch.equal(weight, dict(model.blocks[0].named_parameters())[name]), name


def test_gradients_reach_every_weight() -> None:
    model, row = model_of(tuple(BLOCKS)), random_row()
    model.logits(model(model.tensors(row)))[0].sin().sum().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.any(), name


def test_bfloat16_is_near_float32() -> None:
    """States are kept in float32, so a long document loses little."""
    model = model_of(("delta", "mamba"), dtype=torch.float32)
    row = random_row((200,), padding=0)
    exact = logits_of(model, row)
    found = logits_of(model.to(torch.bfloat16), row)
    assert (found - exact).std() < 0.05 * exact.std()


def test_lora_trains_next_to_recurrent_blocks() -> None:
    pytest.importorskip("peft")
    model = model_of(("delta", "full"), dtype=torch.float32)
    before = logits_of(model, random_row())
    add_lora(model, LoraSettings(rank=2))
    torch.testing.assert_close(logits_of(model, random_row()), before)


def test_what_it_needs_of_rows() -> None:
    found = model_of(("delta", "full")).requirements()
    assert found.prefix is False
    assert found.trees is False
    assert model_of(("full",)).requirements().trees is True
    model = model_of(("delta", "full"))
    row = model.tensors(random_row())
    with pytest.raises(ConfigError, match=r"give run\(carried=…\)"):
        model.run(row.tokens, row.positions, row.attend)


NORMED = BlockSettings(qk_norm=True)
PLAIN, MAMBA = BlockSettings(), BlockSettings(mixer="mamba", state_width=16)
DELTA, KIMI = BlockSettings(mixer="gated_delta"), BlockSettings(mixer="kimi_delta")


@pytest.mark.parametrize(
    ("kinds", "name"),
    [
        ((NORMED,), "Qwen3ForCausalLM"),
        ((DELTA, NORMED), "Qwen3NextForCausalLM"),
        ((replace(DELTA, heads=2, head_width=6, convolution=3),), "Qwen3NextForCausalLM"),
        ((MAMBA, PLAIN), "BambaForCausalLM"),
        ((replace(MAMBA, heads=8),), "BambaForCausalLM"),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_export_of_what_transformers_knows(
    kinds: tuple[BlockSettings, ...], name: str, tied: bool, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    blocks = {f"kind{number}": kind for number, kind in enumerate(dict.fromkeys(kinds))}
    model = tiny(
        layers=4,
        width=32,
        heads=4,
        blocks=blocks,
        pattern=tuple(blocks),
        dtype=torch.float32,
        tied=tied,
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    row = random_row((12,), padding=0)
    export(model, tmp_path / "out")
    inner = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(inner).__name__ == name
    tokens = torch.from_numpy(row.tokens).long()[None]
    with torch.no_grad():
        found = inner(input_ids=tokens, use_cache=False).logits[0]
        cached = inner.generate(
            tokens, max_new_tokens=1, output_logits=True, return_dict_in_generate=True
        )
    expected = logits_of(model, row)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.std()))
    torch.testing.assert_close(
        cached.logits[0][0], expected[-1], rtol=0, atol=1e-4 * float(expected.std())
    )


@pytest.mark.parametrize(
    ("kinds", "cause"),
    [
        ((DELTA, PLAIN), "with qk_norm only"),
        ((MAMBA, NORMED), "qk_norm next to mamba"),
        ((DELTA, MAMBA), r"differ \(gated_delta, mamba\)"),
        ((DELTA, replace(DELTA, heads=1)), "recurrent blocks that differ"),
        ((KIMI,), "kimi_delta have no layout"),
        ((BlockSettings(sliding_window=4), PLAIN), "differs from block to block"),
        (
            (BlockSettings(sliding_window=4, qk_norm=True), DELTA),
            "a sliding window next to gated_delta",
        ),
        ((replace(MAMBA, experts=2),), "experts next to mamba"),
        ((replace(MAMBA, heads=3),), r"3 × 8\) is a multiple of the model's width"),
    ],
)
def test_what_has_no_layout_is_refused_by_name(
    kinds: tuple[BlockSettings, ...], cause: str, tmp_path: Path
) -> None:
    blocks = {f"kind{number}": kind for number, kind in enumerate(kinds)}
    model = tiny(
        layers=2, width=32, heads=4, blocks=blocks, pattern=tuple(blocks), dtype=torch.float32
    )
    with pytest.raises(ConfigError, match=cause):
        export(model, tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"blocks": {"a": BlockSettings()}}, "belong together"),
        (
            {"blocks": {"a": BlockSettings()}, "pattern": ("b",)},
            r"'b' is not one of model\.blocks \(a\)",
        ),
        (
            {"blocks": {"a": BlockSettings(), "b": BlockSettings()}, "pattern": ("a",)},
            "b does not occur",
        ),
        (
            {"blocks": {"a": BlockSettings()}, "pattern": ("a",), "sliding_window": 4},
            "cannot be combined",
        ),
    ],
)
def test_patterns_that_make_no_sense_are_refused(given: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        ModelSettings(**given)


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"mixer": "rwkv"}, "mixer must be one of attention, gated_delta"),
        ({"mixer": "mamba", "sliding_window": 4}, "sliding_window cannot be set with mixer mamba"),
        ({"heads": 4}, "heads cannot be set with mixer attention"),
        ({"mixer": "mamba", "convolution": 1}, "convolution must be at least 2"),
        ({"mixer": "mamba", "state_width": 0}, r"blocks\.state_width must be"),
    ],
)
def test_blocks_that_make_no_sense_are_refused(given: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        BlockSettings(**given)


def test_ids_are_those_of_the_maker() -> None:
    assert model_of(("delta",)).vocab_size == VOCABULARY
