"""Readable validation errors for run files, settings of several kinds, and suggestions for misspelt
keys.

Some places of a run file hold one of several kinds of settings, chosen by the key `kind`. An
objective is a name, such as `causal` or `ul2r`, for its defaults; or a mapping: `{kind: infill,
rate: 0.9}`, `{preset: ul2r, roll: false}`, `{kind: denoise, tasks: [{kind: spans, rate: 0.15, mean:
3}, {kind: prefix}]}`, `{kind: own, function: mine:Objective}`. Keys are those of the settings
classes; only `kind` and `preset` are added here.

Each problem that pydantic finds becomes one line: where, what was found, what was expected, and the
cure. Pydantic tries each member of a union and reports on all of them under names of types. Here a
value gets one line: about the member that it resembles, or with everything that would have been
accepted. For an unknown key the most likely intended key is suggested, from anywhere in the file.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Annotated, Any, Literal, Union, final, get_args, get_origin

from pydantic import BaseModel, Discriminator, Field, Tag, create_model

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonMapping
from penstock.core.suggestions import NEAR, OTHER_NAMES, closest, did_you_mean, listed_under
from penstock.models.own_code import load_own_code
from penstock.plan.objectives import CausalLM, PrefixLM, SpanCorruption
from penstock.plan.objectives.denoise import Denoise
from penstock.plan.objectives.infill import Infill
from penstock.plan.objectives.objective import Causal
from penstock.use.config.document import Document, Place, shortened


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OwnObjective:
    """An objective of your own code."""

    function: str
    """`module:name` or `path/to/file.py:name` of a class or function that makes the objective."""
    arguments: JsonMapping = field(default_factory=dict)
    """What it is called with."""


PRESETS: dict[str, Callable[..., Any]] = {
    "ul2": Denoise.ul2,
    "ul2r": Denoise.ul2r,
    "t5": Denoise.t5,
}
NAMES: dict[str, Callable[..., Any]] = {"causal": Causal, "infill": Infill, **PRESETS}
"""Objectives that can be given by name alone."""

KINDS: dict[type, str] = {
    Denoise: "denoise",
    Infill: "infill",
    SpanCorruption: "spans",
    PrefixLM: "prefix",
    CausalLM: "causal",
    OwnObjective: "own",
}
"""Settings class → its `kind` in a file."""

OBJECTIVE: Any = Literal[tuple(NAMES)] | Denoise | Infill | OwnObjective
"""Type of the value of `objective:`."""

_TAG = "kind="
"""Prefix of the parts that pydantic adds to a place to name the kind it chose."""


def kind_model(settings: type, model: type[BaseModel]) -> type[BaseModel]:
    """The model of one kind: the keys of its class, and those that exist only in files."""
    kind = KINDS[settings]
    note = Field(description="The kind of these settings.")
    extra: dict[str, Any] = {"kind": (Literal[kind], note)}
    if settings is Denoise:
        tasks = model.model_fields["tasks"]
        extra = {
            "kind": (Literal[kind], Field(default=kind, description=note.description)),
            "preset": (
                Literal[tuple(PRESETS)],
                Field(default=None, description="A published set of tasks; replaces `tasks`."),
            ),
            "modes": (
                dict[str, int | str] | None,
                Field(
                    default=None,
                    description="Mode tokens of a preset: R, X and S → id or name; null: none.",
                ),
            ),
            "tasks": (tasks.annotation, Field(default=None, description=tasks.description)),
        }
    made: type[BaseModel] = create_model(settings.__name__, __base__=model, **extra)
    makers: dict[type, Callable[..., Any]] = {Denoise: _make_denoise, OwnObjective: _make_own}
    made.__settings_class__ = makers.get(settings, _without_kind(settings))  # type: ignore[attr-defined]
    return made


def told_apart(kinds: Sequence[tuple[type, type[BaseModel]]], others: Sequence[object]) -> object:
    """The type of a place that holds one of several kinds of settings, or one of `others` (Literal
    types).
    """
    tagged = [Annotated[model, Tag(_TAG + KINDS[settings])] for settings, model in kinds]
    tagged += [Annotated[other, Tag(f"{_TAG}name")] for other in others]
    names = [f"a name ({', '.join(get_args(other))}), or " for other in others]
    expected = (
        f"{''.join(names)}a mapping with kind: "
        f"{' or '.join(KINDS[settings] for settings, _ in kinds)}"
    )
    choose = Discriminator(_tag_of, custom_error_type="kind", custom_error_message=expected)
    return Annotated[Union[tuple(tagged)], choose]  # noqa: UP007  (built at run time)


def _tag_of(value: object) -> str | None:
    if isinstance(value, str):
        return f"{_TAG}name"
    if not isinstance(value, dict):
        return None
    implied = KINDS[Denoise] if "preset" in value or "tasks" in value else None
    return f"{_TAG}{value.get('kind', implied)}"


def is_tag(part: str | int) -> bool:
    """Whether a part of a place only names the kind that pydantic chose."""
    return isinstance(part, str) and part.startswith(_TAG)


def tagged_model(hint: object, tag: str) -> type[BaseModel] | None:
    """The model inside a type that has this tag; None if there is none."""
    arguments = get_args(hint)
    if get_origin(hint) is Annotated and any(
        isinstance(note, Tag) and note.tag == tag for note in arguments[1:]
    ):
        found: type[BaseModel] | None = arguments[0] if get_origin(arguments[0]) is None else None
        return found
    return next((found for argument in arguments if (found := tagged_model(argument, tag))), None)


def objective_of(value: object) -> object:
    """The objective with this name; other values are returned unchanged."""
    return NAMES[value]() if isinstance(value, str) else value


def _without_kind(settings: type) -> Callable[..., object]:
    def make(kind: str, **values: object) -> object:
        return settings(**values)

    return make


def _make_denoise(
    kind: str = "", preset: str | None = None, tasks: Any = None, **values: Any
) -> Denoise:
    if (preset is None) == (tasks is None):
        found = "neither" if preset is None else "both"
        raise ConfigError(
            f"denoising needs either tasks or a preset ({', '.join(PRESETS)}); found {found}"
        )
    if "modes" in values and preset in (None, "t5"):
        raise ConfigError(
            "modes sets the mode tokens of the presets ul2 and ul2r; for other tasks, set "
            "`mode` of each task"
        )
    return Denoise(tasks, **values) if preset is None else PRESETS[preset](**values)


def _make_own(kind: str, function: str, arguments: JsonMapping | None = None) -> object:
    made, given = load_own_code(function, "function"), arguments or {}
    if not callable(made):
        raise ConfigError(
            f"function: {function} is {made!r}; expected a class or a function that makes an "
            "objective"
        )
    try:
        signature(made).bind(**given)
    except ValueError:
        pass  # some built-in classes do not say what they take
    except TypeError as error:
        raise ConfigError(f"arguments: {function} takes {signature(made)}: {error}") from None
    return made(**given)


_OPTIONS = {
    "--output RUN": "output output_dir out_dir save_dir run_dir checkpoint_dir run_name",
    "--resume": "resume resume_from_checkpoint auto_resume resume_from",
}
"""Option of `penstock train` → its names in the files of other libraries."""


def suggestion(root: type[BaseModel], here: type[BaseModel], place: Place) -> str:
    """The cure for an unknown key: the end of its error message.

    Args:
        root: The model of the whole file.
        here: The model of the mapping that contains the key.
        place: The place of the key.
    """
    name = str(place[-1]).lower().replace("-", "_")
    siblings, known = list(here.model_fields), dict(_keys(root))
    if (option := listed_under(_OPTIONS, name)) and "training" in known:
        return f"it is an option of the command line: {option}"
    if (other := listed_under(OTHER_NAMES, name)) and other in known:
        return _meant(other)
    if close := closest(name, siblings, NEAR):
        return f"did you mean {close!r}?"
    if elsewhere := _elsewhere(name, place, known):
        return _meant(elsewhere)
    return did_you_mean(name, siblings, f"known here: {', '.join(siblings)}")


def _meant(key: str) -> str:
    note = (
        " (rows are computed one by one, so there is no other batch size)"
        if key.endswith("rows_per_step")
        else ""
    )
    return f"did you mean {key}?{note}"


def _elsewhere(name: str, place: Place, known: Mapping[str, str]) -> str | None:
    """The full key with a last part equal or similar to this name; of several, the one closest to
    `place`.
    """
    last = set(known.values())
    close = [name] if name in last else [closest(name, sorted(last), 0.8)]
    keys = [key for key, end in known.items() if end in close]
    return min(keys, key=lambda key: _distance(key.split("."), place), default=None)


def _distance(key: Sequence[str], place: Place) -> tuple[int, int]:
    shared = 0
    for mine, theirs in zip(key, map(str, place), strict=False):
        if mine != theirs:
            break
        shared += 1
    return -shared, len(key)


def _keys(
    model: type[BaseModel], before: str = "", inside: tuple[type, ...] = ()
) -> Iterator[tuple[str, str]]:
    """(full key, its last part) of each key; entry 0 stands for all entries of a list, NAME for a
    user-chosen name.
    """
    for name, known in model.model_fields.items():
        yield f"{before}{name}", name
        for kind, part in _models(known.annotation):
            if kind not in inside:
                yield from _keys(kind, f"{before}{name}.{part}", (*inside, kind))


def _models(hint: object, part: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """The models inside a type, each with the path between the field and the model's keys."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield hint, part
        return
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Mapping:
        yield from _models(arguments[1], f"{part}NAME.")
        return
    for argument in arguments:
        yield from _models(argument, f"{part}0." if origin in (list, tuple) else part)


MOST_LINES = 20
"""Maximum lines of one error; further problems are only counted."""

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of at most 19 digits",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys",
    "mapping_type": "a mapping of keys",
    "model_type": "a mapping of keys",
}
"""Pydantic's name of a problem → what was expected. For other names, pydantic's own text is
used.
"""


def complaints(document: Document, model: type[BaseModel], problems: Sequence[Any]) -> list[str]:
    """One line for each place with a problem.

    Args:
        document: The file.
        model: The model that checked it.
        problems: The errors that pydantic reported.
    """
    grouped: dict[Place, list[Any]] = {}
    for problem in problems:
        place = _keys_of(document.values, problem)
        if problem["type"] == "missing" and isinstance(last := place[-1], int):
            # An entry missing from a list of fixed length: report the list.
            place, problem = (
                place[:-1],
                {**problem, "type": "too_short", "ctx": {"min_length": last + 1}},
            )
        grouped.setdefault(place, []).append(problem)
    # A problem inside a union member means that this member was intended: drop what the other
    # members report.
    outer = {place[:size] for place in grouped for size in range(len(place))}
    lines = [
        _line(document, model, place, found)
        for place, found in grouped.items()
        if place not in outer
    ]
    more = len(lines) - MOST_LINES
    return [*lines[:MOST_LINES], f"{document.name}: {more} more problems"] if more > 0 else lines


def _line(
    document: Document, model: type[BaseModel], tagged: Place, problems: Sequence[Any]
) -> str:
    place = tuple(part for part in tagged if not is_tag(part))
    where, kind = document.where(place), problems[-1]["type"]
    if kind == "extra_forbidden":
        return f"{where}: unknown key; {suggestion(model, _model_at(model, tagged[:-1]), place)}"
    if kind == "missing":
        return f"{where}: missing; {_note(model, tagged)}"
    expected = list(dict.fromkeys(_expected(problem) for problem in problems))
    found = problems[-1]["input"]
    quotes = (
        "; put it in quotes"
        if expected == ["text"] and not isinstance(found, dict | list | None)
        else ""
    )
    return f"{where}: found {_shown(found)}, expected {' or '.join(expected)}{quotes}"


def _expected(problem: Any) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in ("too_long", "too_short"):
        entries = context.get("max_length", context.get("min_length"))
        return f"a list of {entries} entries"
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "value_error":
        # From our own checks, which name what they expect.
        return str(context["error"])
    default: str = problem["msg"].removeprefix("Input should be ").partition(", unable to")[0]
    return _EXPECTED.get(kind, default)


def _shown(value: object) -> str:
    """A value as a file writes it, cut to fit a line."""
    plain = {None: "null", True: "true", False: "false"}
    return plain[value] if value is None or isinstance(value, bool) else shortened(repr(value))


def _keys_of(values: Any, problem: Any) -> Place:
    """The place of a problem, without the type names that pydantic adds for members of a union."""
    kept: Place = ()
    last = len(problem["loc"]) - 1
    for number, part in enumerate(problem["loc"]):
        inside = (
            part in values
            if isinstance(values, dict)
            else isinstance(part, int) and isinstance(values, list)
        )
        if inside and isinstance(values, list):
            inside = part < len(values)
        if inside:
            values = values[part]
        if inside or is_tag(part) or (problem["type"] == "missing" and number == last):
            kept = (*kept, part)
    return kept


def _note(model: type[BaseModel], place: Place) -> str:
    field = _model_at(model, place[:-1]).model_fields.get(str(place[-1]))
    return (
        f"it is required: {field.description}"
        if field and field.description
        else f"{place[-1]} is required"
    )


def _model_at(model: type[BaseModel], place: Place) -> type[BaseModel]:
    """The model that checks the mapping at `place`, which may contain pydantic's kind tags."""
    hint = None
    for part in place:
        if isinstance(part, int):
            continue
        if is_tag(part):
            model = tagged_model(hint, str(part)) or model
        elif get_origin(hint) is Mapping:
            # A name chosen by the user.
            hint = get_args(hint)[1]
        else:
            hint = model.model_fields[part].annotation
            model = inner_model(hint) or model
    return model


def inner_model(hint: object) -> type[BaseModel] | None:
    """The first model inside a type."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return hint
    return next((found for argument in get_args(hint) if (found := inner_model(argument))), None)
