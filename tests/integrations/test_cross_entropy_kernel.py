"""The kernel of cross entropy, on the CPU by Triton's interpreter, against torch's operations and
the plain formula.

It needs triton, but no GPU: `pip install --no-deps triton`. `benchmarks/gpu/06_head.py` runs it on
one.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from makers.processes import child_environment, run_python

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs triton, whose interpreter runs the kernel"
)
RUN = Path(__file__).with_name("cross_entropy_kernel_run.py")


@pytest.mark.parametrize("name", ["drawn", "unknown", "chunked", "tried"])
def test_the_kernel_in_the_interpreter(name: str) -> None:
    found = run_python(RUN, name, check=True, env=child_environment(TRITON_INTERPRET="1"))
    assert f"{name} held" in found.stdout


def test_it_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    environment = child_environment(TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    found = run_python(RUN, "compiled", check=True, env=environment)
    assert "compiled held" in found.stdout
