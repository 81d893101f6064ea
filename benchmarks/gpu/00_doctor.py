"""Is everything there? Imports and versions, `penstock doctor`, and the tests that need a GPU.

python benchmarks/gpu/00_doctor.py --output results
"""

import importlib.metadata
import importlib.util
import os

from common import Figures, Report, python

PACKAGES = (
    "torch", "triton", "transformers", "numba", "pyarrow", "tokenizers", "safetensors", "gigatoken",
    "pydantic", "beartype", "fastapi", "uvicorn", "llguidance", "liger-kernel", "flash-attn",
    "flash-linear-attention", "fla-core", "mamba-ssm", "causal-conv1d", "bitsandbytes", "torchao",
    "torchtitan", "datasets", "peft", "trl",
)  # fmt: skip


def versions() -> Figures:
    """Version of each package that a script may use."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def attention() -> Figures:
    """What torch's attention has here."""
    import torch
    from torch.nn import attention as module

    switches = ("activate_flash_attention_impl", "list_flash_attention_impls")
    return {
        **{name: hasattr(module, name) for name in switches},
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "varlen": importlib.util.find_spec("torch.nn.attention.varlen") is not None,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "default"),
    }


def tests(toy: bool) -> Figures:
    """The tests marked `gpu`; warnings of inductor are no errors. A toy run collects one file."""
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-W", "default"]
    more = (
        ["--collect-only", "tests/models/test_paged_gpu.py"] if toy else ["--slow", "tests/models"]
    )
    return python(*words, *more, timeout=400)


def main() -> None:
    report = Report(__file__, __doc__)
    report.part("versions", versions)
    report.part("attention", attention)
    report.part("penstock doctor", python, "-m", "penstock", "doctor", timeout=100)
    report.part("pytest -m gpu", tests, report.toy)
    report.done()


if __name__ == "__main__":
    main()
