"""The verbs generate and chat: with pipes, in a terminal, with a folder in the Hugging Face
layout.
"""

import builtins
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from makers.models import tiny_model
from makers.processes import app_of, call_penstock
from makers.tokenizers import byte_tokenizer
from penstock.chat import load_template
from penstock.core.errors import ConfigError, ConversationError, FormatError, RecordError
from penstock.learn.generation import Prompt
from penstock.models.exporting import export
from penstock.use.cli import chat, generate
from penstock.use.cli.chat import Terminal, Wrapping

TOKENIZER = byte_tokenizer("<bos>", "<eos>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model = tiny_model(TOKENIZER.vocab_size, layers=1, heads=2, kv_heads=None, init_std=0.02)
    template = load_template("chatml", tokenizer=TOKENIZER)
    export(model, path, tokenizer=TOKENIZER, template=template, stop_ids=[259], context_length=120)
    return path


def call(verb: Any, *arguments: str, given: str = "") -> Any:
    return call_penstock(*arguments, app=app_of(verb.run), input=given)


def test_generate_goes_on_from_its_prompt(folder):
    first = call(
        generate, str(folder), "--prompt", "hello", "--max-tokens", "9", "--seed", "3"
    ).stdout
    assert first.startswith("hello")
    assert (
        call(generate, str(folder), "--prompt", "hello", "--max-tokens", "9", "--seed", "3").stdout
        == first
    )
    assert (
        call(generate, str(folder), "--prompt", "hello", "--max-tokens", "9", "--seed", "4").stdout
        != first
    )


def test_generate_tells_machines_everything(folder):
    arguments = [
        str(folder),
        "--prompt",
        "a",
        "--prompt",
        "b",
        "-n",
        "2",
        "--seed",
        "5",
        "--max-tokens",
        "4",
        "--json",
    ]
    found = json.loads(call(generate, *arguments).stdout)
    assert [(each["prompt"], each["seed"]) for each in found["texts"]] == [
        ("a", 5),
        ("a", 6),
        ("b", 5),
        ("b", 6),
    ]
    for each in found["texts"]:
        assert len(each["tokens"]) <= 4
        assert set(each["tokens"]) & {256, 257, 258} == set()
    alone = json.loads(
        call(
            generate, str(folder), "--prompt", "b", "--seed", "6", "--max-tokens", "4", "--json"
        ).stdout
    )
    assert alone["texts"] == found["texts"][3:]


def test_generate_shows_several_texts_with_their_seeds(folder):
    shown = call(generate, str(folder), "-n", "2", "--max-tokens", "3").stdout
    assert "1 of 2, seed 0" in shown
    assert "2 of 2, seed 1" in shown


def test_generate_reads_prompts_from_files_and_pipes(folder, tmp_path):
    (tmp_path / "prompt.txt").write_text("from a file", encoding="utf-8")
    assert call(
        generate, str(folder), "--file", str(tmp_path / "prompt.txt"), "--max-tokens", "2"
    ).stdout.startswith("from a file")
    assert call(
        generate, str(folder), "--file", "-", "--max-tokens", "2", given="piped"
    ).stdout.startswith("piped")
    with pytest.raises(RecordError, match="cannot be read as a prompt"):
        call(generate, str(folder), "--file", str(tmp_path / "none.txt"))


def test_folders_without_a_model_are_refused(tmp_path):
    with pytest.raises(FormatError, match="no run"):
        call(generate, str(tmp_path))


def test_a_model_must_say_how_long_its_sequences_are(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="set context_length"):
        call(generate, str(tmp_path))
    assert (
        call(generate, str(tmp_path), "--context-length", "20", "--max-tokens", "2").exit_code == 0
    )


def test_chat_answers_each_line_of_a_pipe(folder):
    found = call(
        chat,
        str(folder),
        "--max-tokens",
        "3",
        "--context-length",
        "100",
        given="hi\n\n" + "you there\n" * 3,
    )
    assert len(found.stdout.split("\n")) >= 5
    assert "tokens of the oldest turns were dropped" in found.stderr


def test_chat_needs_a_template(folder, tmp_path):
    for file in folder.iterdir():
        if file.suffix != ".jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=r"has no chat template; set template"):
        call(chat, str(tmp_path), given="hi\n")
    assert (
        call(
            chat, str(tmp_path), "--template", "chatml", "--max-tokens", "2", given="hi\n"
        ).exit_code
        == 0
    )


class Answer:
    def __init__(self, pieces: list[str], dropped: int = 0) -> None:
        self.prompt = Prompt(ids=(1,), tokens_dropped=dropped)
        self.pieces, self.text, self.num_tokens, self.finish_reason, self.stopped = (
            pieces,
            "",
            0,
            None,
            False,
        )

    def __iter__(self) -> Any:
        for piece in self.pieces:
            if piece == "^C":
                os.kill(os.getpid(), signal.SIGINT)
                piece = "more"
            self.text, self.num_tokens = self.text + piece, self.num_tokens + 1
            yield piece
        self.finish_reason = "length" if self.num_tokens > 3 else "stop"

    def stop(self) -> None:
        self.stopped = True


class Session:
    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked, self.images = list(answers), [], []
        self.system, self.messages = None, [{"role": "user", "content": "hé"}]
        self.context_length, self.reads_images = 99, False

    def reply(self, text: str, images: Any = ()) -> Any:
        self.asked.append(text)
        self.images.append([*images])
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def clear(self) -> None:
        self.messages = []

    def whole(self) -> list[Any]:
        return self.messages


@pytest.fixture
def talk(monkeypatch, capsys):
    """Lines that a user types, and what the terminal shows; an exception stands for a key."""

    def run(session: Session, *lines: Any) -> str:
        typed = iter([*lines, EOFError()])

        def read(prompt: str) -> str:
            line = next(typed)
            if isinstance(line, BaseException):
                raise line
            return str(line)

        monkeypatch.setattr(builtins, "input", read)
        Terminal(session, "[m]", 7).run()
        return str(capsys.readouterr().out)

    return run


def test_a_terminal_shows_replies_and_what_became_of_them(talk):
    session = Session(
        Answer(["hi ", "you\x1b[2J"]),
        Answer(["a "] * 4, dropped=1234),
        Answer([" "]),
        ConversationError("too long"),
    )
    shown = talk(session, "one", "  ", "two", KeyboardInterrupt(), "three", "four")
    assert session.asked == ["one", "two", "three", "four"]
    assert "[m], step 7, context of 99 tokens" in shown
    assert "[m] › hi you\\x1b[2J" in shown
    assert "1,234 tokens of the oldest turns were dropped" in shown
    assert "cut after 4 tokens" in shown
    assert "the reply is empty; this turn is discarded" in shown
    assert "too long" in shown
    assert "/quit or Ctrl-D leaves" in shown


def test_ctrl_c_stops_a_reply_and_not_the_chat(talk):
    before = signal.getsignal(signal.SIGINT)
    stopped = Answer(["one ", "^C", " never"])
    session = Session(stopped, KeyboardInterrupt(), Answer(["again"]))
    shown = talk(session, "a", "b", "c")
    assert "one more" in shown
    assert "never" not in shown
    assert stopped.stopped
    assert "stopped" in shown
    assert "again" in shown
    assert signal.getsignal(signal.SIGINT) is before


def test_commands(talk, tmp_path):
    session = Session()
    path = tmp_path / "talk.jsonl"
    shown = talk(
        session,
        f"/save {path}",
        f"/save {path}",
        f"/save {tmp_path}",
        "/system be kind",
        "/what",
        "/clear",
        "/quit",
        "x",
    )
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == [
        {"messages": [{"role": "user", "content": "hé"}]}
    ] * 2
    assert "cannot be written" in shown
    assert "system: be kind" in shown
    assert "/clear         forget the conversation" in shown
    assert session.messages == []
    assert session.asked == []


def test_images_go_with_the_next_message(talk, tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    session = Session(
        Answer(["red"]), ConversationError("damaged"), Answer(["blue"]), Answer(["green"])
    )
    image, none = str(tmp_path / "a.png"), str(tmp_path / "b.png")
    lines = (f"/image {image}", f"/image {none}", "one", f"/image {image}", "two", "three")
    session.reads_images = True
    shown = " ".join(talk(session, *lines).split())
    assert session.images == [[image], [image], []]
    assert "there is no such file" in shown
    session = Session(Answer(["red"]))
    assert "reads no images" in talk(session, f"/image {image}", "one")
    assert session.images == [[]]


@given(st.lists(st.text("ab é日\n", max_size=9)), st.integers(4, 20), st.integers(0, 3))
def test_lines_are_broken_between_words(pieces, width, column):
    wrapping = Wrapping(width, column)
    shown = "".join(wrapping.push(piece) for piece in pieces) + wrapping.finish()
    assert shown.split() == "".join(pieces).split()
    for number, line in enumerate(shown.split("\n")):
        size = sum(2 if letter == "日" else 1 for letter in line.rstrip()) + (
            column if number == 0 else 0
        )
        assert size <= width or len(line.split()) == 1
