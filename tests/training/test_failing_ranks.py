"""Under torchrun an error is printed once, with its cause and rank, and torchrun's summary names
it.
"""

import re
import textwrap

import pytest

from makers.forked import run_python
from penstock.core.errors import ConfigError, DistributedError
from penstock.learn.training import failures
from penstock.learn.training.failures import is_consequence, one_error

pytestmark = pytest.mark.usefixtures("plain_torch")

OWN = """
    import os, signal, time
    from penstock.core.errors import ConfigError

    RANK = os.environ["RANK"]

    def on_step(model, step, record):
        if "MODE" in os.environ and RANK == os.environ["WHO"] and record["step"] == 2:
            if os.environ["MODE"] == "bug":
                raise ValueError("a bug of mine")
            if os.environ["MODE"] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ConfigError("a setting that only this machine dislikes")
"""
SCRIPT = """
    import os, sys
    import penstock as ps

    @ps.training.one_error
    def main():
        rank = int(os.environ["RANK"])
        loader = ps.Loader(sys.argv[1], sequence_length=64, rows_per_step=4, seed=rank, data_parallel=(rank, 2))
        model = ps.build_model(layers=1, width=16, heads=2, vocab_size=340)
        ps.train(model, loader, steps=3, warmup_steps=0, output=sys.argv[2], progress=False)

    main()
"""  # noqa: E501


def torchrun(*words, **environment):
    from makers.processes import child_environment

    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    found = run_python(*launcher, *words, env=child_environment(**environment))
    assert found.returncode != 0
    return found.stderr


def told(text):
    """What penstock printed as an error."""
    notices = (
        "learning_rate",
        "model:",
        "ranks compute",
        "compiling",
        "activations",
        "computation",
        "parameters",
        "weights, ",
        "rows:",
        "steps:",
        "documents of",
        "ranks:",
        "bits:",
        "reference",
        "warning",
    )
    lines = re.findall(r"^penstock: (.*)$", text, re.MULTILINE)
    return [line for line in lines if not line.startswith(notices)]


def summary(text):
    """torchrun's word on the first failure."""
    return text.partition("Root Cause (first observed failure)")[2]


def tracebacks(text):
    """Those of ranks: torchrun prints one of its own, and one of a line in its summary."""
    return text.count("Traceback (most recent call last)") - 2


@pytest.mark.slow
def test_an_error_of_all_ranks_is_printed_once(data, tmp_path):
    uneven = "data.loader.rows_per_step=3"
    found = torchrun(
        "-m", "penstock", "train", data / "run.yaml", "-o", tmp_path / "run", "--set", uneven
    )
    (line,) = told(found)
    assert "does not divide among 2 ranks" in line
    assert re.search(r"rank      : [01] .*\n.*exitcode  : 1 ", summary(found))
    assert "ConfigError" in summary(found)
    assert "does not divide among 2 ranks" in summary(found)
    assert tracebacks(found) == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "who", "line"),
    [
        ("setting", "0", "rank 0: a setting that only this machine dislikes"),
        ("bug", "1", "rank 1: ValueError: a bug of mine"),
    ],
)
def test_the_rank_that_knows_the_cause_prints_it(data, tmp_path, mode, who, line):
    own = tmp_path / "own.py"
    own.write_text(textwrap.dedent(OWN))
    words = (
        "train",
        data / "run.yaml",
        "-o",
        tmp_path / "run",
        "--set",
        f"training.on_step={own}:on_step",
    )
    found = torchrun("-m", "penstock", *words, MODE=mode, WHO=who)
    assert told(found) == [line]
    assert "closed by peer" not in found
    assert tracebacks(found) == (mode == "bug")
    assert f"rank      : {who} " in summary(found)
    assert line.partition(": ")[2].removeprefix("ValueError: ") in summary(found)


@pytest.mark.slow
def test_a_rank_that_is_killed(data, tmp_path):
    """It cannot say why; torchrun does, and the others print at most what they saw."""
    own = tmp_path / "own.py"
    own.write_text(textwrap.dedent(OWN))
    words = (
        "train",
        data / "run.yaml",
        "-o",
        tmp_path / "run",
        "--set",
        f"training.on_step={own}:on_step",
    )
    found = torchrun("-m", "penstock", *words, MODE="killed", WHO="1")
    assert told(found) == []
    assert "rank      : 1 " in summary(found)
    assert "SIGKILL" in summary(found)


@pytest.mark.slow
def test_a_python_program(data, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    found = torchrun(script, data / "data" / "train", tmp_path / "run")
    (line,) = told(found)
    assert line.startswith(
        "rank 1 does not train what rank 0 trains: seed is 0 on rank 0, 1 on rank 1"
    )
    assert "seed is 0 on rank 0, 1 on rank 1" in summary(found)


def reported():
    error = DistributedError("rank 1 failed: why")
    error.failed_rank = 1
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (reported(), True),
        (
            RuntimeError(
                "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4"
            ),
            True,
        ),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("CUDA out of memory"), False),
        (DistributedError("ranks disagree"), False),
        (ConfigError("training.steps: connection closed by peer"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_what_only_follows_from_another_failure(error, expected):
    assert is_consequence(error) == expected


def test_a_single_process_raises_as_usual(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)

    @one_error
    def main(value, *, other):
        """Its own words."""
        if other:
            raise ValueError("mine")
        return value

    assert main(3, other=False) == 3
    assert main.__doc__ == "Its own words."
    with pytest.raises(ValueError, match="mine"):
        main(3, other=True)


@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("1", True)])
def test_without_torchrun_each_rank_prints_its_own(monkeypatch, capsys, rank, speaks):
    """As under srun: a rank that only reports another's error is silent."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert failures.end_together(ConfigError("mine")) == 1
    assert capsys.readouterr().err == f"penstock: rank {rank}: mine\n"
    assert failures.end_together(reported()) == 1
    assert capsys.readouterr().err == ""
