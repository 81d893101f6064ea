"""`examples/infill_numbers.py` with a few steps: it trains, fills in, and judges."""

import importlib.util
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "infill_numbers.py"


def test_it_trains_and_judges(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("infill_numbers", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "LARGEST", 17)
    given = ["infill_numbers.py", "--output", str(tmp_path), "--steps", "52", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", given)
    example.main()
    said = capsys.readouterr().out
    assert [line.split(":")[0] for line in said.splitlines()] == ["first", "second", "sum"]
    assert "of 250 new sums are right" in said
