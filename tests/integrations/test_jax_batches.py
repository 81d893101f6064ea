"""Rows as JAX arrays: what a batch holds, that its shapes never change, and that nothing changes
under JAX.
"""

from dataclasses import fields, replace
from itertools import islice

import numpy as np
import pytest
from tiny_models import LENGTH, make_loader

from penstock import BlockDiffusion, InputRequirements, Loader, MaskedDiffusion, Source
from penstock.core.errors import ConfigError
from penstock.plan.inputs import IGNORE
from penstock.plan.inputs.requirements import EVERYTHING
from penstock.plan.objectives.denoise import Denoise

jax = pytest.importorskip("jax")
jnp = jax.numpy

from penstock import jax as psj  # noqa: E402


def compare(batch, rows, max_documents=LENGTH):
    """Each field from the row's own, in plain Python."""
    for i, row in enumerate(rows):
        slots = row.sequence_length
        padding = slots - row.num_tokens
        lengths = np.diff(row.cu_seqlens)[: row.num_documents].tolist()
        assert batch.tokens[i].tolist() == row.tokens.tolist()
        assert batch.targets[i].tolist() == [
            0 if t == IGNORE else t for t in row.targets[0].tolist()
        ]
        assert batch.loss_weights[i].tolist() == row.loss_weights[0].tolist()
        assert batch.segment_ids[i].tolist() == [
            *(d + 1 for d, n in enumerate(lengths) for _ in range(n)),
            *([0] * padding),
        ]
        assert batch.positions[i].tolist() == [p for n in [*lengths, padding] for p in range(n)]
        assert batch.num_documents[i] == row.num_documents
        assert batch.document_lengths[i].tolist() == lengths + [0] * (max_documents - len(lengths))
        starts = np.cumsum([0, *lengths]).tolist()
        assert batch.cu_seqlens[i].tolist() == starts + [slots] * (max_documents + 2 - len(starts))


def test_a_batch_is_the_rows_of_the_step(weighted):
    for (batch, step), plain in zip(
        psj.batches(make_loader(weighted, max_epochs=1)),
        make_loader(weighted, max_epochs=1),
        strict=True,
    ):
        assert step.resume_state == plain.resume_state
        assert float(batch.loss_denominator) == np.float32(plain.loss_denominator)
        compare(batch, plain)
        for field in fields(batch):
            leaf = getattr(batch, field.name)
            expected = "float32" if field.name.startswith("loss") else "int32"
            assert leaf is None or (isinstance(leaf, jax.Array) and leaf.dtype == expected), (
                field.name
            )
        assert batch.prefix is None


def noised(data, objective, **more):
    source = Source(data, objective=objective, max_epochs=1)
    return Loader(source, sequence_length=LENGTH, rows_per_step=4, seed=3, **more)


def test_targets_of_an_objectives_own(weighted):
    """A mask predicts what it stands for, in its own slot."""
    masked = MaskedDiffusion(mask_token=3)
    found = 0
    for batch, step in psj.batches(noised(weighted, masked), prefix=True):
        compare(batch, step)
        for i, row in enumerate(step):
            hidden = np.asarray(batch.loss_weights[i]) > 0
            assert (np.asarray(batch.tokens[i])[hidden] == 3).all()
            assert np.asarray(batch.prefix[i]).tolist() == row.prefix.tolist()
            found += hidden.sum()
    assert found > 100


def test_blocks_are_refused(weighted):
    blocks = BlockDiffusion(mask_token=3, block=4)
    with pytest.raises(ConfigError, match="does not say that it honours"):
        noised(weighted, blocks)
    need = replace(EVERYTHING, trees=True)
    loader = noised(weighted, blocks, requirements=need)
    with pytest.raises(ConfigError, match="blocks of block diffusion, which batches for JAX"):
        next(psj.batches(loader, prefix=True))


def test_a_jitted_function_is_traced_once(weighted):
    """Over an epoch with a last, short step, and rows with different numbers of documents."""
    traces = []

    @jax.jit
    def total(batch):
        traces.append(None)
        return (batch.loss_weights * (batch.targets >= 0)).sum() / batch.loss_denominator

    loader = make_loader(weighted, rows=16, max_epochs=1)
    found = [(float(total(batch)), len(step)) for batch, step in psj.batches(loader)]
    assert len(traces) == 1
    assert found[-1][1] < 16
    assert [share for share, _ in found] == pytest.approx([1.0] * len(found), rel=1e-6)


def test_batches_smaller_than_a_step_are_its_rows_in_order(weighted):
    pairs = list(islice(psj.batches(make_loader(weighted, rows=6), batch_size=2), 6))
    assert [step.index for _, step in pairs] == [0, 0, 0, 1, 1, 1]
    for i, (batch, step) in enumerate(pairs):
        compare(batch, step[2 * (i % 3) : 2 * (i % 3) + 2])
        assert float(batch.loss_denominator) == step.loss_denominator


def test_every_step_has_as_many_batches(weighted):
    """The last step has fewer rows, and batches of nothing but padding after them."""
    pairs = list(psj.batches(make_loader(weighted, rows=24, max_epochs=1), batch_size=4))
    steps = [step.index for _, step in pairs]
    assert steps == sorted([*range(steps[-1] + 1)] * 6)
    batch, step = pairs[-1]
    assert len(step) <= 20
    assert not any(
        np.any(leaf)
        for leaf in (batch.tokens, batch.loss_weights, batch.segment_ids, batch.num_documents)
    )
    assert batch.positions.tolist() == [list(range(LENGTH))] * 4
    assert batch.cu_seqlens.tolist() == [[0] + [LENGTH] * (LENGTH + 1)] * 4


def test_prefixes_come_with_the_batch(weighted):
    source = Source(
        weighted, objective=Denoise.ul2r(modes=None, sentinels=range(40, 64)), max_epochs=1
    )
    settings = {"sequence_length": 80, "rows_per_step": 24}
    plain = list(Loader(source, **settings))
    pairs = list(psj.batches(Loader(source, **settings), prefix=True))
    for (batch, _), step in zip(pairs, plain, strict=True):
        assert batch.prefix.dtype == bool
        compare(batch, step, 80)
        for i, row in enumerate(step):
            np.testing.assert_array_equal(batch.prefix[i], row.prefix)
        assert not batch.prefix[len(step) :].any()
    assert len(plain[-1]) < 24
    assert all(batch.prefix.any() for batch, _ in pairs)


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [(None, "the model is not known"), (False, "the model does not support them")],
)
def test_a_model_that_ignores_prefixes_is_refused(weighted, prefix, reason):
    source = Source(
        weighted, name="web", objective=Denoise.ul2r(modes=None, sentinels=range(40, 64))
    )
    settings = {"sequence_length": 80, "rows_per_step": 4}
    with pytest.raises(
        ConfigError,
        match=rf"'web'.*{reason}.*bidirectional=False",
    ):
        psj.batches(Loader(source, **settings), prefix=prefix)
    next(psj.batches(Loader(source, **settings), prefix=True))
    causal = Source(
        weighted, objective=Denoise.ul2r(modes=None, sentinels=range(40, 64), bidirectional=False)
    )
    next(psj.batches(Loader(causal, **settings), prefix=prefix))
    next(psj.batches(make_loader(weighted), prefix=prefix))


def test_a_model_learns_from_them(weighted):
    """The step of the package's example, with a model of two tables."""

    @jax.jit
    def train(parameters, batch):
        def loss(parameters):
            scores = jax.nn.log_softmax(parameters["in"][batch.tokens] @ parameters["out"])
            picked = jnp.take_along_axis(scores, batch.targets[..., None], axis=-1)[..., 0]
            return -(picked * batch.loss_weights).sum() / batch.loss_denominator

        value, slopes = jax.value_and_grad(loss)(parameters)
        return value, jax.tree.map(lambda p, g: p - 2.0 * g, parameters, slopes)

    generator = np.random.default_rng(0)
    parameters = {"in": generator.normal(size=(64, 16)), "out": generator.normal(size=(16, 64))}
    parameters = jax.tree.map(lambda table: jnp.asarray(table * 0.3, jnp.float32), parameters)
    losses = []
    for batch, _ in islice(psj.batches(make_loader(weighted, rows=8)), 200):
        value, parameters = train(parameters, batch)
        losses.append(float(value))
    assert np.isfinite(losses).all()
    assert losses[0] > 3.5
    assert losses[-1] < 2.0


def test_resuming_goes_on_after_the_step(weighted):
    whole = [batch for batch, _ in islice(psj.batches(make_loader(weighted)), 6)]
    _, step = next(islice(psj.batches(make_loader(weighted)), 2, 3))
    resumed = make_loader(weighted)
    resumed.load_state_dict(step.resume_state)
    for mine, (theirs, _) in zip(whole[3:], psj.batches(resumed), strict=False):
        assert mine.tokens.tolist() == theirs.tokens.tolist()


@pytest.mark.parametrize("batch_size", [None, 1])
def test_nothing_changes_an_array_that_jax_holds(weighted, batch_size):
    """The loader fills its buffers again; a batch must not see it."""
    loader = make_loader(weighted, rows=2, prefetch=1)
    batches = psj.batches(loader, batch_size=batch_size)
    kept = [next(batches)[0] for _ in range(4)]
    before = [jax.tree.map(lambda leaf: np.array(leaf, copy=True), batch) for batch in kept]
    for _ in islice(batches, 60):
        pass
    for batch, then in zip(kept, before, strict=True):
        for now, old in zip(jax.tree.leaves(batch), jax.tree.leaves(then), strict=True):
            np.testing.assert_array_equal(now, old)


def test_several_distances_have_an_axis(weighted):
    need = InputRequirements(asked_by="me", target_distances=3).merge(psj.REQUIREMENTS)
    (batch, step), *_ = islice(psj.batches(make_loader(weighted, requirements=need)), 1)
    assert batch.targets.shape == batch.loss_weights.shape == (4, 3, LENGTH)
    assert batch.loss_denominator.tolist() == [
        np.float32(value) for value in step.loss_denominators
    ]
    np.testing.assert_array_equal(
        batch.targets[:, 2], [np.maximum(row.targets[2], 0) for row in step]
    )


def test_int64_rows_become_int32(weighted):
    need = InputRequirements(asked_by="me", dtype="int64").merge(psj.REQUIREMENTS)
    (batch, step), *_ = islice(psj.batches(make_loader(weighted, requirements=need)), 1)
    assert batch.tokens.dtype == "int32"
    compare(batch, step)


def test_joined_rows_are_one_segment(weighted):
    (batch, step), *_ = islice(psj.batches(make_loader(weighted, attention="row")), 1)
    for i, row in enumerate(step):
        assert batch.segment_ids[i].tolist() == [1] * row.num_tokens + [0] * (
            LENGTH - row.num_tokens
        )
        assert batch.num_documents[i] == 1
        assert batch.document_lengths[i, 0] == row.num_tokens


def test_a_padded_cu_seqlens_says_the_same(weighted):
    need = InputRequirements(asked_by="me", cu_seqlens_capacity=LENGTH + 2).merge(psj.REQUIREMENTS)
    for (mine, _), (theirs, _) in zip(
        islice(psj.batches(make_loader(weighted, requirements=need)), 5),
        psj.batches(make_loader(weighted)),
        strict=False,
    ):
        assert mine.cu_seqlens.tolist() == theirs.cu_seqlens.tolist()
        assert mine.num_documents.tolist() == theirs.num_documents.tolist()


def test_more_documents_than_there_is_room_for_name_the_row(weighted):
    most = [[row.num_documents for row in step] for step in islice(make_loader(weighted), 20)]
    limit = max(map(max, most[:1])) - 1
    row = next(i for i, count in enumerate(most[0]) if count > limit)
    with pytest.raises(ConfigError, match=rf"row {row}: {limit + 1}.*max_documents"):
        next(psj.batches(make_loader(weighted), max_documents=limit))
    batch, step = next(psj.batches(make_loader(weighted), max_documents=limit + 1))
    compare(batch, step, limit + 1)
    # The loader's own limit is that of the batch.
    loader = make_loader(weighted, documents_per_row=limit)
    batch, step = next(psj.batches(loader))
    assert max(row.num_documents for row in step) == limit
    compare(batch, step, limit)
    assert next(psj.batches(loader, max_documents=limit))


def test_settings_that_cannot_work_are_refused_at_once(weighted):
    with pytest.raises(ConfigError, match=r"batch_size.*process's 4.*got 3"):
        psj.batches(make_loader(weighted), batch_size=3)
    with pytest.raises(ConfigError, match="max_documents must be at least 1, got 0"):
        psj.batches(make_loader(weighted), max_documents=0)
    bare = make_loader(weighted, requirements=InputRequirements(loss_weights=True))
    with pytest.raises(ConfigError, match=r"loader's.*document_ids, cu_seqlens"):
        next(psj.batches(bare))
