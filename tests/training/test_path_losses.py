"""Losses of whole answers: against their formulas in NumPy, and the same for trees and for answers stored apart."""

import math

import numpy as np
import pytest
import torch

from makers.trees import tree_dataset
from penstock import Loader, Source, build_model
from penstock.core.errors import ConfigError
from penstock.inputs.paths import RowPaths
from penstock.training.distributed import Ranks
from penstock.training.path_losses import PathScores, policy_loss, preference_loss
from penstock.training.path_settings import LABEL_KINDS, PAIR_KINDS, PolicySettings, PreferenceSettings
from penstock.training.path_training import PathTraining
from penstock.training.settings import TrainSettings

CPU = Ranks(torch.device("cpu"))
BETA, SMOOTHING, GAMMA = 0.3, 0.1, 0.4


def two_answers(counts=(3, 5), seed=0, **values):
    """Scores of one document: a prompt of two slots, and answers of these lengths."""
    slots, starts = [], [0]
    at = 2
    for count in counts:
        slots += [0, 1, *range(at, at + count)]
        starts.append(len(slots))
        at += count
    paths = RowPaths(
        slots=np.array(slots), starts=np.array(starts), documents=np.zeros(len(counts), np.int64),
        values={name: np.array(value, np.float64) for name, value in values.items()},
    )  # fmt: skip
    trained = torch.zeros(at, dtype=torch.bool)
    trained[2:] = True
    generator = np.random.default_rng(seed)
    scores = PathScores.of(paths, trained, {})
    logs, reference = (torch.from_numpy(-generator.uniform(0.1, 3, len(scores.slots))) for _ in range(2))
    return scores, logs, reference


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("kind", PAIR_KINDS)
def test_pairs_follow_their_formulas(kind):
    scores, logs, reference = two_answers(rank=[0, 1])
    # The last slot of an answer has no target.
    assert scores.counts.tolist() == [2, 4]
    better, worse = logs[[0, 1]].sum().item(), logs[[3, 4, 5, 6]].sum().item()
    ratios = better - reference[[0, 1]].sum().item(), worse - reference[[3, 4, 5, 6]].sum().item()
    delta, by_token = ratios[0] - ratios[1], ratios[0] / 2 - ratios[1] / 4
    odds = [m - math.log(1 - math.exp(m)) for m in (better / 2, worse / 4)]
    expected = {
        "dpo": -math.log(sigmoid(BETA * delta)),
        "cdpo": -(1 - SMOOTHING) * math.log(sigmoid(BETA * delta)) - SMOOTHING * math.log(sigmoid(-BETA * delta)),
        "robust": (-(1 - SMOOTHING) * math.log(sigmoid(BETA * delta)) + SMOOTHING * math.log(sigmoid(-BETA * delta)))
        / (1 - 2 * SMOOTHING),
        "hinge": max(0, 1 - BETA * delta),
        "ipo": (by_token - 1 / (2 * BETA)) ** 2,
        "ipo_sum": (delta - 1 / (2 * BETA)) ** 2,
        "sigmoid_norm": -math.log(sigmoid(BETA * by_token)),
        "simpo": -math.log(sigmoid(BETA * (better / 2 - worse / 4) - GAMMA)),
        "orpo": -BETA * math.log(sigmoid(odds[0] - odds[1])),
    }[kind]
    smoothing = SMOOTHING if kind in ("cdpo", "robust") else 0.0
    settings = PreferenceSettings(kind=kind, beta=BETA, label_smoothing=smoothing, gamma=GAMMA)
    found, figures = preference_loss(scores, logs, reference, settings)
    assert float(found) == pytest.approx(expected, rel=1e-12)
    assert figures["margin"] == pytest.approx(BETA * delta)
    assert figures["accuracy"] == float(delta > 0)
    if kind == "hinge":
        return
    also = {"sft_weight": 0.5, "also": {"hinge": 2}}
    settings = PreferenceSettings(kind=kind, beta=BETA, label_smoothing=smoothing, gamma=GAMMA, **also)
    both, _ = preference_loss(scores, logs, reference, settings)
    assert float(both) == pytest.approx(expected + 2 * max(0, 1 - BETA * delta) - 0.5 * better / 2, rel=1e-12)


@pytest.mark.parametrize("kind", LABEL_KINDS)
@pytest.mark.parametrize("label", [0, 1])
def test_labels_follow_their_formulas(kind, label):
    scores, logs, reference = two_answers(label=[label, -1])
    ratio = (logs - reference)[[0, 1]].sum().item()
    z = 0.7 if kind == "kto" else 0.0
    expected = 1 - sigmoid(BETA * (ratio - z if label else z - ratio))
    found, _ = preference_loss(scores, logs, reference, PreferenceSettings(kind=kind, beta=BETA), 0.7)
    assert float(found) == pytest.approx(expected, rel=1e-12)


def test_a_ranked_list_has_all_its_pairs():
    scores, logs, reference = two_answers((2, 3, 4), rank=[1, 0, 2])
    settings = PreferenceSettings(beta=BETA)
    found, figures = preference_loss(scores, logs, reference, settings)
    ratios = (scores.sums(logs) - scores.sums(reference)).tolist()
    expected = sum(-math.log(sigmoid(BETA * (ratios[a] - ratios[b]))) for a, b in ((1, 0), (1, 2), (0, 2)))
    assert float(found) == pytest.approx(expected, rel=1e-12)
    assert figures["accuracy"] == sum(ratios[a] > ratios[b] for a, b in ((1, 0), (1, 2), (0, 2)))


@pytest.mark.parametrize("normalise", ["sequence", "token", "constant"])
@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("given", ["reward", "advantage"])
def test_policies_follow_their_formulas(normalise, importance, given):
    numbers = [1.0, 0.0, 0.25]
    scores, logs, reference = two_answers((3, 5, 4), **{given: numbers})
    most = 0.9 if importance == "token" else 0.2
    old = logs + torch.from_numpy(np.random.default_rng(5).uniform(-0.9, most, len(logs)))
    scores.columns["log_probabilities"] = old
    settings = PolicySettings(
        clip_low=0.2, clip_high=0.3, kl=0.05, importance=importance, normalise=normalise,
        length=9 if normalise == "constant" else None,
    )  # fmt: skip
    group = np.array(numbers)
    gains = group if given == "advantage" else (group - group.mean()) / (group.std(ddof=1) + 1e-4)
    total, active = 0.0, 0
    for path, gain in enumerate(gains):
        mine = scores.entries[scores.owners == path].tolist()
        changes = [float(logs[i] - old[i]) for i in mine]
        if importance == "sequence":
            changes = [sum(changes) / len(changes)] * len(changes)
        tokens = []
        for i, change in zip(mine, changes, strict=True):
            ratio = math.exp(change)
            gap = float(reference[i] - logs[i])
            clipped = min(max(ratio, 0.8), 1.3)
            active += clipped * gain < ratio * gain
            tokens.append(-min(ratio * gain, clipped * gain) + 0.05 * (math.exp(gap) - gap - 1))
        total += sum(tokens) / len(tokens) if normalise == "sequence" else sum(tokens)
    found, figures = policy_loss(scores, logs, reference, settings, 7.0)
    assert float(found) == pytest.approx(total / 7, rel=1e-12)
    assert figures["tokens"] == 9
    assert figures["clipped"] == active
    assert active or importance == "sequence"


def test_on_policy_the_gradient_is_that_of_the_advantage():
    scores, logs, _ = two_answers((3, 5), reward=[1.0, 0.0])
    leaf = logs.clone().requires_grad_()
    found, _ = policy_loss(scores, leaf, None, PolicySettings(scale="none"), 2.0)
    (gradient,) = torch.autograd.grad(found, leaf)
    assert gradient.tolist() == pytest.approx([-0.125, -0.125, 0, 0.0625, 0.0625, 0.0625, 0.0625, 0])


def gradients(dataset, settings, rows_per_pass=1, ranks=((0, 1),)):
    """Loss and gradients of a whole dataset in one step, from a model whose weights differ from the reference's."""
    loss, found = 0.0, None
    for place in ranks:
        model = build_model(vocab_size=90, layers=2, width=32, heads=2, dtype="float64").double()
        loader = Loader(
            Source(dataset, shuffle="none", name="x", max_epochs=1), sequence_length=1024, rows_per_step=4,
            window_rows=4, requirements=model.requirements(), data_parallel=place, threads=0,
        )  # fmt: skip
        training = PathTraining(model, loader, TrainSettings(**settings), torch.device("cpu"))
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.1 * torch.sin(torch.arange(weight.numel())).view_as(weight)
        step = next(iter(loader))
        rows = list(step.joined(rows_per_pass))
        training.begin(rows, step, CPU)
        loss += sum(training.backward(row) for row in rows)
        here = torch.cat([weight.grad.flatten() for weight in model.parameters()])
        found = here if found is None else found + here
    return loss, found


@pytest.mark.parametrize("kind", [*PAIR_KINDS, *LABEL_KINDS, "policy"])
def test_trees_and_answers_stored_apart_give_the_same(tmp_path, kind):
    smoothing = 0.1 if kind in ("cdpo", "robust") else 0.0
    settings = {"policy": PolicySettings(kl=0.1)}
    if kind != "policy":
        settings = {"preference": PreferenceSettings(kind=kind, label_smoothing=smoothing, sft_weight=0.3)}
    tree, _ = tree_dataset(tmp_path / "a", chains=0.0)
    apart, _ = tree_dataset(tmp_path / "b", chains=0.0, share=False)
    assert tree.num_tokens < 0.75 * apart.num_tokens
    loss, expected = gradients(apart, settings)
    assert expected.norm() > 1e-4
    for dataset, rows_per_pass, ranks in (
        (tree, 1, ((0, 1),)),
        (tree, 4, ((0, 1),)),
        *(() if kind == "kto" else ((tree, 2, ((0, 2), (1, 2))),)),
    ):
        other, found = gradients(dataset, settings, rows_per_pass, ranks)
        assert other == pytest.approx(loss, abs=1e-12)
        assert (found - expected).norm() < 1e-10 * expected.norm()


def test_the_gradient_is_that_of_the_loss(tmp_path):
    """The two passes of the head against autograd through the whole loss, and a numeric derivative."""
    dataset, _ = tree_dataset(tmp_path / "d", documents=4, chains=0.0)
    model = build_model(vocab_size=90, layers=1, width=16, heads=2, dtype="float64").double()
    loader = Loader(dataset, sequence_length=256, rows_per_step=1, requirements=model.requirements(), threads=0)
    training = PathTraining(
        model, loader, TrainSettings(preference=PreferenceSettings(kind="simpo", beta=2.0)), torch.device("cpu")
    )
    step = next(iter(loader))
    training.begin([step[0]], step, CPU)
    training.backward(step[0])
    for weight in list(model.parameters())[:3]:
        place = tuple(0 if size < 5 else 4 for size in weight.shape)
        expected = weight.grad[place].item()
        with torch.no_grad():
            values = []
            for change in (1e-6, -2e-6):
                weight[place] += change
                values.append(float(training.loss(step[0])[0]))
            weight[place] += 1e-6
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kind": "dpo", "label_smoothing": 0.1}, "ignores"),
        ({"kind": "nothing"}, "kind must be one of"),
        ({"kind": "dpo", "also": {"kto": 1.0}}, "cannot be combined"),
        ({"beta": 0}, "above 0"),
        ({"kind": "cdpo", "label_smoothing": 0.5}, "below 0.5"),
        ({"sft_weight": -1}, "0 or more"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        PreferenceSettings(**settings)


@pytest.mark.parametrize(
    "settings", [{"clip_low": -1}, {"normalise": "constant"}, {"length": 5}, {"importance": "word"}, {"scale": "all"}]
)
def test_policies_that_make_no_sense_are_refused(settings):
    with pytest.raises(ConfigError, match="policy"):
        PolicySettings(**settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"preference": PreferenceSettings(reference="lora")}, "training.lora is not set"),
        ({"preference": PreferenceSettings(reference="cached")}, "penstock reference"),
        ({"preference": PreferenceSettings(), "policy": PolicySettings()}, "cannot be combined"),
        ({"preference": PreferenceSettings(), "z_loss": 0.1}, "z_loss"),
        ({"policy": PolicySettings(), "micro_sequences": 2}, "micro_sequences"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path, settings, reason):
    dataset, _ = tree_dataset(tmp_path / "d", documents=4)
    model = build_model(vocab_size=90, layers=1, width=16, heads=2)
    loader = Loader(dataset, sequence_length=256, rows_per_step=1, requirements=model.requirements(), threads=0)
    with pytest.raises(ConfigError, match=reason):
        PathTraining(model, loader, TrainSettings(**settings), torch.device("cpu"))
