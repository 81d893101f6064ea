"""The kernel of cross entropy in Triton's interpreter: `python cross_entropy_kernel_run.py NAME`,
with TRITON_INTERPRET=1; `compiled` without it, for GPUs that need not be there.
"""

import sys

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.learn.training import cross_entropy
from penstock.learn.training import cross_entropy_kernel as kernel

HALF = (torch.bfloat16, torch.float16)


def plain(logits: Tensor, targets: Tensor, weights: Tensor, scale: float, z_loss: float):
    """Cross entropy, log Z and the gradient of the logits, in float64."""
    leaf = logits.double().requires_grad_()
    logs = leaf.logsumexp(-1)
    entropies = logs - leaf.gather(1, targets[:, None])[:, 0]
    loss = scale * (weights.double() * (entropies + z_loss * logs.square())).sum()
    loss.backward()
    return entropies.detach(), logs.detach(), leaf.grad


@settings(deadline=None, max_examples=120)
@given(
    n=st.integers(1, 5),
    width=st.one_of(st.integers(1, 70), st.sampled_from([4095, 4096, 4097, 9001])),
    dtype=st.sampled_from(kernel.DTYPES),
    size=st.sampled_from([0.0, 1.0, 30.0, 3e4]),
    masked=st.sampled_from([0.0, 0.3, 1.0]),
    z_loss=st.sampled_from([0.0, 1e-2]),
    zero_weights=st.booleans(),
    gap=st.integers(0, 3),
    in_place=st.booleans(),
    seed=st.integers(0, 99),
)
def drawn(n, width, dtype, size, masked, z_loss, zero_weights, gap, in_place, seed):
    generator = torch.Generator().manual_seed(seed)
    # Rows may lie apart in memory.
    whole = (size * torch.randn(n, width + gap, generator=generator)).clamp(-6e4, 6e4).to(dtype)
    logits = whole[:, :width]
    targets = torch.randint(width, (n,), generator=generator)
    # A vocabulary is often padded or masked, but never at the target.
    hidden = torch.rand(n, width, generator=generator) < masked
    hidden[torch.arange(n), targets] = False
    logits.masked_fill_(hidden, -torch.inf)
    weights = torch.rand(n, generator=generator) * (torch.rand(n, generator=generator) < 0.7)
    weights = weights * (not zero_weights)
    entropies, logs, gradient = plain(logits, targets, weights, 0.3, z_loss)
    twin = cross_entropy._by_torch(logits, targets, weights, 0.3, z_loss)
    out = logits if in_place else torch.empty_like(logits)
    before, outside = logits.clone(), whole[:, width:].clone()
    alone = kernel.fused_cross_entropy(
        logits, targets, weights, scale=0.3, z_loss=z_loss, gradient=None
    )
    assert torch.equal(logits, before)
    found = kernel.fused_cross_entropy(
        logits, targets, weights, scale=0.3, z_loss=z_loss, gradient=out
    )
    assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))
    assert torch.equal(whole[:, width:], outside)
    assert in_place or torch.equal(logits, before)
    # Large logits have few digits left in float32.
    accuracy = 1e-5 * max(1.0, float(before[before > -torch.inf].abs().max()))
    for one, other in zip(found, (entropies, logs), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-6, atol=accuracy)
    torch.testing.assert_close(found[0], twin.entropies, rtol=2e-6, atol=accuracy)
    # The interpreter cuts digits off where a GPU rounds.
    step = 2 * torch.finfo(dtype).eps if dtype in HALF else 1e-5
    tiny = 1e-7 + 1e-5 * abs(z_loss) * accuracy
    bound = step * gradient.abs() + tiny + (1e-5 if dtype != torch.bfloat16 else 0)
    assert ((out.double() - gradient).abs() <= bound).all()
    if not weights.any():
        assert not out.any()


def unknown() -> None:
    """A target outside the vocabulary gives NaN; a row without a logit too, as in torch."""
    logits = torch.zeros(4, 300)
    logits[3] = -torch.inf
    found, _ = kernel.fused_cross_entropy(
        logits, torch.tensor([-100, 300, 5, 5]), torch.ones(4), scale=1.0, z_loss=0.0, gradient=None
    )
    assert found.isnan().tolist() == [True, True, False, True]


VIEWS = ("detach", "set_", "t", "transpose")


class Largest(TorchDispatchMode):
    """Shapes and dtypes of new matrices as large as a chunk's logits."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape, self.made = shape, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        # The interpreter looks at the memory of its arguments.
        if isinstance(found, Tensor) and found.shape == self.shape and name not in VIEWS:
            self.made.append((name, found.dtype))
        return found


def chunked() -> None:
    """The loss with the kernel: the numbers of torch's operations, and one buffer a chunk."""
    width, vocabulary, count = 8, 300, 12
    for dtype in (torch.bfloat16, torch.float32):
        weight = nn.Parameter(torch.randn(vocabulary, width))
        heads = {
            "matrix": lambda x, w=weight: x @ w.to(x.dtype).t(),
            "cap": lambda x, w=weight: 5 * torch.tanh((x @ w.to(x.dtype).t()).float() / 5),
            "tanh": lambda x, w=weight: torch.tanh(x @ w.to(x.dtype).t()),
            "softmax": lambda x, w=weight: torch.log_softmax(x @ w.to(x.dtype).t(), -1),
            "leaf": lambda x, w=weight: x,
        }
        for name, head in heads.items():
            states = torch.randn(count, vocabulary if name == "leaf" else width).to(dtype)
            targets = torch.randint(vocabulary, (count,))
            weights = torch.rand(count)
            results = []
            for function in (None, kernel.fused_cross_entropy):
                cross_entropy.fused_for = lambda device, kind, function=function: function
                leaf = states.clone().requires_grad_()
                weight.grad = None
                each = torch.zeros(count, dtype=torch.float64)
                with Largest((4, vocabulary)) as made:
                    loss, entropy = cross_entropy.chunked_cross_entropy(
                        head, leaf, targets, weights, scale=0.5, z_loss=0.01, chunk=4, each=each
                    )
                    loss.backward()
                assert torch.equal(leaf.detach(), states), (name, "hidden states were overwritten")
                with torch.no_grad():
                    alone = cross_entropy.chunked_cross_entropy(
                        head, leaf, targets, weights, scale=0.5, z_loss=0.01, chunk=4
                    )
                grads = [leaf.grad] + ([] if weight.grad is None else [weight.grad])
                results.append([loss.detach(), entropy, each, *alone, *grads])
                if name == "matrix" and function is not None:
                    assert made.made == [("mm", dtype)] * 3
            tolerance = 1e-5 if dtype == torch.float32 or name == "cap" else 0.02
            for mine, other in zip(*results, strict=True):
                error = (mine.double() - other.double()).norm()
                assert error <= tolerance * other.double().norm(), (name, dtype)


def tried() -> None:
    """A kernel that computes something else is found out."""
    cpu = torch.device("cpu")
    for dtype in kernel.DTYPES:
        assert cross_entropy.disagreement(kernel.fused_cross_entropy, cpu, dtype) == ""

        def wrong(logits, targets, weights, *, gradient, **given):
            found = kernel.fused_cross_entropy(logits, targets, weights, gradient=gradient, **given)
            gradient[2, 4999] += 0.1
            return found

        assert "gradient" in cross_entropy.disagreement(wrong, cpu, dtype)


def compiled() -> None:
    """It compiles for an A100 and an H100, to machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {
        **dict.fromkeys(("stride", "gradient_stride", "width"), "i32"),
        **dict.fromkeys(("weights", "entropies", "logs"), "*fp32"),
        **dict.fromkeys(("scale", "z_loss"), "fp32"),
        **dict.fromkeys(("block", "writes"), "constexpr"),
        "targets": "*i64",
    }
    for logits in ("bf16", "fp32"):
        for capability in (80, 90):
            for writes in (True, False):
                given = {name: kinds.get(name, f"*{logits}") for name in kernel._row.arg_names}
                source = ASTSource(
                    kernel._row, given, constexprs={"block": kernel.BLOCK, "writes": writes}
                )
                made = triton.compile(
                    source,
                    target=GPUTarget("cuda", capability, 32),
                    options={"num_warps": kernel.WARPS},
                )
                assert len(made.asm["cubin"]) > 1000


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print(sys.argv[1], "held")
