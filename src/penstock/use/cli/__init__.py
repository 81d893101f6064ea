"""The command line: one file per verb, imported only when it is used.

A verb is a module of this package. It has either a function `run`, with a docstring that becomes
the help, or a Typer application `app` for a group of verbs (`tokenizer train`). Its options are
made from the declarations of the settings that it passes on (`declared_options`); what only a
terminal needs is a parameter of its own. Each docstring ends with an example that works. What verbs
work with is imported when they run (`used`); `penstock --help` and completion import none of it.

Exit codes: 0 success; 1 an error of penstock, printed without a traceback, by one rank if there are
several; 2 a wrong command line; 130 stopped by Ctrl-C. If the reader of a pipe closes it early (`|
head`), the command ends quietly.
"""

from penstock.core.lazy_imports import public_names
from penstock.use.cli.app import build_app, main
from penstock.use.cli.help_pages import VERBS

__all__ = ["VERBS", "build_app", "main"]

__dir__ = public_names(__name__)
