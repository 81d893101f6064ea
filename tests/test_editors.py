"""What an editor shows of the package: names with their docstrings, settings with their choices.

Asked is a language server with the engine of VS Code's.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

import penstock as ps
from makers.processes import child_environment

pytestmark = pytest.mark.slow
FUNCTION, CLASS, MODULE = 3, 7, 9
"""Kinds of completions in the Language Server Protocol."""
SERVER = "from basedpyright.langserver import main; main()"
OPENING = """\
import penstock as ps
loader = ps.Loader("a", sequence_length=8, rows_per_step=1)
run = ps.train("m", loader, steps=3, output="r")
"""


class Editor:
    """Asks a language server about the end of a text."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        settings = {"extraPaths": sys.path[:], "typeCheckingMode": "standard"}
        (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, "--stdio"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )

    def _initialize(self) -> None:
        shown = {"documentationFormat": ["markdown"]}
        item = {**shown, "resolveSupport": {"properties": ["documentation"]}}
        folder = self._folder
        self._ask(
            "initialize",
            processId=os.getpid(),
            rootUri=folder.as_uri(),
            workspaceFolders=[{"uri": folder.as_uri(), "name": "folder"}],
            capabilities={"textDocument": {"completion": {"completionItem": item}}},
        )
        self._send(method="initialized", params={})

    def __enter__(self) -> Self:
        self._initialize()
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def completions(self, line: str) -> dict[str, Any]:
        """What may follow after a line: name → completion."""
        found = self._ask("textDocument/completion", **self._open(line))
        items = found["items"] if isinstance(found, dict) else found or []
        return {one["label"].strip("\"'="): one for one in items}

    def documentation(self, item: Any) -> str:
        """What is shown next to a completion."""
        found = self._ask("completionItem/resolve", **item).get("documentation", "")
        return str(found["value"] if isinstance(found, dict) else found)

    def signature(self, line: str) -> Any:
        """The call that a line has begun."""
        return self._ask("textDocument/signatureHelp", **self._open(line))["signatures"][0]

    def _open(self, line: str) -> dict[str, Any]:
        text = OPENING + line
        path = self._folder / f"file{self._count}.py"
        path.write_text(text, encoding="utf-8")
        document = {"uri": path.as_uri(), "languageId": "python", "version": 1, "text": text}
        self._send(method="textDocument/didOpen", params={"textDocument": document})
        position = {"line": OPENING.count("\n"), "character": len(line)}
        return {"textDocument": {"uri": path.as_uri()}, "position": position}

    def _ask(self, method: str, **params: Any) -> Any:
        self._count += 1
        self._send(id=self._count, method=method, params=params)
        while True:
            message = self._read()
            if "method" not in message and message.get("id") == self._count:
                return message.get("result")
            if "method" in message and "id" in message:  # the server asks for settings
                self._send(id=message["id"], result=None)

    def _send(self, **message: Any) -> None:
        assert self.process.stdin is not None
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.process.stdin.flush()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        length = 0
        while line := self.process.stdout.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return json.loads(self.process.stdout.read(length))


@pytest.fixture(scope="module")
def editor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Editor]:
    pytest.importorskip("basedpyright")
    with Editor(tmp_path_factory.mktemp("editor")) as made:
        yield made


def test_every_public_name_is_there_with_its_docstring(editor: Editor) -> None:
    found = editor.completions("ps.")
    assert set(ps.__all__) <= set(found)
    assert {found[name]["kind"] for name in ps.__all__} == {FUNCTION, CLASS, MODULE}
    docstrings = {name: editor.documentation(found[name]) for name in ps.__all__}
    assert [name for name, text in docstrings.items() if len(text) < 40] == []
    assert "into a run's folder" in docstrings["train"]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("ps.chat.", ["encode", "Trajectory"]),
        ("ps.objectives.", ["Written", "check_objective"]),
        ("run.", ["chat", "generate", "evaluate", "export", "serve", "metrics"]),
        ("loader.", ["explain", "state_dict", "seek"]),
        ("next(iter(loader)).", ["torch", "arrays", "loss_denominators"]),
        ('ps.open_dataset("a").', ["to_datasets", "tokenizer"]),
    ],
)
def test_members_are_there_with_their_docstrings(
    editor: Editor, line: str, names: list[str]
) -> None:
    found = editor.completions(line)
    assert [name for name in names if name not in found] == []
    assert [name for name in names if len(editor.documentation(found[name])) < 20] == []


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ('ps.train("m", loader, ', ["learning_rate", "lora", "log", "resume"]),
        ('ps.train("m", loader, log="', ["wandb", "trackio", "mlflow", "tensorboard"]),
        ('ps.Loader("a", sequence_length=8, rows_per_step=1, packing="', ["best_fit", "concat"]),
        ('ps.prepare("a", tokenizer="t", output="o", train_on_eos="', ["turn", "all", "last"]),
        ('next(iter(loader)).torch()["', ["tokens", "targets", "cu_seqlens"]),
    ],
)
def test_settings_and_their_choices_are_completed(
    editor: Editor, line: str, names: list[str]
) -> None:
    found = editor.completions(line)
    assert [name for name in names if name not in found] == [], sorted(found)[:80]


def test_a_call_shows_its_settings(editor: Editor) -> None:
    shown = editor.signature("ps.prepare(")
    assert "mask_history: bool" in shown["label"]
    assert "a dataset of shards" in str(shown["documentation"])
