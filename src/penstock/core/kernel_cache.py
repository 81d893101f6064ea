"""Where compiled kernels are kept: one file for each kernel, signature and CPU, named by all that
its code depends on.

A file's name has a hash of the sources of the kernel's module and of those that it takes functions
from, of the constants that they use, of the signature, the CPU, the versions of Python, Numba and
llvmlite, and Numba's settings. So a stale or foreign file is never read: its name differs; and a
change elsewhere compiles nothing again. Its contents carry their own checksum, and are written at
once, so several processes may compile the same kernel. (Numba's own cache asks only whether the
kernel's own file has changed, by its time, and keeps an index that processes overwrite.)

Wheels bring files compiled for a common CPU level (`SHIPPED`), made by
`tests/packaging/ship_kernels.py`. They are used where the CPU has all features of that level, and
never written.
"""

import gc
import hashlib
import os
import pickle
import platform
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
from numba.core import event
from numba.core.base import BaseContext
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.dispatcher import Dispatcher
from numba.core.runtime import rtsys
from numba.core.serialize import dumps
from numba.core.typing import Signature

from penstock.core.formats import KERNEL

PACKAGE = Path(__file__).parents[1]
SHIPPED = PACKAGE / "kernels"
"""Kernels that a wheel brings; not in a checkout."""
KEPT = 4
"""Files of a kernel and signature that are kept, of different sources."""
_CODE_SETTINGS = (
    "OPT",
    "BOUNDSCHECK",
    "DEBUGINFO_DEFAULT",
    "LOOP_VECTORIZE",
    "SLP_VECTORIZE",
    "USING_SVML",
)
"""Settings of Numba (`NUMBA_OPT`, …) that change what it compiles."""
COMPILED = "penstock.core.compiled"
_ENDING = ".kernel"
_DIGEST_BYTES = 16

LEVELS = {
    "x86_64": (
        "x86-64-v3",
        "avx avx2 bmi bmi2 cx16 f16c fma lzcnt movbe popcnt sahf sse3 sse4.1 sse4.2 ssse3 xsave",
    ),
    "aarch64": ("generic", "neon"),
    "arm64": ("apple-m1", ""),
}
"""Machine → (CPU name in LLVM of the code that wheels bring, the features that a CPU needs to run
it). x86-64-v3 is defined in the x86-64 psABI, version 1.0, section 3.1.1; all ARM Macs are at least
an M1.
"""


def cache_folder() -> Path | None:
    """The folder of compiled kernels, which may not exist yet; None if none can be written.

    `$NUMBA_CACHE_DIR/penstock`, the package's own `__pycache__`, or the user's cache folder.
    """
    return _first_writable(numba.config.CACHE_DIR)


@cache
def _first_writable(chosen: str) -> Path | None:
    home = Path.home() / "Library/Caches" if sys.platform == "darwin" else Path.home() / ".cache"
    user = Path(os.environ.get("XDG_CACHE_HOME") or home) / "penstock" / "kernels"
    for folder in (
        [Path(chosen) / "penstock"] if chosen else [PACKAGE / "__pycache__" / "kernels", user]
    ):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    return None


def shipped_level() -> str | None:
    """LLVM's name of the CPU level whose shipped kernels run here; None: they do not."""
    name, features = LEVELS.get(platform.machine(), (None, ""))
    if numba.config.CPU_NAME is not None or numba.config.CPU_FEATURES is not None:
        # Somebody chose what to compile for.
        return None
    has = llvm.get_host_cpu_features()
    return name if all(has.get(feature, False) for feature in features.split()) else None


class KernelCache(_Cache):  # type: ignore[misc]
    """The compiled forms of one kernel on disk; Numba asks it before it compiles.

    Args:
        function: The kernel's Python function.
    """

    def __init__(self, function: FunctionType) -> None:
        self._function, self._enabled = function, True

    @property
    def cache_path(self) -> str:
        """For Numba's statistics."""
        return str(cache_folder())

    def enable(self) -> None:
        """Read and write files."""
        self._enabled = True

    def disable(self) -> None:
        """Neither read nor write files."""
        self._enabled = False

    def flush(self) -> None:
        """Nothing is kept in memory."""

    def load_overload(self, signature: Signature, target: BaseContext) -> CompileResult | None:
        """Compiled code for a signature; None: nothing that can be used."""
        if not self._enabled:
            return None
        # Numba's own cache calls `target.refresh()`, which does this, and imports what only
        # compiling needs (0.3 s).
        rtsys.initialize(target)
        for path in self._files(signature, target.codegen().magic_tuple()):
            try:
                data = path.read_bytes()
            except OSError:
                continue
            digest, payload = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
            if _digest(payload) == digest:
                return CompileResult._rebuild(target, *pickle.loads(payload))
        return None

    def save_overload(self, signature: Signature, result: CompileResult) -> None:
        """Keep what was compiled. Where it cannot be kept, each process compiles."""
        folder = cache_folder()
        if folder is None or not self._enabled or result.library.has_dynamic_globals:
            return
        payload = dumps(result._reduce())
        path = folder / self._name(signature, result.codegen.magic_tuple())
        # Under a name of this process first: a file under its own name is whole.
        own = path.with_suffix(f".{os.getpid()}")
        try:
            own.write_bytes(_digest(payload) + payload)
            own.replace(path)
            self._forget_others(path)
        except OSError:
            own.unlink(missing_ok=True)

    def _files(self, signature: object, cpu: tuple[str, ...]) -> Iterator[Path]:
        """Where the code may be: compiled here, then brought by a wheel."""
        if (folder := cache_folder()) is not None:
            yield folder / self._name(signature, cpu)
        if (level := shipped_level()) is not None:
            yield SHIPPED / self._name(signature, (cpu[0], level, ""))

    def _name(self, signature: object, cpu: tuple[str, ...]) -> str:
        """kernel-platform-sources-signature.kernel; only the third part changes when penstock
        does.
        """
        chosen = [str(getattr(numba.config, name, None)) for name in _CODE_SETTINGS]
        made_with = (
            *cpu,
            platform.python_version_tuple()[:2],
            numba.__version__,
            llvmlite.__version__,
            chosen,
        )
        parts = (
            _digest(repr(made_with)),
            _digest(fingerprint(self._function)),
            _digest(repr(signature)),
        )
        name = f"{self._function.__module__.removeprefix('penstock.')}.{self._function.__name__}"
        return "-".join([name, *(part.hex()[:12] for part in parts)]) + _ENDING

    def _forget_others(self, path: Path) -> None:
        """Delete what other sources of the same kernel left, except the newest: versions may share
        a folder.
        """
        name, made_with, _, signature = path.name.rsplit("-", 3)
        there = sorted(
            path.parent.glob(f"{name}-{made_with}-*-{signature}"),
            key=lambda old: old.stat().st_mtime_ns,
        )
        for old in there[:-KEPT]:
            old.unlink(missing_ok=True)


def _digest(data: bytes | str) -> bytes:
    return hashlib.blake2b(
        data.encode() if isinstance(data, str) else data, digest_size=_DIGEST_BYTES
    ).digest()


def fingerprint(function: FunctionType) -> str:
    """A hash of all that a kernel's code depends on: its module, those that it takes code from, and
    constants.
    """
    closure = [repr(cell.cell_contents) for cell in function.__closure__ or ()]
    code = (function.__code__.co_code, function.__code__.co_firstlineno, closure)
    return _digest(repr([KERNEL.version, _modules(function.__module__), code])).hex()


@cache
def _modules(module: str) -> str:
    """A hash of the sources and the constants of `code_modules`."""
    found = []
    for name in code_modules(module):
        values = vars(sys.modules[name])
        file = Path(values.get("__file__") or "")
        if file.is_file():
            found.append(f"{name}: {_digest(file.read_bytes()).hex()}")
        if name != COMPILED:
            constants = ((key, value) for key, value in values.items() if not key.startswith("__"))
            found += [f"{name}.{key}={one}" for key, value in constants for one in _as_text(value)]
    return _digest("\n".join(sorted(found))).hex()


def code_modules(module: str) -> set[str]:
    """A module of kernels, and all modules whose functions it has, with theirs.

    `core.compiled`, in whose terms all kernels are written, is one, but not what it imports.
    """
    seen: set[str] = set()
    waiting = [module, COMPILED]
    while waiting:
        name = waiting.pop()
        if name in seen or name not in sys.modules:
            continue
        seen.add(name)
        for value in vars(sys.modules[name]).values() if name != COMPILED else ():
            other = (
                value.__name__
                if isinstance(value, ModuleType)
                else str(getattr(value, "__module__", ""))
            )
            if (
                isinstance(value, Dispatcher)
                or other.startswith("penstock.")
                or other.endswith("kernels")
            ):
                waiting.append(other)
    return seen


def _as_text(value: object) -> Iterator[str]:
    if isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}{value.tobytes().hex()}"
    elif isinstance(value, bool | int | float | str | bytes | tuple | np.generic | np.dtype):
        yield repr(value)


class _Compiling(event.Listener):  # type: ignore[misc]
    """Says once that kernels are compiled, and does without garbage collection meanwhile, which
    takes a third.

    Compiling makes hundreds of thousands of objects that live until its end.
    """

    def __init__(self) -> None:
        self._depth, self._said, self._collects = 0, False, False

    def on_start(self, event: event.Event) -> None:
        if not _is_ours(event):
            return
        if not self._depth:
            self._collects = gc.isenabled()
            gc.disable()
            self._say()
        self._depth += 1

    def on_end(self, event: event.Event) -> None:
        if not _is_ours(event):
            return
        self._depth -= 1
        if not self._depth and self._collects:
            gc.enable()

    def _say(self) -> None:
        if self._said:
            return
        self._said = True
        folder = cache_folder()
        later = f"later starts read them from {folder}"
        if folder is None:
            later = (
                "and so at every start, as they can be kept nowhere; set NUMBA_CACHE_DIR to a "
                "folder for them"
            )
        print(f"penstock: compiling kernels (5 to 30 s); {later}", file=sys.stderr, flush=True)


def _is_ours(event: event.Event) -> bool:
    return str(event.data["dispatcher"].py_func.__module__).startswith("penstock.")


event.register("numba:compile", _Compiling())
