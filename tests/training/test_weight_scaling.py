"""Loss weights mean one thing: all of them times c leave every normalised loss and gradient equal,
or are refused.
"""

import itertools
import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from training_makers import make, make_teacher, write_run_file

import penstock as ps
from makers.models import tiny_model
from penstock.core.errors import ConfigError, DistributedError
from penstock.data.shards import build_tree
from penstock.data.shards.memory import weight_spans
from penstock.integrations.trl.preferences import pairs_of_document
from penstock.learn.training import path_counts
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.held_out_loss import HeldOutLoss
from penstock.learn.training.path_settings import (
    LABEL_KINDS,
    PAIR_KINDS,
    PolicySettings,
    PreferenceSettings,
)
from penstock.learn.training.path_training import PathTraining
from penstock.learn.training.settings import TrainSettings

VOCAB, CPU = 61, Ranks(torch.device("cpu"))
SCALES = st.floats(1e-4, 1e3).filter(lambda c: abs(c - 1) > 1e-3)
FEW = settings(
    deadline=None,
    max_examples=10,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
number = itertools.count()
ONE_STEP = ("training.steps=1", "training.schedule.warmup_steps=1")


def documents(folder, scale, vocabulary=VOCAB):
    """Documents whose tokens have weights of their own, all times a number."""
    random = np.random.default_rng(0)
    rows = [random.integers(0, vocabulary, n) for n in (9, 14, 5, 20, 11, 7)]
    weights = [
        np.where(random.random(len(row)) < 0.3, 0, random.random(len(row)) + 0.1) * scale
        for row in rows
    ]
    return ps.write_dataset(
        folder / f"d{next(number)}",
        rows,
        spans=[weight_spans(one) for one in weights],
        vocab_size=vocabulary,
    )


def one_source(dataset):
    # The name decides the order of documents.
    return ps.Source(dataset, shuffle="none", name="x", max_epochs=1)


@FEW
@given(
    scale=SCALES,
    z_loss=st.sampled_from([0.0, 0.1]),
    heads=st.sampled_from([1, 2]),
    joined=st.booleans(),
)
def test_cross_entropy(tmp_path_factory, scale, z_loss, heads, joined):
    found = []
    for c in (1.0, scale):
        model = tiny_model(VOCAB, dtype=torch.float64, prediction_heads=heads)
        loader = ps.Loader(
            one_source(documents(tmp_path_factory.mktemp("d"), c)),
            sequence_length=32,
            rows_per_step=3,
            requirements=model.requirements(),
            threads=0,
        )
        step = next(iter(loader))
        rows = [step] if joined else list(step)
        given = () if joined else (step.loss_denominators,)
        losses = [ps.loss(model, row, *given, z_loss=z_loss) for row in rows]
        for loss in losses:
            loss.backward()
        found.append(
            (
                sum(loss.item() for loss in losses),
                torch.cat([one.grad.flatten() for one in model.parameters()]),
            )
        )
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    # Weights are float32.
    assert (found[1][1] - found[0][1]).norm() < 1e-5 * found[0][1].norm()


@FEW
@given(scale=SCALES)
def test_the_held_out_loss(tmp_path_factory, scale):
    model = tiny_model(VOCAB)
    found = [
        HeldOutLoss(
            one_source(documents(tmp_path_factory.mktemp("d"), c)),
            sequence_length=32,
            tokenizer=None,
            model=model,
            ranks=CPU,
        )(model)["loss"]
        for c in (1.0, scale)
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return make_teacher(tmp_path_factory.mktemp("other"), 3)


@pytest.mark.parametrize("kind", ["kl", "p_kl", "h_kl", "alm", "uld"])
def test_distillation(data, tmp_path, teacher, kind):
    tokenizer = ps.open_dataset(data / "data" / "train").loaded_tokenizer
    texts = [
        [one.tokens, one.loss_weights] for one in ps.open_dataset(data / "data" / "train")[:40]
    ]
    random = np.random.default_rng(0)
    drawn = [random.choice([0.0, 0.4, 1.0], len(tokens)) for tokens, _ in texts]
    found = []
    for c in (1.0, 0.003):
        folder = tmp_path / str(c)
        ps.write_dataset(
            folder / "data" / "train", [tokens for tokens, _ in texts], tokenizer=tokenizer,
            spans=[weight_spans(weights * c) for weights in drawn],
        )  # fmt: skip
        # A teacher of the same tokenizer for kl: a model of the same folder, untrained.
        model = str(teacher) if kind != "kl" else str(_same(data, tmp_path))
        section = json.dumps(
            {"teachers": [{"model": model, "loss": {"kind": kind}}], "cross_entropy": 0.5}
        )
        trainer = make(write_run_file(folder), folder / "run", f"teacher={section}", *ONE_STEP)
        found.append(next(iter(trainer.train())))
    for name in ("loss", "distillation", "gradient_norm"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4), name


def _same(data, folder):
    if not (folder / "same").exists():
        next(iter((trainer := make(data, folder / "same", *ONE_STEP)).train()))
        trainer.state.save(trainer._trained)
    return folder / "same"


def answers(folder, scale, *, share=True, once=False):
    """Groups of answers, some of which are equal or begin alike, with all that the kinds of losses
    need.
    """
    trees = []
    for group in range(6):
        prompt = [group + 1, 3, 4]
        paths = [
            [*prompt, 6, 7, 8],
            [*prompt, 6, 7, 9, group + 10],
            [*prompt, 6, 7, 8],
            [*prompt, 5],
        ]
        trees.append(
            build_tree(
                paths,
                [[0.0] * 3 + [scale] * (len(path) - 3) for path in paths],
                values={
                    "rank": [0.0, 1.0, 0.0, 2.0],
                    "label": [1.0, 0.0, 1.0, -1.0],
                    "reward": [1.0, 0.0, 1.0, 0.3 * group],
                },
                shared_weights="once" if once else "sum",
                share=share,
            )
        )
    return ps.write_dataset(
        folder / f"a{next(number)}",
        [one.tokens for one in trees],
        trees=[one.tree for one in trees],
        spans=[weight_spans(one.loss_weights) for one in trees],
        vocab_size=VOCAB,
    )


def first_step(dataset, **chosen):
    model = tiny_model(VOCAB, dtype=torch.float64).double()
    loader = ps.Loader(
        one_source(dataset),
        sequence_length=64,
        rows_per_step=3,
        requirements=model.requirements(),
        threads=0,
    )
    training = PathTraining(model, loader, TrainSettings(**chosen), CPU.device)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.sin(torch.arange(weight.numel())).view_as(weight)
    losses, parts = 0.0, []
    step = next(iter(loader))
    training.begin(list(step), step, CPU)
    losses = sum(float(training.backward(row)) for row in step)
    parts = [one.grad.flatten() for one in model.parameters()]
    return losses, torch.cat(parts)


POLICIES = {
    f"{kind} {normalise}": {
        "policy": PolicySettings(
            kind=kind, normalise=normalise, kl=0.1, length=9 if normalise == "constant" else None
        )
    }
    for kind in ("clip", "cispo")
    for normalise in ("sequence", "token", "constant")
}
COMPARED = {
    **{
        kind: {"preference": PreferenceSettings(kind=kind, sft_weight=0.3)}
        for kind in (*PAIR_KINDS, *LABEL_KINDS)
    },
    **POLICIES,
}


@FEW
@given(scale=SCALES, name=st.sampled_from(list(COMPARED)), share=st.booleans())
def test_whole_answers_have_weights_of_0_and_1(tmp_path_factory, scale, name, share):
    folder = tmp_path_factory.mktemp("a")
    with pytest.raises(ConfigError, match="weights other than 0"):
        first_step(answers(folder, scale, share=share), **COMPARED[name])


@pytest.mark.parametrize("share", [True, False])
def test_pairs_for_trl_have_weights_of_0_and_1(tmp_path, share):
    assert (
        sum(len(list(pairs_of_document(one))) for one in answers(tmp_path, 1.0, share=share)) == 30
    )
    for one in answers(tmp_path, 0.5, share=share):
        with pytest.raises(ConfigError, match=r"loss weight 0\.5"):
            next(pairs_of_document(one))


class OtherRank:
    """Sums over ranks where another one has found a wrong weight."""

    @staticmethod
    def sum(values):
        return [*values[:-1], values[-1] + 1]


@contextmanager
def failing_elsewhere():
    """As `in_step` where the other rank fails."""
    yield
    raise DistributedError("rank 1 failed: loss weight 0.5")


def test_all_ranks_stop_where_one_has_a_wrong_weight(tmp_path, monkeypatch):
    """None waits for the other, and all say what was found."""
    monkeypatch.setattr(path_counts, "in_step", failing_elsewhere)
    model = tiny_model(VOCAB)
    cases = (
        (1.0, DistributedError, "rank 1 failed"),
        (0.5, ConfigError, "^(?!rank 1).*loss weight 0.5"),
    )
    for scale, error, reason in cases:
        loader = ps.Loader(
            one_source(answers(tmp_path, scale)), sequence_length=64, rows_per_step=3,
            requirements=model.requirements(), threads=0,
        )  # fmt: skip
        training = PathTraining(model, loader, TrainSettings(policy=PolicySettings()), CPU.device)
        step = next(iter(loader))
        with pytest.raises(error, match=reason):
            training.begin(list(step), step, OtherRank())


@pytest.mark.parametrize("name", COMPARED)
def test_shared_tokens_count_once_for_each_answer_however_they_are_stored(tmp_path, name):
    """`shared_weights: once` stores 1 for a token of several answers, sum stores their number."""
    loss, gradient = first_step(answers(tmp_path, 1.0, share=False), **COMPARED[name])
    assert gradient.norm() > 1e-4
    for once in (False, True):
        other, found = first_step(answers(tmp_path, 1.0, once=once), **COMPARED[name])
        assert other == pytest.approx(loss, rel=1e-10)
        torch.testing.assert_close(found, gradient, rtol=1e-8, atol=1e-10)


def test_the_mean_over_tokens_is_over_those_that_are_trained(tmp_path):
    """Slow twin of `normalise: token` on policy: each answer apart, its tokens counted one by
    one.
    """
    loss, _ = first_step(
        answers(tmp_path, 1.0, once=True), policy=PolicySettings(normalise="token", scale="none")
    )
    total = tokens = 0.0
    for group in range(6):
        rewards = np.array([1.0, 0.0, 1.0, 0.3 * group])
        lengths = np.array([3, 4, 3, 1])
        total -= ((rewards - rewards.mean()) * lengths).sum()
        tokens += lengths.sum()
    assert loss == pytest.approx(total / tokens, rel=1e-9)
