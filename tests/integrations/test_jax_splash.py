"""Segment ids for attention kernels, and JAX's splash attention with them, against the dense
mask.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_loader

jax = pytest.importorskip("jax")
jnp = jax.numpy

from makers.processes import jax_environment, run_code  # noqa: E402
from penstock import InputRequirements  # noqa: E402
from penstock import jax as psj  # noqa: E402
from penstock.core.errors import ConfigError  # noqa: E402
from penstock.integrations.jax.batch import stack  # noqa: E402

SLOTS = 128
LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1)), min_size=1, max_size=12)


def row_of(pieces, slots):
    """Segments and prefixes of a row from (length, share that is prefix); what is left over is
    padding.
    """
    segments, prefix, at = np.zeros(slots, np.int32), np.zeros(slots, bool), 0
    for number, (length, share) in enumerate(pieces):
        segments[at : at + length] = number + 1
        prefix[at : at + min(int(share * length), slots - at)] = True
        at += length
    return segments, prefix


@settings(deadline=None)
@given(st.lists(LENGTHS, min_size=1, max_size=3))
def test_two_masks_make_the_rule(rows):
    """The causal one for tokens outside prefixes, the one of `prefix_segment_ids` for those
    inside.
    """
    segments, prefix = map(np.stack, zip(*(row_of(pieces, 60) for pieces in rows), strict=True))
    whole = np.asarray(psj.attention_mask(segments, prefix))[:, 0]
    causal = np.asarray(psj.attention_mask(segments))[:, 0]
    ids = np.asarray(psj.prefix_segment_ids(segments, prefix))
    assert ids.dtype == np.int32
    inside = ids[:, :, None] == ids[:, None, :]
    np.testing.assert_array_equal(np.where(prefix[:, :, None], inside, causal), whole)


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(st.lists(LENGTHS, min_size=2, max_size=2), st.booleans(), st.integers(0, 2**16))
def test_splash_attention_is_the_dense_mask(rows, with_prefix, seed):
    compare(rows, with_prefix, seed)


def compare(rows, with_prefix, seed):
    segments, prefix = map(np.stack, zip(*(row_of(pieces, SLOTS) for pieces in rows), strict=True))
    prefix = prefix if with_prefix else None
    generator = np.random.default_rng(seed)
    q = generator.normal(size=(len(rows), SLOTS, 4, 64)).astype(np.float32)
    k, v = (generator.normal(size=(len(rows), SLOTS, 2, 64)).astype(np.float32) for _ in "kv")
    weights = generator.normal(size=q.shape).astype(np.float32)

    def dense(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, mask=psj.attention_mask(segments, prefix))

    def splash(q, k, v):
        return psj.splash_attention(q, k, v, segments, prefix, interpret=True)

    np.testing.assert_allclose(splash(q, k, v), dense(q, k, v), atol=2e-5)
    slopes = [
        jax.grad(lambda *x, f=f: (f(*x) * weights).sum(), (0, 1, 2))(q, k, v)
        for f in (dense, splash)
    ]
    for expected, found in zip(*slopes, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-4)


def test_splash_attention_on_one_pair_of_rows():
    compare([[(40, 0.5), (60, 0.0), (9, 1.0)], [(128, 0.3)]], True, 0)


@pytest.mark.slow
def test_splash_attention_over_a_mesh():
    code = """
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import AxisType
        from penstock import jax as psj
        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
        q, k, v = np.random.default_rng(0).normal(size=(3, 8, 128, 1, 64)).astype(np.float32)
        segments = np.repeat(np.arange(8, dtype=np.int32), 16)[None].repeat(8, 0)
        prefix = np.tile(np.arange(128) % 16 < 5, (8, 1))
        split = jax.jit(lambda *x: psj.splash_attention(*x, mesh=mesh, interpret=True))(q, k, v, segments, prefix)
        assert len(split.addressable_shards) == 4
        whole = psj.splash_attention(q, k, v, segments, prefix, interpret=True)
        np.testing.assert_allclose(split, whole, atol=1e-6)
    """  # noqa: E501
    found = run_code(code, env=jax_environment(4))
    assert found.returncode == 0, found.stderr


def test_segment_ids_of_rows_and_steps(counting):
    step = next(iter(make_loader(counting)))
    batch = stack(
        list(step),
        like=step[0],
        size=len(step),
        max_documents=32,
        denominators=step.loss_denominators,
        where="",
        first=0,
    )
    ids = psj.segment_ids(step)
    assert (ids.dtype, ids.shape) == (np.int32, step.arrays()["tokens"].shape)
    np.testing.assert_array_equal(ids, batch.segment_ids)
    np.testing.assert_array_equal(psj.segment_ids(step[1]), ids[1:2])
    joined = next(iter(make_loader(counting, attention="row")))
    assert set(np.unique(psj.segment_ids(joined))) <= {0, 1}


def test_what_does_not_fit_is_refused(counting):
    bare = next(iter(make_loader(counting, requirements=InputRequirements())))
    with pytest.raises(ConfigError, match=r"document_ids.*jax.REQUIREMENTS"):
        psj.segment_ids(bare)
    q = jnp.zeros((1, 100, 2, 64))
    with pytest.raises(ConfigError, match=r"a multiple of 128 slots, got 100"):
        psj.splash_attention(q, q, q, jnp.zeros((1, 100), jnp.int32))
    q, k = jnp.zeros((1, 128, 3, 64)), jnp.zeros((1, 128, 2, 64))
    with pytest.raises(ConfigError, match=r"2.*divide.*3.*queries"):
        psj.splash_attention(q, k, k, jnp.zeros((1, 128), jnp.int32))
