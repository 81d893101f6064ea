"""The command line: one file per verb, imported only when it is used.

A verb is a module of this package. It has either a function `run`, with parameters and a docstring that become the
options and the help, or a Typer application `app` for a group of verbs (`tokenizer train`). Options that several verbs
share are in `options`. Verbs import heavy packages inside their functions, so `penstock --help` takes a fraction of a
second.

Exit codes: 0 success; 1 an error of penstock, printed without a traceback; 2 a wrong command line; 130 stopped by
Ctrl-C. If the reader of a pipe closes it early (`| head`), the command ends quietly.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

from penstock.core.lazy_imports import public_names

if TYPE_CHECKING:
    import typer

VERBS = (
    "tokenizer", "prepare", "convert", "copy", "verify", "inspect", "plan",
    "train", "distill", "reference", "rollouts", "plot", "eval", "generate", "chat", "serve", "export", "schema",
    "doctor",
)  # fmt: skip
"""In the order in which a user needs them, which is also the order in `--help`."""

__all__ = ["VERBS", "build_app", "main"]

__dir__ = public_names(__name__)

_STOPPED = 130
"""Exit code after Ctrl-C. Typer turns an interrupt into this code and prints nothing."""


def main() -> None:
    """Run the command line on `sys.argv`, and exit."""
    from penstock.core.errors import PenstockError
    from penstock.core.lazy_imports import missing_extra
    from penstock.core.system import explain_cut_files

    explain_cut_files()
    try:
        code = _run(sys.argv[1:])
    except PenstockError as error:
        code = 1
        _print_error(str(error))
    except ModuleNotFoundError as error:
        # Half of the verbs import torch, which is an optional extra.
        if (missing := missing_extra(error)) is None:
            raise
        code = 1
        _print_error(str(missing))
    except KeyboardInterrupt:
        code = _STOPPED
    except BrokenPipeError:
        code = 1
    if code == _STOPPED:
        print("penstock: stopped", file=sys.stderr)
    sys.exit(_flush(code))


def build_app(arguments: list[str]) -> "typer.Typer":
    """The application with the one verb that `arguments` names, or with all verbs for the help."""
    import typer
    from typer.core import TyperGroup

    from penstock import __version__

    class InOrder(TyperGroup):
        """Lists verbs in the order of `VERBS`; Typer itself lists commands first, then groups."""

        def list_commands(self, ctx: Any) -> list[str]:
            return [verb for verb in VERBS if verb in self.commands]

    app = typer.Typer(
        name="penstock",
        cls=InOrder,
        help="Raw text into the exact tensors that a language model trains on.",
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def common(
        version: Annotated[
            bool, typer.Option("--version", metavar="", help="Print the version and exit.", is_eager=True)
        ] = False,
    ) -> None:
        if version:
            print(f"penstock {__version__}")
            raise typer.Exit

    arguments = arguments or _words_to_complete()
    named = next((argument for argument in arguments if not argument.startswith("-")), None)
    for verb in (named,) if named in VERBS else VERBS:
        module = import_module(f"penstock.cli.{verb}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=verb)
        else:
            app.command(verb)(module.run)
    return app


def _words_to_complete() -> list[str]:
    """The words that a shell wants completed, without the command; see typer's scripts (`--show-completion`)."""
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS") or ""
    return line.split()[1:] if "_PENSTOCK_COMPLETE" in os.environ else []


def _run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        build_app(arguments)(args=arguments, prog_name="penstock")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _print_error(message: str) -> None:
    from penstock.core.terminal import visible

    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    mark = "\x1b[1;31mpenstock:\x1b[0m" if colour else "penstock:"
    print(mark, visible(message, lines=True), file=sys.stderr)


def _flush(code: int) -> int:
    """Flush standard output and return the exit code. A closed pipe is not reported."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or 1
    return code
