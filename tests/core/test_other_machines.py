"""macOS and ARM, imitated: which kernels are read there, where they are kept, and that no call is
Linux's alone.
"""

import ast
import sys
from pathlib import Path

import pytest

from penstock.core import kernel_cache

PACKAGE = Path(kernel_cache.__file__).parents[1]
LINUX_ONLY = {
    "sched_getaffinity",
    "sched_setaffinity",
    "posix_fadvise",
    "POSIX_FADV_DONTNEED",
    "memfd_create",
    "MFD_CLOEXEC",
    "posix_fallocate",
    "pidfd_open",
    "setresuid",
    "setresgid",
    "O_TMPFILE",
    "splice",
    "eventfd",
    "getrandom",
}
"""Names of `os` that macOS does not have."""
GUARDED = {
    "core/system.py": "falls back to the number of all processors",
    "data/stores/files.py": "pages stay in the cache",
    "learn/distillation/outputs.py": "refused with a message",
    "learn/evaluation/sandbox": "refused with a message",
}
"""Where they are used, and what happens without them; `test_system.py` runs the data path without
them.
"""


@pytest.fixture
def machine(monkeypatch):
    """Imitate a machine: its name, and the features of its processor."""

    def imitate(name, *features, chosen=None):
        monkeypatch.setattr(kernel_cache.platform, "machine", lambda: name)
        monkeypatch.setattr(
            kernel_cache.llvm, "get_host_cpu_features", lambda: dict.fromkeys(features, True)
        )
        monkeypatch.setattr(kernel_cache.numba.config, "CPU_NAME", chosen)
        monkeypatch.setattr(kernel_cache.numba.config, "CPU_FEATURES", None)

    return imitate


def test_kernels_of_a_wheel_by_machine(machine):
    machine("arm64")
    assert kernel_cache.shipped_level() == "apple-m1"
    machine("aarch64", "neon", "sve")
    assert kernel_cache.shipped_level() == "generic"
    machine("aarch64")
    assert kernel_cache.shipped_level() is None
    machine("x86_64", *kernel_cache.LEVELS["x86_64"][1].split())
    assert kernel_cache.shipped_level() == "x86-64-v3"
    machine("x86_64", "avx", "sse3")
    assert kernel_cache.shipped_level() is None
    machine("riscv64", "neon")
    assert kernel_cache.shipped_level() is None
    machine("arm64", chosen="apple-m4")
    assert kernel_cache.shipped_level() is None


def test_kernels_of_the_user_are_kept_where_macos_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(kernel_cache, "PACKAGE", Path("/proc/nothing"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert (
        kernel_cache._first_writable.__wrapped__("") == tmp_path / "Library/Caches/penstock/kernels"
    )


def test_calls_that_only_linux_has_stand_where_they_are_guarded():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and ast.unparse(node.value) == "os"
                and node.attr in LINUX_ONLY
            ):
                found.add(path.relative_to(PACKAGE).as_posix())
    assert {path for path in found if not any(path.startswith(known) for known in GUARDED)} == set()
    assert all(any(path.startswith(known) for path in found) for known in GUARDED)


def test_the_fast_encoder_is_required_only_where_it_has_wheels():
    text = (PACKAGE.parents[1] / "pyproject.toml").read_text()
    (line,) = (line for line in text.splitlines() if line.lstrip().startswith('"gigatoken'))
    for name in ("x86_64", "aarch64", "arm64"):
        assert name in line
