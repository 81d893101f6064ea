"""Two ranks that save beside the training: one is killed, cannot write, or does not come."""

import signal
import textwrap

import pytest
from training_makers import losses, on_two_processes, train

from makers.ranks import run_ranks
from penstock.learn.training.checkpoints import newest_complete
from penstock.learn.training.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_torch")]
OPTIONS = (
    "training.steps=8",
    "training.shard=true",
    "training.checkpoints.asynchronous=true",
)
SCRIPT = """
    import errno, os, signal, sys
    from pathlib import Path
    import torch
    from penstock.core.errors import PenstockError
    from penstock.learn.training import checkpoints
    from penstock.learn.training.distributed import Ranks
    from training_makers import train

    data, run, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    plain = checkpoints._write_shard
    def write(partial, name, tensors):
        if "00000004" in partial.name and os.environ["RANK"] == "1":
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(partial, name, tensors)
    checkpoints._write_shard = write
    done = []
    with Ranks(torch.device("cpu")) as ranks:
        try:
            train(data, run, *sys.argv[4:], ranks=ranks, resume=what == "resumed")
        except PenstockError as error:
            print(type(error).__name__, error)
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The losses of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    on_two_processes(folder / "script.py", SCRIPT, data, folder / "run", "whole", *OPTIONS)
    return losses(read_metrics(folder / "run"))


def resumed(data, tmp_path):
    script = tmp_path / "again.py"
    on_two_processes(script, SCRIPT, data, tmp_path / "run", "resumed", *OPTIONS)
    return losses(read_metrics(tmp_path / "run"))


def test_a_rank_is_killed_while_it_writes(data, tmp_path, whole):
    """The checkpoint before is there, and nothing is lost."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    words = [data, tmp_path / "run", "killed", *OPTIONS]
    (first, _, _), (second, _, _) = run_ranks(script, words, 2, tmp_path)
    assert (first != 0, second) == (True, -signal.SIGKILL)
    assert newest_complete(tmp_path / "run" / "checkpoints").step == 2
    assert resumed(data, tmp_path) == whole
    assert newest_complete(tmp_path / "run" / "checkpoints").step == 8


def test_a_rank_that_cannot_write_ends_all_at_one_step(data, tmp_path, whole):
    words = [data, tmp_path / "run", "full", *OPTIONS]
    (first, _), (second, _) = on_two_processes(tmp_path / "script.py", SCRIPT, *words)
    assert first.startswith("DistributedError rank 1 failed: ")
    assert second.startswith("OutputError ")
    assert "No space left on device" in first
    assert "No space left on device" in second
    assert newest_complete(tmp_path / "run" / "checkpoints").step == 2
    assert resumed(data, tmp_path) == whole


def test_sharded_or_not_it_is_the_same_run(data, tmp_path, whole):
    alone = losses(train(data, tmp_path / "alone", "training.steps=8"))
    assert [loss for _, loss, _ in whole] == pytest.approx([loss for _, loss, _ in alone], rel=1e-5)


LATE = """
    import os, sys, time
    from datetime import timedelta
    import torch.distributed as dist
    from penstock.learn.training import processes

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
    group = dist.new_group(backend="gloo")
    print(processes.gather(rank, group))
    processes.SAVE_PATIENCE = timedelta(seconds=1)
    if rank == 1:
        time.sleep(4)
    else:
        try:
            processes.gather(rank, group)
        except RuntimeError as error:
            print(str(error).splitlines()[0])
    sys.stdout.flush()
    os._exit(0)
"""


def test_a_rank_that_does_not_come_is_named(tmp_path):
    (first, _), (second, _) = on_two_processes(tmp_path / "late.py", LATE, tmp_path / "store")
    assert first.startswith("[0, 1]")
    assert second.startswith("[0, 1]")
    assert "Ranks 1 failed to pass monitoredBarrier" in first
