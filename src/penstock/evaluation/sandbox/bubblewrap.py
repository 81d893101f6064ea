"""The command line that starts a program's sandbox: bubblewrap with everything unshared and almost nothing bound.

The root is an empty read-only file system with these in it: `/python` (the interpreter that runs us and its `lib`: the
real one, not a virtual environment), the system's library folders, the packages that are allowed, three devices, and
`/tmp`, a tmpfs of limited size. There is no `/proc`, no `/etc`, no home, no shell.

Two ways not to be root, because the kernel ignores root's limit on processes, whatever a user namespace calls it:

    drop         started as root: no user namespace, all others; the runner becomes a user with a random high number,
                 so that each program's processes are counted by themselves
    namespace    started as anyone else: a user namespace, in which the kernel counts by itself (Linux 5.14)
"""

import importlib.util
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.errors import ConfigError

Way = Literal["drop", "namespace"]

_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib64")
_DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")  # not /dev/zero: memory mapped of it is not counted
_NAMESPACES = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
_NOBODY = "65534"
PACKAGES = "/packages"
"""Where the allowed packages lie inside."""
ENVIRONMENT: Mapping[str, str] = {
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # a verdict must not depend on the order of a set
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
"""All that a program finds in its environment; bubblewrap itself is started with no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enclosure:
    """How programs are started on this machine; made once, used by all."""

    bubblewrap: str
    way: Way
    binds: tuple[str, ...]
    """Arguments that put files in place."""

    def command(self, *, disk_bytes: int, filter_descriptor: int, program: Sequence[str]) -> list[str]:
        """The command line that runs `program`, the arguments of the interpreter, in a sandbox of its own."""
        identity = (
            ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
            if self.way == "drop"
            else ["--unshare-user", "--uid", _NOBODY, "--gid", _NOBODY]
        )
        return [
            self.bubblewrap,
            *_NAMESPACES,
            *identity,
            "--die-with-parent",
            "--new-session",
            *self.binds,
            *("--perms", "1777", "--size", str(disk_bytes), "--tmpfs", "/tmp"),
            *("--remount-ro", "/", "--chdir", "/tmp"),
            *("--setenv", "LD_LIBRARY_PATH", "/python/lib"),
            *("--seccomp", str(filter_descriptor)),
            "/python/bin/python",
            *program,
        ]

    def user(self) -> int:
        """The user that a program must become, the next one being for its solution; −1 where bubblewrap did it."""
        return (1 << 30) + 2 * secrets.randbelow(1 << 28) if self.way == "drop" else -1


def binds(packages: Sequence[str]) -> tuple[str, ...]:
    """Arguments that put the interpreter, system libraries, packages and devices in place.

    Args:
        packages: Names of installed packages that programs may import, with the folder of shared libraries beside them.

    Raises:
        ConfigError: A package is not installed as a folder.
    """
    prefix = Path(sys.base_prefix)
    executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    # Folders that bubblewrap makes on the way to a bind are open to root alone.
    arguments = [word for folder in ("/python/bin", "/usr", "/dev", PACKAGES) for word in _folder(folder)]
    arguments += ["--ro-bind", executable, "/python/bin/python"]
    for name in ("lib", "lib64"):
        if (prefix / name).is_dir():
            arguments += ["--ro-bind", os.path.realpath(prefix / name), f"/python/{name}"]
    for folder in _LIBRARIES:
        if os.path.islink(folder):
            arguments += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            arguments += ["--ro-bind", folder, folder]
    for package in packages:
        for path in package_folders(package):
            arguments += ["--ro-bind", str(path), f"{PACKAGES}/{path.name}"]
    for device in _DEVICES:
        arguments += ["--dev-bind", device, device]
    return tuple(arguments)


def _folder(path: str) -> list[str]:
    """Arguments that make a folder, and those above it, readable by all."""
    made = [str(parent) for parent in reversed(Path(path).parents)][1:]
    return [word for folder in (*made, path) for word in ("--perms", "0755", "--dir", folder)]


def package_folders(name: str) -> list[Path]:
    """The folder of an installed package, and that of the shared libraries that its wheel brought."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None or not found.submodule_search_locations:
        raise ConfigError(f"sandbox: the package {name} is not installed as a folder, so it cannot be lent to programs")
    folder = Path(found.origin).parent.resolve()
    return [path for path in (folder, folder.with_name(f"{name}.libs")) if path.is_dir()]
