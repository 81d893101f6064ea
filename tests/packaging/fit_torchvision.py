"""Make torchvision importable in this environment if its C++ library does not fit torch, as next to
a CPU build.

The wheels of the package index are built for CUDA. Their Python code, which resizes images, runs
with any build of torch, but importing it refers to operators of the library by name. This declares
them, in the installed package, once: `python tests/packaging/fit_torchvision.py`.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

MARK = "# Declared by penstock's tests: the C++ library does not fit this build of torch.\n"
DECLARED = f"""{MARK}import torch as _torch

_declared = _torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _declared.define(f"{{_name}}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
"""


def imports() -> bool:
    """Whether torchvision can be imported, in a new process."""
    return (
        subprocess.run(
            [sys.executable, "-c", "import torchvision"], capture_output=True, check=False
        ).returncode
        == 0
    )


def main() -> None:
    found = find_spec("torchvision")
    if found is None or found.origin is None or imports():
        return
    path = Path(found.origin)
    text = path.read_text(encoding="utf-8")
    if MARK not in text:
        path.write_text(DECLARED + text, encoding="utf-8")
    if not imports():
        raise SystemExit("torchvision cannot be imported next to this build of torch")


if __name__ == "__main__":
    main()
