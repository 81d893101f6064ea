"""The engine with real models: cached as uncached, in a batch as alone, and greedy as transformers
has it.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from makers.models import tiny_model
from makers.tokenizers import byte_tokenizer
from penstock.learn.generation import Engine, Sampling
from penstock.models.exporting import export

TOKENIZER = byte_tokenizer("<bos>", "<end>")
PROMPTS = [b"a", b"hello there", b"some words that are longer", b"\xff\x00", b"hello"]


def model_of(dtype: torch.dtype = torch.float64, **extra: Any) -> Any:
    return tiny_model(TOKENIZER.vocab_size, dtype=dtype, seed=3, width=48, init_std=0.15, **extra)


def uncached_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary]: each prefix by itself, without a cache of before."""
    rows = [
        model.extend(torch.tensor([ids[:n]]), torch.tensor([n]), model.new_cache(1, n))
        for n in range(1, len(ids) + 1)
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("window", [None, 5])
def test_log_probabilities_are_those_without_a_cache(window):
    model = model_of(sliding_window=window)
    engine = Engine(model, TOKENIZER, context_length=80, slots=3, prompt_part=7, stop_ids=[])
    found = engine.generate_all(PROMPTS, Sampling(max_tokens=15, logprobs=0, seed=1))
    for prompt, each in zip(PROMPTS, found, strict=True):
        logs = uncached_logits(model, [*prompt, *each.tokens]).log_softmax(-1)[len(prompt) - 1 : -1]
        expected = logs.gather(1, torch.tensor(each.tokens)[:, None])[:, 0]
        reported = torch.tensor([logprobs.token for logprobs in each.logprobs], dtype=torch.float64)
        assert (reported - expected).abs().max() < 1e-10


def test_company_and_seeds_change_nothing():
    model = model_of()
    ways = [Sampling(max_tokens=20, seed=seed, top_p=0.9) for seed in range(len(PROMPTS))]

    def engine(slots: int) -> Engine:
        return Engine(model, TOKENIZER, context_length=80, slots=slots, stop_ids=[10])

    alone = [
        engine(1).generate_all([prompt], [way])[0]
        for prompt, way in zip(PROMPTS, ways, strict=True)
    ]
    assert engine(2).generate_all(PROMPTS, ways) == alone
    assert engine(5).generate_all(PROMPTS, ways) == alone
    assert len({each.tokens for each in alone}) == len(alone)


def test_what_the_cache_has_from_before_is_right():
    model = model_of()
    engine = Engine(model, TOKENIZER, context_length=200, slots=1, stop_ids=[])
    prompt = list(b"begin")
    for _ in range(4):
        [found] = engine.generate_all([prompt], Sampling(max_tokens=10, seed=2))
        fresh = Engine(model, TOKENIZER, context_length=200, slots=1, stop_ids=[])
        assert fresh.generate_all([prompt], Sampling(max_tokens=10, seed=2)) == [found]
        prompt = [*prompt, *found.tokens[:7], *b" and"]


@pytest.mark.parametrize("window", [None, 6])
def test_greedy_text_is_that_of_transformers(tmp_path: Path, window):
    transformers = pytest.importorskip("transformers")
    model = model_of(torch.float32, sliding_window=window)
    export(model, tmp_path, tokenizer=TOKENIZER, context_length=128)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    engine = Engine(model, TOKENIZER, context_length=128, slots=2, forbidden_ids=[])
    for prompt, found in zip(
        PROMPTS, engine.generate_all(PROMPTS, Sampling(temperature=0, max_tokens=40)), strict=True
    ):
        ids = torch.tensor([list(prompt)])
        expected = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert list(found.tokens) == expected[0, len(prompt) :].tolist()
        assert found.text.rstrip("\ufffd") == TOKENIZER.decode(found.tokens).rstrip("\ufffd")
    assert any(before != after for before, after in pairwise(found.tokens))
