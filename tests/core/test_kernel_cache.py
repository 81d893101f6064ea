"""Compiled kernels on disk: never stale, foreign or damaged, whoever writes them and wherever they
come from.
"""

import ast
import importlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from makers import forked
from makers.processes import child_environment, run_python
from patience import PATIENCE_SECONDS
from penstock.core import kernel_cache

FACTOR = "FACTOR = {factor}\n"
INNER = """
from penstock.core.compiled import inline_kernel
from made_constants import FACTOR

@inline_kernel
def times(value):
    return value * FACTOR {more}
"""
OUTER = """
from penstock.core.compiled import kernel
from made_inner_kernels import times

@kernel
def run(value):
    return times(value) + {plus}
"""
USE = """
import sys
from numba.core import event
recorder = event.RecordingListener()
event.register("numba:compile", recorder)
from made_outer_kernels import run
result = run(3)
compiled = any(record.data["dispatcher"] is run for _, record in recorder.buffer)
print(result, "compiled" if compiled else "read")
"""


FORKED = """
import sys
import numba
sys.path.insert(0, {folder!r})
sys.dont_write_bytecode = True
numba.config.reload_config()
"""
"""What a new process reads as it starts, and one that is forked does not."""


@pytest.fixture
def use(tmp_path):
    """Runs a kernel of three modules in a new process: its result, and whether it was compiled.

    Its start takes longer than all else, so it is forked, unless something is other at the start.
    """

    def run(factor=2, more="", plus=1, cache="cache", before="", **environment):
        (tmp_path / "made_constants.py").write_text(FACTOR.format(factor=factor))
        (tmp_path / "made_inner_kernels.py").write_text(INNER.format(more=more))
        (tmp_path / "made_outer_kernels.py").write_text(OUTER.format(plus=plus))
        names = child_environment(NUMBA_CACHE_DIR=str(tmp_path / cache), **environment)
        if before or environment:
            names["PYTHONDONTWRITEBYTECODE"] = "1"
            names["PYTHONPATH"] = f"{tmp_path}:{names['PYTHONPATH']}"
            code = textwrap.dedent(before) + USE
            found = run_python("-c", code, env=names, check=True)
        else:
            code = FORKED.format(folder=str(tmp_path)) + USE
            found = forked.run_python("-c", code, env=names, check=True)
        result, how = found.stdout.split()
        return int(result), how

    return run


def kernels(folder: Path) -> list[Path]:
    return sorted(folder.glob("penstock/*.kernel"))


def test_a_kernel_is_read_again_and_never_stale(use, tmp_path):
    assert use() == (7, "compiled")
    assert use() == (7, "read")
    assert use(plus=2) == (8, "compiled")
    assert use(more="+ 10") == (17, "compiled")
    # A constant of a module that holds no kernels.
    assert use(factor=5) == (16, "compiled")
    assert use(factor=5) == (16, "read")
    assert use() == (7, "read"), "versions may share a folder"
    assert use(factor=9) == (28, "compiled")
    assert len(kernels(tmp_path / "cache")) == kernel_cache.KEPT, (
        "what the oldest sources left is deleted"
    )


def test_a_name_of_a_kernel_module_is_a_constant_or_from_a_module_that_counts():
    """And what has nothing to do with a kernel does not: neither other rooms nor the rest of
    `core`.
    """
    for path in sorted(kernel_cache.PACKAGE.rglob("_*kernels.py")):
        name = ".".join(path.relative_to(kernel_cache.PACKAGE.parent).with_suffix("").parts)
        module = importlib.import_module(name)
        counted = kernel_cache.code_modules(name)
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("penstock."):
                continue
            for alias in node.names:
                value = getattr(module, alias.asname or alias.name)
                is_constant = bool(list(kernel_cache._as_text(value)))
                assert is_constant or node.module in counted or value.__module__ in counted, (
                    name,
                    alias.name,
                )
        others = {one.removeprefix("penstock.") for one in counted if not one.endswith("kernels")}
        assert others <= {"core.compiled", "core.randomness", "core.vectors"}
    assert kernel_cache.code_modules("penstock.plan.packing._kernels") == {
        "penstock.plan.packing._kernels",
        kernel_cache.COMPILED,
    }


@pytest.mark.parametrize("change", ["cut", "emptied", "changed"])
def test_a_damaged_file_is_compiled_again(use, tmp_path, change):
    use()
    (path,) = kernels(tmp_path / "cache")
    data = path.read_bytes()
    middle = len(data) // 2
    changed = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    path.write_bytes({"cut": data[:-100], "emptied": b"", "changed": changed}[change])
    assert use() == (7, "compiled")
    assert use() == (7, "read")


def test_code_for_another_cpu_is_not_read(use):
    level, _ = kernel_cache.LEVELS[kernel_cache.platform.machine()]
    assert use() == (7, "compiled")
    assert use(NUMBA_CPU_NAME=level, NUMBA_CPU_FEATURES="") == (7, "compiled")
    assert use() == (7, "read")


def test_other_settings_of_numba_compile_other_code(use):
    assert use() == (7, "compiled")
    assert use(NUMBA_BOUNDSCHECK="1") == (7, "compiled")
    assert use() == (7, "read")


OTHER_VERSION = "import {module}\n{module}.__version__ = '0.0'\n"


@pytest.mark.parametrize("module", ["numba", "llvmlite"])
def test_code_of_another_version_is_not_read(use, module):
    assert use() == (7, "compiled")
    assert use(before=OTHER_VERSION.format(module=module)) == (7, "compiled")
    assert use() == (7, "read")


SHIPPED = """
from pathlib import Path
from penstock.core import kernel_cache
kernel_cache.SHIPPED = Path({folder!r})
"""
OLD_CPU = """
kernel_cache.LEVELS = {name: (level, "a-feature-of-the-future") for name, (level, _) in kernel_cache.LEVELS.items()}
"""  # noqa: E501


def test_shipped_kernels_are_read_only_where_they_run(use, tmp_path):
    level, _ = kernel_cache.LEVELS[kernel_cache.platform.machine()]
    use(cache="made", NUMBA_CPU_NAME=level, NUMBA_CPU_FEATURES="")
    (path,) = kernels(tmp_path / "made")
    shipped = SHIPPED.format(folder=str(path.parent))
    assert use(cache="new", before=shipped) == (7, "read")
    assert kernels(tmp_path / "new") == []
    assert use(cache="new", before=shipped, factor=3) == (10, "compiled")
    assert use(cache="old", before=shipped + OLD_CPU) == (7, "compiled")
    path.write_bytes(path.read_bytes()[:-1])
    assert use(cache="other", before=shipped) == (7, "compiled")


def test_processes_that_compile_at_once(use, tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: use(), range(4)))
    assert {result for result, _ in found} == {7}
    assert use() == (7, "read")
    assert [path.suffix for path in (tmp_path / "cache" / "penstock").iterdir()] == [".kernel"], (
        "nothing is left over"
    )


def test_one_line_says_that_kernels_are_compiled(tmp_path):
    code = """
        from penstock.core.randomness import uniforms
        import numpy as np
        uniforms(np.arange(2, dtype=np.uint64), np.arange(2, dtype=np.uint64), np.empty(2))
        uniforms(np.arange(2, dtype=np.uint64), np.arange(2, dtype=np.uint64), np.empty(2, np.float32))
    """  # noqa: E501
    environment = child_environment(NUMBA_CACHE_DIR=str(tmp_path))
    words = [sys.executable, "-c", textwrap.dedent(code)]
    said = [
        subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        ).stderr
        for _ in range(2)
    ]
    assert said[0].splitlines() == [
        f"penstock: compiling kernels (5 to 30 s); later starts read them from {tmp_path}/penstock"
    ]
    assert said[1] == ""


def test_a_folder_that_cannot_be_written_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert kernel_cache._first_writable(str(tmp_path / "file")) is None
    monkeypatch.setattr(kernel_cache, "PACKAGE", tmp_path / "file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    kernel_cache._first_writable.cache_clear()
    assert kernel_cache._first_writable("") == tmp_path / "home" / "penstock" / "kernels"
    kernel_cache._first_writable.cache_clear()
