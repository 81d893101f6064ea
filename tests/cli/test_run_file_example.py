"""The run files that are shown as examples describe runs that can be trained."""

import json
import os
from pathlib import Path

import pytest

from penstock.use.cli.train import run as train

EXAMPLES = Path(__file__).parents[2] / "examples"
LINKS = {
    "data/web": "text/train",
    "data/code": "text/train",
    "data/held": "text/validation",
    "runs/teacher": "plain",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run", "distill"])
def test_a_dry_run_of_the_example(made, tmp_path, monkeypatch, capsys, name):
    for link, target in LINKS.items():
        (tmp_path / link).parent.mkdir(exist_ok=True)
        os.symlink(made / target, tmp_path / link)
    monkeypatch.chdir(tmp_path)
    # Long rows of such short documents are planned for a minute.
    shorter = ["data.loader.sequence_length=256"]
    train(run_file=str(EXAMPLES / f"{name}.yaml"), assignments=shorter, dry_run=True, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["model"] == "8 layers of 512"
    assert told["plan"]["steps"] == 2000
    assert ("runs/teacher (p_kl, weight 1)" in told.get("teachers", "")) == (name == "distill")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "runs"]
