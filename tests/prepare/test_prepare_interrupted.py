"""A run that goes on where another was killed, or over its results, takes from it only what would come out now."""

import json

import pytest
from prepare_cases import contents

from penstock.errors import OutputError
from penstock.prepare import prepare

FIRST = [f"alpha {number}" for number in range(40)]


def run(source, tokenizer, output, **options):
    options = {"part_bytes": 60, "processes": 1, "progress": False, **options}
    return prepare(source, tokenizer=tokenizer, output=output, **options)


@pytest.fixture
def files(tmp_path):
    """Five files of JSONL; each has a record with weights and a bad one."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for number in range(5):
        lines = [json.dumps({"text": f"{number} {text}"}) for text in FIRST]
        lines[3] = json.dumps({"text": "water flows", "w": [{"begin": 5, "end": 11, "weight": 0.5}]})
        lines[5] = "{broken"
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def earlier_version(output):
    """Make a finished preparation look like one of the first version, which noted less."""
    plan = json.loads((output / "prepare.json").read_bytes())
    plan["settings"]["on_error"] = "skip"
    (output / "prepare.json").write_text(json.dumps(plan))
    return plan


def test_settings_that_no_longer_decide_anything_are_no_change(tmp_path, files, tokenizer):
    options = {"part_bytes": None, "on_error": "skip"}
    run(files, tokenizer, tmp_path / "out", **options)
    whole = contents(tmp_path / "out")
    plan = earlier_version(tmp_path / "out")
    assert run(files, tokenizer, tmp_path / "out", **options).seconds is None
    del plan["files"]
    plan["inputs"] = ["of another form"]
    (tmp_path / "out/prepare.json").write_text(json.dumps(plan))
    (tmp_path / "out/parts.json").unlink()
    report = run(files, tokenizer, tmp_path / "out", **options)
    assert (report.parts_resumed, report.input_changes) == (0, {})
    assert contents(tmp_path / "out") == whole
    earlier_version(tmp_path / "out")
    with pytest.raises(OutputError, match=r"another preparation: keep_text was False, is True; choose"):
        run(files, tokenizer, tmp_path / "out", keep_text=True, **options)
