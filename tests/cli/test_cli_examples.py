"""Every command's help has an example, every example is a command line that exists, and what can
run here, runs.
"""

import json
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from makers.hub import Hub
from makers.processes import call_penstock, child_environment, run_penstock
from makers.texts import make_chat, make_texts, write_json_lines, write_texts
from penstock.use.cli import build_app
from penstock.use.cli.help_pages import split_help

RUN_FILE = """\
data:
  sources:
    - path: data/stories/train
  loader: {sequence_length: 128, rows_per_step: 4}
model: {layers: 1, width: 32, heads: 2}
training:
  steps: 3
  device: cpu
  evaluators:
    held out: {kind: loss, data: data/stories/validation, every: 2}
"""
AXOLOTL = """\
base_model: runs/first
datasets:
  - path: chats.jsonl
    type: chat_template
    chat_template: chatml
sequence_len: 128
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 2
num_epochs: 1
learning_rate: 0.0002
optimizer: adamw_torch
lr_scheduler: cosine
"""
ENDLESS = ("serve",)
"""Verbs that run until they are stopped: their examples are parsed only."""
FIRST = ("tokenizer", "prepare", "convert", "copy", "verify", "inspect", "plan", "train")
"""Verbs in the order of their examples, where one needs what another makes; the rest follow."""


def commands(group: Any, before: str = "") -> dict[str, Any]:
    """Full name → command, of a group's commands and of those in its groups."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        found |= (
            {f"{before}{name}": command} if inner is None else commands(command, f"{before}{name} ")
        )
    return found


COMMANDS = commands(get_command(build_app([])))
EXAMPLES = [
    (name, example) for name, command in COMMANDS.items() for example in split_help(command.help)[1]
]


def words(example: str) -> list[str]:
    """The words of the penstock command in a line of shell, without the command's name."""
    line = example.replace("\\\n", " ")
    found = re.search(r"\$\((penstock [^)]*)\)", line)
    given = shlex.split(found[1] if found else line)
    return given[1 : given.index(">")] if ">" in given else given[1:]


def test_every_command_has_an_example_of_itself() -> None:
    assert [name for name, command in COMMANDS.items() if not split_help(command.help)[1]] == []
    assert [one for name, one in EXAMPLES if f"penstock {name}" not in one] == []
    assert [line for _, one in EXAMPLES for line in one.splitlines() if len(line) > 78] == []


@pytest.mark.parametrize(
    ("name", "example"), EXAMPLES, ids=[example[:60] for _, example in EXAMPLES]
)
def test_every_example_is_a_command_line_that_exists(name: str, example: str) -> None:
    arguments = words(example)[len(name.split()) :]
    COMMANDS[name].make_context(name, arguments)


def test_help_shows_examples_as_lines_that_can_be_copied() -> None:
    shown = run_penstock("rollouts", "--help", env=None).stdout
    assert "Example:" not in shown
    end = shown[shown.index("\n Example\n") :]
    assert end.splitlines()[2:] == [
        "  penstock rollouts runs/first prompts.jsonl --reward rewards.py:shorter \\",
        "      --samples 4 --max-tokens 32 -o data/rollouts",
    ]
    assert "\x1b" not in shown


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the small files that the examples name."""
    monkeypatch.chdir(tmp_path)
    chance = random.Random(7)
    vocabulary = [
        "".join(chance.choices("abcdefghijklmnop", k=chance.randint(2, 9))) for _ in range(2000)
    ]
    write_texts(tmp_path / "stories.jsonl", make_texts(600, words=vocabulary))
    write_json_lines(tmp_path / "chats.jsonl", map(make_chat, make_texts(60, 2), make_texts(60, 3)))
    write_json_lines(
        tmp_path / "prompts.jsonl", [{"prompt": text} for text in make_texts(3, 4, longest=8)]
    )
    sampled = {"prompt_ids": [5, 6], "completion_ids": [7], "logprobs": [-0.5], "group": "q"}
    write_json_lines(tmp_path / "rollouts.jsonl", [{**sampled, "reward": n} for n in (0, 1)])
    (tmp_path / "rewards.py").write_text(
        "def shorter(record, answer):\n    return -float(len(answer))\n"
    )
    (tmp_path / "held-out.txt").write_text("\n".join(make_texts(20, 5)))
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    (tmp_path / "more.yaml").write_text(RUN_FILE.replace("steps: 3", "steps: 5"))
    (tmp_path / "axolotl.yaml").write_text(AXOLOTL)
    return tmp_path


@pytest.mark.slow
def test_the_examples_run_one_after_another(desk: Path) -> None:
    pytest.importorskip("torch")
    order = sorted(
        EXAMPLES,
        key=lambda one: (
            FIRST.index(one[0].split()[0]) if one[0].split()[0] in FIRST else len(FIRST)
        ),
    )
    for name, example in order:
        if name in ENDLESS:
            continue
        if name == "chat":
            talk = ["--set", "data.sources.0.path=data/chats", "--set", "training.evaluators={}"]
            assert call_penstock("train", "run.yaml", "-o", "runs/chat", *talk).exit_code == 0
        if "hf://" in example:  # its client reads the environment once, at import
            with Hub({}).served() as environment:
                run_penstock(*words(example), env=child_environment(**environment), check=True)
            continue
        found = call_penstock(*words(example), input="how are you?\n")
        assert found.exit_code == 0, (example, found.output)
    made = (
        "curves.html",
        "rows.html",
        "penstock.schema.json",
        "exported/config.json",
        "data/rollouts/manifest.json",
    )
    assert [name for name in made if not (desk / name).exists()] == []
    assert json.loads((desk / "penstock.schema.json").read_text())["title"] == "penstock run file"
