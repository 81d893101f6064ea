"""The page of the command line, made from the commands themselves: every verb with all its
arguments and options.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from inspect import cleandoc
from typing import Any

from markdown_text import cell, code

PAGE = "reference/cli.md"


def cli_pages() -> dict[str, str]:
    """Place below `docs` → Markdown."""
    from typer.main import get_command

    from penstock.use import cli

    top = get_command(cli.build_app([]))
    return {PAGE: "\n".join(_page(top, _groups()))}


def _groups() -> Mapping[str, Iterable[str]]:
    """What one wants to do → its verbs, as `penstock --help` shows them."""
    from penstock.use import cli

    if find_spec("penstock.use.cli.help_pages") is None:
        return {"Verbs": cli.VERBS}
    groups: Mapping[str, Iterable[str]] = import_module("penstock.use.cli.help_pages").GROUPS
    return groups


def _page(top: Any, groups: Mapping[str, Iterable[str]]) -> Iterator[str]:
    yield "# Command line"
    yield (
        "\nMade from the commands themselves; `penstock VERB --help` shows the same in the "
        "terminal."
    )
    yield (
        "[Work from the shell](../how-to/command-line.md) shows them in use. Exit codes: 0 "
        "success; 1 an error,"
    )
    yield "printed without a traceback; 2 a wrong command line; 130 stopped by Ctrl-C."
    for group, verbs in groups.items():
        yield f"\n**{group}**\n"
        yield "| verb | what it does |"
        yield "|---|---|"
        for verb in verbs:
            text = cleandoc(top.commands[verb].help or "").partition("\n\n")[0]
            yield f"| [`{verb}`](#penstock-{verb}) | {cell(text)} |"
    yield "\n**Of the command itself**\n"
    yield from _options(top)
    for verb in (verb for verbs in groups.values() for verb in verbs):
        yield from _command(top.commands[verb], f"penstock {verb}", 2)


def _command(command: Any, name: str, level: int) -> Iterator[str]:
    yield f"\n{'#' * level} {name}\n"
    text, examples = split_examples(cleandoc(command.help or ""))
    yield text
    if inner := getattr(command, "commands", {}):
        for verb, one in inner.items():
            yield from _command(one, f"{name} {verb}", level + 1)
        return
    yield f"\n```text\n{_usage(command, name)}\n```\n"
    yield from _arguments(command)
    yield from _options(command)
    if examples:
        yield f"\nFor example:\n\n```bash\n{examples}\n```"
    if command.epilog:
        yield f"\n{command.epilog}"


def split_examples(help_text: str) -> tuple[str, str]:
    """A help text without its examples, and the examples: the indented lines behind `Example:`."""
    found = re.search(r"^Examples?:\n((?:[ ]{2,}\S.*\n?|\n)+)", help_text, re.MULTILINE)
    if found is None:
        return help_text, ""
    return (help_text[: found.start()] + help_text[found.end() :]).strip(), cleandoc(
        "\n" + found[1]
    ).strip()


def _usage(command: Any, name: str) -> str:
    arguments = [_argument(param) for param in command.params if not param.opts[0].startswith("-")]
    return " ".join([name, *arguments, "[OPTIONS]"])


def _argument(param: Any) -> str:
    shown = param.metavar or param.name.upper()
    shown += "..." if param.nargs == -1 and "..." not in shown else ""
    return shown if param.required or shown.startswith("[") else f"[{shown}]"


def _arguments(command: Any) -> Iterator[str]:
    """A list of the arguments with their meaning."""
    arguments = [param for param in command.params if not param.opts[0].startswith("-")]
    for param in arguments:
        text = f": {cell(param.help)}" if param.help else ""
        yield f"- `{_argument(param)}`{text}"
    if arguments:
        yield ""


def _options(command: Any) -> Iterator[str]:
    """A table of the options for each of their panels."""
    panels: dict[str, list[Any]] = {}
    for param in command.params:
        if param.opts[0].startswith("-") and not getattr(param, "hidden", False):
            panels.setdefault(getattr(param, "rich_help_panel", None) or "", []).append(param)
    for panel, params in panels.items():
        yield f"\n*{panel}*\n" if panel else ""
        yield "| option | value | meaning |"
        yield "|---|---|---|"
        for param in params:
            names = sorted(
                [*param.opts, *param.secondary_opts],
                key=lambda name: name.startswith("--"),
                reverse=True,
            )
            shown = ", ".join(f"`{name}`" for name in names)
            value = code(param.metavar) if param.metavar else ""
            yield f"| {shown} | {value} | {cell(param.help or '')}{_default(param)} |"
        yield ""


def _default(param: Any) -> str:
    if param.required:
        return " **Required.**"
    value = param.default
    if value is None or isinstance(value, bool) or callable(value) or value in ("", (), []):
        return ""
    shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return f" Default: {code(shown)}."
