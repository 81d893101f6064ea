"""Every number of a run file, given every kind of nonsense: a line that names the key, or
settings.
"""

import copy
import math
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from penstock.core.errors import ConfigError
from penstock.use.config.document import Document
from penstock.use.config.models import check, model_of
from penstock.use.config.run_file import RunSettings
from penstock.use.config.validation import _model_at

PLAIN: dict[str, Any] = {
    "data": {
        "sources": [{"path": "web", "objective": {"kind": "infill"}}],
        "changes": [{"step": 3, "shares": {"web": 0.5}}],
        "loader": {"sequence_length": 64, "rows_per_step": 4},
    },
    "model": {
        "layers": 2,
        "vision": {"image_token": 5},
        "blocks": {"a": {"mixer": "mamba"}},
        "pattern": ["a"],
    },
    "training": {
        "optimizer": {},
        "schedule": {},
        "lora": {},
        "preference": {},
        "policy": {},
        "checkpoints": {},
        "tensor_logs": {},
        "continue_from": {"run": "runs/a"},
        "evaluators": {"a": {"sources": [{"path": "held", "objective": {"kind": "infill"}}]}},
    },
    "teacher": {"teachers": [{"model": "big", "loss": {}}]},
    "chat": {"template": "auto", "role_boundaries": [{"role": "user", "start": "<u>"}]},
}
TASKS = {
    "kind": "denoise",
    "tasks": [{"kind": "spans", "rate": 0.1, "mean": 3}, {"kind": "prefix"}, {"kind": "causal"}],
}
OBJECTIVES = (TASKS, {"kind": "masked_diffusion"}, {"kind": "block_diffusion"})
PATHS = ("web", "masked", "blocks")
SOURCES = [{"path": path, "objective": one} for path, one in zip(PATHS, OBJECTIVES, strict=True)]
DENOISING = {**PLAIN, "data": {**PLAIN["data"], "sources": SOURCES}}
SCORING = {**PLAIN, "training": {"evaluators": {"a": {"kind": "task", "task": {"name": "mmlu"}}}}}
BASES = (PLAIN, DENOISING, SCORING)

NONSENSE = (True, math.inf, -math.inf, math.nan, -1, 10**30, "x", [])


def numbers(base: dict[str, Any]):
    """(place, hint) of every number of the settings that a document has."""

    def walk(value: Any, place: tuple[str | int, ...]):
        if isinstance(value, list):
            for index, entry in enumerate(value):
                yield from walk(entry, (*place, index))
        elif isinstance(value, dict):
            model = _model_at(model_of(RunSettings), tagged(base, place))
            fields = (
                model.model_fields
                if place[-1:] not in (("shares",), ("evaluators",), ("blocks",))
                else {}
            )
            for name, field in fields.items():
                if {int, float} & kinds(field.annotation):
                    yield (*place, name), field.annotation
            for name, entry in value.items():
                yield from walk(entry, (*place, name))

    yield from walk(base, ())


def tagged(base: dict[str, Any], place: tuple[str | int, ...]):
    """The place as pydantic names it, with the kinds of objectives and tasks."""
    value: Any = base
    found: tuple[str | int, ...] = ()
    for part in place:
        value = value[part]
        found = (*found, part)
        if isinstance(value, dict) and "kind" in value and value["kind"] != "task":
            found = (*found, f"kind={value['kind']}")
    return found


def kinds(hint: Any) -> set[Any]:
    """The plain types inside one."""
    return (
        {hint}.union(*(kinds(argument) for argument in get_args(hint)))
        if hint is not None
        else set()
    )


def models(model: type[BaseModel], found: set[type[BaseModel]]) -> set[type[BaseModel]]:
    def inside(hint: Any):
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            yield hint
        for argument in get_args(hint):
            yield from inside(argument)

    found.add(model)
    for field in model.model_fields.values():
        for inner in inside(field.annotation):
            if inner not in found:
                models(inner, found)
    return found


FOUND = {place: (base, hint) for base in BASES for place, hint in numbers(base)}


def load(base: dict[str, Any], place: tuple[str | int, ...], value: Any):
    values = copy.deepcopy(base)
    holder: Any = values
    for part in place[:-1]:
        holder = holder[part]
    holder[place[-1]] = value
    return check(Document("run.yaml", values, {}), RunSettings)


def test_no_number_is_missed():
    """Each class of settings that has a number stands in one of the documents above."""
    visited = {
        _model_at(model_of(RunSettings), tagged(base, place[:-1])).__name__
        for place, (base, _) in FOUND.items()
    }
    with_numbers = {
        model.__name__
        for model in models(model_of(RunSettings), set())
        if any({int, float} & kinds(field.annotation) for field in model.model_fields.values())
    }
    assert visited == with_numbers
    assert len(FOUND) > 80


@pytest.mark.parametrize("base", BASES, ids=("plain", "denoising", "scoring"))
def test_the_documents_themselves_are_taken(base):
    check(Document("run.yaml", base, {}), RunSettings)


@pytest.mark.parametrize("place", FOUND, ids=lambda place: ".".join(map(str, place)))
def test_nonsense_in_place_of_a_number(place):
    base, hint = FOUND[place]
    plain = kinds(hint)
    for value in NONSENSE:
        try:
            load(base, place, value)
        except ConfigError as error:
            for line in str(error).splitlines():
                assert line.startswith("run.yaml"), line
                assert str(place[-1]) in line, line
                assert len(line) < 400, line
                assert "Input should be" not in line, line
        else:
            assert value is not True or bool in plain
            assert isinstance(value, str | list) or math.isfinite(value)
            assert value != "x" or str in plain
            assert value != 10**30 or float in plain


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (
            ("training", "optimizer", "betas"),
            [0.9],
            r"betas: found \[0.9\], expected a list of 2 entries$",
        ),
        (
            ("training", "optimizer", "betas"),
            [0.9, 0.9, 0.9],
            r"betas: found .*, expected a list of 2 entries$",
        ),
        (
            ("training", "optimizer", "betas"),
            [0.9, 1],
            r"optimizer.betas must be from 0 to below 1, got 1",
        ),
        (
            ("model", "dtype"),
            "float16",
            r"model.dtype: found 'float16', expected 'float32', 'bfloat16' or 'float64'$",
        ),
        (("model",), 5, r"^run.yaml: model: found 5, expected a mapping of keys or text$"),
        (
            ("training", "device"),
            "tpu",
            r"training.device 'tpu': expected auto, cpu, cuda, cuda:1, xpu or mps; give",
        ),
        (
            ("training", "attention"),
            "flash",
            r"training.attention: found 'flash', expected 'auto', 'per_document', ",
        ),
        (
            ("data", "loader", "rows_per_step"),
            10**18,
            r"rows_per_step must be at most 16,777,216, got 1000",
        ),
        (
            ("training", "optimizer", "learning_rate"),
            True,
            r"learning_rate: found true, expected a number$",
        ),
        (
            ("training", "optimizer", "learning_rate"),
            math.inf,
            r"learning_rate: found inf, expected a finite number$",
        ),
        (
            ("data", "sources", 0, "name"),
            2024,
            r"name: found 2024, expected text; put it in quotes$",
        ),
        (("training", "tensor_logs", "every"), 0, r"tensor_logs.every must be above 0, got 0"),
        (
            ("training", "steps"),
            99,
            r"training: training.schedule.warmup_steps is 100, and the run has 99 steps; lower",
        ),
    ],
)
def test_what_is_said_of_it(place, value, message):
    base = copy.deepcopy(PLAIN)
    if place == ("training", "steps"):
        base["training"]["schedule"]["warmup_steps"] = 100
    with pytest.raises(ConfigError, match=message) as told:
        load(base, place, value)
    assert len(str(told.value).splitlines()) == 1


def test_a_usual_warm_up_fits_a_short_run():
    settings = load(PLAIN, ("training", "steps"), 30).training
    assert [settings.schedule.share(step, 30) for step in range(3)] == [1 / 3, 2 / 3, 1]


def test_many_mistakes_are_counted():
    with pytest.raises(ConfigError, match=r"run\.yaml: 80 more problems$") as told:
        load(PLAIN, ("data", "sources"), ["x"] * 100)
    assert len(str(told.value).splitlines()) == 21


def test_backends_are_those_of_the_models():
    from penstock.learn.training.settings import AttentionBackend
    from penstock.models.attention import BACKENDS

    assert set(get_args(AttentionBackend)) == {"auto", *BACKENDS}


def test_a_union_inside_a_list_is_one_line():
    with pytest.raises(
        ConfigError,
        match=r"objective.sentinels.0: found \[\]",
    ):
        load(DENOISING, ("data", "sources", 0, "objective", "sentinels"), [[]])
