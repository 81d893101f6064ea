"""The projector against dense matrices, its gradients, and what it does with rows that have no
cell.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from penstock.learn.distillation.projection import Projection  # noqa: E402
from penstock.learn.distillation.token_losses import Projector  # noqa: E402

STUDENT, TEACHER = 12, 7


def made_up(seed: int, k: int = 3) -> Projection:
    """Rows of 0 to k cells."""
    chance = np.random.default_rng(seed)
    indices, weights = np.full((STUDENT, k), -1, np.int32), np.zeros((STUDENT, k), np.float32)
    for row in range(STUDENT):
        count = int(chance.integers(0, k + 1)) if row else 0
        indices[row, :count] = chance.permutation(TEACHER)[:count]
        shares = np.sort(chance.random(count).astype(np.float32) + 0.1)[::-1]
        weights[row, :count] = shares / shares.sum()
    return Projection(
        indices=indices,
        weights=weights,
        exact=weights[:, 0] == 1,
        student_fingerprint="a",
        teacher_fingerprint="b",
        student_size=STUDENT,
        teacher_size=TEACHER,
    )


def dense(projection: Projection) -> "torch.Tensor":
    matrix = torch.zeros(STUDENT, TEACHER, dtype=torch.float64)
    for row in range(STUDENT):
        for column, weight in zip(projection.indices[row], projection.weights[row], strict=True):
            if column >= 0:
                matrix[row, int(column)] += float(weight)
    return matrix


def probabilities(
    count: int, seed: int = 0, dtype: "torch.dtype" = torch.float64
) -> "torch.Tensor":
    return torch.randn(
        count, STUDENT, generator=torch.Generator().manual_seed(seed), dtype=dtype
    ).softmax(1)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 5), st.booleans())
def test_projected_as_by_the_dense_matrix(seed: int, count: int, learnable: bool) -> None:
    projection = made_up(seed)
    projector, p = Projector(projection, learnable=learnable), probabilities(count, seed)
    expected = p @ dense(projection)
    found = projector(p)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    ids = torch.randint(TEACHER, (count, 4), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        projector.columns(p, ids), found.gather(1, ids), atol=1e-12, rtol=1e-12
    )


@pytest.mark.parametrize("learnable", [True, False])
def test_mass_is_kept_but_for_empty_rows(learnable: bool) -> None:
    projection = made_up(3)
    projector, p = Projector(projection, learnable=learnable), probabilities(6)
    if learnable:
        with torch.no_grad():
            projector.log_weights += torch.randn(
                STUDENT, 3, generator=torch.Generator().manual_seed(1)
            )
    kept = p[:, torch.from_numpy(~projection.empty)].sum(1)
    assert projection.empty.any()
    torch.testing.assert_close(projector(p).sum(1), kept, atol=1e-6, rtol=1e-6)


def test_float32_stays_float32() -> None:
    p = probabilities(4, dtype=torch.float32)
    projector = Projector(made_up(3))
    assert (
        projector(p).dtype
        == projector.columns(p, torch.zeros(4, 2, dtype=torch.int64)).dtype
        == torch.float32
    )


@pytest.mark.parametrize("learnable", [True, False])
def test_gradients(learnable: bool) -> None:
    """Of the probabilities and of the learnable weights, by finite differences; on two ways."""
    projector = Projector(made_up(5), learnable=learnable).double()
    p = probabilities(3).requires_grad_()
    ids = torch.tensor([[0, 6, 2], [2, 2, 1], [5, 3, 4]])
    inputs = (p, *projector.parameters())
    assert len(inputs) == 1 + learnable
    for way in (lambda p, *_: projector(p), lambda p, *_: projector.columns(p, ids)):
        assert torch.autograd.gradcheck(way, inputs)


def test_learnt_rows_keep_their_pattern_and_their_sum() -> None:
    projection = made_up(7)
    projector = Projector(projection, learnable=True)
    optimizer = torch.optim.SGD(projector.parameters(), lr=0.5)
    p = probabilities(8, dtype=torch.float32)
    target = torch.randn(8, TEACHER, generator=torch.Generator().manual_seed(2)).softmax(1)
    losses = []
    for _ in range(20):
        loss = ((projector(p) - target) ** 2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    weights = projector.cell_weights().detach()
    assert losses[-1] < losses[0]
    assert (weights[projector.filled] > 0).all()
    assert (weights[~projector.filled] == 0).all()
    torch.testing.assert_close(weights.sum(1), torch.from_numpy(~projection.empty).float())


def test_the_same_bits_each_time_with_deterministic_algorithms() -> None:
    projector, p = Projector(made_up(9), learnable=True), probabilities(50, dtype=torch.float32)
    ids = torch.randint(TEACHER, (50, 4), generator=torch.Generator().manual_seed(0))
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(3):
            x = p.clone().requires_grad_()
            projector.zero_grad()
            (projector(x).square().sum() + projector.columns(x, ids).square().sum()).backward()
            runs.append((x.grad, projector.log_weights.grad.clone()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, runs[0][part]) for run in runs for part, one in enumerate(run))


def test_nothing_of_a_projection_is_saved_with_a_model() -> None:
    assert list(Projector(made_up(0)).state_dict()) == []
    assert list(Projector(made_up(0), learnable=True).state_dict()) == ["log_weights"]
