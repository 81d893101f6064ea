"""Places of a run file that hold one of several kinds of settings, chosen by the key `kind`.

An objective is a name, such as `causal` or `ul2r`, for its defaults; or a mapping: `{kind: infill,
rate: 0.9}`, `{preset: ul2r, roll: false}`, `{kind: denoise, tasks: [{kind: spans, rate: 0.15, mean:
3}, {kind: prefix}]}`, `{kind: own, function: mine:Objective}`. Keys are those of the settings
classes; only `kind` and `preset` are added here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Annotated, Any, Literal, Union, final, get_args, get_origin

from pydantic import BaseModel, Discriminator, Field, Tag, create_model

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonMapping
from penstock.models.own_code import load_own_code
from penstock.plan.objectives import CausalLM, PrefixLM, SpanCorruption
from penstock.plan.objectives.denoise import Denoise
from penstock.plan.objectives.diffusion import BlockDiffusion, MaskedDiffusion
from penstock.plan.objectives.infill import Infill
from penstock.plan.objectives.objective import Causal


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

NAMES: dict[str, Callable[..., Any]] = {
    "causal": Causal,
    "infill": Infill,
    "masked_diffusion": MaskedDiffusion,
    "block_diffusion": BlockDiffusion,
    **PRESETS,
}
"""Objectives that can be given by name alone."""

KINDS: dict[type, str] = {
    Denoise: "denoise",
    Infill: "infill",
    MaskedDiffusion: "masked_diffusion",
    BlockDiffusion: "block_diffusion",
    SpanCorruption: "spans",
    PrefixLM: "prefix",
    CausalLM: "causal",
    OwnObjective: "own",
}
"""Settings class → its `kind` in a file."""

OBJECTIVE: Any = (
    Literal[tuple(NAMES)] | Denoise | Infill | MaskedDiffusion | BlockDiffusion | OwnObjective
)
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


def told_apart(kinds: Sequence[tuple[type, type[BaseModel]]], others: Sequence[object]) -> Any:
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


def objective_of(value: object) -> Any:
    """The objective with this name; other values are returned unchanged."""
    return NAMES[value]() if isinstance(value, str) else value


def _without_kind(settings: type) -> Callable[..., Any]:
    def make(kind: str, **values: object) -> Any:
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


def _make_own(kind: str, function: str, arguments: JsonMapping | None = None) -> Any:
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
