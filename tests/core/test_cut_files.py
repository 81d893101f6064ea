"""A file that is cut while it is mapped: the process ends by SIGBUS, but says which file it was."""

import signal

import numpy as np
import pytest

from makers.forked import run_code
from penstock import open_dataset, write_dataset
from penstock.core.system import cut_files


@pytest.fixture
def dataset(tmp_path):
    return write_dataset(tmp_path / "d", [np.arange(3000)] * 100)


USE = """
    import os, sys
    import penstock.use.cli
    from penstock import open_dataset

    def use(arguments):
        dataset = open_dataset(arguments[0])
        os.truncate(os.path.join(*arguments), 4096)
        if arguments[1].endswith(".arrow"):
            dataset[99]
        else:
            dataset.table.lengths[-100000:].sum()
        return 0

    penstock.use.cli.app._run = use
    penstock.use.cli.main()
"""


def test_the_command_line_names_the_file(dataset):
    path = dataset.path / "00000.arrow"
    size = path.stat().st_size
    done = run_code(USE, dataset.path, "00000.arrow")
    assert done.returncode == -signal.SIGBUS
    # Where kernels are compiled, a line says so first.
    first, *rest = [line for line in done.stderr.splitlines() if "compiling kernels" not in line]
    assert first.startswith(
        f"penstock: {path}: has 4096 bytes, but had {size} when it was opened: it was cut"
    )
    assert "restore a copy (`penstock verify` checks a dataset), then start again" in first
    assert rest[0] == "Fatal Python error: Bus error"


def test_the_lengths(tmp_path):
    write_dataset(tmp_path / "d", [[1]] * 2000)
    done = run_code(USE, tmp_path / "d", "lengths.u32")
    assert done.returncode == -signal.SIGBUS
    assert "lengths.u32: has 4096 bytes, but had 16000 when it was opened" in done.stderr


def test_a_thread_that_holds_nothing(dataset):
    """A kernel without the GIL, in a thread of its own."""
    code = """
        import os, sys, threading
        from penstock.core.system import explain_cut_files
        from penstock import open_dataset
        explain_cut_files()
        dataset = open_dataset(sys.argv[1])
        dataset[0]
        os.truncate(os.path.join(sys.argv[1], "00000.arrow"), 4096)
        thread = threading.Thread(target=lambda: dataset[99])
        thread.start()
        thread.join()
    """
    done = run_code(code, dataset.path)
    assert done.returncode == -signal.SIGBUS
    assert "00000.arrow: has 4096 bytes" in done.stderr


CUT = """
    {before}
    import os, sys
    import penstock as ps
    loader = ps.Loader(ps.Source(sys.argv[1], shuffle="none"), sequence_length=4096, rows_per_step=2, threads={threads})
    {after}
    steps = iter(loader)
    os.truncate(os.path.join(sys.argv[1], "00000.arrow"), 4096)
    list(steps)
"""  # noqa: E501


@pytest.mark.parametrize("threads", [0, 2])
def test_a_program_that_reads_with_a_loader(dataset, threads):
    done = run_code(CUT.format(before="", after="", threads=threads), dataset.path)
    assert done.returncode == -signal.SIGBUS
    assert "00000.arrow: has 4096 bytes, but had" in done.stderr
    assert "Fatal Python error" not in done.stderr


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_faulthandler_of_the_program_stays(dataset, tmp_path, when):
    code = {"before": "", "after": ""}
    code[when] = (
        f"import faulthandler; file = open({str(tmp_path / 'trace')!r}, 'w'); "
        "faulthandler.enable(file)"
    )
    done = run_code(CUT.format(**code, threads=0), dataset.path)
    assert done.returncode == -signal.SIGBUS
    assert "00000.arrow: has 4096 bytes, but had" in done.stderr
    assert "Fatal Python error" not in done.stderr
    assert (tmp_path / "trace").read_text().startswith("Fatal Python error: Bus error")


def test_a_handler_of_the_program_stays(dataset):
    code = """
        import signal, sys, penstock as ps
        signal.signal(signal.SIGBUS, lambda *_: sys.exit("mine"))
        ps.open_dataset(sys.argv[1])[0]
        signal.raise_signal(signal.SIGBUS)
    """
    done = run_code(code, dataset.path)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "mine")


def test_another_bus_error_is_left_to_faulthandler():
    code = """
        import os, signal
        from penstock.core.system import explain_cut_files
        explain_cut_files()
        os.kill(os.getpid(), signal.SIGBUS)
    """
    done = run_code(code)
    assert done.returncode == -signal.SIGBUS
    assert done.stderr.startswith("Fatal Python error: Bus error")


def test_only_files_that_are_shorter_now(dataset):
    again = open_dataset(dataset.path)
    assert [line for line in cut_files() if str(dataset.path) in line] == []
    path = dataset.path / "00000.arrow"
    with open(path, "ab") as file:
        file.write(b"x")
    assert [line for line in cut_files() if str(dataset.path) in line] == []
    with open(path, "r+b") as file:
        file.truncate(9000)
    found = [line for line in cut_files() if str(dataset.path) in line]
    assert len(found) == 2  # each time that it was mapped
    path.unlink()
    assert [line for line in cut_files() if str(dataset.path) in line] == []
    assert len(again) == 100
