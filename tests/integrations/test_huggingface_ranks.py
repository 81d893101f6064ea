"""The Trainer on two processes (gloo) against one: same rows, same loss, same model within
rounding.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import make_dataset
from training_run import train_once

from makers.processes import free_port, rank_environment
from patience import PATIENCE_SECONDS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("ranks") / "held_out", documents=23, seed=1)


def run_on_ranks(folder: Path, size: int, **settings: Any) -> list[dict[str, Any]]:
    port, processes = free_port(), []
    for rank in range(size):
        source = folder / f"settings-{rank}.json"
        source.write_text(
            json.dumps({**settings, "output": str(folder / "out"), "rank": rank, "ranks": size})
        )
        command = [sys.executable, str(Path(__file__).with_name("training_run.py"))]
        arguments = [*command, str(source), str(folder / f"found-{rank}.json")]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        processes.append(
            subprocess.Popen(arguments, env=rank_environment(rank, size, port), text=True, **pipes)
        )
    outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * size, "\n".join(outputs)[-4000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(size)]


def test_two_ranks_train_what_one_does(tmp_path: Path, weighted: Path, held_out: Path) -> None:
    settings = {"data": str(weighted), "eval_data": str(held_out), "max_steps": 4, "save_steps": 2}
    one = train_once(output=str(tmp_path / "one"), **settings)
    two = run_on_ranks(tmp_path, 2, **settings)
    np.testing.assert_allclose(two[0]["losses"], one["losses"], rtol=1e-5)
    assert two[0]["losses"] == two[1]["losses"]
    np.testing.assert_allclose(two[0]["weights"], one["weights"], atol=2e-4)
    # Steps of four rows: rank 0 has the first two of each, rank 1 the others.
    joined = [row for i in range(0, 8, 2) for rank in two for row in rank["seen"][i : i + 2]]
    assert joined == one["seen"]
    assert two[0]["evaluation"]["eval_tokens"] == one["evaluation"]["eval_tokens"]
    assert two[0]["evaluation"]["eval_loss"] == pytest.approx(
        one["evaluation"]["eval_loss"], rel=1e-5
    )

    # A checkpoint of two ranks, resumed on one, sees the batches that two would have seen.
    resumed = train_once(
        output=str(tmp_path / "again"), **settings, resume=str(tmp_path / "out" / "checkpoint-2")
    )
    assert resumed["seen"] == one["seen"][8:]
    np.testing.assert_allclose(resumed["losses"], one["losses"], rtol=1e-5)
