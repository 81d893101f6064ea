"""Pydantic models derived from frozen settings classes, and settings built from checked models.

A settings class is the only place that defines a key, its type, its default and its description.
`model_of` derives a pydantic model that refuses unknown keys. `build` makes the settings from a
checked model, which runs the class's own checks. The JSON Schema comes from the models;
descriptions are the strings under the fields.
"""

import dataclasses
import datetime
import types
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from penstock.core.declarations import declared
from penstock.core.errors import ConfigError
from penstock.data.prepare.chat_settings import GROUPS, ChatSettings
from penstock.learn.training.evaluator_settings import EvaluatorSettings
from penstock.learn.training.settings import TrainSettings
from penstock.plan.loader.kept_settings import KeptSettings
from penstock.plan.loader.mixture import Source
from penstock.plan.loader.plan_settings import PlanSettings
from penstock.use.config.document import Document, Place
from penstock.use.config.kinds import KINDS, OBJECTIVE, kind_model, objective_of, told_apart
from penstock.use.config.validation import complaints

_IN_FILES: dict[tuple[type, str], tuple[Any, Callable[[Any], Any]]] = {
    (Source, "path"): (str | Sequence[str], lambda path: path),
    (ChatSettings, "template"): (str, str),
    (ChatSettings, "date"): (str | datetime.date | None, lambda day: day and str(day)),
    (Source, "objective"): (OBJECTIVE, objective_of),
    (KeptSettings, "image_cache"): (str | None, lambda path: path),
    (KeptSettings, "cache"): (str | None, lambda path: path),
    (PlanSettings, "rows_per_step"): (int | Mapping[str, int], lambda rows: rows),
    (EvaluatorSettings, "objective"): (OBJECTIVE, objective_of),
    (EvaluatorSettings, "function"): (str | None, lambda name: name),
    (TrainSettings, "loss"): (str | None, lambda name: name),
    (TrainSettings, "on_step"): (str | None, lambda name: name),
}
"""(class, field) → (type in a file, conversion), for fields with values that a file cannot express
directly.
"""

_SPREAD: dict[type, dict[str, type]] = {ChatSettings: GROUPS}
"""Class → its nested settings that a file flattens: their fields appear next to those of the
class.
"""


def _no_truth(value: object) -> object:
    """Refuse true and false, which Python takes for 1 and 0. The error text names what was
    expected.
    """
    if isinstance(value, bool):
        raise ValueError("a number")  # noqa: TRY004 (pydantic only catches ValueError)
    return value


def _of_64_bits(value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise ValueError("a whole number of at most 19 digits")
    return value


_NUMBERS: dict[Any, Any] = {
    int: Annotated[int, BeforeValidator(_no_truth), AfterValidator(_of_64_bits)],
    float: Annotated[float, BeforeValidator(_no_truth), Field(allow_inf_nan=False)],
}
"""Type of a number → its stricter type in files: no booleans, no infinity or NaN, integers of at
most 64 bits.
"""


@cache
def model_of(settings: type) -> type[BaseModel]:
    """The pydantic model of a settings dataclass, with the same fields, including nested
    settings.
    """
    hints, notes = get_type_hints(settings), field_notes(settings)
    fields: dict[str, Any] = {}
    for field in _given_fields(settings):
        if field.name in _SPREAD.get(settings, ()):
            inner = model_of(_SPREAD[settings][field.name]).model_fields
            fields |= {name: (one.annotation, one) for name, one in inner.items()}
            continue
        in_file, _ = _in_files(settings, field.name)
        kind = _checked_type(in_file or hints[field.name])
        fields[field.name] = (
            kind,
            Field(default=_default(settings, field), description=notes.get(field.name)),
        )
    config = ConfigDict(extra="forbid", frozen=True)
    model: type[BaseModel] = create_model(
        settings.__name__, __config__=config, __doc__=settings.__doc__, **fields
    )
    model.__settings_class__ = settings  # type: ignore[attr-defined]
    return model


def build(value: object, document: Document, place: Place = ()) -> object:
    """The settings instance for a checked model.

    Raises:
        ConfigError: The class's own checks refuse a value; the message says where in the file.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(
            build(entry, document, (*place, index)) for index, entry in enumerate(value)
        )
    if isinstance(value, dict):
        return {key: build(entry, document, (*place, key)) for key, entry in value.items()}
    if not isinstance(value, BaseModel):
        return value
    settings = type(value).__settings_class__  # type: ignore[attr-defined]
    arguments = {}
    for name in value.model_fields_set:
        _, convert = _in_files(settings, name)
        entry = build(getattr(value, name), document, (*place, name))
        arguments[name] = convert(entry) if convert else entry
    try:
        for group, kind in _SPREAD.get(settings, {}).items():
            arguments[group] = kind(
                **{name: arguments.pop(name) for name in field_names(kind) if name in arguments}
            )
        return settings(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{document.where(place)}: {error}") from error


def check(document: Document, settings: type) -> Any:
    """Check a document against a settings class, and build the settings.

    Raises:
        ConfigError: One line per problem: where, what was found, what was expected.
    """
    try:
        model = model_of(settings).model_validate(document.values)
    except ValidationError as error:
        raise ConfigError(
            "\n".join(complaints(document, model_of(settings), error.errors()))
        ) from None
    return build(model, document)


def field_notes(settings: type) -> dict[str, str]:
    """Field → the description under it in the class's source, as one line."""
    found = declared(f"{settings.__module__}.{settings.__qualname__}")
    return {name: one.note for name, one in found.items() if one.note}


def _in_files(settings: object, name: str) -> tuple[Any, Callable[[Any], Any] | None]:
    """What a file has in place of a field, by the class that declares it."""
    classes = settings.__mro__ if isinstance(settings, type) else ()
    places = ((one, name) for one in classes)
    return next((_IN_FILES[place] for place in places if place in _IN_FILES), (None, None))


def field_names(settings: type) -> list[str]:
    """Names of the fields that the constructor takes."""
    return [field.name for field in _given_fields(settings)]


def _given_fields(settings: type) -> list["dataclasses.Field[Any]"]:
    return [field for field in dataclasses.fields(settings) if field.init]


def _checked_type(hint: object) -> object:
    """The type that pydantic checks for a field: settings classes become models, sequences become
    lists.
    """
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return model_of(hint)
    origin = get_origin(hint)
    if origin is None or origin is Literal:
        return _NUMBERS.get(hint, hint)
    kinds = [argument for argument in get_args(hint) if argument in KINDS]
    if len(kinds) > 1:
        models = [(settings, kind_model(settings, model_of(settings))) for settings in kinds]
        return told_apart(
            models, [argument for argument in get_args(hint) if argument not in KINDS]
        )
    inner = tuple(
        _checked_type(argument) for argument in get_args(hint) if argument is not Fraction
    )
    if origin in (Union, types.UnionType):
        return Union[inner]  # noqa: UP007  (built at run time)
    return list[inner[0]] if origin is Sequence else origin[inner]  # type: ignore[valid-type]


def _default(settings: type, field: "dataclasses.Field[Any]") -> object:
    """The field's default as a file would write it; `...` if it is required."""
    if field.name == "objective" and (settings, field.name) in _IN_FILES:
        return "causal"
    if field.default is not dataclasses.MISSING:
        return list(field.default) if field.default == () else field.default
    return ... if field.default_factory is dataclasses.MISSING else field.default_factory()
