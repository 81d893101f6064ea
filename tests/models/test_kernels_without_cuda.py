"""Models of transformers on a CPU where fla, mamba-ssm and causal-conv1d are installed, which need
CUDA.
"""

import importlib
import sys
from typing import Any

import pytest
import torch
import transformers
from model_makers import logits_of

from makers.architectures import make_small
from makers.published_kernels import install
from makers.rows import random_row
from penstock.core.errors import ConfigError
from penstock.models import use_recurrent
from penstock.models.recurrent import PACKAGES
from penstock.models.recurrent.choice import recurrent_operations
from penstock.models.theirs.attention import true_logits
from penstock.models.theirs.model import HuggingFaceModel

KINDS = ("qwen3_next", "mamba2", "mamba", "lfm2")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity(50)


def dies(*args: Any, **given: Any) -> Any:
    raise RuntimeError("0 active drivers ([]). There should only be one.")


def with_packages(kind: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A small model, and the same with code that was imported where the packages are installed, but
    do not run.
    """
    plain = make_small(kind)
    install(monkeypatch, anywhere=False)
    name = type(plain).__module__
    for module in (one for one in list(sys.modules) if one.partition(".")[0] in PACKAGES):
        for function in [
            one for one, found in vars(sys.modules[module]).items() if callable(found)
        ]:
            monkeypatch.setattr(sys.modules[module], function, dies)
    monkeypatch.delitem(sys.modules, name)
    python = importlib.import_module(name)
    model = getattr(python, type(plain).__name__)(plain.config)
    model.load_state_dict(plain.state_dict())
    return plain, model


@pytest.mark.parametrize("kind", KINDS)
def test_models_run_with_transformers_own_code(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, inner = with_packages(kind, monkeypatch)
    tokens = torch.arange(3, 30)[None]
    with torch.no_grad():
        due = plain.eval()(input_ids=tokens, use_cache=False).logits
        with pytest.raises(RuntimeError, match="0 active drivers"):
            inner.eval()(input_ids=tokens, use_cache=False)
        model = HuggingFaceModel(inner)
        assert torch.equal(inner(input_ids=tokens, use_cache=False).logits, due)
        assert "our recurrent functions in place of" in model.packing(64).way
        # Steps with transformers' own cache call other functions of the packages.
        cache, lengths = model.new_cache(1, 27), torch.tensor([26])
        model.extend(tokens[:, :26], lengths, cache)
        last = model.extend(tokens[:, 26:], lengths // 26, cache)
    assert (last[0] - due[0, -1]).abs().max() <= 1e-4 * due.std()
    assert "without a cache" not in caplog.text


def test_borders_are_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own code knows none, so a call that gives some must not pass."""
    _, inner = with_packages("qwen3_next", monkeypatch)
    HuggingFaceModel(inner)
    function = sys.modules[type(inner).__module__].torch_chunk_gated_delta_rule  # type: ignore[attr-defined]
    x = torch.randn(1, 6, 2, 4)
    with pytest.raises(ValueError, match="cannot keep documents of a row apart"):
        function(x, x, x, g=-x[..., 0].exp(), beta=x[..., 0], cu_seqlens=torch.tensor([0, 6]))


def test_an_error_of_such_a_package_names_cause_and_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """For code that took a package in a way that is not known here."""
    inner = make_small("qwen3_next")
    install(monkeypatch, anywhere=False)
    monkeypatch.setattr(inner.base_model, "forward", dies)
    with pytest.raises(ConfigError, match=r"drivers.*fla, mamba_ssm, causal_conv1d"):
        true_logits(inner)


@pytest.mark.parametrize(
    ("kind", "backends", "used"),
    [
        ("qwen3_next", ("fla",), "causal_convolution by fla, gated_delta_rule by fla"),
        ("kimi_linear", ("fla",), "causal_convolution by fla, kimi_delta_rule by fla"),
        (
            "mamba2",
            ("mamba_ssm", "fla"),
            "causal_convolution by fla, state_space_scan by mamba_ssm",
        ),
        ("lfm2", ("causal_conv1d",), "causal_convolution by causal_conv1d"),
    ],
)
def test_packages_by_name(
    kind: str, backends: tuple[str, ...], used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Made first: its code must not be imported where the packages seem to be installed.
    model, row = HuggingFaceModel(make_small(kind)), random_row((13, 1, 30, 7, 2))
    calls = install(monkeypatch)
    model.packing(row.sequence_length)
    due = logits_of(model, row)
    use_recurrent(model, backends)
    assert recurrent_operations(model).describe() == used
    verdict = model.packing(row.sequence_length)
    assert verdict.reason is None
    assert f"our recurrent functions ({used}) in place of" in verdict.way
    calls.clear()
    found = logits_of(model, row)[0, : row.num_tokens]
    assert (found - due[0, : row.num_tokens]).abs().max() <= 1e-4 * due.std()
    assert calls
    # One document, too.
    calls.clear()
    logits_of(model, random_row((13,)))
    assert calls


def test_a_package_that_fails_does_not_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HuggingFaceModel(make_small("qwen3_next"))
    install(monkeypatch)
    monkeypatch.setattr(
        sys.modules["fla.modules.causal_conv1d"], "causal_conv1d", lambda x, *, cu_seqlens: dies()
    )
    with pytest.raises(ConfigError, match=r"recurrent.*backends.*cannot"):
        use_recurrent(model, "fla")
    assert recurrent_operations(model).backends == ()
    assert model.packing(64).reason is None
