"""What messages and documents say of the command line exists there, and what options take is read
as documented.
"""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from makers.forked import run_penstock
from penstock.core.errors import ConfigError
from penstock.data.sources.opening import FORMATS
from penstock.data.sources.records import COLUMN_TYPES
from penstock.use.cli import VERBS, build_app
from penstock.use.cli.options import unescape

ROOT = Path(__file__).parents[2]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*.yaml")),
]


def options(command: Any) -> dict[str, Any]:
    """Flag → option, of a command and of the commands in it."""
    found = {
        flag: param
        for param in command.params
        for flag in (*param.opts, *param.secondary_opts)
        if flag.startswith("--")
    }
    for inner in getattr(command, "commands", {}).values():
        found |= options(inner)
    return {**found, "--help": None}


def messages(path: Path) -> list[str]:
    """All strings of a module, parts of f-strings and docstrings among them."""
    tree = ast.parse(path.read_text())
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


@pytest.fixture(scope="module")
def command() -> Any:
    return get_command(build_app([]))


def test_every_flag_that_a_message_names_exists(command):
    known = options(command)
    strange = [
        f"{path.name}: {flag}"
        for path in sorted((ROOT / "src" / "penstock").rglob("*.py"))
        # The flags there are bubblewrap's.
        if path.parent.name != "sandbox"
        for text in messages(path)
        # A style sheet names its variables as the command line its flags; pip and torchrun have
        # flags of their own.
        if not any(other in text for other in ("var(--", "pip install", "torchrun"))
        for flag in FLAG.findall(text)
        if flag not in known
    ]
    assert strange == []


def test_every_command_that_a_document_shows_exists(command):
    shown = [
        line.partition(" #")[0].split()
        for path in DOCUMENTS
        for line in path.read_text().splitlines()
        if re.match(rf"penstock ({'|'.join(VERBS)})\b", line)
    ]
    assert len(shown) > 5
    for _, verb, *rest in shown:
        known = options(command.commands[verb])
        assert [flag for flag in rest if flag.startswith("--") and flag not in known] == []


def test_every_option_that_takes_a_value_says_which(command):
    assert {
        flag
        for flag, param in options(command).items()
        if param is not None and param.metavar is None
    } == {"--install-completion", "--show-completion"}


def test_help_names_the_formats_and_types_that_there_are(command):
    for verb in (command.commands["prepare"], command.commands["tokenizer"].commands["train"]):
        assert f"One of {', '.join(FORMATS)}." in options(verb)["--format"].help
    column = options(command.commands["prepare"])["--column"].help
    assert [kind for kind in COLUMN_TYPES if kind not in column] == []


def test_escapes_in_separators():
    assert unescape(r"\n\n") == "\n\n"
    assert unescape(r"a\tb\r\\n") == "a\tb\r\\n"
    assert unescape("\n<|x|>") == "\n<|x|>"
    for wrong in (r"\x", "a\\", r"\\\q"):
        with pytest.raises(ConfigError, match="is not a known escape; expected"):
            unescape(wrong)


@pytest.mark.slow
def test_a_first_sitting(tmp_path):
    """Train, prepare by a separator, look at a document that is not there, and train into the same
    folder.
    """
    (tmp_path / "book.txt").write_text(
        "\n\n".join(f"chapter {number}: the wheel turns" for number in range(40))
    )
    train = [
        "tokenizer",
        "train",
        str(tmp_path / "book.txt"),
        "--vocab-size",
        "300",
        "-o",
        str(tmp_path / "t"),
    ]
    assert run_penstock(*train).returncode == 0
    again = run_penstock(*train)
    assert again.returncode == 1
    assert "tokenizer.json: exists already" in again.stderr
    assert run_penstock(*train, "--overwrite").returncode == 0
    prepare = [
        "prepare",
        str(tmp_path / "book.txt"),
        "-t",
        str(tmp_path / "t"),
        "-o",
        str(tmp_path / "d"),
    ]
    done = run_penstock(*prepare, "--separator", r"\n\n", "--processes", "1", "-q")
    assert done.stdout.startswith("40 documents, ")
    wrong = run_penstock("inspect", str(tmp_path / "d"), "--document", "50")
    assert (wrong.returncode, wrong.stderr) == (
        1,
        "penstock: d: no document 50; it has 40, from 0\n",
    )
