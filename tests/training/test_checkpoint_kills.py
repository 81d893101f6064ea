"""A process that saves checkpoints is killed: the newest complete one is always there, whole, and
of one step.
"""

import textwrap

import pytest

from makers.forked import run_code
from penstock.learn.training.checkpoints import newest_complete

SAVE = """
    import os, random, resource, signal, sys, traceback
    from pathlib import Path
    import torch
    from penstock.learn.training import checkpoints
    from penstock.learn.training.checkpoints import newest_complete, save_checkpoint

    torch.set_num_threads(1)
    folder = sys.argv[1]

    def parts(step):
        tensors = {f"t{n}": torch.full((20_000,), float(step)) for n in range(3)}
        return {"optimizer.safetensors": tensors, "state.json": {"step": step}, "model": write(step)}

    def write(step):
        def model(path):
            path.mkdir()
            (path / "weights").write_text(str(step) * 1000)
        return model
"""  # noqa: E501
AT_RANDOM = """
    chance, first = random.Random(0), 1
    for _ in range(20):
        moment, child = chance.uniform(0.005, 0.04), os.fork()
        if child == 0:
            # It dies of this signal as of kill -9, anywhere, after so much work of its own, however busy others are.
            signal.setitimer(signal.ITIMER_PROF, moment)
            for step in range(first, first + 10_000):
                save_checkpoint(folder, step, parts(step), keep=2)
        assert os.waitpid(child, 0)[1] == signal.SIGPROF
        said = []
        found = newest_complete(folder, say=said.append)
        assert not said, said
        step = 0 if found is None else found.step
        assert step >= first - 1, (step, first)
        if step:
            assert found.value("state.json") == {"step": step}
            assert all(bool((t == step).all()) for t in found.tensors("optimizer.safetensors").values())
        first = step + 1
    print("steps", step)
"""  # noqa: E501
AT_EACH = """
    save_checkpoint(folder, 1, parts(1), keep=1)
    for fatal in range(1000):
        child = os.fork()
        if child == 0:
            calls = 0
            def fragile(plain):
                def call(*args, **named):
                    global calls
                    if calls == fatal:
                        os.kill(os.getpid(), signal.SIGKILL)
                    calls += 1
                    return plain(*args, **named)
                return call
            for name in ("fsync", "rename", "rmdir", "unlink", "mkdir"):
                setattr(os, name, fragile(getattr(os, name)))
            try:
                save_checkpoint(folder, SECOND, parts(SECOND), keep=1)
            except BaseException:
                traceback.print_exc()
                os._exit(3)
            os._exit(0)
        code = os.waitpid(child, 0)[1]
        assert code in (0, signal.SIGKILL), code
        said = []
        found = newest_complete(folder, say=said.append)
        assert found is not None, (fatal, os.listdir(folder))
        assert not said, said
        visible = [path for path in Path(folder).iterdir() if not path.name.startswith(".")]
        assert all(checkpoints.damage(path) is None for path in visible), visible
        state = found.value("state.json")["step"]
        assert state == found.step and state in (1, SECOND), (fatal, state)
        assert all(float(t[0]) == state == float(t[-1]) for t in found.tensors("optimizer.safetensors").values())
        if code == 0:
            print("calls", fatal)
            break
        if found.step == SECOND != 1:
            import shutil
            shutil.rmtree(folder)
            save_checkpoint(folder, 1, parts(1), keep=1)
"""  # noqa: E501
TOO_LARGE = """
    from penstock.core.errors import OutputError

    save_checkpoint(folder, 1, parts(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        save_checkpoint(folder, 2, parts(2))
    except OutputError as error:
        print(error)
"""


def save(tmp_path, body: str):
    """Run the helpers and `body` in a process of its own, whose children it kills."""
    return run_code(textwrap.dedent(SAVE) + textwrap.dedent(body), tmp_path / "checkpoints")


def check_whole(folder) -> int:
    """Step of the newest complete one, after a look at all that is in it; nothing may be passed
    over.
    """
    said: list[str] = []
    found = newest_complete(folder, say=said.append)
    assert not said
    step = found.step
    assert found.value("state.json") == {"step": step}
    assert (found.part("model") / "weights").read_text() == str(step) * 1000
    for tensor in found.tensors("optimizer.safetensors").values():
        assert bool((tensor == step).all())
    return step


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    done = save(tmp_path, AT_RANDOM)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 20
    assert check_whole(tmp_path / "checkpoints") == int(done.stdout.split()[1])


@pytest.mark.parametrize("second", [2, 1])
def test_killed_at_each_call_that_changes_the_disk(tmp_path, second):
    """The second checkpoint replaces one of another step, or of the same step."""
    done = save(tmp_path, AT_EACH.replace("SECOND", str(second)))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 15
    assert check_whole(tmp_path / "checkpoints") == second


def test_a_limit_on_files_that_safetensors_meets(tmp_path):
    done = save(tmp_path, TOO_LARGE)
    assert "the checkpoint cannot be written" in done.stdout, done.stderr
    assert "earlier checkpoints are untouched" in done.stdout
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert check_whole(tmp_path / "checkpoints") == 1
