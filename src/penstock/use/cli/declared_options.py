"""The options of verbs, made from where their settings are declared.

A setting's option has its name with dashes; type, choices, default and help are those of its
declaration (`penstock.core.declarations`), so nothing is imported for them. A verb gets the
settings that were given, in one dictionary, and passes them to the function that Python users call.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, Literal, final

import typer

from penstock.core.declarations import Declaration, Shape, declared

SHORT = {
    "output": "-o",
    "tokenizer": "-t",
    "task": "-t",
    "data": "-d",
    "num": "-n",
    "quiet": "-q",
}
"""Option → its letter."""
METAVARS = {
    "output": "DIR",
    "tokenizer": "PATH",
    "template": "PATH|auto",
    "processor": "FOLDER",
    "image_folder": "DIR",
    "text_field": "NAME",
    "delimiter": "CHARACTER",
    "validation": "SHARE",
    "max_rejects": "LIMIT",
    "part_bytes": "BYTES",
    "roles_to_train": "ROLES",
    "temperature": "T",
    "top_k": "K",
    "top_p": "P",
    "min_p": "P",
    "eos_id": "ID",
    "device": "NAME",
    "name": "NAME",
}
"""Setting → what its value is called, where its type does not say it."""
_WIDEST = 24
"""Choices that take more characters stand in the text, so that it keeps its width."""
_WORDS = {"int": "N", "float": "X", "Path": "PATH", "str": "TEXT"}
_TYPES: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "str": str, "Path": Path}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What the command line says otherwise than a setting's declaration."""

    flag: str | None = None
    """By default the setting's name with dashes."""
    metavar: str | None = None
    argument: bool = False
    """It stands without a flag."""
    read: Callable[[Any], Any] | None = None
    """Makes the setting's value of what was given."""
    repeated: bool = False
    """May be given several times, which `read` makes one value of."""
    help: str | None = None
    """Where Python takes more than one word can say."""
    default: str | None = None
    """What the help calls the default."""
    envvar: str | None = None
    required: bool | None = None
    """Whether it must be given on the command line; None: as declared."""
    keyword: str | None = None
    """Key in the verb's dictionary, if not the declared name."""
    hint: Any = None
    """Type of what is given, if the declaration's cannot be one word."""


_PLAIN = Option()


@final
@dataclass(frozen=True, slots=True)
class Options:
    """Options for some settings of one class or function."""

    address: str
    """Relative to penstock."""
    names: tuple[str, ...]
    panel: str | None
    special: Mapping[str, Option]

    def made(self) -> Iterator["_Made"]:
        """The options, in the order of the names."""
        known = declared(f"penstock.{self.address}")
        for name, special in (dict.fromkeys(self.names, _PLAIN) | dict(self.special)).items():
            yield _Made(known[name], known[name].shape(), special, self.panel)


def options(address: str, *names: str, panel: str | None = None, **special: Option) -> Options:
    """Options for settings.

    Args:
        address: The class or function that declares them, relative to penstock.
        names: Which of its settings.
        panel: Heading above them in the help.
        special: Further settings, and how their options differ from their declarations.
    """
    return Options(address, names, panel, special)


@final
@dataclass(frozen=True, slots=True)
class _Made:
    """The option of one setting."""

    declaration: Declaration
    shape: Shape
    special: Option
    panel: str | None

    @property
    def key(self) -> str:
        return self.special.keyword or self.declaration.name

    def parameter(self, all_options: Mapping[str, "_Made"]) -> Parameter:
        """As a parameter of the function from which Typer reads a verb's options.

        Args:
            all_options: All of the verb's settings, which the help may name.
        """
        required = self.special.required
        if required is None:
            required = self.declaration.default is None
        hint, default = self._hint(), Parameter.empty if required else None
        kind = Parameter.KEYWORD_ONLY
        if not required:
            hint |= None
        if self.special.argument:
            info: Any = typer.Argument(metavar=self._metavar(), help=self._help(all_options))
        else:
            info = typer.Option(
                *self._flags(),
                metavar=self._metavar(),
                help=self._help(all_options),
                envvar=self.special.envvar,
                rich_help_panel=self.panel,
            )
        return Parameter(self.key, kind, default=default, annotation=Annotated[hint, info])

    def value(self, given: Any) -> Any:
        """The setting's value."""
        if self.special.read is not None:
            return self.special.read(given)
        return tuple(given) if isinstance(given, list) else given

    def _hint(self) -> Any:
        one: Any = self.special.hint or _TYPES[self.shape.plain or "str"]
        if self.shape.choices:
            one = Literal[self.shape.choices]
        return list[one] if self._many else one

    @property
    def _many(self) -> bool:
        said = self.special.hint is not None or self.special.read is not None
        return self.special.repeated or (self.shape.repeated and not said)

    @property
    def flag(self) -> str:
        return self.special.flag or f"--{self.key.replace('_', '-')}"

    def _flags(self) -> tuple[str, ...]:
        flag = self.flag
        if self.shape.plain == "bool" and self.declaration.value is not False:
            flag = "/--".join((flag, f"no-{flag.removeprefix('--')}"))
        return tuple(one for one in (flag, SHORT.get(self.key)) if one)

    def _metavar(self) -> str:
        if self.shape.plain == "bool":
            return ""  # a flag takes no value
        found = self.special.metavar or METAVARS.get(self.key)
        choices = self.key.upper() if self._in_text else "|".join(self.shape.choices)
        return found or choices or _WORDS.get(self.shape.plain, "TEXT")

    @property
    def _in_text(self) -> bool:
        return len("|".join(self.shape.choices)) > _WIDEST

    def _help(self, all_options: Mapping[str, "_Made"]) -> str:
        text = self.special.help or _as_options(self.declaration.note, all_options)
        if self._in_text:
            text = f"{text} One of {', '.join(self.shape.choices)}."
        if self._many and not self.special.argument:
            text = f"{text} May be repeated."
        shown, default = self.special.default, self.declaration.value
        if shown is None and default not in (None, "", (), {}, False):
            shown = "yes" if default is True else re.sub(r"\.0$", "", str(default))
        return text if shown is None else f"{text} [default: {shown}]"


def _as_options(note: str, all_options: Mapping[str, _Made]) -> str:
    """A declaration's text as the command line says it: settings are options, and what Python
    calls None is what holds by default.
    """
    note = re.sub(r"(^|\. )None: ", r"\1By default ", note)
    note = re.sub(r"\bNone: ", "by default ", note)

    def option(found: re.Match[str]) -> str:
        made, value = all_options[found[1]], found[2]
        if value in made.shape.choices:
            return f"{made.flag} {value}"
        return found[0] if value or "_" not in found[1] else made.flag

    names = "|".join(sorted(all_options, key=len, reverse=True))
    return re.sub(rf"(?<![\w.\"'-])({names})(?:: (\w+))?(?![\w=(])", option, note)


def takes(**groups: Sequence[Options]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace each of a verb's parameters that is named here by options.

    The verb, which must take keyword arguments, gets in its place a dictionary of the settings that
    were given.

    Args:
        groups: Parameter → the options that stand for it.
    """
    made = {group: [one for some in of for one in some.made()] for group, of in groups.items()}
    named = {one.key: one for some in made.values() for one in some}

    def replaced(verb: Callable[..., None]) -> Callable[..., None]:
        @wraps(verb)
        def run(**arguments: Any) -> None:
            for group, some in made.items():
                found = {one.key: (one, arguments.pop(one.key, None)) for one in some}
                arguments[group] = {
                    key: one.value(given)
                    for key, (one, given) in found.items()
                    if given is not None and given != []
                }
            verb(**arguments)

        parameters: list[Parameter] = []
        for own in signature(verb).parameters.values():
            if own.name in made:
                parameters += [one.parameter(named) for one in made[own.name]]
            else:
                parameters.append(own.replace(kind=Parameter.KEYWORD_ONLY))
        # Typer reads the options of a verb from its signature.
        run.__signature__ = signature(verb).replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return replaced
