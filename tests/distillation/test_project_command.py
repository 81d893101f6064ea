"""`penstock distill project`: the file, the report, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from makers.tokenizers import tiny_tokenizer
from penstock import load_tokenizer
from penstock.learn.distillation.projection import Projection


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tokenizers; the second lies in a run's folder."""
    folder = tmp_path_factory.mktemp("command")
    one, other = (
        ["water flows through the gate 鳥鳩鳥鳩"] * 4,
        ["the turbine throws water at the gate"] * 4,
    )
    tiny_tokenizer(folder / "s", one, 290, ["<|a|>", "<|x=y|>"])
    tiny_tokenizer(folder / "run/tokenizer", other, 280, ["<|b|>"])
    return folder


def test_project(folder: Path, command_line: Any) -> None:
    output = folder / "p.safetensors"
    words = [
        "distill",
        "project",
        folder / "s",
        folder / "run",
        "-o",
        output,
        "--top-k",
        3,
        "--control",
        "<|x=y|>=<|b|>",
    ]
    code, out, _ = command_line(*words, "--json")
    assert code == 0
    report = json.loads(out)
    found = Projection.load(output)
    student, teacher = load_tokenizer(folder / "s"), load_tokenizer(folder / "run/tokenizer")
    found.check(student, teacher)
    assert found.indices.shape == (student.vocab_size, 3)
    assert found.indices[student.special_tokens["<|x=y|>"], 0] == teacher.special_tokens["<|b|>"]
    assert report["exact"] == pytest.approx(found.exact.mean())
    assert report["exact"] + report["twins"] + report["split"] + report["empty"] == pytest.approx(1)
    assert report["common"] == len(found.pairs())
    assert 0 < report["reached"] < 1
    assert report["examples"]["split"]
    code, out, err = command_line(*words)
    assert code == 0
    assert "equal to one teacher token; a common vocabulary of" in out
    assert "(control)" in out
    assert "projecting: 100%" in err


@pytest.mark.parametrize("pair", ["<|a|>", "<|a|>=<|a|>", "<|nothing|>=<|b|>"])
def test_control_pairs_that_are_none(pair: str, folder: Path, command_line: Any) -> None:
    words = [folder / "s", folder / "run", "-o", folder / "none", "--control", pair]
    code, _, err = command_line("distill", "project", *words)
    assert code == 1
    assert "expected STUDENT=TEACHER, a control token of s and one of run/tokenizer" in err
    assert not (folder / "none").exists()
