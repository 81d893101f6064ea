"""Trajectories whose paths are stored apart, for models that read no trees: the same answers, and
the same loss as with shared beginnings.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

import penstock as ps
from makers.tokenizers import CHAT_CONTROLS, tiny_tokenizer
from penstock.chat import FinishedTrajectory
from penstock.chat.trajectories.paths import OpenPath
from penstock.core.errors import ConfigError
from penstock.learn.training import TrainSettings
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.path_settings import PolicySettings
from penstock.learn.training.path_training import PathTraining
from penstock.use.runs.opening import Opened


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("apart") / "tokenizer"
    return tiny_tokenizer(folder, ["some words of it"] * 20, 300, CHAT_CONTROLS)


def walked(chance, question, rewritten, **more):
    """A trajectory of three turns: the last is in a path of its own if what came before was
    `rewritten`.
    """

    def some(low, high):
        return chance.integers(5, 250, chance.integers(low, high)).tolist()

    path, done = OpenPath(), []
    path.read(question)
    for number in range(3):
        if number == 2 and rewritten:
            done.append(path.done())
            path = path.branch([*path.ids[: len(question) + 2], *some(3, 6)])
        elif number:
            path.read(some(2, 5))
        ids = some(2, 6)
        path.sampled(number, ids, (-chance.random(len(ids))).tolist(), [1.0] * len(ids))
    return FinishedTrajectory(paths=(*done, path.done()), **more)


@pytest.fixture(scope="module")
def trajectories():
    chance = np.random.default_rng(3)
    questions = [chance.integers(5, 250, 12).tolist() for _ in range(4)]
    return [
        walked(
            chance,
            question,
            rewritten=(group + answer) % 2 == 0,
            group=str(group),
            reward=float(chance.integers(0, 5)),
            truncated=answer == 2,
            temperature=1.0,
            version=2,
            step_rewards=(0.0, float(answer), 1.0),
        )
        for group, question in enumerate(questions)
        for answer in range(3)
    ]


@pytest.fixture(scope="module")
def stored(trajectories, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    return {
        share: ps.write_trajectories(
            folder / str(share), trajectories, tokenizer=tokenizer, share=share
        )
        for share in (True, False)
    }


def test_the_same_answers_are_stored(stored, trajectories):
    together, apart = stored[True], stored[False]
    assert len(together) == len(apart) == 4
    assert together.num_tokens < 0.8 * apart.num_tokens
    assert apart.num_tokens == sum(len(path.ids) for one in trajectories for path in one.paths)
    for one, other in zip(together, apart, strict=True):
        assert one.tree.names == other.tree.names
        np.testing.assert_array_equal(one.tree.values, other.tree.values)
        assert set(one.columns) == set(other.columns) >= {"turn_rewards", "policy_version"}
        assert float(one.loss_weights.sum()) == float(other.loss_weights.sum())
        for number in range(len(one.tree.paths)):
            mine, theirs = one.tree.slots(number), other.tree.slots(number)
            np.testing.assert_array_equal(one.tokens[mine], other.tokens[theirs])
            # Where a path forks, its first own target stands elsewhere.
            logs = [
                found.columns["log_probabilities"][slots][found.loss_weights[slots] > 0]
                for found, slots in ((one, mine), (other, theirs))
            ]
            assert set(logs[1]) <= set(logs[0])


def gradients(dataset, trees, **policy):
    model = ps.build_model(vocab_size=300, layers=2, width=32, heads=2, dtype="float64").double()
    loader = ps.Loader(
        ps.Source(dataset, shuffle="none", name="x", max_epochs=1),
        sequence_length=1024,
        rows_per_step=1,
        requirements=replace(model.requirements(), trees=trees),
        threads=0,
    )
    settings = TrainSettings(policy=PolicySettings(kl=0.1, version=2, **policy))
    training = PathTraining(model, loader, settings, torch.device("cpu"))
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.sin(torch.arange(weight.numel())).view_as(weight)
    step = next(iter(loader))
    rows = list(step.joined(1))
    training.begin(rows, step, Ranks(torch.device("cpu")))
    loss = sum(float(training.backward(row)) for row in rows)
    return loss, torch.cat([weight.grad.flatten() for weight in model.parameters()])


@pytest.mark.parametrize(
    "policy", [{}, {"normalise": "token", "kind": "cispo"}, {"importance": "sequence"}]
)
def test_the_loss_is_the_same(stored, policy):
    loss, expected = gradients(stored[True], True, **policy)
    assert expected.norm() > 1e-4
    for trees in (True, False):
        other, found = gradients(stored[False], trees, **policy)
        assert other == pytest.approx(loss, abs=1e-12)
        assert (found - expected).norm() < 1e-10 * expected.norm()


def test_a_model_without_trees_learns_from_them(stored, tmp_path):
    def train(share):
        model = ps.build_model(
            vocab_size=300, layers=2, width=16, heads=2, blocks={"delta": {"mixer": "gated_delta"}},
            pattern=("delta",),
        )  # fmt: skip
        assert model.requirements().trees is False
        loader = ps.Loader(stored[share].path, sequence_length=1024, rows_per_step=1)
        return ps.train(
            model, loader, output=tmp_path / str(share), steps=2, threads=1, progress=False,
            policy={"version": 2},
        )  # fmt: skip

    assert len(train(False).metrics) == 2
    with pytest.raises(ConfigError, match="trees"):
        train(True)


def test_rollouts_ask_the_model(tmp_path):
    """Of a loaded model what it requires, of others what their folder says."""
    for mixer, expected in (("attention", True), ("gated_delta", False)):
        model = ps.build_model(
            vocab_size=300, layers=1, width=16, heads=2, blocks={"x": {"mixer": mixer}},
            pattern=("x",),
        )  # fmt: skip
        folder = tmp_path / mixer
        ps.models.save_model(model, folder)
        run = type("Run", (), {"model": folder})
        for given in (model, None):
            opened = Opened(
                run=run, model=given, tokenizer=None, template=None, context_length=8,
                begin_ids=(), row_length=8,
            )  # fmt: skip
            assert opened.reads_trees is expected
