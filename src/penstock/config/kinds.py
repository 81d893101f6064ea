"""Settings of several kinds at one place of a run file: `objective: ul2r`, or a mapping whose `kind` says which.

An objective is a name, such as `causal` or `ul2r`, for one with nothing changed; or `{kind: infill, rate: 0.9}`,
`{preset: ul2r, roll: false}`, `{kind: denoise, tasks: [{kind: spans, rate: 0.15, mean: 3}, {kind: prefix}]}`. The keys
are those of the settings classes; only what tells the kinds apart is added here.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Discriminator, Field, Tag, create_model

from penstock.errors import ConfigError
from penstock.objectives import Causal, CausalLM, Denoise, Infill, PrefixLM, SpanCorruption

PRESETS: dict[str, Callable[..., Any]] = {"ul2": Denoise.ul2, "ul2r": Denoise.ul2r, "t5": Denoise.t5}
NAMES: dict[str, Callable[..., Any]] = {"causal": Causal, "infill": Infill, **PRESETS}
"""Objectives that a name alone says."""

KINDS: dict[type, str] = {
    Denoise: "denoise",
    Infill: "infill",
    SpanCorruption: "spans",
    PrefixLM: "prefix",
    CausalLM: "causal",
}
"""What `kind` says in a file."""

OBJECTIVE: Any = Literal[tuple(NAMES)] | Denoise | Infill
"""What `objective:` may hold."""

_TAG = "kind="
"""Begins the parts that pydantic puts into a place to say which kind it took something for."""


def kind_model(settings: type, model: type[BaseModel]) -> type[BaseModel]:
    """The model of one kind: the keys of its class, and those that only a file has."""
    kind = KINDS[settings]
    note = Field(description="Which kind of settings these are.")
    extra: dict[str, Any] = {"kind": (Literal[kind], note)}
    if settings is Denoise:
        tasks = model.model_fields["tasks"]
        extra = {
            "kind": (Literal[kind], Field(default=kind, description=note.description)),
            "preset": (Literal[tuple(PRESETS)], Field(default=None, description="Published tasks, in place of tasks.")),
            "modes": (
                dict[str, int | str] | None,
                Field(default=None, description="Of a preset: mode token of R, X and S, an id or a name; null: none."),
            ),
            "tasks": (tasks.annotation, Field(default=None, description=tasks.description)),
        }
    made: type[BaseModel] = create_model(settings.__name__, __base__=model, **extra)
    made.__settings_class__ = _make_denoise if settings is Denoise else _without_kind(settings)  # type: ignore[attr-defined]
    return made


def told_apart(kinds: Sequence[tuple[type, type[BaseModel]]], others: Sequence[Any]) -> Any:
    """The type of a place that holds one of several kinds of settings, or one of `others`, which is a Literal."""
    tagged: list[Any] = [Annotated[model, Tag(_TAG + KINDS[settings])] for settings, model in kinds]
    tagged += [Annotated[other, Tag(f"{_TAG}name")] for other in others]
    names = [f"a name ({', '.join(get_args(other))}), or " for other in others]
    expected = f"{''.join(names)}a mapping with kind: {' or '.join(KINDS[settings] for settings, _ in kinds)}"
    choose = Discriminator(_tag_of, custom_error_type="kind", custom_error_message=expected)
    return Annotated[Union[tuple(tagged)], choose]  # noqa: UP007  (made at run time)


def _tag_of(value: Any) -> str | None:
    if isinstance(value, str):
        return f"{_TAG}name"
    if not isinstance(value, dict):
        return None
    implied = KINDS[Denoise] if "preset" in value or "tasks" in value else None
    return f"{_TAG}{value.get('kind', implied)}"


def is_tag(part: str | int) -> bool:
    """Whether a part of a place only says which kind something was taken for."""
    return isinstance(part, str) and part.startswith(_TAG)


def tagged_model(hint: Any, tag: str) -> type[BaseModel] | None:
    """The model inside a type that a tag means."""
    arguments = get_args(hint)
    if get_origin(hint) is Annotated and any(isinstance(note, Tag) and note.tag == tag for note in arguments[1:]):
        found: type[BaseModel] | None = arguments[0] if get_origin(arguments[0]) is None else None
        return found
    return next((found for argument in arguments if (found := tagged_model(argument, tag))), None)


def objective_of(value: Any) -> Any:
    """The objective that a name stands for; others as they are."""
    return NAMES[value]() if isinstance(value, str) else value


def _without_kind(settings: type) -> Callable[..., Any]:
    def make(kind: str, **values: Any) -> Any:
        return settings(**values)

    return make


def _make_denoise(kind: str = "", preset: str | None = None, tasks: Any = None, **values: Any) -> Denoise:
    if (preset is None) == (tasks is None):
        found = "neither" if preset is None else "both"
        raise ConfigError(f"denoising has tasks or a preset ({', '.join(PRESETS)}); found {found}")
    if "modes" in values and preset in (None, "t5"):
        raise ConfigError("modes are the mode tokens of the presets ul2 and ul2r; give each of other tasks its mode")
    return Denoise(tasks, **values) if preset is None else PRESETS[preset](**values)
