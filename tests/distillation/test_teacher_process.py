"""A teacher in another process: the same bits, in order, and nothing left behind however either
side ends.
"""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from teacher_makers import (
    assert_same,
    load,
    load_badly,
    load_model_that_dies,
    load_slowly,
    make_teacher_row,
)

from makers.processes import child_environment
from patience import PATIENCE_SECONDS, wait_for
from penstock.core.errors import ConfigError, PenstockError
from penstock.learn.distillation.outputs import Wanted
from penstock.learn.distillation.process_teacher import ProcessTeacher
from penstock.learn.distillation.teachers import ModelTeacher

WANTED = Wanted(top_k=5, boundary=True)
SHARED = Path("/dev/shm")


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that waits to be reaped has."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def shared_files(*pids: int) -> set[Path]:
    """Files of shared memory that these processes hold or have mapped, or that are named after
    them.
    """
    found = {path for path in SHARED.glob("*") if any(str(pid) in path.name for pid in pids)}
    for pid in pids:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        held = [
            os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()
        ]
        names = [
            name
            for line in [*lines, *held]
            if (name := line[line.find("/") :]).startswith(f"{SHARED}/")
        ]
        found |= {Path(name) for name in names if not name.endswith(" (deleted)")}
    return found


@pytest.fixture(scope="module")
def there() -> Iterator[ProcessTeacher]:
    """One child for the tests that do not end it."""
    teacher = ProcessTeacher(load, WANTED, threads=1)
    yield teacher
    teacher.close()


@pytest.mark.slow
def test_same_bits_with_few_buffers() -> None:
    """Both kinds of outputs; rows grow, so buffers are made again; three rows are held while others
    come.
    """
    model, tokenizer = load()
    rows = [make_teacher_row((length, 3), seed=length) for length in (5, 4, 60, 7, 61, 61, 2)]
    for wanted in (WANTED, Wanted(temperature=2.0)):
        here, there = (
            ModelTeacher(model, tokenizer, wanted),
            ProcessTeacher(load, wanted, threads=1),
        )
        there.ask(rows)
        held = [(row, there.outputs(row)) for row in rows[:3]]
        for row in rows[3:]:
            assert_same(there.outputs(row), here.outputs(row))
        there.close()
        # What is held outlives the teacher.
        for row, outputs in held:
            assert_same(outputs, here.outputs(row))


@pytest.mark.slow
def test_buffers_are_used_again(there: ProcessTeacher) -> None:
    rows = [make_teacher_row(seed=seed) for seed in range(12)]
    there.ask(rows)
    for row in rows:
        there.outputs(row)
    assert len(there._buffers) <= 3
    kept, before = [], []
    for row in rows:
        kept.append(there.outputs(row))
        before.append(kept[-1].entropy.clone())
    for row in rows:
        there.outputs(row)
    assert all(
        torch.equal(outputs.entropy, expected)
        for outputs, expected in zip(kept, before, strict=True)
    )


def test_asking_anew_forgets_what_was_asked(there: ProcessTeacher) -> None:
    model, tokenizer = load()
    here = ModelTeacher(model, tokenizer, WANTED)
    old, new = (
        [make_teacher_row(seed=seed) for seed in seeds] for seeds in (range(6), range(6, 9))
    )
    there.ask(old)
    assert_same(there.outputs(old[0]), here.outputs(old[0]))
    there.ask(new)
    for row in new:
        assert_same(there.outputs(row), here.outputs(row))
    there.ask(new)
    with pytest.raises(ConfigError, match="must be fetched in the order"):
        there.outputs(new[1])


def test_a_row_that_fails_is_an_error_with_its_traceback_and_the_next_is_answered(
    there: ProcessTeacher,
) -> None:
    model, tokenizer = load()
    bad, good = make_teacher_row(), make_teacher_row(seed=1)
    bad.input.tokens[3] = 64
    there.ask([bad, good])
    with pytest.raises(PenstockError, match=r"(?s)Traceback.*token id 64 in slot 3"):
        there.outputs(bad)
    assert_same(there.outputs(good), ModelTeacher(model, tokenizer, WANTED).outputs(good))


def test_a_child_that_cannot_load() -> None:
    there = ProcessTeacher(load_badly, WANTED)
    with pytest.raises(PenstockError, match=r"(?s)load_badly.*no such weights"):
        there.outputs(make_teacher_row())
    there.close()
    with pytest.raises(ConfigError, match="a function of a module"):
        ProcessTeacher(lambda: load(), WANTED)


def test_a_child_that_dies_in_a_row() -> None:
    there = ProcessTeacher(load_model_that_dies, WANTED)
    with pytest.raises(PenstockError, match=r"died \(killed by signal 9"):
        there.outputs(make_teacher_row())
    for again in (there.outputs, lambda row: there.ask([row])):
        with pytest.raises(PenstockError, match=r"died \(killed by signal 9"):
            again(make_teacher_row())


def test_a_child_that_is_killed_while_it_loads() -> None:
    there = ProcessTeacher(load_slowly, WANTED)
    os.kill(there._process.pid, signal.SIGKILL)
    with pytest.raises(PenstockError, match=r"died \(killed by signal 9"):
        there.outputs(make_teacher_row())


def test_threads_are_told() -> None:
    with pytest.raises(ConfigError, match="threads and ahead must be at least 1"):
        ProcessTeacher(load, WANTED, threads=0)
    there = ProcessTeacher(load, WANTED, threads=2)
    there.outputs(make_teacher_row())
    status = Path(f"/proc/{there._process.pid}/environ").read_bytes()
    assert b"OMP_NUM_THREADS=2\0" in status
    there.close()


@pytest.mark.slow
def test_a_forgotten_teacher_ends() -> None:
    there = ProcessTeacher(load, WANTED, threads=1)
    there.outputs(make_teacher_row())
    pid = there._process.pid
    del there
    gc.collect()
    wait_for(lambda: is_gone(pid))


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["parent", "idle parent", "child"])
def test_kill_leaves_nothing(killed: str) -> None:
    """Neither a process nor a segment of shared memory, with a row under way or without."""
    program = (
        "import signal, sys; from teacher_makers import load, make_teacher_row\nfrom "
        "penstock.learn.distillation.process_teacher import ProcessTeacher\nfrom "
        "penstock.learn.distillation.outputs import Wanted\nthere = ProcessTeacher(load, "
        "Wanted(), threads=1)\nrows = [make_teacher_row((200,) * 4, seed=n) for n in "
        "range(200)]\nthere.ask(rows[: int(sys.argv[1])]); there.outputs(rows[0]); "
        "print(there._process.pid, flush=True)\nif sys.argv[1] == '1': signal.pause()\nwhile "
        "True:\n    there.ask(rows)\n    for row in rows: there.outputs(row)\n"
    )
    command, pipe = (
        [sys.executable, "-c", program, "1" if killed == "idle parent" else "200"],
        subprocess.PIPE,
    )
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=child_environment()
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        child = int(parent.stdout.readline())
        shared = shared_files(parent.pid, child)
        os.kill(child if killed == "child" else parent.pid, signal.SIGKILL)
        wait_for(lambda: is_gone(child))
        said = parent.communicate(timeout=PATIENCE_SECONDS)[1]
        if killed == "child":
            assert "the teacher's process died (killed by signal 9" in said
            assert parent.returncode == 1
    shared |= {
        path
        for path in SHARED.glob("*")
        if any(str(pid) in path.name for pid in (parent.pid, child))
    }
    assert [path for path in shared if path.exists()] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_same_bits_on_a_gpu() -> None:
    """Tensors of the child's GPU, opened here."""
    model, tokenizer = load(device="cuda")
    here = ModelTeacher(model, tokenizer, WANTED)
    there = ProcessTeacher(partial(load, device="cuda"), WANTED, device="cuda")
    rows = [make_teacher_row(seed=seed) for seed in range(8)]
    there.ask(rows)
    for row in rows:
        found = there.outputs(row)
        assert found.entropy.device.type == "cuda"
        assert_same(found, here.outputs(row))
    there.close()
