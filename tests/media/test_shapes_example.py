"""The example of pictures runs: it draws, prepares, trains, goes on, and counts right answers."""

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "shapes.py"


@pytest.fixture
def shapes(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("shapes", EXAMPLE)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    monkeypatch.setattr(found, "TRAINED", 40)
    monkeypatch.setattr(found, "HELD_OUT", 10)
    monkeypatch.setattr(
        sys,
        "argv",
        ["shapes.py", "--output", str(tmp_path / "shapes"), "--steps", "31", "--threads", "1"],
    )
    return found


def test_it_runs_and_goes_on(shapes, capsys):
    for _ in range(2):
        shapes.main()
        assert "of 10 pictures that it never saw are described right" in capsys.readouterr().out


def test_an_answer_says_what_was_drawn(shapes):
    random = shapes.Random(3)
    answers = {shapes.draw(random)[1] for _ in range(300)}
    assert len(answers) > 40
    assert all(any(colour in answer for colour in shapes.COLOURS) for answer in answers)
