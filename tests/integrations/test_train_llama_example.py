"""The example of a bare loop: it learns, and stopped and started again it says the same as in one
go.
"""

import runpy
import shutil
from pathlib import Path

import pytest
from tiny_models import make_dataset

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_llama.py"


def test_stopped_and_started_again_it_trains_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, main = str(make_dataset(tmp_path / "data")), runpy.run_path(str(EXAMPLE))["main"]
    main(data, tmp_path / "run", steps=6, sequence_length=64, rows_per_step=2)
    whole = capsys.readouterr().out
    shutil.rmtree(tmp_path / "run")
    for steps in (3, 6):
        main(data, tmp_path / "run", steps=steps, sequence_length=64, rows_per_step=2)
    assert capsys.readouterr().out.replace("goes on at step 3\n", "") == whole
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in whole.splitlines()]
    assert losses[-1] < losses[0]
