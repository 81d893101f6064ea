"""Ray Train: with a worker killed, or a node lost and come back, the steps and losses are those of
one process.
"""

import hashlib
import json
import os
import sys
from itertools import islice
from pathlib import Path

import pytest

from makers.processes import child_environment, run_python
from penstock import Loader

pytest.importorskip("ray.train", reason="needs Ray")

SCRIPT = Path(__file__).with_name("ray_train_run.py")
EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 14


def run(dataset, folder, mode):
    """[(step, workers, loss, [[row, digest]])] of each worker, in the order in which they were
    written.
    """
    folder.mkdir()
    # A busy machine starts workers slowly. But Ray may still count a lost node, and waits so long
    # for workers on it.
    environment = child_environment(
        RAY_USAGE_STATS_ENABLED="0",
        RAY_memory_monitor_refresh_ms="0",
        RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="120",
    )
    environment["PYTHONPATH"] += f":{EXAMPLES}"
    done = run_python(SCRIPT, dataset, folder, mode, env=environment, check=True)
    # Ray may write lines of its own behind it.
    last = [one for one in done.stdout.splitlines() if one.startswith("{")][-1]
    assert json.loads(last)["step"] == STEPS - 1
    lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    return [(step, workers, loss, rows) for step, workers, loss, _, rows in lines]


@pytest.fixture(scope="module")
def expected(counting):
    """(step, row) → digest, of one undisturbed loader."""
    steps = islice(Loader(counting, sequence_length=64, rows_per_step=4, seed=1), STEPS)
    return {
        (step.index, number): hashlib.sha1(row.tokens.tobytes()).hexdigest()[:12]
        for step in steps
        for number, row in enumerate(step)
    }


@pytest.mark.slow
@pytest.mark.skipif(
    "PENSTOCK_INTEGRATIONS" not in os.environ,
    reason="takes minutes: make test-integrations runs it",
)
@pytest.mark.parametrize("mode", ["kill", "node"])
def test_the_steps_are_those_of_an_undisturbed_run(counting, tmp_path, expected, mode):
    lines = run(counting, tmp_path / mode, mode)
    found = [((step, row), digest) for step, _, _, rows in lines for row, digest in rows]
    assert {place for place, _ in found} == set(expected)
    assert all(expected[place] == digest for place, digest in found)
    losses = {}
    for step, _, loss, _ in lines:
        # A step that was trained again, also on another number of workers, has the same loss.
        assert losses.setdefault(step, loss) == pytest.approx(loss, rel=1e-4)
    assert losses[STEPS - 1] < 0.6 * losses[0]
    sizes = [size for _, size, _, _ in lines]
    changes = [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before]
    assert changes == ([2] if mode == "kill" else [2, 1, 2])
    assert len(found) > len(expected) or mode == "node"


def test_the_example_runs_without_a_cluster_of_its_own():
    """Its function for workers can be imported without Ray."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import train_ray

        assert callable(train_ray.train)
    finally:
        sys.path.remove(str(EXAMPLES))
