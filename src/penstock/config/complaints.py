"""What pydantic finds wrong with a file, as lines for people: where, what was found, what was expected, the cure.

Pydantic tries each member of a union and reports on all of them, under names of types. Here a value has one line: of
the member that it looks like, or with all that would have been accepted.
"""

from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from penstock.config.document import Document, Place, shortened
from penstock.config.kinds import is_tag, tagged_model
from penstock.config.suggestions import suggestion

MOST_LINES = 20
"""Lines of one error; further problems are counted."""

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
"""Pydantic's name of a problem → what was expected; of others its own words."""


def complaints(document: Document, model: type[BaseModel], problems: Sequence[Any]) -> list[str]:
    """One line for each place where something is wrong.

    Args:
        document: The file.
        model: What it was checked with.
        problems: What pydantic found.
    """
    grouped: dict[Place, list[Any]] = {}
    for problem in problems:
        place = _keys_of(document.values, problem)
        if problem["type"] == "missing" and isinstance(last := place[-1], int):
            # Of a list that has a length, what it lacks.
            place, problem = place[:-1], {**problem, "type": "too_short", "ctx": {"min_length": last + 1}}
        grouped.setdefault(place, []).append(problem)
    # Where a member of a union fits but for something inside it, the other members have nothing to say.
    outer = {place[:size] for place in grouped for size in range(len(place))}
    lines = [_line(document, model, place, found) for place, found in grouped.items() if place not in outer]
    more = len(lines) - MOST_LINES
    return [*lines[:MOST_LINES], f"{document.name}: {more} further mistakes"] if more > 0 else lines


def _line(document: Document, model: type[BaseModel], tagged: Place, problems: Sequence[Any]) -> str:
    place = tuple(part for part in tagged if not is_tag(part))
    where, kind = document.where(place), problems[-1]["type"]
    if kind == "extra_forbidden":
        return f"{where}: unknown key; {suggestion(model, _model_at(model, tagged[:-1]), place)}"
    if kind == "missing":
        return f"{where}: missing; {_note(model, tagged)}"
    expected = list(dict.fromkeys(_expected(problem) for problem in problems))
    found = problems[-1]["input"]
    quotes = "; put it in quotes" if expected == ["text"] and not isinstance(found, dict | list | None) else ""
    return f"{where}: found {_shown(found)}, expected {' or '.join(expected)}{quotes}"


def _expected(problem: Any) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in ("too_long", "too_short"):
        entries = context.get("max_length", context.get("min_length"))
        return f"a list of {entries} entries"
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "value_error":
        # Of our own checks, which say it themselves.
        return str(context["error"])
    default: str = problem["msg"].removeprefix("Input should be ").partition(", unable to")[0]
    return _EXPECTED.get(kind, default)


def _shown(value: Any) -> str:
    """A value as a file writes it, cut to what a line holds."""
    plain = {None: "null", True: "true", False: "false"}
    return plain[value] if value is None or isinstance(value, bool) else shortened(repr(value))


def _keys_of(values: Any, problem: Any) -> Place:
    """The place of a problem, without the names of types by which pydantic tells the members of a union apart."""
    kept: Place = ()
    last = len(problem["loc"]) - 1
    for number, part in enumerate(problem["loc"]):
        inside = part in values if isinstance(values, dict) else isinstance(part, int) and isinstance(values, list)
        if inside and isinstance(values, list):
            inside = part < len(values)
        if inside:
            values = values[part]
        if inside or is_tag(part) or (problem["type"] == "missing" and number == last):
            kept = (*kept, part)
    return kept


def _note(model: type[BaseModel], place: Place) -> str:
    field = _model_at(model, place[:-1]).model_fields.get(str(place[-1]))
    return f"it must be given: {field.description}" if field and field.description else f"{place[-1]} must be given"


def _model_at(model: type[BaseModel], place: Place) -> type[BaseModel]:
    """The model that checks the mapping at `place`, in which pydantic says which kind it took things for."""
    hint: Any = None
    for part in place:
        if isinstance(part, int):
            continue
        if is_tag(part):
            model = tagged_model(hint, str(part)) or model
        elif get_origin(hint) is Mapping:
            # A name of the user's own.
            hint = get_args(hint)[1]
        else:
            hint = model.model_fields[part].annotation
            model = inner_model(hint) or model
    return model


def inner_model(hint: Any) -> type[BaseModel] | None:
    """The first model inside a type."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return hint
    return next((found for argument in get_args(hint) if (found := inner_model(argument))), None)
