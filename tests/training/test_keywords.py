"""Keyword arguments are the settings of the classes: names, types, and what is said of a name that
is wrong.
"""

import re
import types
from dataclasses import fields, is_dataclass
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest

import penstock as ps
from penstock.chat.masks.mask_settings import MaskKeywords, MaskSettings
from penstock.core.errors import ConfigError
from penstock.learn.distillation.settings import DistillationSettings
from penstock.learn.evaluation.tasks import TaskSettings
from penstock.learn.generation.settings import Sampling
from penstock.learn.training.optimizer_settings import OptimizerSettings, ScheduleSettings
from penstock.learn.training.settings import TrainSettings
from penstock.models.settings import ModelSettings
from penstock.use.runs import keywords
from penstock.use.serving.settings import ServeSettings

WIDER = {"blocks", "evaluators"}
"""Take more than settings, and are tried by the tests of models and evaluators."""


def members(hint):
    return set(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else {hint}


def is_same(found, expected):
    """The same type; of a class of settings also a mapping of its values, or the name that it has
    in one word.
    """
    if found == expected:
        return True
    inner = {one for one in members(expected) if is_dataclass(one)}
    words = {one for one in members(found) - members(expected) if get_origin(one) is Literal}
    main = {
        get_type_hints(one)[name]
        for one in inner
        for name in ("kind", "shape")
        if name in get_type_hints(one)
    }
    return (
        bool(inner)
        and members(found) - members(expected) - words == {keywords.Values}
        and words <= main
    )


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


TRAINING = settings_of(TrainSettings) | settings_of(OptimizerSettings, without=("kind",))
TRAINING |= settings_of(ScheduleSettings, without=("shape",))
OPENING = get_type_hints(keywords.OpeningKeywords)
CASES = {
    "train": (keywords.TrainKeywords, TRAINING),
    "distill": (
        keywords.DistillKeywords,
        {name: hint for name, hint in TRAINING.items() if name != "loss"}
        | settings_of(DistillationSettings, without=("teachers",)),
    ),
    "model": (keywords.ModelKeywords, settings_of(ModelSettings, without=("vocab_size",))),
    "generate": (keywords.GenerateKeywords, settings_of(Sampling) | OPENING),
    "evaluate": (keywords.EvaluateKeywords, settings_of(TaskSettings, without=("name",)) | OPENING),
    "serve": (keywords.ServeKeywords, settings_of(ServeSettings) | OPENING),
    "chat": (MaskKeywords, settings_of(MaskSettings)),
}


@pytest.mark.parametrize("name", CASES)
def test_keywords_are_the_settings(name):
    found, expected = get_type_hints(CASES[name][0]), CASES[name][1]
    assert found.keys() == expected.keys()
    assert [
        one for one in found if one not in WIDER and not is_same(found[one], expected[one])
    ] == []


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
        ({"qqq": 1}, "known: attention, betas"),
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
