"""The command line: one file per verb, imported only when it is used.

A verb is a module of this package. It has either a function `run`, whose parameters and docstring are the options and
the help, or a Typer application `app` for a group of verbs (`tokenizer train`); options that several verbs have are in
`options`. Modules of verbs import what is heavy inside their functions, so `penstock --help` takes a fraction of a
second.

Exit codes: 0 done; 1 an error of ours, printed in one line without a traceback; 2 a wrong command line; 130 stopped by
Ctrl-C. A reader that closes the pipe early (`| head`) ends the command quietly.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    import typer

VERBS = (
    "tokenizer", "prepare", "convert", "verify", "inspect", "plan",
    "train", "distill", "plot", "eval", "generate", "chat", "serve", "export", "schema", "doctor",
)  # fmt: skip
"""In the order in which a user meets them; `--help` lists them so."""

_STOPPED = 130
"""Exit code after Ctrl-C; typer turns the interrupt of a verb into it, and says nothing."""


def main() -> None:
    """Run the command line on `sys.argv`, and exit."""
    from penstock.cut_files import explain_cut_files
    from penstock.errors import PenstockError
    from penstock.late import missing_extra

    explain_cut_files()
    try:
        code = _run(sys.argv[1:])
    except PenstockError as error:
        code = 1
        _print_error(str(error))
    except ModuleNotFoundError as error:
        # Half of the verbs need torch, and the core does not: they just import it.
        if (told := missing_extra(error)) is None:
            raise
        code = 1
        _print_error(str(told))
    except KeyboardInterrupt:
        code = _STOPPED
    except BrokenPipeError:
        code = 1
    if code == _STOPPED:
        print("penstock: stopped", file=sys.stderr)
    sys.exit(_flush(code))


def build_app(arguments: list[str]) -> "typer.Typer":
    """The application with the verbs that `arguments` can need: the one they name, or all of them for the help."""
    import typer
    from typer.core import TyperGroup

    from penstock import __version__

    class InOrder(TyperGroup):
        """Typer's own order is commands first, then groups."""

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
    """What a shell asks to complete, without the command; see typer's scripts (`--show-completion`)."""
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS") or ""
    return line.split()[1:] if "_PENSTOCK_COMPLETE" in os.environ else []


def _run(arguments: list[str]) -> int:
    """Run one command line; the exit code."""
    try:
        build_app(arguments)(args=arguments, prog_name="penstock")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _print_error(message: str) -> None:
    from penstock.terminal import visible

    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    mark = "\x1b[1;31mpenstock:\x1b[0m" if colour else "penstock:"
    print(mark, visible(message, lines=True), file=sys.stderr)


def _flush(code: int) -> int:
    """Write out what is buffered; where nobody reads it any more, say nothing."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or 1
    return code
