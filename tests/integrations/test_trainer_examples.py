"""The examples for TRL and Megatron: stopped and started again, they print the losses of an
uninterrupted run.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

import penstock as ps
from makers.processes import free_port, rank_environment, run_python

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.slow


def run(name: str, *words: object) -> list[str]:
    """The losses that an example prints."""
    found = run_python(
        "-W", "ignore", EXAMPLES / name, *words, check=True, env=rank_environment(0, 1, free_port())
    )
    return re.findall(r"loss'?:? '?([0-9.]+)", found.stdout)


def test_megatron(tmp_path: Path, counting: Path) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    words = ["--sequence-length", 64, "--rows-per-step", 4]
    whole = run("megatron_packed.py", counting, tmp_path / "whole", "--steps", 4, *words)
    first = run("megatron_packed.py", counting, tmp_path / "cut", "--steps", 2, *words)
    rest = run("megatron_packed.py", counting, tmp_path / "cut", "--steps", 4, *words)
    assert [*first, *rest] == whole
    assert len(whole) == 4


def test_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    texts = [f"line {i} counts {i + 1} and {i + 2}" for i in range(400)]
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    tokenizer = ps.train_tokenizer(texts, vocab_size=300, output=tmp_path / "tokenizer")
    ps.prepare(tmp_path / "text.jsonl", tokenizer=tokenizer, output=tmp_path / "data")
    words = ["--steps", 22, "--sequence-length", 64, "--rows-per-step", 4]
    whole = run("trl_sft.py", tmp_path / "data", tmp_path / "run", *words)
    shutil.rmtree(tmp_path / "run" / "checkpoint-22")
    rest = run("trl_sft.py", tmp_path / "data", tmp_path / "run", *words)
    assert len(whole) >= 22
    assert rest[:2] == whole[20:22]
