"""DeepSpeed through the Hugging Face Trainer, on CPUs: the losses and batches of a run without it,
also resumed.
"""

import shutil
from pathlib import Path

import pytest
from rank_runs import run_on_ranks
from training_run import train_once

pytest.importorskip("deepspeed", reason="deepspeed is not installed: make test-integrations")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("g++") is None, reason="DeepSpeed compiles its communication on CPUs with g++"
    ),
]


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_train_and_resume_as_one_without_it(
    tmp_path: Path, weighted: Path, stage: int
) -> None:
    settings = {"data": str(weighted), "max_steps": 4, "save_steps": 2}
    one = train_once(output=str(tmp_path / "one"), **settings)
    settings |= {"output": str(tmp_path / "two"), "stage": stage}
    whole = run_on_ranks("deepspeed_run.py", tmp_path / "whole", 2, **settings)
    assert whole[0]["losses"] == pytest.approx(one["losses"], rel=1e-4)
    # Norms too: AdamW forgives a loss that is too large by a factor.
    assert [float(norm) for norm in whole[0]["norms"]] == pytest.approx(one["norms"], rel=1e-3)
    joined = [row for i in range(0, 8, 2) for rank in whole for row in rank["seen"][i : i + 2]]
    assert joined == one["seen"]
    resume = str(tmp_path / "two" / "checkpoint-2")
    again = run_on_ranks("deepspeed_run.py", tmp_path / "again", 2, resume=resume, **settings)
    assert [rank["seen"] for rank in again] == [rank["seen"][4:] for rank in whole]
    assert again[0]["losses"] == pytest.approx(whole[0]["losses"], rel=1e-6)
