"""Batches over the devices of a mesh, in one process and in two, against the rows of the plain
loader.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_models import LENGTH, make_loader

from makers.processes import free_port, jax_environment
from patience import PATIENCE_SECONDS

pytest.importorskip("jax")

SCRIPT = Path(__file__).with_name("jax_mesh_run.py")
ROWS = 16


def run_on_mesh(weighted, processes):
    port = str(free_port())
    environment, pipe = jax_environment(8 // processes), subprocess.PIPE
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", SCRIPT, weighted, str(processes), str(process), port],
            env=environment, stdout=pipe, stderr=pipe, text=True,
        )
        for process in range(processes)
    ]  # fmt: skip
    try:
        ended = [process.communicate(timeout=PATIENCE_SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, ended, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(printed.splitlines()[-1]) for printed, _ in ended]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_batches_on_eight_devices_are_the_steps(weighted, processes):
    plain = list(make_loader(weighted, rows=ROWS, max_epochs=1))
    for process, found in enumerate(run_on_mesh(weighted, processes)):
        assert found["place"] == [process, processes]
        assert (found["traces"], found["shapes"]) == (1, [[ROWS, LENGTH]])
        mine = range(process * ROWS // processes, (process + 1) * ROWS // processes, 2)
        assert found["shards"] == [[row, [2, LENGTH]] for row in mine]
        assert len(found["results"]) == len(plain)
        for (index, share, documents), step in zip(found["results"], plain, strict=True):
            expected = sum(
                float((row.loss_weights[0] * row.tokens).sum(dtype=np.float64)) for row in step
            )
            assert share == pytest.approx(expected / step.loss_denominator, rel=1e-5)
            assert (index, documents) == (step.index, sum(row.num_documents for row in step))
        assert found["first"] == [
            row.tokens.tolist() for row in plain[0][process * ROWS // processes :][:2]
        ]
        assert found["square"] == [[process, processes], [ROWS, LENGTH], [4, LENGTH]]
        assert found["pair"] == [2, LENGTH]
        assert (
            f"in the mesh this process is rank {process} of {processes} along 'data'"
            in found["wrong place"]
        )
        assert found["rows"].startswith(
            "this process's 6 rows of a batch cannot be divided among its "
        )
        assert found["axis"] == "mesh: it has the axes data, but no 'rows'; pass axis=…"
    if processes == 2:
        told = "rank 1 does not train what rank 0 trains: "
        assert found["another seed"].startswith(f"{told}seed is 0 on rank 0, 1 on rank 1. ")
        assert found["another size"].startswith(f"{told}batch_size is 8 on rank 0, 4 on rank 1. ")
        assert (
            f"process {process} of 2, and the loader gives each all rows; pass data_parallel="
            in found["no mesh"]
        )
        assert found["order"].startswith(
            "mesh: this process's devices hold shards [1, 3, 5, 7] of 8 along 'data'"
        )
