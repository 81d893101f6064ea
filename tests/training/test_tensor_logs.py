"""Statistics and whole tensors of the steps that are due."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from penstock.core.errors import ConfigError
from penstock.learn.training.settings import TensorLogSettings
from penstock.learn.training.tensor_logs import TensorLogs, statistics


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(run, model, settings, steps, **options) -> None:
    logs = TensorLogs(run, model, settings, **options)
    for step in steps:
        with logs.watch(step):
            for row in range(2):
                model(torch.full((5, 3), float(step + row))).sum().backward()
        model.zero_grad()
    logs.close()


def lines(run) -> list[dict]:
    return [
        json.loads(line) for line in (run / "tensors" / "statistics.jsonl").read_text().splitlines()
    ]


def test_what_fits_the_patterns_in_the_steps_that_are_due(tmp_path):
    model = small()
    train(
        tmp_path,
        model,
        TensorLogSettings(patterns=("0.weight", "grad.*.bias", "out.1"), every=2),
        range(1, 5),
    )
    found = [(line["step"], line["name"]) for line in lines(tmp_path)]
    names = ["out.1", "0.weight", "grad.0.bias", "grad.2.bias"]
    assert found == [(step, name) for step in (2, 4) for name in names]
    outputs, weights, _, gradient = lines(tmp_path)[:4]
    assert outputs["shape"] == [5, 4]
    assert outputs["max"] == pytest.approx(float(model[:2](torch.full((5, 3), 2.0)).detach().max()))
    assert weights["norm"] == pytest.approx(float(model[0].weight.detach().norm()))
    assert gradient["mean"] == 10
    assert not list((tmp_path / "tensors").glob("*.safetensors"))
    assert not any(module._forward_hooks for module in model)


def test_whole_tensors(tmp_path):
    model = small()
    train(
        tmp_path,
        model,
        TensorLogSettings(patterns=("2.weight", "out.0"), every=3, full=True),
        range(1, 4),
    )
    found = load_file(tmp_path / "tensors" / "step-00000003.safetensors")
    torch.testing.assert_close(found["2.weight"], model[2].weight.detach(), rtol=0, atol=0)
    torch.testing.assert_close(
        found["out.0"], model[0](torch.full((5, 3), 3.0)).detach(), rtol=0, atol=0
    )


def test_a_resumed_run_has_no_line_twice(tmp_path):
    settings = TensorLogSettings(patterns=("0.bias",), every=1)
    train(tmp_path, small(), settings, range(1, 6))
    train(tmp_path, small(), settings, range(4, 8), done=3)
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 8))


def test_nothing_asked_nothing_written(tmp_path):
    train(tmp_path, small(), TensorLogSettings(every=1), range(3))
    train(tmp_path, small(), TensorLogSettings(patterns=("*",), every=1), range(3), writes=False)
    assert not list(tmp_path.iterdir())


def test_a_pattern_that_fits_nothing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"'blocks\.\*'.*tensor.*others.*0\.weight"):
        TensorLogs(tmp_path, small(), TensorLogSettings(patterns=("0.*", "blocks.*")))


def test_figures_are_of_the_finite_numbers():
    found = statistics(torch.tensor([1.0, 3.0, math.nan, math.inf]))
    assert found == {
        "shape": [4], "dtype": "float32", "not_finite": 0.5,
        "mean": 2.0, "std": 1.0, "min": 1.0, "max": 3.0, "norm": pytest.approx(math.sqrt(10)),
    }  # fmt: skip
    assert statistics(torch.tensor([math.nan]))["mean"] is None
    assert statistics(torch.empty(0, dtype=torch.bfloat16)) == {
        "shape": [0], "dtype": "bfloat16", "not_finite": 0.0,
        "mean": None, "std": None, "min": None, "max": None, "norm": None,
    }  # fmt: skip
