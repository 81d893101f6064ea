"""Denoising in JAX against the compiled writer: the same tokens, weights, prefix and slots for the
same keys.
"""

from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.core.randomness import philox
from penstock.plan.objectives.denoise import Denoise
from penstock.plan.objectives.denoise_tasks import LONGEST as LONGEST_EVER
from penstock.plan.objectives.denoise_tasks import CausalLM, PrefixLM, SpanCorruption

jax = pytest.importorskip("jax")
jnp = jax.numpy

from penstock import jax as psj  # noqa: E402
from penstock.integrations.jax.spans import below, draw_ends, multiply_high, random_words, share_of  # noqa: E402  # noqa: E402

LONGEST = 300
PAD = 0
SENTINELS = tuple(range(1000, 1400))
MODES = {"R": 2001, "X": 2002, "S": 2003}
CASES = {
    "ul2": Denoise.ul2(modes=MODES, sentinels=SENTINELS),
    "ul2r": Denoise.ul2r(modes=MODES, sentinels=SENTINELS, final_sentinel=True, input_end=2009),
    "t5": Denoise.t5(sentinels=SENTINELS),
    "causal attention": Denoise.ul2(
        modes=None, sentinels=SENTINELS, roll=False, bidirectional=False, train_on_inputs=True
    ),
    "extremes": Denoise(
        [
            SpanCorruption("9/10", 1.5),
            SpanCorruption(0.5, 1),
            SpanCorruption("999/1000", 1000),
            PrefixLM(sentinel=False, rate="1/3"),
            CausalLM(mode=7),
            CausalLM(),
        ],
        sentinels=SENTINELS,
        final_sentinel=True,
    ),
    "no sentinels": Denoise([PrefixLM(sentinel=False), CausalLM(mode=7, weight=0.5)], sentinels=()),
}
words = st.integers(0, 2**32 - 1)


MAX_SLOTS = max(objective.worst(LONGEST)[0] for objective in CASES.values())


@lru_cache
def in_one_shape(case):
    """Settings with tasks that never come and sentinels that nobody needs, so that one trace serves
    all cases.
    """
    made = psj.DenoiseSettings.of(CASES[case], LONGEST)
    more = 7 - len(made.tasks)
    return replace(
        made,
        thresholds=np.pad(made.thresholds, (0, more), constant_values=2**32 - 1),
        tasks=np.pad(made.tasks, ((0, more), (0, 0)), mode="edge"),
        sentinels=np.pad(made.sentinels, (0, 300 - len(made.sentinels))),
    )


def assert_same(objective, document, key, got, weights=None):
    """All of M slots: what is written, and nothing after it."""
    written = objective.write(document, weights, key)
    slots = len(written.tokens)
    assert (int(got.slots), int(got.prefix)) == (slots, written.prefix)
    assert got.tokens[:slots].tolist() == written.tokens.tolist()
    assert got.weights[:slots].tolist() == written.weights.tolist()
    assert not got.tokens[slots:].any()
    assert not got.weights[slots:].any()


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(sorted(CASES)),
    st.integers(1, 12) | st.integers(1, LONGEST),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32),
    st.sampled_from([2, 1100, 2**31 - 1]),
)
def test_a_document_is_what_the_compiled_writer_writes(case, length, key, seed, vocabulary):
    """Any ids: 0 and the pad id, those of sentinels, the largest; and any at all after the
    document's end.
    """
    tokens = np.random.default_rng(seed).integers(0, vocabulary, LONGEST, dtype=np.int32)
    chosen, halves = in_one_shape(case), psj.split_keys(key)
    got = psj.denoise(tokens, length, halves, chosen, max_slots=MAX_SLOTS)
    assert_same(CASES[case], tokens[:length], key, jax.tree.map(np.asarray, got))
    weights = np.random.default_rng(seed + 1).choice(np.float32([0, 0, 0.5, 1, 2.25]), LONGEST)
    got = psj.denoise(tokens, length, halves, chosen, weights, max_slots=MAX_SLOTS)
    assert_same(CASES[case], tokens[:length], key, jax.tree.map(np.asarray, got), weights[:length])


def test_a_batch_of_documents_long_and_short():
    objective = Denoise.ul2(modes=MODES, sentinels=range(60_000, 60_400))
    generator, tool = np.random.default_rng(7), psj.Denoiser(objective, max_length=2000)
    lengths = np.concatenate([np.arange(1, 41), np.linspace(50, 2000, 60).astype(int)])
    tokens = generator.integers(0, 3, (100, 2000), dtype=np.int32)
    for _ in range(4):
        keys = generator.integers(0, 2**64, 100, dtype=np.uint64)
        got = jax.tree.map(np.asarray, tool(tokens, lengths, keys))
        for i, length in enumerate(lengths.tolist()):
            assert_same(
                objective,
                tokens[i, :length],
                int(keys[i]),
                jax.tree.map(lambda leaf, i=i: leaf[i], got),
            )


def test_other_settings_need_no_other_trace():
    traces = []

    @jax.jit
    def run(tokens, length, key, settings):
        traces.append(None)
        return psj.denoise(tokens, length, key, settings, max_slots=420)

    tokens = np.arange(LONGEST, dtype=np.int32)
    objectives = [
        Denoise([SpanCorruption(0.15, 3), PrefixLM()], sentinels=SENTINELS),
        Denoise(
            [SpanCorruption(0.15, 3, mode=5, weight=0.2), PrefixLM(rate=0.3)],
            sentinels=SENTINELS[::-1],
        ),
        Denoise(
            [CausalLM(), SpanCorruption(0.15, 3)],
            sentinels=SENTINELS,
            bidirectional=False,
            input_end=3,
        ),
    ]
    for objective in objectives:
        chosen = psj.DenoiseSettings.of(objective, LONGEST)
        for key in range(5):
            got = run(tokens, 40 + key, psj.split_keys(key), chosen)
            assert_same(objective, tokens[: 40 + key], key, jax.tree.map(np.asarray, got))
    assert len(traces) == 1


def test_the_most_unlike_settings_of_jax_change_nothing():
    """With 64-bit numbers, and no silent promotion of types or ranks."""
    tokens = np.arange(LONGEST, dtype=np.int32)
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        for key in (1, 2**64 - 1):
            got = psj.denoise(
                tokens,
                250,
                psj.split_keys(key),
                in_one_shape("ul2"),
                np.ones(LONGEST, np.float32),
                max_slots=MAX_SLOTS,
            )
            assert (got.tokens.dtype, got.weights.dtype) == ("int32", "float32")
            assert (got.slots.dtype, got.prefix.dtype) == ("int32", "int32")
            assert_same(CASES["ul2"], tokens[:250], key, jax.tree.map(np.asarray, got))


def test_what_does_not_fit_is_refused_or_told():
    tool, tokens = psj.Denoiser(CASES["t5"], max_length=LONGEST), np.zeros((2, LONGEST), np.int32)
    with pytest.raises(ConfigError, match=r"document 1.*301.*expected: 1 … 300"):
        tool(tokens, [300, 301], [1, 2])
    with pytest.raises(ConfigError, match=r"document 0.*0.*expected: 1 … 300"):
        tool(tokens, [0, 300], [1, 2])
    with pytest.raises(ConfigError, match=r"\[2.*300\].*lengths.*\[3\].*300\]"):
        tool(tokens, [1, 2, 3], [1, 2])
    with pytest.raises(ConfigError, match=r"needs.*15.*sentinels.*'spans'.*10"):
        psj.Denoiser(Denoise.t5(sentinels=range(1000, 1010)), max_length=LONGEST)
    with pytest.raises(ConfigError, match=r"sentinels.*tokenizer"):
        psj.Denoiser(Denoise.t5(), max_length=LONGEST)
    with pytest.raises(ConfigError, match=r"max_length.*0.*expected: 1.*4,194,304"):
        psj.Denoiser(CASES["t5"], max_length=0)
    with pytest.raises(ConfigError, match=r"documents.*301.*sentinels.*300"):
        psj.denoise(np.zeros(301, np.int32), 5, psj.split_keys(1), tool.settings, max_slots=400)
    narrow = psj.Denoiser(CASES["t5"], max_length=LONGEST, max_slots=320)
    with pytest.raises(ConfigError, match=r"document 1.*330.*most 320.*max_slots"):
        narrow(tokens, [250, 300], [1, 2])
    inside = psj.denoise(tokens[0], 300, psj.split_keys(1), narrow.settings, max_slots=320)
    assert int(inside.slots) == 330


def floyd(total, parts, purpose, key):
    """Ends of the parts, one draw after another."""
    cuts, chosen = parts - 1, set()
    for i in range(cuts):
        word = int(philox(np.uint64(i // 4), np.uint64(purpose), np.uint64(key))[i % 4])
        last = total - 1 - cuts + i
        drawn = word * (last + 1) >> 32
        chosen.add(last if drawn in chosen else drawn)
    return [gap + 1 for gap in sorted(chosen)] + [total]


draw_compiled = jax.jit(draw_ends, static_argnames=("room", "limit"))


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 64), st.data())
def test_compositions_are_those_of_the_sequential_draws(total, data):
    """Many parts of little, where most draws collide with an earlier one, and with what collisions
    have added.
    """
    parts = data.draw(st.integers(1, total))
    key = data.draw(st.integers(0, 2**64 - 1))
    ends = draw_compiled(total, parts, 2, psj.split_keys(key), room=64, limit=64).tolist()
    assert ends == floyd(total, parts, 2, key) + [total] * (64 - parts)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2))
def test_words_are_those_of_the_compiled_generator(key, purpose):
    expected = [philox(np.uint64(block), np.uint64(purpose), np.uint64(key)) for block in range(3)]
    assert (
        random_words(psj.split_keys(key), purpose, 10).tolist() == np.ravel(expected)[:10].tolist()
    )


@settings(deadline=None, max_examples=200)
@given(words, words)
def test_high_words_of_products(a, b):
    assert int(multiply_high(jnp.uint32(a), jnp.uint32(b))) == a * b >> 32
    bound = b >> 1
    assert int(below(jnp.uint32(a), jnp.int32(bound))) == a * bound >> 32


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, LONGEST_EVER) | st.just(LONGEST_EVER),
    st.tuples(st.integers(1, 1000), st.integers(1, 1000)),
)
def test_shares_are_rounded_half_to_even(number, share):
    numerator, denominator = sorted(share)
    got = share_of(jnp.int32(number), jnp.int32(numerator), jnp.int32(denominator))
    assert int(got) == round(Fraction(number * numerator, denominator))
