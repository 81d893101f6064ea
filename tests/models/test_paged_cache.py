"""The paged cache on the CPU: whatever joins, grows, is cut or copied, logits are those of the slot
cache; pages are shared, counted and given back; recorded steps give the same bits.
"""

import logging
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cache import ACTIONS, CAPACITY, MODELS, SLOTS
from test_mixers import model_of
from varlen_twin import varlen_on_the_cpu

from makers.architectures import make_small
from makers.models import tiny_model
from makers.paged_caches import PlainGraph, paged
from penstock.core.errors import ConfigError
from penstock.models.attention.paged import PAGE, refusal, try_pages
from penstock.models.pages import Pages
from penstock.models.static_steps import WARM
from penstock.models.theirs.model import HuggingFaceModel

CPU = torch.device("cpu")


@settings(deadline=None, max_examples=60)
@given(
    st.lists(ACTIONS, max_size=12),
    st.sampled_from([None, 3]),
    st.sampled_from([2, 4, 32]),
    st.booleans(),
    st.booleans(),
)
def test_logits_are_those_of_the_slot_cache(actions, window, page, in_place, recorded):
    model, chance = MODELS[window], np.random.default_rng(0)
    cache = paged(model, SLOTS, CAPACITY, page=page, make_graph=PlainGraph if recorded else None)
    other = model.new_cache(SLOTS, CAPACITY)
    assert cache.gathers
    if in_place:
        cache.gathers = ""
    lengths = [0] * SLOTS
    with pytest.MonkeyPatch.context() as patch, varlen_on_the_cpu(patch):
        for name, *given_ in actions:
            if name == "truncate":
                slot, share = given_
                lengths[slot] = int(lengths[slot] * share)
                for one in (cache, other):
                    one.truncate(slot, lengths[slot])
            elif name == "copy":
                source, target, share = given_
                lengths[target] = int(lengths[source] * share)
                for one in (cache, other):
                    one.copy(source, target, lengths[target])
            else:
                asked = dict(given_[0]) if name == "extend" else dict.fromkeys(given_[0], 1)
                asked = {slot: min(n, CAPACITY - lengths[slot]) for slot, n in asked.items()}
                tokens = torch.from_numpy(
                    chance.integers(0, 40, (len(asked), max(1, *asked.values())))
                )
                counts, slots = torch.tensor([*asked.values()]), torch.tensor([*asked])
                found, due = (model.extend(tokens, counts, one, slots) for one in (cache, other))
                real = counts > 0
                torch.testing.assert_close(found[real], due[real], rtol=0, atol=1e-10)
                for slot, count in asked.items():
                    lengths[slot] += count
            assert cache.lengths.tolist() == lengths
            check(cache.pages, lengths)
    for slot in range(SLOTS):
        cache.clear(slot)
    assert cache.pages.free == cache.pages.total - 1


def check(pages: Pages, lengths: list[int]) -> None:
    """Tables are as long as they must be, and each page is counted, or free."""
    assert [len(table) for table in pages.tables] == [-(-n // pages.size) for n in lengths]
    uses = Counter(page for table in pages.tables for page in table)
    assert 0 not in uses
    assert pages._uses == [1] + [uses[page] for page in range(1, pages.total)]
    assert sorted(pages._free) == [page for page in range(1, pages.total) if not uses[page]]


def test_beginnings_share_pages_and_the_last_to_write_keeps_the_page():
    pages = Pages(3, 4)
    pages.add(9)
    assert pages.grow(0, 0, 10) is None
    assert pages.tables[0] == [1, 2, 3]
    for target in (1, 2):
        pages.share(0, target, 10)
    assert pages.free == 5
    growing = [(0, 10, 1), (1, 10, 1), (2, 10, 3)]
    # Two copies, and one more page for the last.
    assert pages.needed(growing) == 3
    assert pages.grow(*growing[0]) == (3, 4)
    assert pages.grow(*growing[1]) == (3, 5)
    assert pages.grow(*growing[2]) is None
    assert pages.tables == [[1, 2, 4], [1, 2, 5], [1, 2, 3, 6]]
    pages.cut(0, 0)
    assert (pages.free, pages._uses[1]) == (3, 2)


def test_copies_take_no_memory_until_they_differ():
    model = MODELS[None]
    cache = paged(model, 4, 24)
    cache.growth(torch.ones(1, 9, dtype=torch.int64), torch.tensor([9]), torch.tensor([0])).done()
    for target in (1, 2, 3):
        cache.copy(0, target, 9)
    assert cache.pages.total - 1 - cache.pages.free == 3
    model.extend(torch.ones(4, 1, dtype=torch.int64), torch.ones(4, dtype=torch.int64), cache)
    assert cache.pages.total - 1 - cache.pages.free == 6


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "mixtral", "qwen3"])
def test_models_of_transformers(kind):
    """With soft caps, sinks, windows in some layers, experts."""
    model = HuggingFaceModel(make_small(kind).eval())
    same_steps(model, 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_heads": 1},
        {"attention_softcap": 5.0},
    ],
)
def test_models_of_ours(options):
    same_steps(tiny_model(60, **options).eval(), 1e-5)


@pytest.mark.parametrize("pattern", [("delta",), ("mamba", "near"), ("kimi", "full")])
def test_recurrent_layers(pattern):
    """Their states are kept beside the pages."""
    same_steps(model_of(pattern).eval(), 1e-5)


def same_steps(model, far):
    tokens = torch.arange(1, 37).view(3, 12)
    caches = [model.new_cache(3, 16), paged(model, 3, 16, make_graph=PlainGraph)]
    parts = [(0, 5, [5, 3, 4])] + [(at, at + 1, [1, 1, 1]) for at in range(5, 12)]
    for begin, end, counts in parts:
        found, due = (
            model.extend(tokens[:, begin:end], torch.tensor(counts), cache, torch.arange(3))
            for cache in caches
        )
        torch.testing.assert_close(found, due, rtol=0, atol=far)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("make", [lambda: MODELS[3], lambda: HuggingFaceModel(make_small("llama"))])
def test_recorded_steps_give_the_same_bits(make, in_place, monkeypatch):
    model, graphs = make(), []

    def recorder():
        graphs.append(PlainGraph())
        return graphs[-1]

    caches = [paged(model, 4, 24, make_graph=recorder), paged(model, 4, 24)]
    for cache in caches:
        cache.gathers = "" if in_place else cache.gathers
    tokens = torch.arange(1, 25).view(2, 12)
    inside = varlen_on_the_cpu(monkeypatch) if in_place else nullcontext()
    with inside:
        for at in range(12):
            given_ = tokens[:, at : at + 1], torch.ones(2, dtype=torch.int64)
            slots = torch.tensor([2, 0])
            found, due = (model.extend(*given_, cache, slots) for cache in caches)
            assert torch.equal(found, due)
    # Pages of a sequence: 1, then up to 4. The pool grew once, before anything was recorded.
    assert [graph.replays for graph in graphs] == [4 - WARM, 8 - WARM]


def test_a_graph_ends_with_the_memory_that_it_reads():
    model = MODELS[None]
    cache = paged(model, 2, 400, make_graph=PlainGraph)
    for _ in range(3 * WARM):
        model.extend(torch.ones(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), cache,
                     torch.tensor([0]))  # fmt: skip
    assert any(held.graph for held in cache.steps._shapes.values())
    cache.lack({0: 300})
    assert not cache.steps._shapes


def test_a_step_that_reads_is_not_recorded(caplog, monkeypatch):
    model = tiny_model(40).eval()
    cache, run = paged(model, 2, 24, make_graph=PlainGraph), model.run

    def reads(tokens, positions, attend, **given_):
        assert int(positions.max()) < 24
        return run(tokens, positions, attend, **given_)

    one = torch.ones(1, 1, dtype=torch.int64)
    monkeypatch.setattr(model, "run", reads)
    with caplog.at_level(logging.WARNING):
        for _ in range(9):
            model.extend(one, one[0], cache, torch.tensor([0]))
    assert len([x for x in caplog.records if "without CUDA graphs" in x.message]) == 1
    assert "reads" in cache.steps.reason
    other = model.new_cache(2, 24)
    for _ in range(9):
        due = model.extend(one, one[0], other, torch.tensor([0]))
    cache.truncate(0, 8)
    torch.testing.assert_close(model.extend(one, one[0], cache, torch.tensor([0])), due)


def test_a_full_pool_says_so():
    model = MODELS[None]
    cache = paged(model, 3, 24, most=4)
    ones = torch.ones(3, 8, dtype=torch.int64)
    model.extend(ones[:2], torch.tensor([8, 8]), cache, torch.tensor([0, 1]))
    assert not cache.lack({0: 0})
    with pytest.raises(ConfigError, match=r"full: 4 pages of 4 tokens, 0\.00 GB; take a shorter"):
        model.extend(ones[:1], torch.tensor([1]), cache, torch.tensor([2]))
    assert cache.lengths.tolist() == [8, 8, 0]
    cache.clear(0)
    model.extend(ones[:1], torch.tensor([8]), cache, torch.tensor([2]))


def test_a_device_without_memory_is_a_full_pool(monkeypatch):
    cache = paged(MODELS[None], 3, 4000)
    new = type(cache)._new

    def scarce(self, pages):
        if pages > 20:
            raise torch.OutOfMemoryError("no memory")
        return new(self, pages)

    monkeypatch.setattr(type(cache), "_new", scarce)
    assert not cache.lack({0: 4 * 15})
    # By doubling there is none, but what is needed fits.
    assert not cache.lack({0: 4 * 19})
    assert cache.pages.total == 20
    assert "full" in cache.lack({0: 4 * 20})


def test_the_trial_compares_both_ways(monkeypatch):
    with varlen_on_the_cpu(monkeypatch):
        assert try_pages(2, 8, CPU, torch.float32, 4) == ""
        twin = torch.ops.torch_attn._varlen_attn
        monkeypatch.setattr(
            "penstock.models.attention.paged.attend_pages", lambda q, *_: torch.zeros_like(q)
        )
        assert "off" in try_pages(2, 8, CPU, torch.float32, 4)
        assert twin is not None


def test_what_flash_attention_refuses():
    cuda = torch.device("cuda", 0)
    assert refusal(CPU, torch.bfloat16, 64, None) == "bfloat16 on cpu"
    assert refusal(cuda, torch.float32, 64, None) == "float32 on cuda"
    assert refusal(cuda, torch.bfloat16, 64, 30.0) == "scores are capped"
    assert refusal(cuda, torch.bfloat16, 320, None) == "heads are 320 wide"
    assert PAGE % 256 == 0
