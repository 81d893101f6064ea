"""On macOS what only Linux has is done without; on Windows there is one sentence; Numba's JIT is
needed.
"""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from makers.processes import child_environment, run_penstock, run_python
from penstock.core.errors import ConfigError, OutputError
from penstock.core.system import peak_memory_bytes, usable_processors
from penstock.use.inspection.page import write_html

ON_MACOS = """
import os, sys
for name in ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "POSIX_FADV_DONTNEED", "memfd_create",
             "MFD_CLOEXEC", "posix_fallocate", "pidfd_open", "setresuid", "setresgid"):
    if hasattr(os, name):
        delattr(os, name)
"""  # noqa: E501


def python(code, **environment):
    return run_python("-c", code, env=child_environment(**environment))


def test_usable_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 6}, raising=False)
    assert usable_processors() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert usable_processors() == 12
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_processors() == 1


def test_peak_memory_is_in_bytes(monkeypatch):
    """The kernel of Linux counts in KiB, that of macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    monkeypatch.setattr(sys, "platform", "linux")
    assert peak_memory_bytes() >= peak * 1024
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peak <= peak_memory_bytes() < peak * 1024


def test_the_data_path_without_what_only_linux_has(tmp_path):
    """A whole preparation in processes, doctor and loading, with the calls gone that macOS has
    not.
    """
    (tmp_path / "a.jsonl").write_text('{"text": "water flows"}\n' * 200)
    code = f"""{ON_MACOS}
import penstock as ps
from penstock.use.cli.doctor import examine
from penstock.data.sources import open_sources, read_texts
tokenizer = ps.train_tokenizer(read_texts(open_sources("a.jsonl")), vocab_size=270, output="tokenizer", progress=False)
ps.prepare("a.jsonl", tokenizer=tokenizer, output="out", processes=2, part_bytes=2000, progress=False)
loader = ps.Loader(ps.Mixture([ps.Source("out")]), sequence_length=64, rows_per_step=2)
print(sum(row.num_tokens for row in next(iter(loader))), examine()["cores"])
"""  # noqa: E501
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert found.returncode == 0, found.stderr[-2000:]
    tokens, cores = map(int, found.stdout.split())
    assert tokens > 0
    assert cores == os.cpu_count()


def test_code_of_models_runs_on_linux_only(monkeypatch):
    from penstock.learn.evaluation.sandbox import Sandbox

    monkeypatch.setattr(sys, "platform", "darwin")
    for unsafe in (False, True):
        with pytest.raises(ConfigError, match=r"model.*wrote.*tasks"):
            Sandbox(unsafe=unsafe)


def test_windows_is_one_sentence():
    code = (
        "import sys; sys.platform = 'win32'; sys.modules['fcntl'] = None\n"
        "from penstock.core.errors import ConfigError\n"
        "try:\n    import penstock.core.folders\nexcept ConfigError as error:\n    print(error)"
    )
    assert (
        python(code).stdout
        == "penstock runs on Linux and macOS; on Windows, install WSL and run it there\n"
    )


@pytest.mark.parametrize(
    "command", [["prepare", "a.jsonl", "-t", "t", "-o", "out"], ["verify", "out"]]
)
def test_without_the_jit_there_is_one_line(tmp_path, command):
    found = run_penstock(*command, cwd=tmp_path, env=child_environment(NUMBA_DISABLE_JIT="1"))
    assert found.returncode == 1
    assert found.stderr.startswith("penstock: NUMBA_DISABLE_JIT is set, so nothing is compiled")
    assert len(found.stderr.splitlines()) == 1


def test_the_doctor_names_a_disabled_jit():
    found = python(
        "from penstock.use.cli.doctor import examine; print(examine()['problems'])",
        NUMBA_DISABLE_JIT="1",
    )
    assert "unset NUMBA_DISABLE_JIT" in found.stdout


@pytest.mark.parametrize(
    ("code", "cure"),
    [
        (errno.ENOSPC, "make room or choose another folder"),
        (errno.EACCES, "choose a folder that you may write to"),
        (errno.EROFS, "choose a folder that you may write to"),
        (errno.ENOENT, "name a file in a folder that exists"),
        (errno.EMFILE, "raise the limit of open files"),
    ],
)
def test_each_reason_of_a_failed_writing_has_its_cure(code, cure, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_text", fail)
    monkeypatch.setattr("penstock.use.inspection.page.page_html", lambda _: "")
    with pytest.raises(OutputError, match=cure):
        write_html(tmp_path / "page.html", None)
