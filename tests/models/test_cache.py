"""Caches: whatever joins, grows, is cut, copied or left idle, logits are those of the whole text
alone.
"""

import numpy as np
import pytest
import torch
from attention_makers import attention_of
from hypothesis import given, settings
from hypothesis import strategies as st

from makers.models import tiny_model
from penstock.core.errors import ConfigError
from penstock.models import cache as cache_module
from penstock.models.attention import RowAttention
from penstock.models.cache import Cache, _runs
from penstock.models.text_cache import TextCache
from penstock.plan.inputs import AttentionRule

SLOTS, CAPACITY = 4, 24
MODELS = {
    window: tiny_model(40, dtype=torch.float64, sliding_window=window) for window in (None, 3)
}


def alone(model, text):
    """Logits after a text, without a cache."""
    tokens, positions = torch.tensor(text), torch.arange(len(text))
    rule = AttentionRule(np.array([[0, 0, len(text)]]))
    attention: RowAttention = attention_of(
        rule, model.settings.sliding_window, device=torch.device("cpu"), dtype=torch.float64
    )
    return model.logits(
        model.run(tokens, positions, lambda layer, *heads: attention(*heads))[0, -1]
    )


ACTIONS = st.one_of(
    st.tuples(
        st.just("extend"),
        st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 5)), min_size=1),
    ),
    st.tuples(st.just("single"), st.sets(st.integers(0, SLOTS - 1), min_size=1)),
    st.tuples(st.just("truncate"), st.integers(0, SLOTS - 1), st.floats(0, 1)),
    st.tuples(
        st.just("copy"), st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1), st.floats(0, 1)
    ),
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(ACTIONS, max_size=12),
    st.sampled_from([None, 3]),
    st.sampled_from([0, 3, 1000]),
    st.booleans(),
)
def test_every_way_to_a_text_gives_its_logits(actions, window, slack, on_demand):
    model, chance = MODELS[window], np.random.default_rng(0)
    cache = model.new_cache(SLOTS, CAPACITY)
    # Any number of calls, and room that grows as on a GPU.
    cache._slack = slack
    if on_demand:
        cache._keys, cache._values = cache._new(2), cache._new(2)
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


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 90), st.integers(0, 1)), min_size=1, max_size=12
    ),
    st.integers(0, 40),
)
def test_rows_of_a_call(rows, slack):
    """Each row with a new token is in one call, rows and slots of a call are adjacent, padding
    pays.
    """
    past, slot = [], -1
    for gap, start, count in rows:
        slot += 1 + gap
        past.append((slot, start, count))
    runs = list(_runs(past, slack))
    assert [row for run in runs for row in run] == [
        row for row, (_, _, count) in enumerate(past) if count
    ]
    for run in runs:
        slots, ends = [past[row][0] for row in run], [past[row][1] + past[row][2] for row in run]
        assert slots == list(range(slots[0], slots[0] + len(run)))
        assert max(ends) * len(run) - sum(ends) <= slack * (len(run) - 1)


def test_equal_lengths_share_a_call_and_a_long_one_does_not():
    short = [(slot, 16, 1) for slot in range(7)]
    assert list(_runs(short, 60)) == [range(7)]
    assert list(_runs([*short, (7, 2000, 1)], 60)) == [range(7), range(7, 8)]


def test_memory_follows_what_is_stored():
    """A cache for 17 GB takes no memory for what is not stored, but for the rest of each page."""
    resident = _resident()
    cache = Cache(
        layers=8,
        sequences=64,
        capacity=16_384,
        kv_heads=4,
        head_width=64,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    assert _resident() - resident < 50e6
    cache._keys[:, 3, :, :100] = 1.0
    assert _resident() - resident < 50e6


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_more_than_the_system_provides():
    with pytest.raises(ConfigError, match=r"GB.*system.*provide.*lower"):
        Cache(
            layers=1 << 10,
            sequences=1 << 12,
            capacity=1 << 16,
            kv_heads=8,
            head_width=64,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )


def test_bfloat16_is_zeroed_too():
    cache = Cache(
        layers=1,
        sequences=2,
        capacity=3,
        kv_heads=1,
        head_width=2,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
    )
    assert cache._keys.dtype == torch.bfloat16
    assert not cache._keys.any()


@pytest.mark.parametrize(
    "make", [lambda: MODELS[None].new_cache(2, 8), lambda: TextCache(2, 8, torch.device("cpu"))]
)
def test_more_than_there_is_cannot_be_copied(make):
    with pytest.raises(ConfigError, match=r"sequence 0.*0.*first 1"):
        make().copy(0, 1, 1)


def test_tokens_are_copied_with_their_keys():
    keys = MODELS[None].new_cache(2, 4)
    cache = TextCache(2, 8, torch.device("cpu"), keys)
    cache.append(torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([5]), torch.tensor([0]))
    keys.lengths[0] = 4
    cache.copy(0, 1, 3)
    assert cache.text(1).tolist() == [1, 2, 3]
    assert keys.lengths.tolist() == [4, 3]
    assert cache_module.FIRST_ROOM > 0
