"""Readable validation errors for run files, and suggestions for misspelt keys.

Each problem that pydantic finds becomes one line: where, what was found, what was expected, and the
cure. Pydantic tries each member of a union and reports on all of them under names of types. Here a
value gets one line: about the member that it resembles, or with everything that would have been
accepted. For an unknown key the most likely intended key is suggested, from anywhere in the file.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from penstock.core.suggestions import NEAR, OTHER_NAMES, closest, did_you_mean, listed_under
from penstock.use.config.document import Document, Place, shortened
from penstock.use.config.kinds import is_tag, tagged_model

_OPTIONS = {
    "--output RUN": "output output_dir out_dir save_dir run_dir checkpoint_dir run_name",
    "--resume": "resume resume_from_checkpoint auto_resume resume_from",
}
"""Option of `penstock train` → its names in the files of other libraries."""
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
