"""Options are made from declarations: names, types, choices, defaults, texts; and a verb gets what
was given.
"""

from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from penstock.core.declarations import declared
from penstock.use.cli.declared_options import Option, Options, options, takes

MASK = "chat.masks.mask_settings.MaskSettings"
SAMPLING = "learn.generation.settings.Sampling"


def run(made: Options, *words: str) -> tuple[dict[str, Any], Any]:
    """The settings that a verb with these options gets, and its command."""
    got: list[dict[str, Any]] = []

    @takes(settings=(made,))
    def verb(*, settings: dict[str, Any]) -> None:
        """A verb."""
        got.append(settings)

    app = typer.Typer()
    app.command()(verb)
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    return got[0], get_command(app)


def help_of(made: Options, name: str) -> str:
    _, command = run(made)
    text: str = next(one.help for one in command.params if one.name == name)
    return text


def test_only_what_was_given_reaches_the_verb() -> None:
    made = options(SAMPLING, "temperature", "top_k", "stop", "seed")
    assert run(made)[0] == {}
    assert run(made, "--temperature", "0.5", "--stop", "a", "--stop", "b")[0] == {
        "temperature": 0.5,
        "stop": ("a", "b"),
    }


def test_a_setting_that_is_on_by_default_can_be_turned_off() -> None:
    made = options(MASK, "train_on_reasoning", "mask_history")
    assert run(made, "--no-train-on-reasoning")[0] == {"train_on_reasoning": False}
    assert run(made, "--train-on-reasoning", "--mask-history")[0] == {
        "train_on_reasoning": True,
        "mask_history": True,
    }


def test_choices_are_those_of_the_type() -> None:
    made = options(MASK, "train_on_eos", "train_on_eot")
    _, command = run(made)
    shown = {one.name: one.metavar for one in command.params}
    assert shown["train_on_eos"] == shown["train_on_eot"] == "turn|all|last|none"
    app = typer.Typer()
    app.command()(takes(settings=(made,))(lambda *, settings: None))
    wrong = CliRunner().invoke(app, ["--train-on-eos", "x"])
    assert wrong.exit_code == 2


def test_help_says_what_the_declaration_says_in_words_of_the_command_line() -> None:
    made = options(MASK, "train_on_eos", "train_on_eot")
    note = declared(f"penstock.{MASK}")["train_on_eot"].note
    assert note.endswith("None: as `train_on_eos`.")
    assert help_of(made, "train_on_eot").endswith("by default as `--train-on-eos`.")
    assert help_of(made, "train_on_eos").endswith("[default: turn]")


@pytest.mark.parametrize(
    ("address", "name", "end"),
    [
        ("use.serving.settings.ServeSettings", "messages", "[default: 4096]"),
        ("use.serving.settings.ServeSettings", "grace_seconds", "[default: 10]"),
        (SAMPLING, "stop", "May be repeated."),
        (MASK, "train_on_reasoning", "[default: yes]"),
    ],
)
def test_defaults_and_repetition_are_said(address: str, name: str, end: str) -> None:
    assert help_of(options(address, name), name).endswith(end)


def test_what_the_command_line_says_otherwise() -> None:
    made = options(
        SAMPLING,
        top_k=Option(flag="--k", read=lambda given: given or None, default="the model's own"),
    )
    assert run(made, "--k", "0")[0] == {"top_k": None}
    assert help_of(made, "top_k").endswith("[default: the model's own]")


def test_a_setting_without_a_default_must_be_given() -> None:
    app = typer.Typer()
    made = options("plan.loader.loader_settings.LoaderSettings", "sequence_length")
    app.command()(takes(settings=(made,))(lambda *, settings: None))
    assert CliRunner().invoke(app, []).exit_code == 2


def test_a_named_choice_of_a_setting_is_its_option() -> None:
    made = options("chat.records.layout_settings.LayoutSettings", "media", "answers")
    processor = options("data.prepare.chat_settings.ChatSettings", "processor")

    @takes(settings=(made, processor))
    def verb(*, settings: dict[str, Any]) -> None:
        """A verb."""

    app = typer.Typer()
    app.command()(verb)
    command: Any = get_command(app)
    text = next(one.help for one in command.params if one.name == "processor")
    assert "`--media drop`" in text
