"""Shells complete verbs, options, choices and files, fast, by scripts that ask `penstock`
itself.
"""

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from makers.processes import child_environment, run_code, run_penstock
from penstock.data.sources.opening import FORMATS
from penstock.use.cli import VERBS, build_app, candidates
from penstock.use.cli.app import _command_of
from penstock.use.cli.candidates import CHOICES, value_kind
from penstock.use.cli.completion import SCRIPTS

complete = partial(candidates.complete, command_of=_command_of)


def offered(line: str) -> list[str]:
    return [value for value, _ in complete(line.split(" ")[1:])[1]]


def test_verbs_and_options() -> None:
    assert offered("penstock ") == list(VERBS)
    assert offered("penstock pl") == ["plan", "plot"]
    assert offered("penstock --") == ["--help", "--version"]
    assert offered("penstock tokenizer ") == ["train", "add", "show"]
    assert offered("penstock tokenizer tr") == ["train"]
    assert offered("penstock train --dry") == ["--dry-run"]
    assert offered("penstock distill cache --to") == ["--top-k"]
    assert offered("penstock nothing ") == []
    assert offered("penstock tokenizer nothing ") == []


def test_an_option_that_is_there_is_not_offered_again_unless_it_may_be_repeated() -> None:
    assert "--resume" not in offered("penstock train run.yaml --resume --")
    assert "--set" in offered("penstock train run.yaml --set a=1 --")


def test_choices_of_options() -> None:
    assert offered("penstock prepare --on-error ") == ["stop", "skip"]
    assert offered("penstock prepare x.jsonl --too-long d") == ["drop"]
    assert offered("penstock prepare --format p") == ["parquet"]
    assert offered("penstock plot runs/a --over t") == ["tokens"]
    # As zsh and fish give it, in one word, and bash, in three.
    assert offered("penstock prepare --on-error=st") == ["--on-error=stop"]
    assert offered("penstock prepare --on-error = st") == ["stop"]
    assert offered("penstock prepare --on-error =") == ["stop", "skip"]
    assert offered("penstock completion ") == list(SCRIPTS)
    assert offered("penstock completion bash ") == []


def test_files_and_folders() -> None:
    assert complete(["prepare", ""]) == ("files", [])
    assert complete(["prepare", "a.jsonl", "b.js"]) == ("files", [])
    assert complete(["train", "ru"]) == ("files", [])
    assert complete(["train", "run.yaml", "-o", ""]) == ("folders", [])
    assert complete(["train", "run.yaml", "ru"]) == ("words", []), "it takes one file"
    assert complete(["prepare", "--template", "a"]) == ("files", [("auto", "")])
    assert complete(["train", "run.yaml", "--set", ""]) == ("words", [])


def test_the_completion_knows_what_every_value_is() -> None:
    """A new name of a value must be added to `candidates`: nothing is offered by accident."""

    def check(command: Any) -> None:
        for param in command.params:
            if param.metavar:
                value_kind(param.metavar, param.opts)
        for inner in getattr(command, "commands", {}).values():
            check(inner)

    check(get_command(build_app([])))
    with pytest.raises(KeyError, match="UNHEARD"):
        value_kind("UNHEARD")
    assert set(CHOICES["FORMAT"]) == set(FORMATS)


def test_the_tasks_are_those_of_the_help() -> None:
    group: Any = get_command(build_app(["eval"]))
    task = next(one for one in group.commands["eval"].params if one.name == "task")
    named = set(re.split(r", | or ", task.help.partition(";")[0]))
    assert named == {*CHOICES["--task"]} - {"lm-eval:"} | {"lm-eval:NAME"}


def ask(*words: str) -> "subprocess.CompletedProcess[str]":
    """Completion in a process of its own, which then tells what it has loaded."""
    code = (
        "import sys\nfrom penstock.use.cli import main\ntry: main()\nexcept SystemExit: "
        "print(*sys.modules)"
    )
    return run_code(code, *words, env=child_environment(_PENSTOCK_COMPLETE="1"), check=True)


@pytest.mark.parametrize(
    "words", [("pl",), ("inspect", "--ro"), ("serve", "--po"), ("distill", "cache", "--te")]
)
def test_completing_loads_nothing_heavy(words: tuple[str, ...]) -> None:
    """What the user waits for at each press of the key; of our own, one verb at most."""
    found = ask(*words)
    assert found.stderr == ""
    *_, loaded = found.stdout.splitlines()
    heavy = {
        "torch",
        "numba",
        "numpy",
        "pyarrow",
        "tokenizers",
        "rich",
        "jinja2",
        "pydantic",
        "yaml",
    }
    assert heavy & set(loaded.split()) == set()
    verbs = {f"penstock.use.cli.{verb}" for verb in VERBS} & set(loaded.split())
    assert verbs == (set() if words == ("pl",) else {f"penstock.use.cli.{words[0]}"})
    assert ("typer" in loaded.split()) == (words != ("pl",))


@pytest.fixture
def shell_environment(tmp_path: Path) -> dict[str, str]:
    command = tmp_path / "bin" / "penstock"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock "$@"\n')
    command.chmod(0o755)
    return {
        **child_environment(),
        "HOME": str(tmp_path),
        "PATH": f"{command.parent}:{os.environ['PATH']}",
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("penstock prep", "prepare"),
        ("penstock prepare --on-damaged-file = s", "stop skip"),
        ("penstock tokenizer ''", "train add show"),
        ("penstock prepare 'two words.jsonl' --over", "--overwrite"),
    ],
)
def test_bash_asks_the_command(
    shell_environment: dict[str, str], words: str, expected: str
) -> None:
    if not (bash := shutil.which("bash")):
        pytest.skip("bash is not installed")
    code = (
        f'eval "$(penstock completion bash)"; COMP_WORDS=({words}); '
        f"COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n"
        "_penstock_completion penstock; echo ${COMPREPLY[@]}"
    )
    found = subprocess.run(
        [bash, "-c", code], env=shell_environment, capture_output=True, text=True, check=True
    )
    assert (found.stdout, found.stderr) == (f"{expected}\n", "")


def test_fish_asks_the_command(shell_environment: dict[str, str]) -> None:
    if not (fish := shutil.which("fish")):
        pytest.skip("fish is not installed")
    code = (
        "penstock completion fish | source; complete -C 'penstock prep'; complete -C 'penstock "
        "prepare --on-error s'"
    )
    found = subprocess.run(
        [fish, "-c", code], env=shell_environment, capture_output=True, text=True, check=True
    )
    assert [line.split("\t")[0] for line in found.stdout.splitlines()] == [
        "prepare",
        "skip",
        "stop",
    ]


@pytest.mark.parametrize("shell", SCRIPTS)
def test_scripts_are_sound(shell: str) -> None:
    script = run_penstock("completion", shell, check=True).stdout
    assert script == SCRIPTS[shell]
    if shutil.which(shell):
        assert (
            subprocess.run(
                [shell, "-n", "-c", script], capture_output=True, text=True, check=True
            ).stderr
            == ""
        )


def test_an_unknown_shell_is_refused() -> None:
    found = run_penstock("completion", "tcsh")
    assert (found.returncode, found.stderr) == (
        1,
        "penstock: completion: no script for 'tcsh'; expected one of bash, zsh, fish\n",
    )
