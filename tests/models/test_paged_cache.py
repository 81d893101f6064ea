"""Caches in pages: whatever joins, grows, is cut or copied, logits are those of the whole text
alone; pages are shared where beginnings are, and given back; recorded steps are the steps
themselves.
"""

import logging

import numpy as np
import paged_twin
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cache import ACTIONS, CAPACITY, MODELS, SLOTS, alone

from makers.models import tiny_huggingface, tiny_model
from penstock.core.errors import ConfigError
from penstock.models.cache import Cache
from penstock.models.decoding_graphs import Steps
from penstock.models.paged_cache import PagedCache, new_keys
from penstock.models.settings import BlockSettings
from penstock.models.theirs.model import HuggingFaceModel

PAGE = 4


def paged(model, page=PAGE, *, kernel=None, sequences=SLOTS, capacity=CAPACITY):
    """A paged cache with the settings of the model's own."""
    own = model.new_cache(sequences, capacity)
    layers, _, kv_heads, head_width = own._shape
    made = PagedCache(
        layers=layers,
        sequences=sequences,
        capacity=capacity,
        kv_heads=kv_heads,
        head_width=head_width,
        device=torch.device("cpu"),
        dtype=own._dtype,
        windows=own._windows,
        softcap=own._softcap,
        recurrent=own._recurrent,
        page=page,
    )
    made.kernel = kernel
    return made


def check_pages(cache):
    """Each page is free or held as often as tables have it; nobody holds page 0."""
    held = np.zeros(len(cache._holders), np.int64)
    for sequence, table in enumerate(cache._tables):
        assert len(table) == -(-int(cache.lengths[sequence]) // cache.page)
        for page in table:
            held[page] += 1
    np.testing.assert_array_equal(held, cache._holders)
    assert not held[0]
    assert sorted([*cache._free, *np.flatnonzero(held)]) == list(range(1, len(held)))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(ACTIONS, max_size=12),
    st.sampled_from([None, 3]),
    st.sampled_from([1, 3, 4, 100]),
    st.booleans(),
    st.booleans(),
)
def test_every_way_to_a_text_gives_its_logits(actions, window, page, by_kernel, graphs):
    model, chance = MODELS[window], np.random.default_rng(0)
    cache = paged(model, page, kernel=paged_twin.attend if by_kernel else None)
    if graphs:
        cache.steps = Steps(cache, paged_twin.Again(), uses=0)
    texts: list[list[int]] = [[] for _ in range(SLOTS)]
    for name, *given_ in actions:
        if name == "truncate":
            slot, share = given_
            keep = int(len(texts[slot]) * share)
            cache.truncate(slot, keep)
            del texts[slot][keep:]
        elif name == "copy":
            source, target, share = given_
            count = int(len(texts[source]) * share)
            cache.copy(source, target, count)
            texts[target] = texts[source][:count]
        else:
            asked = dict(given_[0]) if name == "extend" else dict.fromkeys(given_[0], 1)
            asked = {slot: min(count, CAPACITY - len(texts[slot])) for slot, count in asked.items()}
            new = {slot: chance.integers(0, 40, count).tolist() for slot, count in asked.items()}
            width = max(1, *asked.values())
            tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids in new.values()])
            lengths = torch.tensor([*asked.values()])
            logits = model.extend(tokens, lengths, cache, torch.tensor([*asked]))
            for row, (slot, ids) in enumerate(new.items()):
                texts[slot] += ids
                if ids:
                    torch.testing.assert_close(
                        logits[row], alone(model, texts[slot]), rtol=0, atol=1e-10
                    )
        assert cache.lengths.tolist() == [*map(len, texts)]
        check_pages(cache)


def grow(model, cache, texts):
    """Append texts to the first sequences; logits."""
    width = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    lengths = torch.tensor([*map(len, texts)])
    return model.extend(tokens, lengths, cache, torch.arange(len(texts)))


def test_a_prompt_of_several_samples_is_held_once():
    cache = paged(MODELS[None], sequences=5, capacity=40)
    grow(MODELS[None], cache, [list(range(14))])
    for sequence in range(1, 5):
        cache.copy(0, sequence, 14)
    # Three full pages are shared, the last one is each one's own.
    assert cache.used_pages == 3 + 5
    check_pages(cache)
    for sequence in range(5):
        cache.clear(sequence)
    assert cache.used_pages == 0


def test_a_shared_page_is_copied_before_it_is_written_to():
    model = MODELS[None]
    cache = paged(model, capacity=40)
    grow(model, cache, [list(range(8))])
    cache.copy(0, 1, 8)
    assert cache.used_pages == 2
    cache.truncate(1, 6)
    found = grow(model, cache, [[20], [30]])
    torch.testing.assert_close(found[0], alone(model, [*range(8), 20]), rtol=0, atol=1e-10)
    torch.testing.assert_close(found[1], alone(model, [*range(6), 30]), rtol=0, atol=1e-10)
    check_pages(cache)


def test_the_pool_grows_with_what_is_stored():
    model = MODELS[None]
    cache = paged(model, page=1, sequences=8, capacity=24)
    cache.keys = [one[:3].clone() for one in cache.keys]
    cache.values = [one[:3].clone() for one in cache.values]
    cache._holders, cache._free = cache._holders[:3], [2, 1]
    texts = [list(range(n + 1)) for n in range(8)]
    found = grow(model, cache, texts)
    for row, text in enumerate(texts):
        torch.testing.assert_close(found[row], alone(model, text), rtol=0, atol=1e-10)
    assert cache.moved > 0
    assert len(cache.keys[0]) >= 37
    check_pages(cache)


def test_what_does_not_fit_is_refused():
    model = MODELS[None]
    cache = paged(model)
    with pytest.raises(ConfigError, match="capacity of the cache is 24"):
        grow(model, cache, [[1] * 25])
    with pytest.raises(ConfigError, match="cannot copy the first 3"):
        cache.copy(0, 1, 3)
    assert cache.used_pages == 0


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "llama"])
def test_models_of_transformers(kind):
    more = {"sliding_window": 6} if kind != "llama" else {}
    model = HuggingFaceModel(tiny_huggingface(kind, **more))
    slots = model.new_cache(2, 40)
    if not isinstance(slots, Cache):
        pytest.skip("it has no cache of keys")
    texts = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3, 4]]
    kernels = [None] if slots._softcap is not None else [None, paged_twin.attend]
    for kernel in kernels:
        pages = paged(model, kernel=kernel, sequences=2, capacity=40)
        pages.steps = Steps(pages, paged_twin.Again(), uses=2)
        expected = paged_or_slots = None
        slots.clear(0)
        slots.clear(1)
        for new in (texts, *[[[n], [n + 1]] for n in range(8)]):
            expected, paged_or_slots = (grow(model, one, new) for one in (slots, pages))
            torch.testing.assert_close(paged_or_slots, expected, rtol=0, atol=2e-5)
        assert bool(pages.steps.recorded) == (kernel is not None)


# -- recorded steps


def recorded(model, uses=2, recorder=None, **options):
    cache = paged(model, kernel=paged_twin.attend, **options)
    cache.steps = Steps(cache, recorder or paged_twin.Again(), uses=uses)
    return cache


def test_a_step_is_recorded_for_each_size_after_some_uses():
    model = MODELS[None]
    again = paged_twin.Again()
    cache, plain = recorded(model, recorder=again), paged(model, kernel=paged_twin.attend)
    for number in range(6):
        rows = [[number + row] for row in range(3 if number < 5 else 1)]
        found, expected = (grow(model, one, rows) for one in (cache, plain))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert cache.lengths.tolist() == plain.lengths.tolist()
    assert cache.steps.recorded == (4,)
    assert again.runs == 3


def test_results_of_a_step_are_not_overwritten_by_the_next():
    model = MODELS[None]
    cache = recorded(model, uses=0)
    first = grow(model, cache, [[1], [2]])
    kept = first.clone()
    grow(model, cache, [[3], [4]])
    assert torch.equal(first, kept)


def test_a_recorded_step_reads_the_same_memory_and_nothing_else(monkeypatch):
    """Inputs lie where they lay when it was recorded, and the host is not asked for a number."""
    model = MODELS[3]
    cache = recorded(model, uses=0)
    grow(model, cache, [[1], [2], [3]])
    [size] = cache.steps._sizes.values()
    places = [one.data_ptr() for one in (size._tokens, size.positions, size._table, size._used)]
    for name in ("item", "tolist", "nonzero", "__bool__", "__int__", "__float__"):
        whole = getattr(torch.Tensor, name)

        def refuse(self, *args, _whole=whole, **given):
            # The slow kernel of this test reads numbers, as a kernel does.
            frames = [frame.filename for frame in __import__("traceback").extract_stack()]
            assert any(one.endswith(("paged_twin.py", "cache.py")) for one in frames)
            return _whole(self, *args, **given)

        monkeypatch.setattr(torch.Tensor, name, refuse)
    size.repeat()
    assert places == [
        one.data_ptr() for one in (size._tokens, size.positions, size._table, size._used)
    ]


def test_a_pool_that_moved_is_recorded_anew():
    model = MODELS[None]
    cache = recorded(model, uses=0, page=1, capacity=24)
    plain = paged(model, page=1)
    cache.keys = [one[:6].clone() for one in cache.keys]
    cache.values = [one[:6].clone() for one in cache.values]
    cache._holders, cache._free = cache._holders[:6], [5, 4, 3, 2, 1]
    for number in range(8):
        found, expected = (grow(model, one, [[number], [9]]) for one in (cache, plain))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert cache.moved
    assert cache.steps.recorded == (2,)


def test_what_cannot_be_recorded_runs_as_before(caplog):
    model = MODELS[None]
    cache = recorded(model, uses=1, recorder=paged_twin.Refusing())
    plain = paged(model)
    with caplog.at_level(logging.WARNING, "penstock.models"):
        for number in range(4):
            found, expected = (grow(model, one, [[number]]) for one in (cache, plain))
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert len(caplog.records) == 1
    assert "not permitted when stream is capturing" in caplog.text
    assert cache.lengths.tolist() == plain.lengths.tolist()
    check_pages(cache)


def test_recurrent_models_are_not_recorded():
    model = tiny_model(
        40,
        layers=2,
        blocks={"delta": BlockSettings(mixer="gated_delta"), "own": BlockSettings()},
        pattern=("delta", "own"),
    )
    cache = recorded(model, uses=0)
    plain = model.new_cache(SLOTS, CAPACITY)
    for new in ([[1, 2, 3], [4]], [[5], [6]]):
        found, expected = (grow(model, one, new) for one in (cache, plain))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert not cache.steps.recorded


def test_a_gpu_has_pages_and_the_cpu_has_slots():
    given = {"layers": 1, "sequences": 2, "capacity": 8, "kv_heads": 1, "head_width": 4}
    made = new_keys(device=torch.device("cpu"), dtype=torch.float32, **given)
    assert isinstance(made, Cache)
