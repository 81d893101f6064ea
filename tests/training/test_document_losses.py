"""Losses by document against full logits in float64, document by document: sums, right predictions,
gradients.
"""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loss import Head, Largest, inputs, plain

import penstock as ps
from makers.datasets import random_documents
from makers.models import tiny_huggingface, tiny_model
from makers.rows import make_row, random_row
from makers.trees import tree_dataset
from penstock.core.errors import ConfigError
from penstock.learn.training import cross_entropy
from penstock.learn.training.cross_entropy import chunked_cross_entropy
from penstock.learn.training.document_losses import target_losses
from penstock.models import head as heads
from penstock.plan.inputs import IGNORE

VOCAB = 61
pytestmark = pytest.mark.usefixtures("plain_torch")


def twin(net, row, owners, count, z_loss=0.0):
    """Losses [D, n] with gradient, weights, targets and right ones, slot by slot from all logits;
    `owners`: the document of each slot.
    """
    tensors = net.tensors(row)
    logits = net.logits(net(tensors)).double()
    distances = len(tensors.targets)
    losses = [[logits.sum() * 0] * count for _ in range(distances)]
    weights, targets, right = np.zeros((3, distances, count))
    for d in range(distances):
        for slot, target in enumerate(tensors.targets[d].tolist()):
            weight = float(tensors.loss_weights[d, slot])
            if target == IGNORE or not weight:
                continue
            scores, owner = logits[d, slot], owners[slot]
            log_z = torch.logsumexp(scores, 0)
            nats = log_z - scores[target]
            losses[d][owner] = losses[d][owner] + weight * (nats + z_loss * log_z**2)
            weights[d, owner] += weight
            targets[d, owner] += 1
            right[d, owner] += int(np.argmax(scores.detach().numpy())) == target
    return torch.stack([torch.stack(line) for line in losses]), weights, targets, right


def assert_same(found, expected):
    losses, weights, targets, right = expected
    torch.testing.assert_close(found.losses, losses, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(found.weights.numpy(), weights, rtol=1e-6)
    assert np.array_equal(found.targets.numpy(), targets)
    assert np.array_equal(found.right.numpy(), right)


def gradients(net, value):
    net.zero_grad()
    value.backward()
    return [weight.grad.clone() for weight in net.parameters()]


def half_trained(row, seed):
    """The row with half of its targets untrained, by weight 0."""
    kept = np.random.default_rng(seed).random(row.targets.shape) < 0.5
    row.loss_weights[...] *= kept
    return row


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    padding=st.integers(0, 4),
    distances=st.integers(1, 3),
    prefixed=st.booleans(),
    chunk=st.integers(1, 20),
    z_loss=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 99),
)
def test_sums_and_gradients_are_those_of_all_logits(
    lengths, padding, distances, prefixed, chunk, z_loss, seed
):
    net = tiny_model(
        VOCAB, dtype=torch.float64, width=16, heads=2, kv_heads=None, prediction_heads=distances
    )
    prefixes = [seed % (length + 1) for length in lengths] if prefixed else None
    row = random_row(
        lengths, padding=padding, distances=distances, prefixes=prefixes, seed=seed, below=VOCAB
    )
    row = half_trained(row, seed)
    expected = twin(net, row, row.document_ids, len(lengths), z_loss)
    found = ps.loss(net, row, by="document", z_loss=z_loss, chunk=chunk)
    assert_same(found, expected)
    # Any function of the sums can be trained, such as the mean of the documents' perplexities.
    factors = torch.from_numpy(np.random.default_rng(seed).normal(size=found.losses.shape))
    for mine, its in zip(
        gradients(net, (factors * found.losses).sum() + (found.losses / 50).exp().sum()),
        gradients(net, (factors * expected[0]).sum() + (expected[0] / 50).exp().sum()),
        strict=True,
    ):
        torch.testing.assert_close(mine, its, rtol=1e-8, atol=1e-10)


def test_gradcheck():
    hidden, targets, weights = inputs(7)
    head = Head()

    def of(hidden, weight, bias):
        def logits(states):
            return 5 * torch.tanh(torch.nn.functional.linear(states, weight, bias) / 5)

        return target_losses(heads.Head(logits), hidden, targets, weights, z_loss=0.1, chunk=3)[0]

    assert torch.autograd.gradcheck(of, (hidden, head.weight, head.bias))


@pytest.mark.parametrize("frozen", ["head", "hidden", "both"])
def test_only_what_learns_gets_gradients(frozen):
    hidden, targets, weights = inputs(9)
    head = Head()
    head.requires_grad_(frozen not in ("head", "both"))
    hidden.requires_grad_(frozen not in ("hidden", "both"))
    each, _ = target_losses(heads.Head(head), hidden, targets, weights, chunk=4)
    assert each.requires_grad == (frozen != "both")
    leaves = [p for p in (hidden, *head.parameters()) if p.requires_grad]
    if leaves:
        expected = torch.autograd.grad(plain(head(hidden), targets, weights, 1, 0), leaves)
        for mine, its in zip(torch.autograd.grad(each.sum(), leaves), expected, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-11, atol=1e-12)


def test_the_logits_of_a_row_never_exist_at_once():
    vocab, tokens, width, chunk = 50, 640, 6, 8
    weight = torch.randn(vocab, width, requires_grad=True)
    hidden = torch.randn(tokens, width, requires_grad=True)
    with Largest() as largest:
        head = heads.Head(lambda x: x @ weight.T)
        targets, weights = torch.randint(vocab, (tokens,)), torch.ones(tokens)
        each, _ = target_losses(head, hidden, targets, weights, chunk=chunk)
        each.square().sum().backward()
    assert largest.elements == tokens * width


def test_weights_that_changed_before_the_backward_pass_are_not_used():
    hidden, targets, weights = inputs(9)
    head = Head()
    each, _ = target_losses(heads.Head(head), hidden, targets, weights)
    with torch.no_grad():
        head.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        each.sum().backward()


def test_of_equal_logits_the_first_is_the_prediction():
    logits = torch.tensor([[1.0, 3.0, 3.0], [1.0, 3.0, 3.0], [3.0, 3.0, 3.0], [0.0, 0.0, 1.0]])
    _, right = target_losses(heads.Head(lambda x: x), logits, torch.tensor([1, 2, 0, 2]), ones(4))
    assert right.tolist() == [True, False, True, True]


def ones(count):
    return torch.ones(count)


def test_predictions_are_read_before_a_kernel_takes_the_memory_of_the_logits(monkeypatch):
    """As on a GPU: the gradient is written over the logits."""

    def fused(logits, targets, weights, *, scale, z_loss, gradient):
        found = cross_entropy._by_torch(logits, targets, weights, scale, z_loss)
        if gradient is not None:
            gradient.copy_(found.gradient)
        return found.entropies, torch.logsumexp(logits, -1)

    monkeypatch.setattr(cross_entropy, "fused_for", lambda device, dtype: fused)
    weight = torch.randn(13, 6, requires_grad=True)
    hidden, targets = torch.randn(20, 6), torch.randint(13, (20,))
    right = torch.zeros(20, dtype=torch.bool)
    chunked_cross_entropy(lambda x: x @ weight.t(), hidden, targets, ones(20), chunk=7, right=right)
    assert torch.equal(right, (hidden @ weight.t()).argmax(1) == targets)
    assert right.any()


# -- rows and steps


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return ps.write_dataset(
        tmp_path_factory.mktemp("documents") / "d",
        random_documents(60, 1, 90, below=VOCAB, seed=1),
        vocab_size=VOCAB,
    )


def model(**more):
    return tiny_model(VOCAB, dtype=torch.float64, width=16, heads=2, kv_heads=None, **more)


def loader(data, net, **more):
    return ps.Loader(
        data,
        **{"sequence_length": 64, "rows_per_step": 3, "seed": 2, "threads": 0, **more},
        requirements=net.requirements(),
    )


@pytest.mark.parametrize("distances", [1, 2])
def test_a_step_names_its_documents(dataset, distances):
    """Long ones are cut, and their parts are in several rows."""
    net = model(prediction_heads=distances)
    rows = loader(dataset, net)
    step = next(iter(rows))
    found = ps.loss(net, step, by="document")
    pieces = rows.explain(0)
    assert len(found) == len(pieces) > 3
    assert found.numbers.tolist() == [piece.document for piece in pieces]
    assert found.first_tokens.tolist() == [piece.first_token for piece in pieces]
    assert max(found.first_tokens) > 0
    assert found.rows.tolist() == [piece.row for piece in pieces]
    assert found.sources.tolist() == [0] * len(pieces)
    for row in range(3):
        here = [piece for piece in pieces if piece.row == row]
        owners = np.repeat(np.arange(len(here)), [piece.num_tokens for piece in here])
        owners = np.pad(owners, (0, 64 - len(owners)))
        at = np.flatnonzero(found.rows == row)
        for name, expected in zip(
            ("losses", "weights", "targets", "right"),
            twin(net, step[row], owners, len(here)),
            strict=True,
        ):
            got = getattr(found, name)[:, at].double()
            torch.testing.assert_close(got, torch.as_tensor(expected), rtol=1e-6, atol=1e-8)


def test_documents_add_up_to_the_loss_of_the_step(dataset):
    net = model(prediction_heads=2, prediction_weights=(1.0, 0.3))
    step = next(iter(loader(dataset, net)))
    found = ps.loss(net, step, by="document", z_loss=0.1)
    shares = torch.tensor([1.0, 0.3], dtype=torch.float64) / torch.tensor(step.loss_denominators)
    mine = gradients(net, (found.losses.sum(1) * shares).sum())
    whole = ps.loss(net, step, z_loss=0.1)
    assert (found.losses.sum(1) * shares).sum().item() == pytest.approx(whole.item(), rel=1e-12)
    for one, its in zip(mine, gradients(net, whole), strict=True):
        torch.testing.assert_close(one, its, rtol=1e-8, atol=1e-12)
    assert found.weights.sum(1).tolist() == pytest.approx(step.loss_denominators)


def test_rows_joined_or_one_by_one_have_the_same_documents(dataset):
    net = model()
    for step, _ in zip(loader(dataset, net), range(4), strict=False):
        whole = ps.loss(net, step, by="document")
        single = [ps.loss(net, row, by="document") for row in step]
        torch.testing.assert_close(whole.losses, torch.cat([one.losses for one in single], 1))
        assert [len(one) for one in single] == np.bincount(whole.rows, minlength=3).tolist()
        assert all(one.numbers is None and not one.rows.any() for one in single)
        # A row that was joined by hand has its paddings as documents.
        [joined] = step.joined(len(step))
        found = ps.loss(net, joined, by="document")
        assert torch.equal(found.losses[:, found.sources >= 0], whole.losses)
        assert not found.targets[:, found.sources < 0].any()


def test_rows_of_documents_that_see_each_other(dataset):
    """They do not say where their documents begin; the step does."""
    net = model()
    need = ps.InputRequirements(positions=True, cu_seqlens=True, loss_weights=True, attention="row")
    rows = ps.Loader(
        dataset, sequence_length=64, rows_per_step=3, seed=2, threads=0, requirements=need
    )
    step = next(iter(rows))
    found = ps.loss(net, step, by="document")
    assert len(found) == len(rows.explain(0))
    number = int(np.argmax([row.num_documents for row in step]))
    with pytest.raises(ConfigError, match=r"\d+ documents and does not say where .* give the step"):
        ps.loss(net, step[number], by="document")
    owners = np.repeat(
        np.arange(step[number].num_documents),
        [piece.num_tokens for piece in rows.explain(0, number)],
    )
    owners = np.pad(owners, (0, 64 - len(owners)))
    expected = twin(net, step[number], owners, step[number].num_documents)
    torch.testing.assert_close(found.losses[:, found.rows == number], expected[0])


def test_a_prefix_tree_is_one_document(tmp_path):
    """What its paths share counts once, as in the loss."""
    data, _ = tree_dataset(tmp_path / "trees", vocabulary=VOCAB, documents=20)
    net = model()
    rows = loader(data, net, sequence_length=128)
    step = next(iter(rows))
    found = ps.loss(net, step, by="document")
    assert found.numbers.tolist() == [piece.document for piece in rows.explain(0)]
    forked = 0
    for number, row in enumerate(step):
        forked += row.reach is not None
        count = int(row.paths.documents.max()) + 1
        owners = np.zeros(128, np.int64)
        for path in range(len(row.paths)):
            owners[row.paths[path]] = row.paths.documents[path]
        expected = twin(net, row, owners, count)
        assert_same(ps.loss(net, row, by="document"), expected)
        torch.testing.assert_close(found.losses[:, found.rows == number], expected[0])
        assert ps.loss(net, row, by="document").sources.tolist() == [0] * count
    assert forked
    [joined] = step.joined(len(step))
    of_joined = ps.loss(net, joined, by="document")
    known = of_joined.sources >= 0
    assert torch.equal(of_joined.losses[:, known], found.losses)


@pytest.mark.parametrize(
    "objective",
    [
        ps.MaskedDiffusion(mask_token=60),
        ps.BlockDiffusion(mask_token=60, block=4),
        ps.BlockDiffusion(mask_token=60, block=4, form="prefix"),
    ],
    ids=["masked", "blocks", "prefix"],
)
def test_documents_of_diffusion_are_whole(dataset, objective):
    """Targets are of the slots themselves, and each document may be several nodes."""
    net = model()
    rows = loader(ps.Source(dataset, objective=objective), net, sequence_length=256)
    step = next(iter(rows))
    found = ps.loss(net, step, by="document")
    pieces = rows.explain(0)
    assert found.numbers.tolist() == [piece.document for piece in pieces]
    total = ps.loss(net, step).item() * step.loss_denominator
    assert found.losses.sum().item() == pytest.approx(total, rel=1e-6)
    for number, row in enumerate(step):
        here = [piece for piece in pieces if piece.row == number]
        owners = np.repeat(np.arange(len(here)), [piece.num_tokens for piece in here])
        expected = twin(net, row, np.pad(owners, (0, 256 - len(owners))), len(here))
        at = found.rows == number
        torch.testing.assert_close(found.losses[:, at], expected[0], rtol=1e-8, atol=1e-10)
        assert np.array_equal(found.right[:, at].numpy(), expected[3])
        if row.reach is None:
            assert torch.equal(ps.loss(net, row, by="document").losses, found.losses[:, at])
        else:
            with pytest.raises(ConfigError, match=r"the nodes of its documents .* give the step"):
                ps.loss(net, row, by="document")


def test_a_row_without_targets_reaches_every_weight():
    net, row = model(), make_row([5, 3])
    found = ps.loss(net, row, by="document")
    assert found.losses.tolist() == [[0.0, 0.0]]
    assert all(not grad.any() for grad in gradients(net, found.losses.sum()))
    assert np.isnan(found.means()).all()
    assert found.worst(3).tolist() == []


def test_a_model_of_transformers_and_no_gradients():
    net, alone = tiny_huggingface().double(), tiny_huggingface().double()
    row = half_trained(random_row((9, 4, 14), below=VOCAB), 0)
    with torch.no_grad():
        found = ps.loss(net, row, by="document")
    assert not found.losses.requires_grad
    for number, (begin, end) in enumerate([(0, 9), (9, 13), (13, 27)]):
        ids = torch.from_numpy(row.tokens[begin:end].astype(np.int64))
        logs = torch.log_softmax(alone(ids[None]).logits[0], -1).detach()
        due = sum(
            float(row.loss_weights[0, begin + slot]) * -float(logs[slot, ids[slot + 1]])
            for slot in range(end - begin - 1)
        )
        assert found.losses[0, number].item() == pytest.approx(due, rel=1e-9)


def test_the_worst_documents_come_first(dataset):
    net = model(prediction_heads=2)
    found = ps.loss(net, next(iter(loader(dataset, net))), by="document")
    means = found.means()
    for distance in (1, 2):
        worst = found.worst(4, distance=distance)
        line = means[distance - 1]
        assert line[worst].tolist() == sorted(line[~np.isnan(line)], reverse=True)[:4]
    assert (found.right <= found.targets).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"by": "row"}, "by must be 'document' or None, got 'row'"),
        ({"by": "document", "denominators": 3.0}, "not divided; leave out denominators"),
        ({"by": "document", "distance_weights": (1.0,)}, "leave out distance_weights"),
    ],
)
def test_what_does_not_go_together_is_refused(given, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        ps.loss(model(), random_row(), **given)


def test_distances_that_differ_are_refused():
    with pytest.raises(ConfigError, match="predicts 2 target distances, the row has 1"):
        ps.loss(model(prediction_heads=2), random_row(), by="document")
