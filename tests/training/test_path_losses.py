"""Losses of whole answers: against their formulas in NumPy, and the same for trees and for answers
stored apart.
"""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from training_makers import figures_of

from makers.rows import make_row
from makers.trees import tree_dataset
from penstock import Loader, Source, build_model, write_dataset
from penstock.core.errors import ConfigError
from penstock.data.shards import build_tree, extend_dataset
from penstock.data.shards.memory import weight_spans
from penstock.learn.training.answer_advantages import advantages
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.path_losses import PathScores, policy_loss, preference_loss
from penstock.learn.training.path_settings import (
    LABEL_KINDS,
    PAIR_KINDS,
    PolicySettings,
    PreferenceSettings,
)
from penstock.learn.training.path_training import PathTraining
from penstock.learn.training.settings import TrainSettings
from penstock.plan.inputs.answers import RowAnswers
from penstock.plan.inputs.paths import RowPaths
from penstock.use.runs.reference import score_documents

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
    logs, reference = (
        torch.from_numpy(-generator.uniform(0.1, 3, len(scores.slots))) for _ in range(2)
    )
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
        "cdpo": -(1 - SMOOTHING) * math.log(sigmoid(BETA * delta))
        - SMOOTHING * math.log(sigmoid(-BETA * delta)),
        "robust": (
            -(1 - SMOOTHING) * math.log(sigmoid(BETA * delta))
            + SMOOTHING * math.log(sigmoid(-BETA * delta))
        )
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
    settings = PreferenceSettings(
        kind=kind, beta=BETA, label_smoothing=smoothing, gamma=GAMMA, **also
    )
    both, _ = preference_loss(scores, logs, reference, settings)
    assert float(both) == pytest.approx(
        expected + 2 * max(0, 1 - BETA * delta) - 0.5 * better / 2, rel=1e-12
    )


@pytest.mark.parametrize("kind", LABEL_KINDS)
@pytest.mark.parametrize("label", [0, 1])
def test_labels_follow_their_formulas(kind, label):
    scores, logs, reference = two_answers(label=[label, -1])
    ratio = (logs - reference)[[0, 1]].sum().item()
    z = 0.7 if kind == "kto" else 0.0
    expected = 1 - sigmoid(BETA * (ratio - z if label else z - ratio))
    found, _ = preference_loss(
        scores, logs, reference, PreferenceSettings(kind=kind, beta=BETA), 0.7
    )
    assert float(found) == pytest.approx(expected, rel=1e-12)


def test_a_ranked_list_has_all_its_pairs():
    scores, logs, reference = two_answers((2, 3, 4), rank=[1, 0, 2])
    settings = PreferenceSettings(beta=BETA)
    found, figures = preference_loss(scores, logs, reference, settings)
    ratios = (scores.sums(logs) - scores.sums(reference)).tolist()
    expected = sum(
        -math.log(sigmoid(BETA * (ratios[a] - ratios[b]))) for a, b in ((1, 0), (1, 2), (0, 2))
    )
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


def slow_policy(scores, new, settings, divisor, rewards, *, reference=None, cut=()):
    """The loss as a float of lists, and its gradient to log-probabilities by hand, token by token.

    `rewards` of groups of two answers; `cut`: answers that `max_tokens` cut.
    """
    groups = [list(range(at, at + 2)) for at in range(0, len(rewards), 2)]
    total, gradient = 0.0, [0.0] * len(new)
    for path in range(len(rewards)):
        group = next(one for one in groups if path in one)
        numbers = [rewards[one] for one in group]
        dead = numbers[0] == numbers[1]
        if (dead and settings.dead_groups == "leave_out") or (
            path in cut and settings.truncated == "mask"
        ):
            continue
        mean = sum(numbers) / 2
        deviation = math.sqrt(sum((one - mean) ** 2 for one in numbers))
        gain = (rewards[path] - mean) / (deviation + 1e-4)
        mine = scores.entries[scores.owners == path].tolist()
        columns = {name: values.tolist() for name, values in scores.columns.items()}
        sampler = columns["log_probabilities"]
        old = columns.get(
            "trainer_log_probabilities", sampler if settings.importance_cap is None else new
        )

        def ratio_of(above, below, mine=mine):
            changes = [above[i] - below[i] for i in mine]
            if settings.importance == "sequence":
                changes = [sum(changes) / len(changes)] * len(changes)
            return [math.exp(change) for change in changes]

        ratios = ratio_of(new, old)
        weights = [1.0] * len(mine)
        if settings.importance_cap is not None:
            weights = [min(one, settings.importance_cap) for one in ratio_of(old, sampler)]
        low, high = 1 - settings.clip_low, 1 + settings.clip_high
        share = 1 / (divisor * (len(mine) if settings.normalise == "sequence" else 1))
        for i, ratio, weight in zip(mine, ratios, weights, strict=True):
            clipped = min(max(ratio, low), high)
            if settings.kind == "cispo":
                total -= share * weight * clipped * gain * new[i]
                gradient[i] -= share * weight * clipped * gain
                continue
            total -= share * weight * min(ratio * gain, clipped * gain)
            if ratio * gain <= clipped * gain:
                # Of a sequence's ratio, each token has an equal part.
                parts = mine if settings.importance == "sequence" else [i]
                for part in parts:
                    gradient[part] -= share * weight * ratio * gain / len(parts)
        for i in mine if settings.kl else ():
            gap = reference[i] - new[i]
            total += share * settings.kl * (math.exp(gap) - gap - 1)
            gradient[i] += share * settings.kl * (1 - math.exp(gap))
    return total, gradient


def four_answers(rewards, seed):
    """Two groups of two answers, with all columns and values."""
    generator = np.random.default_rng(seed)
    counts = generator.integers(2, 7, 4)
    slots, starts, at = [], [0], 2
    for count in counts:
        slots += [0, 1, *range(at, at + count)]
        starts.append(len(slots))
        at += count
    paths = RowPaths(
        slots=np.array(slots), starts=np.array(starts), documents=np.array([0, 0, 1, 1]),
        values={"reward": np.array(rewards, float), "truncated": np.array([0.0, 1.0, np.nan, 0.0])},
    )  # fmt: skip
    trained = torch.zeros(at, dtype=torch.bool)
    trained[2:] = True
    scores = PathScores.of(paths, trained, {})
    logs, reference = (
        torch.from_numpy(-generator.uniform(0.1, 3, len(scores.slots))) for _ in range(2)
    )
    scores.columns["log_probabilities"] = logs + torch.from_numpy(
        generator.normal(0, 0.5, len(logs))
    )
    return scores, logs, reference, generator


@pytest.mark.parametrize("kind", ["clip", "cispo"])
@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("cap", [None, 1.1])
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_policies_and_their_gradients_are_those_of_a_slow_twin(kind, importance, cap, stored, seed):
    rewards = [[1.0, 0.0, 0.5, 0.2], [0.3, 0.3, 1.0, 0.0], [0.1, 0.9, 0.7, 0.7]][seed]
    scores, logs, reference, generator = four_answers(rewards, seed)
    if stored:
        scores.columns["trainer_log_probabilities"] = logs + torch.from_numpy(
            generator.normal(0, 0.3, len(logs))
        )
    changed = 0
    for normalise, truncated, dead in itertools.product(
        ("sequence", "token"), ("train", "mask"), ("count", "leave_out")
    ):
        settings = PolicySettings(
            kind=kind,
            importance=importance,
            importance_cap=cap,
            clip_low=0.1,
            clip_high=0.15,
            kl=0.05,
            normalise=normalise,
            truncated=truncated,
            dead_groups=dead,
        )
        leaf = logs.clone().requires_grad_()
        found, figures = policy_loss(scores, leaf, reference, settings, 7.0)
        (gradient,) = torch.autograd.grad(found, leaf)
        total, expected = slow_policy(
            scores, logs.tolist(), settings, 7.0, rewards, reference=reference.tolist(), cut=[1]
        )
        assert float(found.detach()) == pytest.approx(total, rel=1e-9, abs=1e-12)
        np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-9, atol=1e-12)
        changed += figures["clipped"] + figures.get("capped", 0)
    assert changed or importance == "sequence"


def test_cispo_teaches_where_the_clip_does_not():
    scores, logs, _ = two_answers((3, 5), reward=[1.0, 0.0])
    scores.columns["log_probabilities"] = logs - 2.0
    gradients = []
    for kind in ("clip", "cispo"):
        leaf = logs.clone().requires_grad_()
        found, figures = policy_loss(
            scores, leaf, None, PolicySettings(kind=kind, clip_high=0.5), 1.0
        )
        gradients.append(torch.autograd.grad(found, leaf)[0])
        assert figures["clipped"] == (2 if kind == "clip" else 6)
    # The better answer, whose tokens became more likely already.
    assert gradients[0][:2].tolist() == [0, 0]
    gain = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert gradients[1][:2].tolist() == pytest.approx([-1.5 * gain / 2] * 2)


@pytest.mark.parametrize(
    ("settings", "answers", "tokens"),
    [
        ({}, 4, [0, 1, 2, 3]),
        ({"truncated": "mask"}, 3, [0, 2, 3]),
        ({"dead_groups": "leave_out"}, 2, [2, 3]),
        ({"truncated": "mask", "dead_groups": "leave_out"}, 2, [2, 3]),
    ],
)
@pytest.mark.parametrize("normalise", ["sequence", "token", "constant"])
def test_what_is_masked_is_in_no_denominator(tmp_path, settings, answers, tokens, normalise):
    """Of two groups, one is dead, and an answer of it was cut."""
    lengths = [2, 4, 3, 5]
    trees = [
        build_tree(
            [[n, 3, *range(10 * path + 4, 10 * path + 4 + lengths[path])] for path in pair],
            [[0, 0, *[1.0] * lengths[path]] for path in pair],
            values={"reward": rewards, "truncated": [0.0, float(n == 1)]},
        )
        for n, pair, rewards in ((1, (0, 1), [0.1, 0.1]), (2, (2, 3), [1.0, 0.0]))
    ]
    dataset = write_dataset(
        tmp_path / "d",
        [one.tokens for one in trees],
        trees=[one.tree for one in trees],
        vocab_size=90,
        spans=[weight_spans(one.loss_weights) for one in trees],
    )
    model = build_model(vocab_size=90, layers=1, width=16, heads=2)
    once = Source(dataset, name="x", max_epochs=1)
    loader = Loader(
        once, sequence_length=64, rows_per_step=1, requirements=model.requirements(), threads=0
    )
    length = 8 if normalise == "constant" else None
    policy = PolicySettings(normalise=normalise, length=length, **settings)
    training = PathTraining(model, loader, TrainSettings(policy=policy), torch.device("cpu"))
    step = next(iter(loader))
    training.begin(list(step), step, CPU)
    counted = sum(lengths[path] for path in tokens)
    assert (
        training.divisor
        == {"sequence": answers, "token": counted, "constant": 8 * answers}[normalise]
    )
    training.backward(step[0])
    assert figures_of(training, step)["policy.entropy_estimate"] > 0
    everything = PolicySettings(truncated="mask", dead_groups="leave_out")
    numbers = advantages(RowAnswers.of(step[0].paths), everything)
    assert np.isnan(numbers).sum() == 2


def tempered_dataset(folder, temperatures, *, share=False):
    """Groups of two answers, each group sampled at its temperature; None: it is not known."""
    trees = []
    for n, temperature in enumerate(temperatures):
        paths = [[n + 1, 2, 3 + n, 4, 5], [n + 1, 2, 6, 7, 8 + n, 9]]
        trees.append(
            build_tree(
                paths,
                [[0, 0, *[1.0] * (len(path) - 2)] for path in paths],
                values={
                    "reward": [1.0, 0.0],
                    "temperature": [math.nan if temperature is None else temperature] * 2,
                },
                share=share,
            )
        )
    return write_dataset(
        folder, [one.tokens for one in trees], trees=[one.tree for one in trees], vocab_size=90,
        spans=[weight_spans(one.loss_weights) for one in trees],
    )  # fmt: skip


def test_log_probabilities_are_those_at_the_temperature_of_the_answer(tmp_path):
    """The loss and its gradient against softmax(logits / T) of each document alone, by autograd; T
    differs in a row.
    """
    warm = [0.5, None, 1.7]
    dataset = tempered_dataset(tmp_path / "d", warm)
    model = build_model(vocab_size=90, layers=1, width=16, heads=2, dtype="float64").double()
    scored = extend_dataset(
        dataset, tmp_path / "old", {"log_probabilities": score_documents(model, dataset)}
    )
    loader = Loader(
        Source(scored, shuffle="none", name="x", max_epochs=1), sequence_length=64, rows_per_step=1,
        requirements=model.requirements(), threads=0,
    )  # fmt: skip
    policy = PolicySettings(kl=0.3, clip_high=0.05)
    training = PathTraining(model, loader, TrainSettings(policy=policy), torch.device("cpu"))
    reference = copy.deepcopy(model)
    step = next(iter(loader))
    training.begin(list(step), step, CPU)
    _, figures = training.loss(step[0])
    assert figures["log_ratio"] < 1e-5
    assert figures["kl"] == pytest.approx(0, abs=1e-12)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.sin(torch.arange(weight.numel())).view_as(weight)
    found = training.backward(step[0])
    got = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    model.zero_grad()
    total = 0.0
    for document, temperature in zip(scored, warm, strict=True):
        for path, gain in zip(range(2), (1, -1), strict=True):
            slots = document.tree.slots(path)
            ids = document.tokens[slots].astype(np.int64)
            row = make_row([len(ids)], tokens=ids)
            logs = [
                (one.logits(one(one.tensors(row)))[0] / (temperature or 1.0)).log_softmax(-1)[
                    torch.arange(1, len(ids) - 1), ids[2:]
                ]
                for one in (model, reference)
            ]
            old = torch.from_numpy(
                document.columns["log_probabilities"][slots][2:].astype(np.float64)
            )
            ratio = (logs[0] - old).exp()
            advantage = gain * 0.5 / (math.sqrt(0.5) + 1e-4)
            gap = logs[1].detach() - logs[0]
            each = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.05) * advantage)
            total = total + (each + 0.3 * (gap.exp() - gap - 1)).mean() / 6
    total.backward()
    expected = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    assert found == pytest.approx(total.item(), rel=1e-6)
    assert (got - expected).norm() < 1e-6 * expected.norm()


def test_temperatures_that_cannot_be_are_refused(tmp_path):
    model = build_model(vocab_size=90, layers=1, width=16, heads=2)
    paths = [[1, 2, 3, 4], [1, 2, 3, 5]]
    both = {"temperature": [0.5, 1.0], "reward": [1.0, 0.0]}
    mixed = build_tree(paths, [[0, 1, 1, 1]] * 2, values=both)
    apart = write_dataset(
        tmp_path / "mixed",
        [mixed.tokens],
        trees=[mixed.tree],
        spans=[weight_spans(mixed.loss_weights)],
        vocab_size=90,
    )
    for dataset, reason in (
        (tempered_dataset(tmp_path / "cold", [0.0]), "above 0"),
        (apart, "share a token"),
    ):
        loader = Loader(
            dataset,
            sequence_length=64,
            rows_per_step=1,
            requirements=model.requirements(),
            threads=0,
        )
        training = PathTraining(
            model, loader, TrainSettings(policy=PolicySettings()), torch.device("cpu")
        )
        step = next(iter(loader))
        training.begin(list(step), step, CPU)
        with pytest.raises(ConfigError, match=reason):
            training.loss(step[0])


def test_what_a_policy_must_know_of_its_data(tmp_path):
    dataset, _ = tree_dataset(tmp_path / "plain", documents=4, chains=0.0)
    trees = [one.tree for one in dataset]
    filtered = write_dataset(
        tmp_path / "filtered",
        [one.tokens for one in dataset],
        trees=trees,
        vocab_size=90,
        spans=[weight_spans(one.loss_weights) for one in dataset],
        sampling={"top_k": 5, "top_p": 0.9},
    )
    copied = extend_dataset(
        filtered, tmp_path / "copy", {"x": [np.zeros(len(one.tokens)) for one in filtered]}
    )
    model = build_model(vocab_size=90, layers=1, width=16, heads=2)

    def begin(data, **policy):
        loader = Loader(
            data, sequence_length=256, rows_per_step=1, requirements=model.requirements(), threads=0
        )
        return PathTraining(
            model, loader, TrainSettings(policy=PolicySettings(**policy)), torch.device("cpu")
        )

    assert begin(dataset).notices == []
    for data in (filtered, copied):
        with pytest.raises(ConfigError, match=r"sampled with top_k 5, top_p 0\.9"):
            begin(data)
        [notice] = begin(data, filtered="accept").notices
        assert "top_k 5" in notice
    with pytest.raises(ConfigError, match="which answers were cut"):
        begin(dataset, truncated="mask")
    with pytest.raises(ConfigError, match=r"importance_cap needs the sampler's"):
        begin(dataset, importance_cap=2.0)


def test_on_policy_the_gradient_is_that_of_the_advantage():
    scores, logs, _ = two_answers((3, 5), reward=[1.0, 0.0])
    leaf = logs.clone().requires_grad_()
    found, _ = policy_loss(scores, leaf, None, PolicySettings(scale="none"), 2.0)
    (gradient,) = torch.autograd.grad(found, leaf)
    assert gradient.tolist() == pytest.approx(
        [-0.125, -0.125, 0, 0.0625, 0.0625, 0.0625, 0.0625, 0]
    )


def gradients(dataset, settings, rows_per_pass=1, ranks=((0, 1),)):
    """Loss and gradients of a whole dataset in one step, from a model whose weights differ from the
    reference's.
    """
    loss, found = 0.0, None
    for place in ranks:
        model = build_model(vocab_size=90, layers=2, width=32, heads=2, dtype="float64").double()
        loader = Loader(
            Source(dataset, shuffle="none", name="x", max_epochs=1),
            sequence_length=1024,
            rows_per_step=4,
            window_rows=4,
            requirements=model.requirements(),
            data_parallel=place,
            threads=0,
        )
        training = PathTraining(model, loader, TrainSettings(**settings), torch.device("cpu"))
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.1 * torch.sin(torch.arange(weight.numel())).view_as(weight)
        step = next(iter(loader))
        rows = list(step.joined(rows_per_pass))
        training.begin(rows, step, CPU)
        loss += sum(float(training.backward(row)) for row in rows)
        here = torch.cat([weight.grad.flatten() for weight in model.parameters()])
        found = here if found is None else found + here
    return loss, found


@pytest.mark.parametrize("kind", [*PAIR_KINDS, *LABEL_KINDS, "policy"])
def test_trees_and_answers_stored_apart_give_the_same(tmp_path, kind):
    smoothing = 0.1 if kind in ("cdpo", "robust") else 0.0
    settings = {"policy": PolicySettings(kl=0.1)}
    if kind != "policy":
        settings = {
            "preference": PreferenceSettings(kind=kind, label_smoothing=smoothing, sft_weight=0.3)
        }
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
    """The two passes of the head against autograd through the whole loss, and a numeric
    derivative.
    """
    dataset, _ = tree_dataset(tmp_path / "d", documents=4, chains=0.0)
    model = build_model(vocab_size=90, layers=1, width=16, heads=2, dtype="float64").double()
    loader = Loader(
        dataset, sequence_length=256, rows_per_step=1, requirements=model.requirements(), threads=0
    )
    training = PathTraining(
        model,
        loader,
        TrainSettings(preference=PreferenceSettings(kind="simpo", beta=2.0)),
        torch.device("cpu"),
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
    "settings",
    [
        {"clip_low": -1},
        {"normalise": "constant"},
        {"length": 5},
        {"importance": "word"},
        {"scale": "all"},
        {"kind": "ppo"},
        {"importance_cap": 0},
        {"truncated": True},
        {"dead_groups": "drop"},
        {"filtered": "warn"},
    ],
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
    loader = Loader(
        dataset, sequence_length=256, rows_per_step=1, requirements=model.requirements(), threads=0
    )
    with pytest.raises(ConfigError, match=reason):
        PathTraining(model, loader, TrainSettings(**settings), torch.device("cpu"))
