"""Answers of several paths: policies count each answer once, and each of its tokens once. Against a
twin on lists, which knows nothing of slots.
"""

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from python_makers import KillAfter, KilledError
from training_makers import figures_of, on_two_processes

import penstock as ps
from makers.texts import make_texts
from makers.tokenizers import tiny_tokenizer
from penstock.core.errors import ConfigError
from penstock.data.shards import build_tree
from penstock.data.shards.memory import weight_spans, write_dataset
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

CPU = Ranks(torch.device("cpu"))
NOW = 9
"""Version of the policy that is trained."""


def number(kind, *key, low=-3.0, high=-0.1):
    """A number that depends on a token and all before it in its path, and on nothing else."""
    return random.Random(str((kind, *key))).uniform(low, high)


def drawn_group(generator, document):
    """A prompt and answers of 1 to 4 paths, which fork anywhere; of each path its tokens and
    whether each is trained in it.
    """
    prompt = [generator.randrange(9) for _ in range(generator.randint(1, 4))]
    answers = []
    for _ in range(generator.randint(1, 4)):
        paths = []
        for _ in range(generator.randint(1, 4)):
            begin = prompt
            if paths and generator.random() < 0.8:
                base = generator.choice(paths)[0]
                begin = base[: generator.randint(1, len(base))]
            ids = begin + [generator.randrange(2) for _ in range(generator.randint(1, 6))]
            paths.append((ids, [generator.random() < 0.6 for _ in ids]))
        answers.append(
            {
                "paths": paths,
                "reward": generator.choice([0.0, 0.5, 1.0]),
                "truncated": float(generator.random() < 0.2),
            }
        )
    if generator.random() < 0.3:
        for one in answers:
            one["reward"] = 0.5
    return {"document": document, "answers": answers}


def tokens_of(answer):
    """The trained tokens of an answer, each as all ids up to it: path after path, each once."""
    found = dict.fromkeys(
        tuple(ids[: at + 1]) for ids, _ in answer["paths"] for at in range(1, len(ids))
    )
    trained = {
        tuple(ids[: at + 1])
        for ids, flags in answer["paths"]
        for at in range(1, len(ids))
        if flags[at]
    }
    return [key for key in found if key in trained]


def turn_reward(document, key):
    value = number("turn", document, key, low=-1.0, high=1.0)
    return value if value > 0.2 else math.nan


def token_advantage(document, key):
    value = number("advantage", document, key, low=-1.0, high=1.5)
    return value if value < 1.2 else math.nan


def version_of(document, key):
    return random.Random(str(("version", document, key))).randint(3, NOW)


def twin_advantages(group, source, settings):
    """Of each answer: its tokens, each with its advantage; NaN: not trained."""
    document, answers = group["document"], group["answers"]
    tokens = [tokens_of(one) for one in answers]
    if source == "advantages":
        found = [[token_advantage(document, key) for key in mine] for mine in tokens]
        dead = not any(abs(one) > 0 for mine in found for one in mine if not math.isnan(one))
    else:
        if source == "turn_rewards":
            rewards = [[turn_reward(document, key) for key in mine] for mine in tokens]
        else:
            rewards = [[one["reward"]] for one in answers]
        given = [one for mine in rewards for one in mine if not math.isnan(one)]
        if not given:
            return [[(key, math.nan) for key in mine] for mine in tokens]
        mean = sum(given) / len(given)
        dead = min(given) == max(given)
        scale = 1.0
        if settings.scale == "group":
            squares = sum((one - mean) ** 2 for one in given)
            scale = (math.sqrt(squares / (len(given) - 1)) if len(given) > 1 else 0.0) + 1e-4
        centred = [
            [0.0 if dead or math.isnan(one) else (one - mean) / scale for one in mine]
            for mine in rewards
        ]
        if source == "turn_rewards":
            found = [[sum(mine[at:]) for at in range(len(mine))] for mine in centred]
        else:
            found = [[mine[0]] * len(keys) for mine, keys in zip(centred, tokens, strict=True)]
    return [
        [
            (
                key,
                math.nan
                if (dead and settings.dead_groups == "leave_out")
                or (settings.truncated == "mask" and one["truncated"])
                or (
                    settings.max_staleness is not None
                    and NOW - version_of(document, key) > settings.max_staleness
                )
                else gain,
            )
            for key, gain in zip(keys, gains, strict=True)
        ]
        for one, keys, gains in zip(answers, tokens, found, strict=True)
    ]


def twin(groups, source, settings, divisor):
    """The loss, and its derivative by the log-probability of each (document, token); answers and
    tokens that are trained.
    """
    total, derivative, answers, count = 0.0, {}, 0, 0
    for group in groups:
        document = group["document"]
        for mine in twin_advantages(group, source, settings):
            mine = [(key, gain) for key, gain in mine if not math.isnan(gain)]
            answers += bool(mine)
            count += len(mine)
            new, old, sampler, reference = (
                [number(kind, document, key) for key, _ in mine]
                for kind in ("new", "old", "sampler", "reference")
            )

            def ratios(above, below):
                changes = [a - b for a, b in zip(above, below, strict=True)]
                if settings.importance == "sequence" and changes:
                    changes = [sum(changes) / len(changes)] * len(changes)
                return [math.exp(one) for one in changes]

            weights = [1.0] * len(mine)
            if settings.importance_cap is not None:
                weights = [min(one, settings.importance_cap) for one in ratios(old, sampler)]
            share = 1 / divisor / (len(mine) if settings.normalise == "sequence" and mine else 1)
            slopes = [0.0] * len(mine)
            for at, (ratio, weight) in enumerate(zip(ratios(new, old), weights, strict=True)):
                gain = mine[at][1]
                clipped = min(max(ratio, 1 - settings.clip_low), 1 + settings.clip_high)
                gap = reference[at] - new[at]
                if settings.kind == "cispo":
                    total -= share * weight * clipped * gain * new[at]
                    slopes[at] -= share * weight * clipped * gain
                else:
                    total -= share * weight * min(ratio * gain, clipped * gain)
                    parts = range(len(mine)) if settings.importance == "sequence" else [at]
                    for part in parts if ratio * gain <= clipped * gain else ():
                        slopes[part] -= share * weight * ratio * gain / len(parts)
                total += share * settings.kl * (math.exp(gap) - gap - 1)
                slopes[at] += share * settings.kl * (1 - math.exp(gap))
            for (key, _), slope in zip(mine, slopes, strict=True):
                derivative[document, key] = derivative.get((document, key), 0.0) + slope
    return total, derivative, answers, count


def scores_of(groups, source, *, share=True):
    """A row of the groups' trees, log-probabilities of its trained targets, and the token of
    each.
    """
    slots, starts, documents, trained, keys = [], [0], [], [], {}
    values = {name: [] for name in ("answer", "reward", "truncated")}
    columns = {}
    at = 0
    for group in groups:
        document = group["document"]
        # Any order of paths, but those of an answer keep theirs, by which later turns are later.
        order = [n for n, one in enumerate(group["answers"]) for _ in one["paths"]]
        random.Random(document).shuffle(order)
        following = [iter(one["paths"]) for one in group["answers"]]
        every = [(n, group["answers"][n], *next(following[n])) for n in order]
        extra = {"policy_version": version_of}
        if source != "reward":
            extra[source] = {"turn_rewards": turn_reward, "advantages": token_advantage}[source]
        mine = {n: set(tokens_of(one)) for n, one in enumerate(group["answers"])}

        def column(name, n, ids, document=document, extra=extra, mine=mine):
            found = []
            for end in range(1, len(ids) + 1):
                key = tuple(ids[:end])
                # Only the tokens that an answer trains have rewards.
                inside = key in mine[n] or name == "policy_version"
                found.append(extra[name](document, key) if inside else math.nan)
            return found

        built = build_tree(
            [ids for _, _, ids, _ in every],
            [[float(flag) for flag in flags] for *_, flags in every],
            values={
                "answer": [float(n) for n, *_ in every],
                "reward": [one["reward"] for _, one, *_ in every],
                "truncated": [one["truncated"] for _, one, *_ in every],
            },
            columns={name: [column(name, n, ids) for n, _, ids, _ in every] for name in extra},
            share=share,
        )
        count = len(built.tokens)
        for path, (_, _, ids, _) in enumerate(every):
            places = at + built.tree.slots(path)
            slots += places.tolist()
            starts.append(len(slots))
            documents.append(document)
            for place, end in zip(places[:-1].tolist(), range(2, len(ids) + 1), strict=True):
                keys[place] = (document, tuple(ids[:end]))
        for name in values:
            values[name] += built.tree.value(name).tolist()
        trained += [*(built.loss_weights[1:] != 0).tolist(), False]
        for name in extra:
            columns.setdefault(name, []).extend(built.columns[name].tolist())
        at += count
    paths = RowPaths(
        slots=np.array(slots),
        starts=np.array(starts),
        documents=np.array(documents),
        values={name: np.array(value) for name, value in values.items()},
    )
    scores = PathScores.of(
        paths, np.array(trained), {name: np.array(one) for name, one in columns.items()}
    )
    tokens = [keys[slot] for slot in scores.slots.tolist()]

    def logs(kind):
        return torch.tensor([number(kind, *key) for key in tokens], dtype=torch.float64)

    scores.columns["trainer_log_probabilities"] = logs("old")
    scores.columns["log_probabilities"] = logs("sampler")
    return scores, logs("new"), logs("reference"), tokens


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    source=st.sampled_from(["reward", "advantages", "turn_rewards"]),
    share=st.booleans(),
    kind=st.sampled_from(["clip", "cispo"]),
    importance=st.sampled_from(["token", "sequence"]),
    cap=st.sampled_from([None, 1.1]),
    normalise=st.sampled_from(["sequence", "token"]),
    scale=st.sampled_from(["group", "none"]),
    truncated=st.sampled_from(["train", "mask"]),
    dead=st.sampled_from(["count", "leave_out"]),
    staleness=st.sampled_from([None, 3]),
)
def test_a_policy_counts_answers(
    seed, source, share, kind, importance, cap, normalise, scale, truncated, dead, staleness
):
    generator = random.Random(seed)
    groups = [drawn_group(generator, document) for document in range(3)]
    settings = PolicySettings(
        kind=kind,
        importance=importance,
        importance_cap=cap,
        normalise=normalise,
        scale=scale,
        truncated=truncated,
        dead_groups=dead,
        kl=0.05,
        max_staleness=staleness,
        stale="refuse" if staleness is None else "mask",
    )
    scores, logs, reference, tokens = scores_of(groups, source, share=share)
    expected, derivative, answers, count = twin(groups, source, settings, 7.0)
    leaf = logs.clone().requires_grad_()
    found, figures = policy_loss(scores, leaf, reference, settings, 7.0, NOW)
    gradient = torch.autograd.grad(found, leaf)[0].tolist()
    assert float(found.detach()) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert figures["tokens"] == count
    sums = {}
    for key, slope in zip(tokens, gradient, strict=True):
        sums[key] = sums.get(key, 0.0) + slope
    for key, slope in sums.items():
        assert slope == pytest.approx(derivative.get(key, 0.0), rel=1e-6, abs=1e-9)
    assert answers <= len(scores.answers)


@settings(deadline=None)
@given(seed=st.integers(0, 10**6))
def test_an_answer_trains_what_any_of_its_paths_does_and_each_token_once(seed):
    generator = random.Random(seed)
    groups = [drawn_group(generator, document) for document in range(2)]
    for share in (True, False):
        scores, _, _, tokens = scores_of(groups, "reward", share=share)
        found = [[] for _ in range(len(scores.answers))]
        for entry, owner in zip(scores.entries.tolist(), scores.owners.tolist(), strict=True):
            found[owner].append(tokens[entry])
        expected = [
            [(group["document"], key) for key in tokens_of(one)]
            for group in groups
            for one in group["answers"]
        ]
        assert sorted(map(sorted, found)) == sorted(map(sorted, expected))


def test_a_third_path_shares_no_target_that_its_answer_does_not_train():
    paths = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7]]
    weights = [[0, 1, 1, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 1]]
    built = build_tree(paths, weights, values={"answer": [0, 0, 1]})
    # Paths of the first answer share all up to their fork; the other answer shares nothing.
    assert built.tree.branches.tolist() == [[0, 0, -1], [5, 3, 0], [7, 0, -1]]
    assert built.loss_weights.tolist() == [0, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 1]
    stored = build_tree(
        paths,
        [[0, 1, 1, 1, 1]] * 3,
        values={"answer": [0, 0, 1]},
        columns={"turn_rewards": [[math.nan, 0, 1, 2, 3]] * 3},
        share=False,
    )
    assert stored.loss_weights.tolist() == [0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 0, 1, 1, 1, 1]
    # So are rewards of turns, as none may be at a token that is not trained.
    assert (np.isnan(stored.columns["turn_rewards"]) == (stored.loss_weights == 0)).all()


def test_a_shared_weight_is_the_sum_over_answers():
    paths = [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    for answers, weight in (([0, 0, 0], 1), ([0, 0, 1], 2), ([0, 1, 2], 3), (None, 3)):
        values = {} if answers is None else {"answer": answers}
        assert build_tree(paths, values=values).loss_weights[1] == weight
    assert build_tree(paths, values={"answer": [0, 0, 1]}, shared_weights="once").loss_weights[1]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"answer": [0, 0], "reward": [1, 0]}, "another path of its answer"),
        ({"answer": [3, 3], "rank": [1, 0]}, "an answer has one rank"),
        ({"answer": [0, 0.5]}, "a path has answer 0.5; expected a whole number"),
        ({"answer": [0, -1]}, "a path has answer -1"),
    ],
)
def test_answers_that_make_no_sense_are_refused(tmp_path, values, reason):
    with pytest.raises(ConfigError, match=reason):
        build_tree([[1, 2, 3], [1, 2, 4]], values=values)
    built = build_tree([[1, 2, 3], [1, 2, 4]])
    table = np.array(list(values.values()), np.float64).T
    tree = type(built.tree)(
        branches=built.tree.branches, paths=built.tree.paths, values=table, names=tuple(values)
    )
    spans = [weight_spans(built.loss_weights)]
    with pytest.raises(ConfigError, match=reason):
        write_dataset(tmp_path / "d", [built.tokens], trees=[tree], spans=spans, vocab_size=9)


def test_values_are_those_of_answers():
    values = {
        "answer": [4, math.nan, 4, 0, math.nan],
        "reward": [math.nan, 0.5, 1.0, 0.25, math.nan],
        "truncated": [0, 0, 1, 0, math.nan],
    }
    paths = RowPaths(
        slots=np.arange(10),
        starts=np.arange(0, 11, 2),
        documents=np.zeros(5, np.int64),
        values={name: np.array(value) for name, value in values.items()},
    )
    answers = RowAnswers.of(paths)
    assert answers.numbers.tolist() == [0, 1, 0, 2, 3]
    np.testing.assert_array_equal(answers.value("reward", "x"), [1, 0.5, 0.25, math.nan])
    np.testing.assert_array_equal(answers.value("truncated", "x"), [1, 0, 0, math.nan])
    with pytest.raises(ConfigError, match="x needs the value 'rank'"):
        answers.value("rank", "x")


def answers_dataset(
    folder, *, kind="whole", documents=24, seed=0, versions=None, tokenizer=None, **more
):
    """Groups of three answers. As whole paths; or each in branches: what its steps saw is a path of
    its own, and trained in the first that has it (`branches`), or in all (`again`).
    """
    generator, made = random.Random(seed), []
    for _ in range(documents):
        prompt = [generator.randrange(90) for _ in range(generator.randint(1, 9))]
        paths, weights, values = [], [], []
        for answer in range(3):
            ids = [generator.randrange(5) for _ in range(generator.randint(4, 9))]
            cuts = sorted(generator.sample(range(1, len(ids)), 2))
            numbers = (generator.random(), float(answer > 0), float(generator.random() < 0.3))
            begin = 0
            for end in (*cuts, len(ids)) if kind != "whole" else (len(ids),):
                known = len(prompt) + (0 if kind == "again" else begin)
                paths.append([*prompt, *ids[:end]])
                weights.append([0.0] * known + [1.0] * (len(prompt) + end - known))
                values.append((float(answer), *numbers))
                begin = end
        names = ("answer", "reward", "rank", "truncated")
        given = {name: [one[at] for one in values] for at, name in enumerate(names)}
        given["label"] = [1 - rank for rank in given["rank"]]
        if kind == "whole" and not more.get("numbered"):
            del given["answer"]
        elif kind == "alone":
            given["answer"] = [math.nan] * len(paths)
        extra = {}
        if versions is not None:
            extra["policy_version"] = [
                np.array([versions + sum(path[: at + 1]) % 4 for at in range(len(path))], np.int32)
                for path in paths
            ]
        if more.get("turns"):
            extra["turn_rewards"] = [
                [
                    turn_reward(0, tuple(path[: at + 1])) if weight[at] else math.nan
                    for at in range(len(path))
                ]
                for path, weight in zip(paths, weights, strict=True)
            ]
        share = more.get("share", True)
        made.append(build_tree(paths, weights, values=given, columns=extra, share=share))
    return write_dataset(
        folder,
        [one.tokens for one in made],
        spans=[weight_spans(one.loss_weights) for one in made],
        trees=[one.tree for one in made],
        columns={name: [one.columns[name] for one in made] for name in made[0].columns},
        vocab_size=None if tokenizer else 90,
        tokenizer=tokenizer,
    )


def gradients(dataset, rows_per_pass=1, **settings):
    """Divisor, loss and gradients of a dataset in one step, and the step's figures."""
    model = ps.build_model(vocab_size=90, layers=2, width=32, heads=2, dtype="float64").double()
    loader = ps.Loader(
        ps.Source(dataset, shuffle="none", name="x", max_epochs=1),
        sequence_length=1024,
        rows_per_step=4,
        window_rows=4,
        requirements=model.requirements(),
        threads=0,
    )
    training = PathTraining(model, loader, TrainSettings(**settings), torch.device("cpu"))
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.sin(torch.arange(weight.numel())).view_as(weight)
    step = next(iter(loader))
    rows = list(step.joined(rows_per_pass))
    training.begin(rows, step, CPU)
    loss = sum(float(training.backward(row)) for row in rows)
    found = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    return training.divisor, loss, found, figures_of(training, step)


POLICIES = [
    {"kl": 0.1},
    {"normalise": "token", "kind": "cispo", "truncated": "mask"},
    {"normalise": "constant", "length": 12, "importance": "sequence", "scale": "none"},
]


@pytest.mark.parametrize(
    "settings",
    [
        *({"policy": PolicySettings(**one)} for one in POLICIES),
        *(
            {"preference": PreferenceSettings(kind=kind, sft_weight=0.3)}
            for kind in ("dpo", "ipo", "simpo", "orpo", "apo_zero_unpaired")
        ),
    ],
)
def test_an_answer_in_branches_is_the_answer_in_one_path(tmp_path, settings):
    divisor, loss, expected, figures = gradients(answers_dataset(tmp_path / "whole"), **settings)
    assert expected.norm() > 1e-4
    for kind, share, rows in itertools.product(("branches", "again"), (True, False), (1, 4)):
        folder = tmp_path / f"{kind}-{share}"
        dataset = (
            ps.open_dataset(folder)
            if folder.exists()
            else answers_dataset(folder, kind=kind, share=share)
        )
        assert len(dataset[0].tree.paths) == 9
        found = gradients(dataset, rows, **settings)
        assert found[0] == divisor
        assert found[1] == pytest.approx(loss, abs=1e-12)
        assert (found[2] - expected).norm() < 1e-10 * expected.norm()
        assert found[3] == pytest.approx(figures, abs=1e-9)


def test_answers_without_rewards_are_ordinary_data(tmp_path):
    """As runs of an agent that a model imitates: a shared token counts once for each answer."""
    built = build_tree(
        [[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 3, 7]],
        values={"answer": [0, 0, 1], "truncated": [0, 0, 0]},
    )
    columns = {"trees": [built.tree], "spans": [weight_spans(built.loss_weights)], "vocab_size": 90}
    model = ps.build_model(vocab_size=90, layers=1, width=16, heads=2)
    for name, expected in (("answer", False), ("reward", True)):
        tree = dataclasses.replace(built.tree, names=(name, "truncated"))
        dataset = write_dataset(tmp_path / name, [built.tokens], **{**columns, "trees": [tree]})
        loader = ps.Loader(
            ps.Source(dataset, name="x"),
            sequence_length=64,
            rows_per_step=1,
            requirements=model.requirements(),
            threads=0,
        )
        assert loader.has_compared("x") == expected
        assert loader.columns_lacked == []
    assert built.loss_weights[1] == 2


def same_bits(one, other):
    return one[:2] == other[:2] and torch.equal(one[2], other[2]) and one[3] == other[3]


def test_answers_of_one_path_are_what_they_were_to_the_bit(tmp_path):
    plain = answers_dataset(tmp_path / "plain")
    numbered = answers_dataset(tmp_path / "numbered", numbered=True)
    assert "answer" in numbered[0].tree.names
    assert "answer" not in plain[0].tree.names
    for chosen in (
        *({"policy": PolicySettings(**one)} for one in POLICIES),
        *({"preference": PreferenceSettings(kind=one)} for one in (*PAIR_KINDS, LABEL_KINDS[1])),
    ):
        assert same_bits(gradients(plain, **chosen), gradients(numbered, **chosen))
    # As branches that are answers by themselves, the same tokens are something else.
    policy = {"policy": PolicySettings()}
    branches, alone = (
        answers_dataset(tmp_path / kind, kind=kind) for kind in ("branches", "alone")
    )
    divisor, loss, *_ = gradients(alone, **policy)
    assert divisor > gradients(branches, **policy)[0]
    assert loss != gradients(branches, **policy)[1]


def test_pairs_and_examples_are_of_answers(tmp_path):
    whole, branches = (
        answers_dataset(tmp_path / kind, kind=kind)[0].tree for kind in ("whole", "branches")
    )
    assert whole.num_pairs == branches.num_pairs == 2
    assert whole.num_examples == branches.num_examples == 3
    assert branches.answers.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert branches.pairs().tolist() == [[0, 3], [0, 6]]
    scores, logs, reference, _ = scores_of([drawn_group(random.Random(3), 0)], "reward")
    with pytest.raises(ConfigError, match="'rank'"):
        preference_loss(scores, logs, reference, PreferenceSettings())


def begun(dataset, **policy):
    """A policy's training with the first step begun."""
    model = ps.build_model(vocab_size=90, layers=1, width=16, heads=2)
    if not isinstance(dataset, list):
        dataset = ps.Source(dataset, name="x", max_epochs=1)
    loader = ps.Loader(
        dataset, sequence_length=1024, rows_per_step=2, requirements=model.requirements(), threads=0
    )
    settings = TrainSettings(policy=PolicySettings(**policy))
    training = PathTraining(model, loader, settings, torch.device("cpu"))
    step = next(iter(loader))
    training.begin(list(step), step, CPU)
    return training, step


def test_staleness_is_a_figure_and_has_a_bound(tmp_path):
    dataset = answers_dataset(tmp_path / "d", kind="branches", versions=2)
    # A shared token has the sum of its answers' weights, and counts for each.
    ages = np.concatenate(
        [
            np.repeat(7 - one.columns["policy_version"], one.loss_weights.astype(int))
            for one in dataset
        ]
    )
    training, step = begun(dataset, version=7)
    for row in step:
        training.backward(row)
    figures = figures_of(training, step)
    assert figures["policy.staleness.mean"] == pytest.approx(ages.mean())
    assert [figures[f"policy.staleness.{name}"] for name in ("largest", "masked")] == [5, 0]
    training, step = begun(dataset, version=7, max_staleness=3, stale="mask", normalise="token")
    assert training.divisor == np.count_nonzero(ages <= 3)
    for row in step:
        training.backward(row)
    masked = figures_of(training, step)
    assert masked["policy.staleness.mean"] == pytest.approx(ages.mean())
    assert masked["policy.staleness.masked"] == pytest.approx((ages > 3).mean())
    assert begun(dataset, version=7, max_staleness=5)[0].divisor == 72
    with pytest.raises(ConfigError, match=r"a token is 5 versions behind .*stale: mask"):
        begun(dataset, version=7, max_staleness=4)
    with pytest.raises(ConfigError, match=r"by version 5 .*version 4 is trained now; set policy"):
        begun(dataset, version=4)
    plain = answers_dataset(tmp_path / "plain")
    with pytest.raises(ConfigError, match="max_staleness needs the version"):
        begun(plain, max_staleness=4)
    assert "policy.staleness.mean" not in figures_of(*begun(plain))


NUMBERS = itertools.count()


def with_column(tmp_path, name, values, **more):
    dataset = answers_dataset(tmp_path / f"d{next(NUMBERS)}", **more)
    columns = {name: [np.asarray(values(one), np.float32) for one in dataset]}
    return ps.shards.extend_dataset(dataset, tmp_path / f"d{next(NUMBERS)}", columns)


def trained(one, number):
    return np.where(one.loss_weights != 0, number, np.nan)


def test_columns_of_advantages(tmp_path):
    """The column wins over rewards, and says so; one that differs from the answers' own is
    refused.
    """
    dataset = with_column(tmp_path, "advantages", lambda one: trained(one, 0.5))
    training, _ = begun(dataset)
    assert "advantages from the column 'advantages', in place of" in training.notices[0]
    assert begun(dataset, dead_groups="leave_out", normalise="token")[0].divisor > 1
    zeros = with_column(tmp_path, "advantages", lambda one: np.zeros(len(one.tokens)))
    assert begun(zeros, dead_groups="leave_out")[0].divisor == 1
    both = ps.shards.extend_dataset(
        dataset, tmp_path / "both", {"turn_rewards": [np.zeros(len(one.tokens)) for one in dataset]}
    )
    with pytest.raises(ConfigError, match=r"'advantages' and 'turn_rewards'.*leave one out"):
        begun(both)
    elsewhere = with_column(tmp_path, "turn_rewards", lambda one: np.zeros(len(one.tokens)))
    with pytest.raises(ConfigError, match="is 0 at a token that is not trained"):
        begun(elsewhere)
    lacking = [ps.Source(dataset, name="a"), ps.Source(answers_dataset(tmp_path / "b"), name="b")]
    with pytest.raises(ConfigError, match="source 'b' lacks the column 'advantages'"):
        begun(lacking)


def test_an_advantage_of_an_answer_and_of_its_tokens_must_agree(tmp_path):
    def dataset(name, of_tokens):
        built = build_tree(
            [[1, 2, 3, 4], [1, 2, 5, 6]],
            [[0, 0, 1, 1]] * 2,
            values={"advantage": [0.1, -0.1]},
            columns={"advantages": [[0, 0, *one] for one in of_tokens]},
        )
        return write_dataset(
            tmp_path / name,
            [built.tokens],
            trees=[built.tree],
            spans=[weight_spans(built.loss_weights)],
            columns={"advantages": [np.asarray(built.columns["advantages"], np.float32)]},
            vocab_size=90,
        )

    # Equal, up to float32; a token that is not trained agrees with anything.
    assert begun(dataset("same", [[0.1, 0.1], [-0.1, math.nan]]))[0].divisor == 2
    with pytest.raises(ConfigError, match=r"has advantage -0\.1, but one of its tokens has 0\.3"):
        begun(dataset("other", [[0.1, 0.1], [-0.1, 0.3]]))


@pytest.mark.parametrize(
    "settings", [{"version": -1}, {"max_staleness": -1}, {"stale": "mask"}, {"stale": "drop"}]
)
def test_bounds_that_make_no_sense_are_refused(settings):
    with pytest.raises(ConfigError, match=r"policy\."):
        PolicySettings(**settings)


RUN = {"steps": 6, "threads": 1, "learning_rate": 3e-3, "progress": False}
STALE = {"version": 6, "max_staleness": 7, "stale": "mask", "truncated": "mask", "kl": 0.1}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Answers in branches with versions and rewards of turns, and a tokenizer."""
    folder = tmp_path_factory.mktemp("answers")
    tokenizer = tiny_tokenizer(folder / "tokenizer", make_texts(20), 300)
    answers_dataset(folder / "d", kind="branches", versions=2, turns=True, tokenizer=tokenizer)
    return folder / "d"


def run_of(folder, output, **more):
    loader = ps.Loader(folder, sequence_length=128, rows_per_step=4, seed=1)
    vocab_size = ps.open_dataset(folder).tokenizer.vocab_size
    model = ps.build_model(layers=2, width=16, heads=2, vocab_size=vocab_size)
    return ps.train(model, loader, output=output, policy=STALE, **{**RUN, **more})


def figures(run):
    names = ("loss", "policy.staleness.mean", "policy.staleness.largest", "policy.staleness.masked")
    return [[one[name] for name in names] for one in run.metrics]


def test_killed_and_resumed_is_the_same(stored, tmp_path):
    checkpoints = {"every": 2}
    whole = run_of(stored, tmp_path / "whole", checkpoints=checkpoints)
    with pytest.raises(KilledError, match="after step"):
        run_of(stored, tmp_path / "killed", checkpoints=checkpoints, on_step=KillAfter(3))
    again = run_of(stored, tmp_path / "killed", checkpoints=checkpoints, resume=True)
    assert figures(again) == figures(whole)
    # Each step is a version, so the same tokens are older.
    assert [one[2] for one in figures(whole)] == [4, 5, 6, 7, 8, 9]
    assert figures(whole)[3][3] == 0 < figures(whole)[5][3] < 1


RANKS = """
    import os, sys
    import penstock as ps

    folder, output = sys.argv[1:]
    loader = ps.Loader(
        folder, sequence_length=128, rows_per_step=4, seed=1, data_parallel=ps.DataParallel.from_env()
    )
    vocab_size = ps.open_dataset(folder).tokenizer.vocab_size
    model = ps.build_model(layers=2, width=16, heads=2, vocab_size=vocab_size)
    policy = {"version": 6, "max_staleness": 7, "stale": "mask", "truncated": "mask", "kl": 0.1}
    ps.train(
        model, loader, output=output, steps=6, threads=1, learning_rate=3e-3, progress=False, policy=policy,
    )
    # Gloo's threads may still hold tensors, and abort an interpreter that ends (pytorch/pytorch#179291).
    os._exit(0)
"""  # noqa: E501


@pytest.mark.slow
def test_two_processes_train_answers_as_one_does(stored, tmp_path):
    on_two_processes(tmp_path / "script.py", RANKS, stored, tmp_path / "two")
    one, two = run_of(stored, tmp_path / "one"), ps.open_run(tmp_path / "two")
    np.testing.assert_allclose(figures(two), figures(one), rtol=1e-4, atol=1e-6)
