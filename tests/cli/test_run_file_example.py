"""The run file that is shown as an example describes a run that can be trained."""

import json
import os
from pathlib import Path

from penstock.cli.train import run as train

EXAMPLE = Path(__file__).parents[2] / "examples/run.yaml"


def test_a_dry_run_of_the_example(made, tmp_path, monkeypatch, capsys):
    (tmp_path / "data").mkdir()
    for name in ("web", "code"):
        os.symlink(made / "text/train", tmp_path / "data" / name)
    monkeypatch.chdir(tmp_path)
    train(str(EXAMPLE), dry_run=True, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["model"] == "8 layers of 512"
    assert told["plan"]["steps"] == 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]
