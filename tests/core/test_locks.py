"""A folder for one process at a time."""

import errno
import fcntl
import os
import subprocess
import sys
import time

import pytest

from penstock.core import folders as locks
from penstock.core.errors import OutputError
from penstock.core.folders import lock_folder


def test_a_killed_holder_lets_go_and_a_living_one_does_not(tmp_path, monkeypatch):
    code = "import sys; from pathlib import Path; from penstock.core.folders import lock_folder\n"
    code += (
        "lock_folder(Path(sys.argv[1]), Path(sys.argv[1], 'lock'), doing='working'); "
        "print(flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout.readline()
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.1)
    with pytest.raises(OutputError, match=rf"process.*{holder.pid}.*working.*wait"):
        lock_folder(tmp_path, tmp_path / "lock", doing="working")
    holder.kill()
    holder.communicate()
    os.close(lock_folder(tmp_path, tmp_path / "lock", doing="working"))
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_it_waits_for_what_is_left_of_a_killed_process(tmp_path, monkeypatch):
    first = lock_folder(tmp_path, tmp_path / "lock", doing="working")
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            os.close(first)

    monkeypatch.setattr(time, "sleep", sleep)
    os.close(lock_folder(tmp_path, tmp_path / "lock", doing="working"))
    assert len(slept) == 3


def test_a_file_system_without_locks_is_no_reason_to_stop(tmp_path, monkeypatch):
    def unknown(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unknown)
    os.close(lock_folder(tmp_path, tmp_path / "lock", doing="working"))


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "lock").mkdir()
    with pytest.raises(OutputError, match=r"cannot.*directory.*folder"):
        lock_folder(tmp_path, tmp_path / "lock", doing="working")


def test_a_lock_that_its_holder_removes_is_made_anew(tmp_path, monkeypatch):
    """Or one would hold a file that has no name any more, and the next a new one of the same
    name.
    """
    file = tmp_path / "work" / "lock"
    first = lock_folder(tmp_path, file, doing="working")

    def sleep(_):
        file.unlink()
        file.parent.rmdir()
        os.close(first)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)

    monkeypatch.setattr(time, "sleep", sleep)
    second = lock_folder(tmp_path, file, doing="working")
    assert os.path.samestat(os.fstat(second), file.stat())
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.0)
    with pytest.raises(OutputError, match="is working into it"):
        lock_folder(tmp_path, file, doing="working")
    os.close(second)
