"""Keyword arguments that mean one thing, and what is said of a name that is wrong."""

import re
from dataclasses import fields
from typing import get_type_hints

import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.learn.distillation.settings import DistillationSettings
from penstock.learn.training.optimizer_settings import OptimizerSettings, ScheduleSettings
from penstock.learn.training.settings import TrainSettings
from penstock.models.settings import ModelSettings


def settings_of(*classes, without=()):
    hints = {}
    for one in classes:
        new = {
            field.name: get_type_hints(one)[field.name]
            for field in fields(one)
            if field.name not in without
        }
        assert not new.keys() & hints.keys(), "a name means two things"
        hints |= new
    return hints


def test_names_of_sections_that_are_given_directly_mean_one_thing():
    settings_of(TrainSettings, OptimizerSettings, ScheduleSettings, without=("kind", "shape"))
    settings_of(TrainSettings, DistillationSettings, without=("loss",))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lr": 1e-3}, "'lr'; did you mean learning_rate?"),
        ({"stesp": 3}, "'stesp'; did you mean 'steps'?"),
        ({"warmup": 3}, "did you mean warmup_steps?"),
        ({"scheduler": "cosine"}, "did you mean schedule?"),
        ({"save_steps": 3}, 'did you mean checkpoints={"every": …}?'),
        ({"batch_size": 3}, "did you mean rows_per_step of ps.Loader?"),
        ({"n_layers": 3}, "did you mean layers of ps.build_model?"),
        ({"output_dir": "x"}, "did you mean output?"),
        ({"qqq": 1}, "known: activation_checkpointing, assignments, attention"),
        ({"policy": "ppo"}, "training.policy.kind: found 'ppo', expected 'clip' or 'cispo'"),
        ({"optimizer": "sgd"}, "training.optimizer.kind: found 'sgd', expected 'adamw' or 'muon'"),
        (
            {"optimizer": {"lr": 1}},
            "training.optimizer.lr: unknown key; did you mean training.optimizer.learning",
        ),
        ({"steps": "many"}, "training.steps: found 'many', expected a whole number"),
        ({"learning_rate": -1.0}, "optimizer.learning_rate must be above 0"),
        (
            {"evaluators": {"a": {"kidn": "loss"}}},
            "training.evaluators.a.kidn: unknown key; did you mean 'kind'?",
        ),
    ],
)
def test_wrong_arguments_of_train(data, tmp_path, given, said):
    loader = ps.Loader(data / "data" / "train", sequence_length=64, rows_per_step=4)
    with pytest.raises(ConfigError, match=re.escape(said)):
        ps.train(ModelSettings(layers=1), loader, output=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_wrong_arguments_elsewhere(data):
    with pytest.raises(ConfigError, match=r"unknown.*argument.*'n_layer'.*'layers'"):
        ps.build_model(vocab_size=10, n_layer=3)
    with pytest.raises(ConfigError, match=r"'mask_histroy'.*'mask_history'"):
        ps.chat.encode([], tokenizer=data / "tokenizer", template="chatml", mask_histroy=True)
