"""Shells complete verbs, options and choices by Typer, fast."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from makers.processes import child_environment, run_code
from penstock.use.cli import VERBS


def ask(*words: str) -> "tuple[list[str], set[str]]":
    """What bash is offered in place of the last word, and the modules that this loaded."""
    code = (
        "import sys\nfrom penstock.use.cli import main\ntry: main()\nexcept SystemExit: "
        "print(*sys.modules)"
    )
    environment = child_environment(
        _PENSTOCK_COMPLETE="complete_bash",
        COMP_WORDS=" ".join(("penstock", *words)),
        COMP_CWORD=str(len(words)),
    )
    found = run_code(code, env=environment, check=True)
    assert found.stderr == ""
    *offered, loaded = found.stdout.splitlines()
    return offered, set(loaded.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("",), list(VERBS)),
        (("pl",), ["plan", "plot"]),
        (("tokenizer", ""), ["train", "add", "show"]),
        (("train", "--dry"), ["--dry-run"]),
        (("distill", "cache", "--to"), ["--top-k"]),
        (("prepare", "--on-error", ""), ["stop", "skip"]),
        (("prepare", "x.jsonl", "--too-long", "d"), ["drop"]),
        (("prepare", "--format", "p"), ["parquet"]),
        (("plot", "runs/a", "--over", "t"), ["tokens"]),
        (("train", "ru"), [""]),
    ],
)
def test_what_is_offered(words: tuple[str, ...], expected: list[str]) -> None:
    assert ask(*words)[0] == expected


@pytest.mark.parametrize(
    "words", [("pl",), ("inspect", "--ro"), ("serve", "--po"), ("distill", "cache", "--te")]
)
def test_completing_loads_nothing_heavy(words: tuple[str, ...]) -> None:
    """What the user waits for at each press of the key; of our own, one verb at most."""
    _, loaded = ask(*words)
    heavy = {"torch", "numba", "numpy", "pyarrow", "tokenizers", "jinja2", "yaml"}
    assert heavy & loaded == set()
    verbs = {f"penstock.use.cli.{verb}" for verb in VERBS} & loaded
    assert verbs == (set() if words == ("pl",) else {f"penstock.use.cli.{words[0]}"})


def test_bash_asks_the_command(tmp_path: Path) -> None:
    if not (bash := shutil.which("bash")):
        pytest.skip("bash is not installed")
    command = tmp_path / "bin" / "penstock"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock "$@"\n')
    command.chmod(0o755)
    code = (
        'eval "$(penstock --show-completion bash)"; COMP_WORDS=(penstock prep); COMP_CWORD=1\n'
        "_penstock_completion penstock; echo ${COMPREPLY[@]}"
    )
    environment = {
        **child_environment(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"),
        "HOME": str(tmp_path),
        "PATH": f"{command.parent}:{os.environ['PATH']}",
    }
    found = subprocess.run(
        [bash, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert (found.stdout, found.stderr) == ("prepare\n", "")
