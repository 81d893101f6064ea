"""Training processes that are killed or stopped: nothing is lost, and the losses are those of an
uninterrupted run.
"""

import signal
import textwrap

import pytest
from training_makers import losses, train

from makers.forked import run_python, start_python
from patience import wait_for
from penstock.learn.training.checkpoints import newest_complete
from penstock.learn.training.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_torch")]
KILLS, STEPS = 7, 50

# Torch is imported once: the processes that train are forks.
KILLING = """
    import os, random, signal, sys, traceback
    from pathlib import Path
    import training_makers

    data, run, chance = Path(sys.argv[1]), Path(sys.argv[2]), random.Random(0)

    class Fatal(training_makers.Metrics):
        # Soon after some steps it dies of a signal as of kill -9: after so much CPU time of its own, whatever the load.
        def see(self, record):
            super().see(record)
            Fatal.steps -= 1
            if Fatal.steps == 0:
                signal.setitimer(signal.ITIMER_PROF, Fatal.moment)

    training_makers.Metrics = Fatal

    def child(steps):
        Fatal.steps, Fatal.moment = steps, chance.uniform(0.0001, 0.03)
        pid = os.fork()
        if pid == 0:
            try:
                training_makers.train(data, run, "training.steps=STEPS", "training.checkpoints.asynchronous=BESIDE", resume=True)
            except BaseException:
                traceback.print_exc()
                os._exit(3)
            os._exit(0)
        return os.waitpid(pid, 0)[1]

    for _ in range(KILLS):
        assert child(chance.randint(1, 4)) == signal.SIGPROF, "it ended before it was killed"
    assert child(0) == 0
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["true", "false"])
def test_killed_again_and_again(data, tmp_path, beside):
    """Also while checkpoints are written beside the training."""
    script, code = tmp_path / "killing.py", textwrap.dedent(KILLING)
    for name, value in (("KILLS", KILLS), ("STEPS", STEPS), ("BESIDE", beside)):
        code = code.replace(name, str(value))
    script.write_text(code)
    run_python(script, data, tmp_path / "killed", check=True)
    due = train(data, tmp_path / "whole", f"training.steps={STEPS}")
    found = read_metrics(tmp_path / "killed")
    assert [record["step"] for record in found] == list(range(1, STEPS + 1))
    assert losses(found) == losses(due)
    assert found[-1]["tokens"] == due[-1]["tokens"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_asked_to_stop_it_saves_and_says_how_to_go_on(data, tmp_path, name):
    options = (
        "training.steps=200000",
        "training.checkpoints.every=199999",
        "training.schedule.shape=constant",
    )
    words = ["-m", "penstock", "train", data / "run.yaml", "-o", tmp_path / "run"]
    words += [word for option in options for word in ("--set", option)]
    with start_python(*words, folder=tmp_path) as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3, process)
        process.send_signal(getattr(signal, name))
        done = metrics.read_text().count("\n")
        said = process.communicate()[1]
    assert process.returncode == 0
    stopped = newest_complete(tmp_path / "run" / "checkpoints").step
    # The step that was under way, and the one before it, whose record may not have been written.
    assert stopped <= done + 2
    assert f"stopped by {name} after step {stopped}; resume=True (--resume) goes on" in said
    until = stopped + 3
    before = signal.getsignal(signal.SIGTERM)
    found = train(data, tmp_path / "run", *options, resume=True, until=until)
    assert signal.getsignal(signal.SIGTERM) == before
    assert losses(found) == losses(train(data, tmp_path / "whole", *options, until=until))
