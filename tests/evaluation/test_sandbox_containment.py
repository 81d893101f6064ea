"""Known-bad programs: each is held, and this process stays as it was."""

import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox_makers import sandbox_or_skip

from patience import PATIENCE_SECONDS
from penstock.learn.evaluation.sandbox import Limits, Outcome, Sandbox

SMALL = Limits(
    wall_seconds=2.0, cpu_seconds=2, memory_bytes=256 << 20, processes=8, disk_bytes=1 << 20
)


COUNT_CHILDREN = """
import os, time
children = 0
while True:
    try:
        child = os.fork()
    except OSError:
        break
    if child == 0:
        time.sleep(1)
        os._exit(0)
    children += 1
print(children)
"""
IGNORE_SIGNALS = """
import signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    time.sleep(1)
"""
BECOME_A_DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return sandbox_or_skip(SMALL)


def _descendants(process: int) -> set[int]:
    """All processes below one."""
    found, waiting = set(), [process]
    while waiting:
        process = waiting.pop()
        for thread in Path(f"/proc/{process}/task").glob("*"):
            try:
                children = set(map(int, (thread / "children").read_text().split()))
            except OSError:
                continue
            found |= children
            waiting += children
    return found


def _held(sandbox: Sandbox, program: str) -> Outcome:
    """Run a program; when it is over, no process and no descriptor of it may be left."""
    before = _descendants(os.getpid()), len(os.listdir("/proc/self/fd")), threading.active_count()
    outcome = sandbox.run(program)
    assert outcome.seconds < SMALL.wall_seconds + 3
    assert (
        _descendants(os.getpid()),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
    ) == before
    assert sandbox.run("assert 1 + 1 == 2").passed  # the next program is none the worse
    return outcome


def _refused(
    sandbox: Sandbox, statement: str, imports: str = "", errors: str = "OSError"
) -> Outcome:
    """The statement must raise one of the errors inside."""
    program = (
        f"import os, socket{imports}\ntry:\n    {statement}\nexcept ({errors}) as error:\n    "
        "print(repr(error))\n"
    )
    program += "else:\n    raise SystemExit('it was allowed')\n"
    outcome = _held(sandbox, program)
    assert outcome.passed, outcome
    return outcome


def test_a_fork_bomb_is_stopped_at_the_limit(sandbox: Sandbox) -> None:
    outcome = _held(sandbox, "import os\nwhile True:\n    os.fork()\n")
    assert outcome.verdict == "failed"
    assert "BlockingIOError" in outcome.detail
    patient = (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    )
    assert _held(sandbox, patient).verdict == "timeout"


def test_processes_are_counted_for_each_program(sandbox: Sandbox) -> None:
    outcomes = list(sandbox.run_all([COUNT_CHILDREN] * 4, workers=4))
    assert [outcome.output for outcome in outcomes] == [f"{SMALL.processes - 1}\n"] * 4


def test_a_thread_bomb_is_stopped(sandbox: Sandbox) -> None:
    program = (
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, "
        "args=(60,)).start()\n"
    )
    outcome = _held(sandbox, program)
    # On a busy machine the clock may run out before it has made enough threads to hit the other
    # limits.
    assert outcome.verdict in ("failed", "memory", "timeout")
    patient = sandbox_or_skip(replace(SMALL, wall_seconds=300))
    assert patient.run(program).verdict in ("failed", "memory")


def test_there_is_no_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        _refused(sandbox, f"socket.create_connection(('127.0.0.1', {port}), timeout=1)")
        _refused(sandbox, "socket.getaddrinfo('example.org', 80)")
        _refused(sandbox, "socket.create_connection(('192.0.2.1', 80), timeout=1)")
        server.settimeout(0.1)
        with pytest.raises(TimeoutError, match="timed out"):
            server.accept()


def test_sockets_are_local_and_do_not_reach_the_host(sandbox: Sandbox) -> None:
    name = f"\\0penstock-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name.replace("\\0", "\0"))
        server.listen()
        _refused(sandbox, f"socket.socket(socket.AF_UNIX).connect('{name}')")
    for family in ("AF_VSOCK", "AF_NETLINK", "AF_ALG", "AF_PACKET"):
        _refused(sandbox, f"socket.socket(socket.{family}, socket.SOCK_RAW)")
    assert _held(sandbox, "import asyncio\nasyncio.run(asyncio.sleep(0))").passed


def test_nothing_outside_its_folder_can_be_written(sandbox: Sandbox, tmp_path: Path) -> None:
    for place in (
        "/file",
        "/dev/file",
        "/dev/shm/file",
        "/usr/lib/file",
        "/python/lib/file",
        str(tmp_path / "file"),
    ):
        _refused(sandbox, f"open({place!r}, 'w')")
    _refused(sandbox, "os.mkdir('/python/folder')")
    _refused(sandbox, "os.chmod('/python/lib', 0o777)")
    assert list(tmp_path.iterdir()) == []
    assert _held(
        sandbox, "open('mine', 'w').write('mine')\nassert open('/tmp/mine').read() == 'mine'"
    ).passed
    assert _held(
        sandbox, "import os\nassert os.listdir('/tmp') == []"
    ).passed  # the next one's folder is new


def test_the_hosts_files_are_not_there(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    for place in (
        "/etc/shadow",
        "/etc/passwd",
        __file__,
        "/proc/1/environ",
        "/proc/self/mem",
        str(tmp_path / "secret"),
    ):
        _refused(sandbox, f"open({place!r}).read()")
    _refused(sandbox, "os.listdir('/root')")
    _refused(sandbox, "os.listdir('/home')")
    _refused(sandbox, "import penstock", errors="ImportError")
    assert _held(sandbox, "import os\nprint(sorted(os.listdir('/')))").output.count("root") == 0


def test_the_environment_is_empty(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_SECRET", "secret")
    outcome = _held(sandbox, "import os\nprint(dict(os.environ))")
    assert outcome.passed
    assert "secret" not in outcome.output.lower()
    assert "PATH'" not in outcome.output.replace("LD_LIBRARY_PATH'", "")


def test_it_is_not_root_and_cannot_become_it(sandbox: Sandbox) -> None:
    assert _held(
        sandbox,
        "import os\nassert 0 not in os.getresuid() + os.getresgid()\nassert not os.getgroups()",
    ).passed
    _refused(sandbox, "os.setuid(0)")
    _refused(
        sandbox,
        "resource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000))",
        ", resource",
        "ValueError, OSError",
    )


@pytest.mark.parametrize(
    "program",
    [
        "import time\ntime.sleep(60)\n",
        IGNORE_SIGNALS,
        "import os, time\nfor _ in range(3):\n    os.fork()\ntime.sleep(60)\n",
        "import os, time\nos.closerange(0, 1000)\ntime.sleep(60)\n",
    ],
    ids=["sleeps", "ignores signals", "forks", "closes its pipes"],
)
def test_waiting_ends_with_the_wall_clock(sandbox: Sandbox, program: str) -> None:
    assert _held(sandbox, program).verdict == "timeout"


def test_a_busy_loop_ends_with_its_cpu_time(sandbox: Sandbox) -> None:
    quick = Sandbox(Limits(wall_seconds=PATIENCE_SECONDS, cpu_seconds=1), packages=())
    begun = time.monotonic()
    assert quick.run("while True: pass").verdict == "timeout"
    ignoring = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert not quick.run(ignoring).passed
    assert time.monotonic() - begun < PATIENCE_SECONDS


def test_a_daemon_dies_with_its_program(sandbox: Sandbox) -> None:
    outcome = _held(sandbox, BECOME_A_DAEMON)
    assert outcome.passed
    assert outcome.seconds < 2


@pytest.mark.parametrize(
    "program",
    [
        "kept = []\nwhile True:\n    kept.append(bytes(1 << 20))\n",
        "kept = bytes(1 << 40)\n",
        "import mmap\nkept = mmap.mmap(-1, 1 << 36, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n",
        # Each process is under its own limit; together they are not.
        (
            "import os, time\nfor _ in range(2):\n    os.fork()\nkept = b'x' * (150 << "
            "20)\ntime.sleep(60)\n"
        ),
    ],
    ids=["grows", "huge object", "huge mapping", "several processes"],
)
def test_memory_is_limited(sandbox: Sandbox, program: str) -> None:
    outcome = _held(sandbox, program)
    assert outcome.verdict == "memory" or "Cannot allocate memory" in outcome.detail


def test_memory_that_no_limit_counts_is_refused(sandbox: Sandbox) -> None:
    _refused(sandbox, "os.memfd_create('kept')")
    # After MADV_DONTNEED its pages stay, and no process is charged for them.
    _refused(sandbox, "__import__('mmap').mmap(-1, 1 << 20)")
    assert _held(sandbox, "import os\nassert not os.path.exists('/dev/zero')").passed


def test_gigabytes_of_output_are_thrown_away(sandbox: Sandbox) -> None:
    outcome = _held(sandbox, "while True:\n    print('x' * 1000000)\n")
    assert outcome.verdict == "timeout"
    assert len(outcome.output) == SMALL.output_bytes
    assert _held(sandbox, "print('x' * 10_000_000)").passed


def test_the_disk_is_limited(sandbox: Sandbox) -> None:
    fill = "for number in range(100):\n    open(f'{number}', 'wb').write(bytes(100_000))\n"
    assert "No space left" in _held(sandbox, fill).detail
    assert not _held(sandbox, "open('large', 'wb').write(bytes(10_000_000))").passed


SYSTEM_CALLS = """
import ctypes, errno, platform
library = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
calls = {"ptrace": (101, 117), "keyctl": (250, 219), "mount": (165, 40), "unshare": (272, 97), "setns": (308, 268),
    "bpf": (321, 280), "userfaultfd": (323, 282), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
    "process_vm_readv": (310, 270), "add_key": (248, 217), "chroot": (161, 51), "open_tree": (428, 428)}
for name, numbers in calls.items():
    ctypes.set_errno(0)
    result = library.syscall(numbers[0 if x86 else 1], 0, 0, 0, 0, 0)
    assert result == -1 and ctypes.get_errno() == errno.EPERM, (name, result, ctypes.get_errno())
assert library.syscall(435, 0, 0) == -1 and ctypes.get_errno() == errno.ENOSYS
NEWUSER, NEWPID = 0x10000000, 0x20000000
for flag in (NEWUSER, NEWPID):
    assert library.syscall(56 if x86 else 220, flag | 17, 0, 0, 0, 0) == -1 and ctypes.get_errno() == errno.EPERM
"""  # noqa: E501


def test_system_calls_are_filtered(sandbox: Sandbox) -> None:
    outcome = _held(sandbox, SYSTEM_CALLS)
    assert outcome.passed, outcome


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x32 is of x86_64")
def test_calls_of_another_architecture_end_the_process(sandbox: Sandbox) -> None:
    program = "import ctypes\nctypes.CDLL(None).syscall(0x40000000 | 39)\n"
    outcome = _held(sandbox, program)
    assert (outcome.verdict, outcome.detail) == ("crashed", "SIGSYS")


def test_signals_do_not_reach_the_outside(sandbox: Sandbox) -> None:
    _refused(sandbox, f"os.kill({os.getpid()}, 9)")
    _held(sandbox, "import os\nos.kill(-1, 9)")
    _held(
        sandbox,
        "import os\nfor number in range(1, 300):\n    try:\n        os.kill(number, 9)\n    "
        "except OSError: pass\n",
    )


def test_standard_input_is_empty(sandbox: Sandbox) -> None:
    assert "EOFError" in _held(sandbox, "input()").detail


def test_deep_recursion_crashes_only_itself(sandbox: Sandbox) -> None:
    program = (
        "import sys\nsys.setrecursionlimit(10**9)\ndef deeper(x): return "
        "[deeper([x])]\nrepr(deeper(0))\n"
    )
    assert _held(sandbox, program).verdict in ("crashed", "memory", "timeout", "failed")
    program = (
        "x = []\nfor _ in range(10**5):\n    x = [x]\nimport "
        "sys\nsys.setrecursionlimit(10**9)\nrepr(x)\n"
    )
    patient = Sandbox(Limits(wall_seconds=60, memory_bytes=256 << 20), packages=())
    assert patient.run(program).verdict in ("crashed", "memory")
    assert "RecursionError" in _held(sandbox, "def f(): f()\nf()").detail


def test_programs_die_with_the_evaluation(sandbox: Sandbox) -> None:
    script = (
        "from penstock.learn.evaluation.sandbox import Sandbox\nSandbox(packages=()).run('import "
        "time; time.sleep(60)')"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as evaluation:
        for _ in range(200):
            time.sleep(0.05)
            if len(_descendants(evaluation.pid)) > 1:
                break
        time.sleep(0.3)
        below = _descendants(evaluation.pid)
        evaluation.kill()
    assert below
    for _ in range(100):
        if not any(Path(f"/proc/{process}").exists() for process in below):
            return
        time.sleep(0.05)
    pytest.fail(f"still there: {below}")
