"""The Flax example: stopped and resumed through Orbax, it has the batches and losses of an
undisturbed run.
"""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from makers.processes import free_port, jax_environment, run_code
from patience import PATIENCE_SECONDS

MISSING = [name for name in ("jax", "flax", "optax", "orbax") if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
]

EXAMPLE = Path(__file__).parents[2] / "examples/train_jax.py"
STEPS = 9
"""The example saves every 5 steps."""


def run(dataset, folder, steps, *, devices=1, processes=1):
    """[(step, loss, [digest of each process])] of a run in new processes."""
    more = (
        ["--coordinator", f"localhost:{free_port()}", "--processes", processes]
        if processes > 1
        else []
    )
    pipe, environment = subprocess.PIPE, jax_environment(devices // processes)
    words = [sys.executable, EXAMPLE, dataset, folder, "--steps", steps, *more]
    started = [
        subprocess.Popen(
            [*map(str, words), *(["--process", str(number)] if more else [])],
            env=environment, stdout=pipe, stderr=pipe, text=True,
        )
        for number in range(processes)
    ]  # fmt: skip
    try:
        ended = [process.communicate(timeout=PATIENCE_SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, ended, strict=True):
        assert process.returncode == 0, errors
    printed = [
        [json.loads(line) for line in out.splitlines() if re.match(r"\[\d", line)]
        for out, _ in ended
    ]
    assert all(
        [line[:2] for line in lines] == [line[:2] for line in printed[0]] for lines in printed
    )
    return [
        (lines[0][0], lines[0][1], [line[2] for line in lines])
        for lines in zip(*printed, strict=True)
    ]


@pytest.fixture(scope="module")
def undisturbed(counting, tmp_path_factory):
    return run(counting, tmp_path_factory.mktemp("jax") / "run", STEPS)


@pytest.mark.parametrize(("devices", "processes"), [(1, 1), (4, 1), (2, 2)])
def test_it_resumes_exactly(counting, tmp_path, undisturbed, devices, processes):
    """Stopped after 7 steps, it goes on after the checkpoint of step 5."""
    shape = {"devices": devices, "processes": processes}
    whole = undisturbed if devices == 1 else run(counting, tmp_path / "whole", STEPS, **shape)
    first = run(counting, tmp_path / "run", 7, **shape)
    again = run(counting, tmp_path / "run", STEPS, **shape)
    assert first == whole[:7]
    assert again == whole[5:]
    assert [loss for _, loss, _ in whole] == pytest.approx(
        [loss for _, loss, _ in undisturbed], rel=1e-5
    )
    assert whole[-1][1] < 0.5 * whole[0][1]


def test_it_resumes_on_another_number_of_processes_and_devices(counting, tmp_path, undisturbed):
    run(counting, tmp_path / "run", 5, devices=2, processes=2)
    one = run(counting, tmp_path / "run", STEPS)
    assert [(step, rows) for step, _, rows in one] == [
        (step, rows) for step, _, rows in undisturbed[5:]
    ]
    assert [loss for _, loss, _ in one] == pytest.approx(
        [loss for _, loss, _ in undisturbed[5:]], rel=1e-5
    )


def test_its_model_keeps_documents_apart(counting):
    code = """
        import sys
        from dataclasses import replace
        import jax, jax.numpy as jnp, numpy as np
        from flax import nnx
        sys.path.insert(0, sys.argv[2])
        import train_jax
        import penstock as ps
        from penstock import jax as psj
        loader = ps.Loader(sys.argv[1], sequence_length=64, rows_per_step=2, seed=1)
        batch = next(psj.BatchIterator(loader))
        model = train_jax.Transformer(64, nnx.Rngs(0))
        whole = np.asarray(model(batch))
        compared = 0
        for row in range(2):
            for document in range(1, int(batch.num_documents[row]) + 1):
                slots = np.flatnonzero(np.asarray(batch.segment_ids[row]) == document)
                arrays = {name: getattr(batch, name) for name in ("tokens", "positions", "segment_ids")}
                alone = replace(batch, prefix=None, **{name: one[row : row + 1, slots] for name, one in arrays.items()})
                np.testing.assert_allclose(whole[row, slots], np.asarray(model(alone))[0], atol=2e-5)
                compared += document > 1
        assert compared > 2
    """  # noqa: E501
    found = run_code(code, counting, EXAMPLE.parent, env=jax_environment(1))
    assert found.returncode == 0, found.stderr
