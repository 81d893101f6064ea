"""An engine whose cache has few pages: sequences wait and are read again, with the same texts."""

import pytest
import torch

from makers.models import tiny_model
from makers.paged_caches import PlainGraph, paged
from makers.pretended_device import pretended
from makers.tokenizers import byte_tokenizer
from penstock.core.errors import ConfigError
from penstock.learn.generation import Engine, Sampling

TOKENIZER = byte_tokenizer("<bos>", "<end>")
WAYS = [
    Sampling(temperature=0, max_tokens=20, logprobs=1),
    Sampling(temperature=0.9, max_tokens=30, seed=4, frequency_penalty=0.2),
    Sampling(max_tokens=9),
]
PROMPTS = [list(b"once upon a time there was"[: 4 + 3 * n]) for n in range(6)]


@pytest.fixture(scope="module")
def model():
    return tiny_model(TOKENIZER.vocab_size, dtype=torch.float64, init_std=0.3).eval()


def engine_of(model, monkeypatch, most, **settings):
    cache = None

    def new_cache(sequences, capacity):
        nonlocal cache
        cache = paged(plain, sequences, capacity, most=most, make_graph=PlainGraph)
        return cache

    plain = tiny_model(TOKENIZER.vocab_size, dtype=torch.float64)
    monkeypatch.setattr(model, "new_cache", new_cache)
    given = {"context_length": 60, "stop_ids": [257], "slots": 4, "prompt_part": 5, **settings}
    made = Engine(model, TOKENIZER, **given)
    return made, cache


def told(found):
    return [(one.tokens, one.text, one.finish_reason, len(one.logprobs)) for one in found]


@pytest.mark.parametrize("most", [15, 16, 25, 60])
def test_waiting_changes_no_text(most, model, monkeypatch):
    due = Engine(model, TOKENIZER, context_length=60, stop_ids=[257], slots=4, prompt_part=5)
    expected = told(due.generate_all(PROMPTS, WAYS * 2))
    engine, cache = engine_of(model, monkeypatch, most)
    leaves, before = [], engine._slots.give_back
    monkeypatch.setattr(engine._slots, "give_back", lambda one: (leaves.append(one), before(one)))
    assert told(engine.generate_all(PROMPTS, WAYS * 2)) == expected
    assert cache.pages.total <= most + 1
    # With few pages, some were given back and read again.
    assert (len(leaves) > len(PROMPTS)) == (most < 20)


def test_who_cannot_fit_alone_ends_and_the_others_do_not(model, monkeypatch):
    engine, _ = engine_of(model, monkeypatch, 5)
    long = engine.submit(list(b"a prompt of more than twenty tokens"), Sampling(max_tokens=3))
    short = engine.submit(list(b"short"), Sampling(max_tokens=3, min_tokens=3))
    events = []
    while engine.num_running or engine.num_waiting:
        events += engine.step()
    [error] = [one.error for one in events if one.sequence == long]
    assert isinstance(error, ConfigError)
    assert "full: 5 pages" in str(error)
    assert len([one for one in events if one.sequence == short]) == 3
    assert not [one for one in events if one.sequence == short and one.error]


def test_free_slots_lose_what_they_hold_first(model, monkeypatch):
    engine, cache = engine_of(model, monkeypatch, 8)
    engine.generate_all([list(b"0123456789abcdef")], Sampling(max_tokens=1))
    assert cache.pages.free <= 4
    engine.generate_all([list(b"fedcba9876543210zyxw")], Sampling(max_tokens=1))
    assert cache.lengths.count_nonzero() == 1


def test_a_step_over_pages_sends_twice_and_reads_once(model, monkeypatch):
    for graphs in (None, PlainGraph):
        engine, cache = engine_of(model, monkeypatch, 60)
        for prompt in PROMPTS[:3]:
            engine.submit(prompt, Sampling(max_tokens=30, min_tokens=30))
        for _ in range(9):
            engine.step()
        if graphs is None:
            cache.steps = None
        with pretended(monkeypatch, model) as device:
            for x in [x for pools in cache.pools for x in pools]:
                device.mark(x)
            for x in [engine._chooser._forbidden, *vars(engine._chooser._samplers[1]).values()]:
                if isinstance(x, torch.Tensor):
                    device.mark(x)
            for held in cache.steps._shapes.values() if cache.steps else ():
                device.mark(held.inputs)
                if held.out is not None:
                    device.mark(held.out)
            assert len(engine.step()) == 3
        assert len(device.reads) == 1, device.reads
        assert len(device.copies) == 2, device.copies
        assert not device.blocking, device.blocking
