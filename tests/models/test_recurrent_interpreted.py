"""The Triton kernels of fla and mamba-ssm themselves, in Triton's interpreter on the CPU, against
our operations.

It needs the packages with triton, but no GPU: `pip install flash-linear-attention triton`, and for
mamba-ssm its sources, on the path, without its compiled parts. On a GPU, `test_recurrent_gpu.py`
says more.
"""

from importlib.util import find_spec

import pytest

from makers.processes import child_environment, run_code

_START = """
    import builtins, importlib.util, sys, types, warnings
    from contextlib import nullcontext
    warnings.simplefilter("ignore")
    import torch
    from torch.nn.functional import normalize, softplus
    import triton.runtime.autotuner

    # The interpreter times nothing, has no device, and gives loops plain integers.
    triton.runtime.autotuner.Autotuner._bench = lambda *args, **given: [0.0]
    torch.cuda.device = lambda device: nullcontext()
    torch.cuda.get_device_properties = lambda *args: types.SimpleNamespace(multi_processor_count=1)

    class Integer(int):
        def to(self, kind):
            return self

    def integers(*bounds):
        return map(Integer, builtins.range(*bounds))

    from penstock.models.recurrent import PACKAGES, Borders
    from penstock.models.recurrent.operations import TORCH

    total, heads, width = 150, 2, 16
    borders = Borders([0, 20, 20, 21, 130, 150])
    draw = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(*shape, generator=draw)

    def agree(name, run, due, inputs, gradients=True):
        results = []
        for function in (run, due):
            leaves = [x.clone().requires_grad_(gradients) for x in inputs]
            with torch.set_grad_enabled(gradients):
                found = [x for x in function(*leaves) if x is not None]
                if gradients:
                    far = found[0][21:130].sum()
                    reach = torch.autograd.grad(far, leaves, retain_graph=True, allow_unused=True)
                    for one in reach:
                        if one is not None and len(one) == total:
                            assert not one[:21].any() and not one[130:].any(), name
                    loss = sum((x * torch.linspace(-1, 1, x.shape[-1])).sum() for x in found)
                    found += torch.autograd.grad(loss, leaves)
            results.append(found)
        for mine, other in zip(*results):
            assert (mine - other).abs().max() <= 1e-5 * other.abs().max(), name
        print(name, "agrees")
"""


def run(code: str) -> str:
    return run_code(_START + code, check=True, env=child_environment(TRITON_INTERPRET="1")).stdout


@pytest.mark.slow
@pytest.mark.skipif(
    not (find_spec("fla") and find_spec("triton")), reason="needs flash-linear-attention and triton"
)
def test_fla() -> None:
    out = run("""
    import fla.ops.common.chunk_delta_h as chunks
    chunks.range = integers

    kernels = PACKAGES["fla"].operations
    queries, keys, values = (numbers(total, heads, width) for _ in range(3))
    common = [queries, normalize(keys, dim=-1), values]
    rest = [torch.rand(total, heads, generator=draw), numbers(5, heads, width, width)]
    for name, shape in (("gated_delta_rule", (total, heads)), ("kimi_delta_rule", (total, heads, width))):
        for gradients in (False, True):
            agree(
                name,
                lambda *x: kernels[name](*x[:5], borders, x[5], torch.float32),
                lambda *x: TORCH.gated_delta_rule(*x[:5], borders, x[5]),
                [*common, -torch.rand(shape, generator=draw), *rest],
                gradients,
            )
    # Without gradients and with short documents: slot by slot.
    short = Borders([0, 20, 20, 21])
    found = kernels["gated_delta_rule"]
    inputs = [x[:21] for x in (*common, -torch.rand(total, heads, generator=draw), rest[0])] + [rest[1][:3]]
    agree(
        "fused_recurrent",
        lambda *x: found(*x[:5], short, x[5], torch.float32),
        lambda *x: TORCH.gated_delta_rule(*x[:5], short, x[5]),
        inputs,
        False,
    )
    agree(
        "causal_convolution",
        lambda *x: [kernels["causal_convolution"](*x, borders, torch.float32)],
        lambda *x: [TORCH.causal_convolution(*x, borders)],
        [numbers(total, 8), numbers(8, 4)] + [numbers(8)],
        False,
    )
    """)  # noqa: E501
    assert out.count("agrees") == 6


@pytest.mark.slow
@pytest.mark.skipif(
    not (find_spec("mamba_ssm") and find_spec("triton")), reason="needs mamba-ssm and triton"
)
def test_mamba_ssm() -> None:
    out = run("""
    # Without its compiled parts, which the scan of Mamba-2 does not need.
    package = types.ModuleType("mamba_ssm")
    package.__path__ = list(importlib.util.find_spec("mamba_ssm").submodule_search_locations)
    sys.modules["mamba_ssm"] = package
    sys.modules.setdefault("selective_scan_cuda", types.ModuleType("selective_scan_cuda"))

    scan = PACKAGES["mamba_ssm"].operations["state_space_scan"]
    inputs = [numbers(total, 4, 16), softplus(numbers(total, 4)), -torch.rand(4, generator=draw)]
    agree(
        "state_space_scan",
        lambda *x: [scan(*x, borders, torch.float32)],
        lambda *x: [TORCH.state_space_scan(*x, borders)[0]],
        [*inputs, numbers(total, 2, 16), numbers(total, 2, 16)],
    )
    """)
    assert out.count("agrees") == 1
