"""The application: builds the verb that is called, runs it, and prints errors as a user reads
them.
"""

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

from penstock.core.errors import PenstockError
from penstock.core.lazy_imports import missing_extra
from penstock.core.system import explain_cut_files
from penstock.core.terminal import visible
from penstock.core.version import __version__
from penstock.use.cli.help_pages import (
    GROUPS,
    VERBS,
    colourful,
    show_overview,
    show_verb,
)

if TYPE_CHECKING:
    import typer

_COMPLETE = "_PENSTOCK_COMPLETE"
"""Environment variable with which a shell that completes calls the command."""

_WRONG = 2
"""Exit code of a wrong command line, as Typer gives it; one without a verb is wrong too."""
_STOPPED = 130
"""Exit code after Ctrl-C. Typer turns an interrupt into this code and prints nothing."""


def main() -> None:
    """Run the command line on `sys.argv`, and exit; or answer a shell that asks what may come
    next.
    """
    if _COMPLETE in os.environ:
        words = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
        build_app(words.split()[1:])(prog_name="penstock")

    explain_cut_files()
    try:
        code = _run(sys.argv[1:])
    except PenstockError as error:
        code = _fail(error, _with_flags(str(error), sys.argv[1:]))
    except ModuleNotFoundError as error:
        # Half of the verbs import torch, which is an optional extra.
        missing = missing_extra(error)
        code = _fail(error, None if missing is None else str(missing))
    except KeyboardInterrupt:
        code = _STOPPED
    except BrokenPipeError:
        code = 1
    except Exception as error:
        code = _fail(error, None)
    if code == _STOPPED and os.environ.get("RANK", "0") == "0":
        print("penstock: stopped", file=sys.stderr)
    sys.exit(_flush(code))


def _fail(error: Exception, message: str | None) -> int:
    """Print an error, on one of several ranks, and return the exit code; without a message it is
    raised again.
    """
    if "RANK" in os.environ:
        from penstock.learn.training.failures import among_ranks, end_together

        if among_ranks():
            return end_together(error, message)
    if message is None:
        raise error
    _print_error(message)
    return 1


def build_app(arguments: list[str]) -> "typer.Typer":
    """The application with the one verb that `arguments` names, or with all verbs for the help."""
    import typer
    from typer.core import TyperCommand, TyperGroup

    class Overview(TyperGroup):
        """Lists verbs by what one wants to do; its help is one page."""

        def list_commands(self, ctx: Any) -> list[str]:
            return [verb for verb in VERBS if verb in self.commands]

        def format_help(self, ctx: Any, formatter: Any) -> None:
            formatter.write(show_overview())

    class Verb(TyperCommand):
        """Its help is a page of ours."""

        def format_help(self, ctx: Any, formatter: Any) -> None:
            formatter.write(show_verb(self, ctx.command_path))

    class Verbs(TyperGroup):
        """Its help is a page of ours."""

        def format_help(self, ctx: Any, formatter: Any) -> None:
            formatter.write(show_verb(self, ctx.command_path))

    app = typer.Typer(
        name="penstock",
        cls=Overview,
        help="Raw text into the exact tensors that a language model trains on.",
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def common(
        version: Annotated[
            bool,
            typer.Option(
                "--version", metavar="", help="Print the version and exit.", is_eager=True
            ),
        ] = False,
    ) -> None:
        if version:
            print(f"penstock {__version__}")
            raise typer.Exit

    named = next((argument for argument in arguments if not argument.startswith("-")), None)
    if named not in VERBS and _COMPLETE in os.environ:
        # The shell gets verbs as plain data, so that none is loaded for it.
        for name, summary in (pair for group in GROUPS.values() for pair in group.items()):
            app.command(name, help=summary)(lambda: None)
        return app
    for verb in (named,) if named in VERBS else VERBS:
        module = _load_verb(verb)
        if hasattr(module, "app"):
            for command in module.app.registered_commands:
                command.cls = Verb
            app.add_typer(module.app, name=verb, cls=Verbs)
        else:
            app.command(verb, cls=Verb)(module.run)
    return app


def _load_verb(verb: str) -> ModuleType:
    """The module of a verb; dashes of its name are underscores in the file's."""
    return import_module(f"penstock.use.cli.{verb.replace('-', '_')}")


def _run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    if arguments in ([], ["--help"], ["-h"]):
        # The page is plain data: nothing needs to be loaded for it.
        print(show_overview())
        return 0 if arguments else _WRONG
    if (page := _help_of(arguments)) is not None:
        print(page, end="")
        return 0
    try:
        build_app(arguments)(args=arguments, prog_name="penstock")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _help_of(arguments: list[str]) -> str | None:
    """The page of a verb that is called for its help alone; None: it is called for more.

    Typer would show the same page after it has parsed the line, for which it imports pydantic.
    """
    *words, last = arguments
    if last not in ("--help", "-h") or not words or words[0] not in VERBS:
        return None
    from typer.main import get_command

    command: Any = get_command(build_app(arguments))
    for word in words:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            return None
    return show_verb(command, " ".join(["penstock", *words]))


def _with_flags(message: str, arguments: list[str]) -> str:
    """An error message with its settings as options of the verb that was called."""
    from typer.main import get_command

    try:
        from penstock.use.cli.flags import Flags, as_flags

        command: Any = get_command(build_app(arguments))
        for argument in arguments:
            if argument in getattr(command, "commands", {}):
                command = command.commands[argument]
        return as_flags(message, Flags.of(command))
    except Exception:  # the verb cannot be imported, which is what the message is about
        return message


def _print_error(message: str) -> None:
    mark = "\x1b[1;31mpenstock:\x1b[0m" if colourful(sys.stderr) else "penstock:"
    print(mark, visible(message, lines=True), file=sys.stderr)


def _flush(code: int) -> int:
    """Flush standard output and return the exit code. A closed pipe is not reported."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or 1
    return code
