"""Verdicts: what passes, what does not, and what cannot pass for a pass."""

import os
import re
import struct
import time
from pathlib import Path

import pytest
from sandbox_makers import sandbox_or_skip

from penstock.core.errors import ConfigError
from penstock.learn.evaluation.sandbox import Limits, Sandbox
from penstock.learn.evaluation.sandbox import sandbox as sandbox_module
from penstock.learn.evaluation.sandbox.bubblewrap import seccomp_filter

TESTS = "\nassert add(1, 2) == 3\n"
SEARCH_FOR_A_SECRET = """
import gc, os, sys
def add(a, b): return 0
places, frame = gc.get_objects(), sys._getframe()
while frame is not None:
    places += [frame, frame.f_locals, frame.f_globals, frame.f_code]
    frame = frame.f_back
found = {part for place in places for part in gc.get_referents(place) if isinstance(part, bytes)}
found = {part for part in found if len(part) == 33 and part[:1] == b"P"}
for secret in found:
    for pipe in range(3, 16):
        try:
            os.write(pipe, secret)
        except OSError:
            pass
    os._exit(0)
"""


@pytest.fixture(scope="module", params=["enclosed", "open"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    limits = Limits(wall_seconds=10)
    if request.param == "enclosed":
        return sandbox_or_skip(limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sandbox_module, "working_enclosure", lambda packages: (None, "it was taken away")
        )
        with pytest.warns(UserWarning, match="WITHOUT a sandbox"):
            return Sandbox(limits, packages=(), unsafe=True)


def test_a_program_that_runs_to_its_end_passes(sandbox: Sandbox) -> None:
    outcome = sandbox.run("def add(a, b): return a + b\nprint('hello, wörld')" + TESTS)
    assert (outcome.verdict, outcome.detail, outcome.output) == ("passed", "", "hello, wörld\n")
    assert 0 < outcome.seconds < 10


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def add(a, b): return 0", "AssertionError"),
        ("def add(a, b): return", "AssertionError"),
        ("def add(a, b) return", "SyntaxError"),
        ("def add(a, b): return missing", r"NameError: name 'missing' is not defined \(line 1\)"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; os._exit(0)", "ended early, with status 0"),
        ("import os; os._exit(77)", "ended early, with status 77"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("print('passed')\nprint('P')\nraise SystemExit", "SystemExit"),
        (
            "class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd",
            "cannot be read",
        ),
        (
            "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return 0",
            "AssertionError",
        ),
    ],
)
def test_what_does_not_reach_its_end_does_not_pass(sandbox: Sandbox, code: str, words: str) -> None:
    outcome = sandbox.run(code + TESTS)
    assert outcome.verdict == "failed"
    assert re.search(words, outcome.detail), outcome


def test_the_secret_is_not_found_by_looking(sandbox: Sandbox) -> None:
    outcome = sandbox.run(SEARCH_FOR_A_SECRET + TESTS)
    assert outcome.verdict == "failed", outcome


def test_a_secret_guessed_wrong_does_not_pass(sandbox: Sandbox) -> None:
    guess = (
        "import os\ndef add(a, b): return 3\nfor pipe in range(3, 64):\n    try: os.write(pipe, "
        "b'P' + bytes(32))\n"
    )
    guess += "    except OSError: pass\nos._exit(0)\n"
    assert not sandbox.run(guess + TESTS).passed


def test_a_signal_is_named(sandbox: Sandbox) -> None:
    outcome = sandbox.run("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert (outcome.verdict, outcome.detail) == ("crashed", "SIGSEGV")


def test_the_program_is_the_main_module(sandbox: Sandbox) -> None:
    program = (
        "import dataclasses, sys, typing\n@dataclasses.dataclass\nclass Point:\n    x: 'int'\n"
        "assert typing.get_type_hints(Point) == {'x': int}\nassert __name__ == '__main__'\n"
        "assert sys.modules['__main__'].Point is Point\nassert sys.argv == ['program']\n"
        "passed = False\nif __name__ == '__main__':\n    passed = True\nassert passed"
    )
    outcome = sandbox.run(program)
    assert outcome.passed, outcome


def test_verdicts_do_not_depend_on_hashes(sandbox: Sandbox) -> None:
    program = "print(list({'one', 'two', 'three', 'four', 'five', 'six'}))"
    assert len({outcome.output for outcome in sandbox.run_all([program] * 4, workers=2)}) == 1


def test_long_programs_and_odd_characters_arrive(sandbox: Sandbox) -> None:
    program = f"text = {'é' * 300_000!r}\nassert len(text) == 300_000\nlone = '\\ud800'\n# \ud800\n"
    assert sandbox.run(program).passed
    assert sandbox.run("").passed
    assert sandbox.run("x = '\0'").verdict == "failed"


def test_outcomes_come_in_order_and_at_once(sandbox: Sandbox) -> None:
    programs = [f"import time\ntime.sleep({0.5 if n == 0 else 0})\nprint({n})" for n in range(8)]
    begun = time.monotonic()
    outcomes = list(sandbox.run_all(programs, workers=8))
    took = time.monotonic() - begun
    assert [outcome.output for outcome in outcomes] == [f"{n}\n" for n in range(8)]
    # One after another they would take as long as all together.
    assert took < sum(outcome.seconds for outcome in outcomes)


def test_a_package_is_lent() -> None:
    lending, bare = sandbox_or_skip(packages=("numpy",)), sandbox_or_skip()
    program = "import numpy\nassert numpy.arange(4).sum() == 6"
    assert lending.run(program).passed
    assert "ModuleNotFoundError" in bare.run(program).detail
    with pytest.raises(ConfigError, match="package no_such_package is not installed"):
        Sandbox(packages=("no_such_package",))


def test_without_a_sandbox_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox_module.working_enclosure.cache_clear()
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match=r"bwrap.*path.*bubblewrap.*set `unsafe`"):
        Sandbox(packages=())
    with pytest.warns(UserWarning, match="WITHOUT a sandbox"):
        assert not Sandbox(packages=(), unsafe=True).is_safe
    sandbox_module.working_enclosure.cache_clear()


def test_a_bubblewrap_that_does_not_work_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sandbox_module.working_enclosure.cache_clear()
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'No permissions to create new namespace'\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ConfigError, match="No permissions to create new namespace"):
        Sandbox(packages=())
    sandbox_module.working_enclosure.cache_clear()


@pytest.mark.parametrize("field", ["wall_seconds", "memory_bytes", "processes"])
def test_limits_are_positive(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be above 0, got 0"):
        Limits(**{field: 0})


def _decide(rules: bytes, architecture: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """A slow reading of a classic BPF program: what it returns for one system call."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    at, word = 0, 0
    while True:
        code, on_true, on_false, value = struct.unpack_from("=HBBI", rules, 8 * at)
        at += 1
        if code == 0x20:
            (word,) = struct.unpack_from("=I", data, value)
        elif code == 0x06:
            return value
        else:
            holds = {0x15: word == value, 0x35: word >= value, 0x45: bool(word & value)}[code]
            at += on_true if holds else on_false


@pytest.mark.parametrize(
    ("machine", "architecture", "read", "ptrace", "clone", "socket_call", "mmap"),
    [("x86_64", 0xC000003E, 0, 101, 56, 41, 9), ("aarch64", 0xC00000B7, 63, 117, 220, 198, 222)],
)
def test_the_filter_decides_as_it_says(
    machine: str, architecture: int, read: int, ptrace: int, clone: int, socket_call: int, mmap: int
) -> None:
    rules = seccomp_filter(machine)
    allow, kill, denied = 0x7FFF0000, 0x80000000, 0x00050001
    assert len(rules) % 8 == 0
    assert _decide(rules, architecture, read) == allow
    assert _decide(rules, architecture, ptrace) == denied
    assert _decide(rules, 0x40000003, read) == kill
    assert _decide(rules, architecture, 0x40000000 | read) == kill
    assert _decide(rules, architecture, 435) == 0x00050026
    assert _decide(rules, architecture, clone, (17,)) == allow
    assert _decide(rules, architecture, clone, (0x10000000 | 17,)) == denied
    assert [_decide(rules, architecture, socket_call, (family,)) for family in (1, 2, 40)] == [
        allow,
        denied,
        denied,
    ]
    flags = {0x22: allow, 0x02: allow, 0x01: allow, 0x21: denied, 0x23: denied}
    assert {flag: _decide(rules, architecture, mmap, (0, 0, 0, flag)) for flag in flags} == flags


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="this machine is riscv64"):
        seccomp_filter("riscv64")
