"""The command line of a program's sandbox: bubblewrap with every namespace unshared, and a seccomp
filter.

The root is an empty read-only file system with only these in it: `/python` (the interpreter that
runs us and its `lib`; the real one, not a virtual environment), the system's library folders, the
allowed packages, three devices, and `/tmp`, a tmpfs of limited size. There is no `/proc`, no
`/etc`, no home, no shell.

A program must not run as root, because the kernel ignores root's limit on processes, even inside a
user namespace. Two ways:

    drop         started as root: all namespaces except a user namespace; the runner becomes a user with a random high
                 number, so that each program's processes are counted separately
    namespace    started as another user: a user namespace, in which the kernel counts separately (Linux 5.14)

Namespaces and limits stop most of what a program could do. The seccomp filter, in classic BPF,
forbids system calls that bypass them or have been attack paths into kernels: tracing, keys, mounts,
new namespaces, BPF, io_uring, and memory or queues that no limit counts. All others are allowed. A
forbidden call fails with EPERM, so a program that only tries it continues. Calls of another
architecture (32-bit, x32) end the process, because their numbers mean other calls. Sockets may only
be AF_UNIX: AF_VSOCK reaches a virtual machine's host in spite of network namespaces. `clone3`
passes its flags in memory, where a filter cannot see them; it fails with ENOSYS, and C libraries
then use `clone`.

Source: seccomp(2), linux/seccomp.h, linux/bpf_common.h; numbers from asm/unistd_64.h and
asm-generic/unistd.h.
"""  # noqa: E501

import errno
import importlib.util
import os
import platform
import secrets
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.core.errors import ConfigError

_COLUMNS = {"x86_64": 0, "aarch64": 1}
_AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Name: (number on x86_64, number on aarch64).
_FORBIDDEN: dict[str, tuple[int | None, int | None]] = {
    "_sysctl": (156, None),
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_setup": (206, 0),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mbind": (237, 235),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "set_mempolicy": (238, 237),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmget": (29, 194),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "sysfs": (139, None),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "ustat": (136, None),
    "vhangup": (153, 58),
}
_CLONE, _CLONE3, _SOCKET, _SOCKETPAIR, _IOCTL = (
    (56, 220),
    (435, 435),
    (41, 198),
    (53, 199),
    (16, 29),
)
_MMAP, _SHARED, _ANONYMOUS = (9, 222), 0x01, 0x20
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX insert input into a terminal."""
_AF_UNIX = 1
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

Way = Literal["drop", "namespace"]

_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib64")
_DEVICES = (
    "/dev/null",
    "/dev/random",
    "/dev/urandom",
)  # not /dev/zero: memory mapped from it is not counted
_NAMESPACES = (
    "--unshare-pid",
    "--unshare-net",
    "--unshare-ipc",
    "--unshare-uts",
    "--unshare-cgroup-try",
)
_NOBODY = "65534"
PACKAGES = "/packages"
"""Folder of the allowed packages inside the sandbox."""
ENVIRONMENT: Mapping[str, str] = {
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # a verdict must not depend on the order of a set
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
"""The whole environment of a program, and of bubblewrap itself."""


def _step(code: int, value: int, on_true: int = 0, on_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, on_true, on_false, value)


def _refuse_if(test: int, value: int, action: int) -> bytes:
    """Return `action` if the test of the loaded word holds; otherwise continue with the next
    step.
    """
    return _step(test, value, 0, 1) + _step(_RETURN, action)


def _by_argument(number: int, argument: int, steps: bytes) -> bytes:
    """Steps on the low word of an argument (counted from 0) of one system call; they must end with
    a return.
    """
    steps = _step(_LOAD, _ARGUMENTS + 8 * argument) + steps
    return _step(_EQUAL, number, 0, len(steps) // 8) + steps


def seccomp_filter(machine: str | None = None) -> bytes:
    """The filter, as an array of `struct sock_filter`.

    Args:
        machine: `platform.machine()` of the target system; None: this one.

    Raises:
        ConfigError: The system call numbers of this architecture are unknown.
    """
    machine = machine or platform.machine()
    if machine not in _COLUMNS:
        raise ConfigError(
            f"the sandbox supports the architectures {', '.join(_COLUMNS)}; this machine is "
            f"{machine}"
        )
    column = _COLUMNS[machine]
    denied, absent, allowed = _FAIL | errno.EPERM, _FAIL | errno.ENOSYS, _step(_RETURN, _ALLOW)
    parts = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, _AUDIT_ARCHITECTURES[machine], 1, 0) + _step(_RETURN, _KILL_PROCESS),
        _step(_LOAD, _NUMBER),
        _refuse_if(_AT_LEAST, _X32, _KILL_PROCESS),
        _refuse_if(_EQUAL, _CLONE3[column], absent),
    ]
    forbidden = (numbers[column] for numbers in _FORBIDDEN.values())
    parts += [_refuse_if(_EQUAL, number, denied) for number in forbidden if number is not None]
    unix_only = _step(_EQUAL, _AF_UNIX, 1, 0) + _step(_RETURN, denied) + allowed
    terminal = (
        b"".join(_refuse_if(_EQUAL, request, denied) for request in _TERMINAL_INPUT) + allowed
    )
    # Shared memory without a file can escape every count (MADV_DONTNEED), and each process has its
    # own limit.
    no_shared = _step(_ANY_BIT, _ANONYMOUS, 0, 2) + _refuse_if(_ANY_BIT, _SHARED, denied) + allowed
    parts += [
        _by_argument(_MMAP[column], 3, no_shared),
        _by_argument(_CLONE[column], 0, _refuse_if(_ANY_BIT, _NEW_NAMESPACES, denied) + allowed),
        _by_argument(_SOCKET[column], 0, unix_only),
        _by_argument(_SOCKETPAIR[column], 0, unix_only),
        _by_argument(_IOCTL[column], 1, terminal),
        allowed,
    ]
    return b"".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Enclosure:
    """How programs are started on this machine; made once and used for all."""

    bubblewrap: str
    way: Way
    binds: tuple[str, ...]
    """Arguments that bind files; see `binds`."""

    def command(
        self, *, disk_bytes: int, filter_descriptor: int, program: Sequence[str]
    ) -> list[str]:
        """The command line of a new sandbox; `program`: the arguments of its interpreter."""
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
        """The user that a program must become (its solution becomes the next one); −1 if bubblewrap
        has set it.
        """
        return (1 << 30) + 2 * secrets.randbelow(1 << 28) if self.way == "drop" else -1


def binds(packages: Sequence[str]) -> tuple[str, ...]:
    """Arguments that bind the interpreter, system libraries, packages and devices.

    Args:
        packages: Names of installed packages that programs may import; each brings its folder of
            shared libraries.

    Raises:
        ConfigError: A package is not installed as a folder.
    """
    prefix = Path(sys.base_prefix)
    executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    # Parent folders that bubblewrap itself makes for a bind are open to root only.
    arguments = [
        word for folder in ("/python/bin", "/usr", "/dev", PACKAGES) for word in _folder(folder)
    ]
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
    """Arguments that create a folder and its parents, readable by all."""
    made = [str(parent) for parent in reversed(Path(path).parents)][1:]
    return [word for folder in (*made, path) for word in ("--perms", "0755", "--dir", folder)]


def package_folders(name: str) -> list[Path]:
    """The folder of an installed package, and the folder of shared libraries from its wheel.

    Raises:
        ConfigError: The package is not installed as a folder.
    """
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None or not found.submodule_search_locations:
        raise ConfigError(
            f"sandbox: package {name} is not installed as a folder, so programs cannot use it"
        )
    folder = Path(found.origin).parent.resolve()
    return [path for path in (folder, folder.with_name(f"{name}.libs")) if path.is_dir()]
