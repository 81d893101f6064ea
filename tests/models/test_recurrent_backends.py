"""Published kernels for recurrent layers, chosen by name: what they are given, what they give, and
what is refused.
"""

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from model_makers import VOCABULARY, logits_of, tiny
from torch import Tensor

from makers.published_kernels import install
from makers.recurrences import LENGTHS, delta_inputs, numbers, space_inputs
from makers.rows import random_row
from penstock.core.errors import ConfigError
from penstock.models import ModelSettings, use_recurrent
from penstock.models.building import build_model
from penstock.models.recurrent import PACKAGES, Borders, Operations
from penstock.models.recurrent.choice import recurrent_operations
from penstock.models.recurrent.operations import TORCH
from penstock.models.settings import BlockSettings

Recorded = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return install(monkeypatch)


def operations(*names: str, dtype: torch.dtype = torch.float32) -> Operations:
    return Operations.of(names, device="cpu", dtype=dtype)


def borders_of(lengths: list[int]) -> Borders:
    return Borders(np.concatenate([[0], np.cumsum(lengths)]))


def agree(run, by: Operations, inputs: list[Tensor], tolerance: float = 1e-4) -> None:
    """Outputs, states if there are some, and gradients are those of torch, relative to their
    largest.
    """
    results = []
    for one in (by, TORCH):
        leaves = [x.float().requires_grad_() for x in inputs]
        found = [x for x in run(one, *leaves) if x is not None]
        loss = sum((x * numbers(9, *x.shape).float()).sum() for x in found)
        results.append([*found, *torch.autograd.grad(loss, leaves)])
    for mine, due in zip(*results, strict=False):
        assert (mine - due).abs().max() <= tolerance * due.abs().max().clamp(min=1e-6)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("channels", [False, True], ids=["gated", "kimi"])
@pytest.mark.parametrize("carried", [False, True], ids=["fresh", "carried"])
def test_fla_computes_delta_rules(
    calls: Recorded, lengths: list[int], channels: bool, carried: bool
) -> None:
    borders, inputs = borders_of(lengths), delta_inputs(sum(lengths), len(lengths), 2.0, channels)
    agree(
        lambda by, *x: by.gated_delta_rule(*x[:5], borders, x[5] if carried else None),
        operations("fla"),
        inputs[: 6 if carried else 5],
    )
    name, given = calls[-1]
    assert name == ("chunk_kda" if channels else "chunk_gated_delta_rule")
    # Its chunks are numbered by documents, so one without tokens is left out.
    assert given["cu_seqlens"].diff().tolist() == [length for length in lengths if length]
    assert (given["initial_state"] is not None) == carried


@pytest.mark.parametrize("channels", [False, True], ids=["gated", "kimi"])
def test_fla_goes_slot_by_slot_through_short_documents(calls: Recorded, channels: bool) -> None:
    """As in generation, where a document gets one slot at a time."""
    lengths = [1, 3, 0, 1]
    borders, inputs = borders_of(lengths), [x.float() for x in delta_inputs(5, 4, 2.0, channels)]
    with torch.no_grad():
        out, after = operations("fla").gated_delta_rule(*inputs[:5], borders, inputs[5])
        due, due_after = TORCH.gated_delta_rule(*inputs[:5], borders, inputs[5])
    torch.testing.assert_close(out, due, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after, due_after, rtol=1e-5, atol=1e-5)
    name, given = calls[-1]
    assert name == "fused_recurrent_gated_delta_rule"
    assert given["gk" if channels else "g"] is not None


@pytest.mark.parametrize("backend", ["fla", "causal_conv1d"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("carried", [False, True], ids=["fresh", "carried"])
def test_convolutions(calls: Recorded, backend: str, lengths: list[int], carried: bool) -> None:
    borders, total = borders_of(lengths), sum(lengths)
    inputs = [
        numbers(1, total, 16),
        numbers(2, 16, 4),
        numbers(3, 16),
        numbers(4, len(lengths), 3, 16),
    ]
    agree(
        lambda by, row, weight, bias, *state: [
            by.causal_convolution(row, weight, bias, borders, *state)
        ],
        operations(backend),
        inputs[: 4 if carried else 3],
    )
    name, given = calls[-1]
    if backend == "causal_conv1d":
        assert name == "causal_conv1d_fn"
        assert given["x"].stride(1) == 1
    else:
        assert name == "causal_conv1d"
        assert given["x"].is_contiguous()


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_mamba_ssm_computes_state_space_scans(calls: Recorded, lengths: list[int]) -> None:
    borders = borders_of(lengths)

    def run(by: Operations, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> list[Any]:
        return [by.state_space_scan(x, dt, a, b, c, borders, keeps=False)[0]]

    agree(run, operations("mamba_ssm"), space_inputs(sum(lengths), len(lengths))[:5])
    assert [name for name, _ in calls] == ["mamba_chunk_scan_combined"]
    due = np.repeat(np.arange(len(lengths)), lengths)
    assert calls[0][1]["seq_idx"].tolist() == [due.tolist()]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_mamba_ssm_computes_selective_scans(
    calls: Recorded, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    borders, total = borders_of(lengths), sum(lengths)
    inputs = [numbers(1, total, 6), numbers(2, total, 6).exp(), -numbers(3, 6, 4).exp()]
    agree(
        lambda by, u, dt, a, b, c: [by.selective_scan(u, dt, a, b, c, borders, keeps=False)[0]],
        operations("mamba_ssm"),
        [*inputs, numbers(4, total, 4), numbers(5, total, 4)],
    )
    assert {name for name, _ in calls} == {"selective_scan_fn"}
    if lengths == [8] * 12:
        assert [len(given["u"]) for _, given in calls] == [12]


def test_states_that_a_package_cannot_carry_are_carried_by_torch(calls: Recorded) -> None:
    by, borders = operations("mamba_ssm"), borders_of([7, 5])
    x, dt, b, c, a, state = (one.float() for one in space_inputs(12, 2))
    for given in ({"keeps": True}, {"state": state, "keeps": False}):
        _, after = by.state_space_scan(x, dt, a, b, c, borders, **given)
        assert (after is not None) == given["keeps"]
    assert calls == []
    assert by.describe() == "state_space_scan by torch"
    by.state_space_scan(x, dt, a, b, c, borders, keeps=False)
    assert by.describe() == "state_space_scan by mamba_ssm and torch"


def test_kernels_compute_in_the_dtype_of_the_model_and_keep_decays_precise(calls: Recorded) -> None:
    by, borders = operations("fla", "mamba_ssm", dtype=torch.bfloat16), borders_of([9, 4])
    inputs = [x.float() for x in delta_inputs(13, 2, 1.0, False)]
    out, after = by.gated_delta_rule(*inputs[:5], borders)
    assert out.dtype == after.dtype == torch.float32
    assert calls[-1][1]["q"].dtype == torch.bfloat16
    assert calls[-1][1]["g"].dtype == torch.float32
    x, dt, b, c, a, _ = (one.float() for one in space_inputs(13, 2))
    by.state_space_scan(x, dt, a, b, c, borders, keeps=False)
    assert calls[-1][1]["x"].dtype == torch.bfloat16
    assert calls[-1][1]["dt"].dtype == torch.float32


def test_the_first_backend_that_provides_an_operation_computes_it(calls: Recorded) -> None:
    row, weight, borders = torch.randn(6, 8), torch.randn(8, 3), borders_of([6])
    for names, due in (
        (("fla", "causal_conv1d"), "causal_conv1d"),
        (("causal_conv1d", "fla"), "causal_conv1d_fn"),
    ):
        by = operations(*names, "torch")
        by.causal_convolution(row, weight, None, borders)
        assert calls[-1][0] == due
        assert by.idle == [names[1]]


@pytest.mark.parametrize(("taps", "channels"), [(5, 8), (3, 12)])
def test_a_convolution_that_causal_conv1d_does_not_have(
    calls: Recorded, taps: int, channels: int
) -> None:
    with pytest.raises(ConfigError, match=rf"{taps}.*over.*{channels}.*'fla"):
        operations("causal_conv1d").causal_convolution(
            torch.randn(6, channels), torch.randn(channels, taps), None, borders_of([6])
        )


def test_selective_scans_refuse_determinism(
    calls: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    row, a = torch.randn(6, 2), -torch.rand(2, 3)
    with pytest.raises(ConfigError, match=r"summed.*fixed.*training.deterministic"):
        operations("mamba_ssm").selective_scan(
            row, row.exp(), a, torch.randn(6, 3), torch.randn(6, 3), borders_of([6]), keeps=False
        )


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_named_with_its_cure(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"'{name}' is not installed: pip install"):
        Operations.of([name], device="cuda", dtype=torch.float32)


def test_devices_and_dtypes_that_kernels_do_not_support(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, anywhere=False)
    with pytest.raises(ConfigError, match=r"'fla'.*runs.*cuda.*'torch'"):
        operations("fla")
    with pytest.raises(ConfigError, match=r"'mamba_ssm'.*float32, bfloat16.*float64"):
        Operations.of(["mamba_ssm"], device="cuda", dtype=torch.float64)
    # Chosen on a GPU, then moved.
    moved = Operations.of(["fla"], device="cuda", dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"chosen.*model.*again"):
        moved.causal_convolution(torch.randn(6, 8), torch.randn(8, 3), None, borders_of([6]))


@pytest.mark.parametrize("names", [["flash"], ["fla", "nothing"]])
def test_unknown_names(calls: Recorded, names: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"unknown.*mamba_ssm, causal_conv1d"):
        operations(*names)


def test_torch_stands_last(calls: Recorded) -> None:
    with pytest.raises(ConfigError, match="put it last"):
        operations("torch", "fla")
    assert operations("torch").describe() == "torch"


def test_a_version_without_borders_is_refused(
    calls: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(
        sys.modules["fla.ops.gated_delta_rule"], "chunk_gated_delta_rule", chunk_gated_delta_rule
    )
    inputs = delta_inputs(6, 1, 1.0, False)[:5]
    with pytest.raises(ConfigError, match="cu_seqlens, initial_state"):
        operations("fla").gated_delta_rule(*inputs, borders_of([6]))


def test_a_package_that_does_not_import(calls: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "causal_conv1d", ModuleType("causal_conv1d"))
    with pytest.raises(ConfigError, match=r"'causal_conv1d'.*AttributeError.*for"):
        operations("causal_conv1d").causal_convolution(
            torch.randn(6, 8), torch.randn(8, 3), None, borders_of([6])
        )


BLOCKS = {
    "delta": BlockSettings(mixer="gated_delta"),
    "kimi": BlockSettings(mixer="kimi_delta"),
    "mamba": BlockSettings(mixer="mamba", state_width=8),
    "full": BlockSettings(),
}


def model_of(*pattern: str, **settings: Any) -> Any:
    blocks = {name: BLOCKS[name] for name in pattern}
    return tiny(
        torch.float32,
        layers=len(pattern),
        width=16,
        heads=2,
        blocks=blocks,
        pattern=pattern,
        **settings,
    )


def test_our_transformer_with_packages(calls: Recorded, caplog: pytest.LogCaptureFixture) -> None:
    model, row = model_of("delta", "kimi", "mamba", "full"), random_row()
    due = logits_of(model, row)
    with caplog.at_level("INFO", "penstock.models"):
        use_recurrent(model, ("fla", "mamba_ssm"))
    used = recurrent_operations(model).describe()
    assert used == (
        "causal_convolution by fla, gated_delta_rule by fla, kimi_delta_rule by fla, "
        "state_space_scan by mamba_ssm"
    )
    assert caplog.messages == [f"Transformer: recurrent operations: {used}"]
    calls.clear()
    torch.testing.assert_close(logits_of(model, row), due, rtol=1e-4, atol=1e-4)
    assert {name for name, _ in calls} == {
        "causal_conv1d", "fused_recurrent_gated_delta_rule", "mamba_chunk_scan_combined"
    }  # fmt: skip
    use_recurrent(model, "torch")
    calls.clear()
    assert torch.equal(logits_of(model, row), due)
    assert calls == []


@pytest.mark.parametrize("mixer", ["delta", "kimi", "mamba"])
def test_rounding_in_half_precision_is_no_fault(calls: Recorded, mixer: str) -> None:
    settings = ModelSettings(
        layers=1, width=64, dtype="bfloat16", blocks={mixer: BLOCKS[mixer]}, pattern=(mixer,)
    )
    model = build_model(settings, vocab_size=VOCABULARY)
    use_recurrent(model, "mamba_ssm" if mixer == "mamba" else "fla")
    model.train()
    logits_of(model, random_row())
    kept = next(
        given for name, given in calls[::-1] if "delta" in name or "scan" in name or "kda" in name
    )
    assert kept["x" if mixer == "mamba" else "q"].dtype == torch.bfloat16


def test_generation_with_packages_carries_states(calls: Recorded) -> None:
    model = model_of("delta", "mamba")
    tokens = torch.from_numpy(random_row((12,), padding=0).tokens)[None]
    due = model.extend(tokens, torch.tensor([12]), model.new_cache(1, 12))
    use_recurrent(model, ("fla", "mamba_ssm"))
    cache = model.new_cache(1, 12)
    for begin, end in ((0, 7), (7, 8), (8, 12)):
        found = model.extend(tokens[:, begin:end], torch.tensor([end - begin]), cache)
    torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-4)
    assert "state_space_scan by mamba_ssm and torch" in recurrent_operations(model).describe()


def test_a_backend_without_work_is_refused(calls: Recorded) -> None:
    model = model_of("delta", "full")
    with pytest.raises(ConfigError, match=r"'mamba_ssm'.*operation of Transformer"):
        use_recurrent(model, ("fla", "mamba_ssm"))
    assert recurrent_operations(model) is TORCH
    with pytest.raises(ConfigError, match=r"'fla' would compute nothing.*none at all"):
        use_recurrent(tiny(torch.float32), "fla")


@pytest.mark.parametrize("fault", ["wrong", "leak"])
def test_kernels_are_tried_before_they_are_used(
    calls: Recorded, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A kernel that is a little off, and one that keeps states over borders."""
    module = sys.modules["fla.modules.causal_conv1d"]
    right = module.causal_conv1d  # type: ignore[attr-defined]

    def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, *, cu_seqlens: Tensor) -> Any:
        if fault == "leak":
            cu_seqlens = torch.tensor([0, x.shape[1]])
        out, after = right(x, weight, bias, cu_seqlens=cu_seqlens)
        return out * (1.01 if fault == "wrong" else 1.0), after

    monkeypatch.setattr(module, "causal_conv1d", causal_conv1d)
    model = model_of("delta", "full", init_std=0.3)
    with pytest.raises(ConfigError, match=r"differs.*standard.*deviations"):
        use_recurrent(model, "fla")
    assert recurrent_operations(model) is TORCH
