"""Compile the kernels that a wheel brings, for the Python that runs this: `make kernels`.

They go to `src/penstock/kernels`, from where a build takes them; git does not. A release runs this
with each Python that it supports, on each kind of machine in `penstock.core.kernel_cache.LEVELS`.
"""

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPILE = """
import sys
from penstock.use.runs.kernels import compile_kernels
compile_kernels(progress=sys.stderr.isatty())
"""


def ship_kernels(folder: Path, package: Path = ROOT / "src" / "penstock") -> list[Path]:
    """Compile the kernels of `package` into `folder` for the CPU level that machines of this kind
    share.
    """
    from penstock.core.kernel_cache import LEVELS

    level, _ = LEVELS[platform.machine()]
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "NUMBA_CACHE_DIR": cache,
            "NUMBA_CPU_NAME": level,
            "NUMBA_CPU_FEATURES": "",
            "PYTHONPATH": str(package.parent),
        }
        subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True)
        folder.mkdir(exist_ok=True)
        made = []
        for kernel in sorted(Path(cache).glob("penstock/*.kernel")):
            made.append(folder / kernel.name)
            made[-1].write_bytes(kernel.read_bytes())
    return made


if __name__ == "__main__":
    made = ship_kernels(ROOT / "src" / "penstock" / "kernels")
    size = sum(path.stat().st_size for path in made) / 1e6
    print(f"{len(made)} kernels, {size:.1f} MB, for Python {platform.python_version()}")
