"""The arguments of `ps.train` as an equivalent run file, plus the objects that a run file cannot
hold.

Keyword arguments become values of a run file and pass the same checks, so both have the same
meaning and the same errors. Objects (a model, a function of a script) are kept next to the values,
by place; the run's folder lists them in the section `python`. Functions that can be imported are
written as `module:function`, and need no object.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, final, get_type_hints

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonObject
from penstock.core.suggestions import did_you_mean, refuse_arguments
from penstock.core.yaml_files import write_yaml
from penstock.data.shards.tables.corpus import is_corpus, location_of
from penstock.learn.distillation.settings import DistillationSettings
from penstock.learn.evaluation.tasks import TaskSettings
from penstock.learn.training.optimizer_settings import OptimizerSettings, ScheduleSettings
from penstock.learn.training.settings import TrainSettings
from penstock.models.own_code import is_own_code, name_of
from penstock.plan.loader.mixture import Mixture, Source
from penstock.plan.objectives.objective import Causal
from penstock.use.config.document import Document, Place, copied, dotted
from penstock.use.config.kinds import KINDS, PRESETS
from penstock.use.config.models import check, field_names, model_of
from penstock.use.config.run_file import PYTHON, DataSettings, RunSettings
from penstock.use.config.validation import suggestion

OBJECT = "given in Python"
"""Placeholder in a run file for an object."""
SHORT = {"optimizer": (OptimizerSettings, "kind"), "schedule": (ScheduleSettings, "shape")}
"""Sections of `training` with settings that may be given directly → (class, setting that a plain
string sets).
"""
_PYTHON_NAMES = (
    (r"it is an option of the command line: --(\w+).*", r"did you mean \1?"),
    (r"training\.(?:optimizer|schedule)\.(?!kind|shape)(\w+)", r"\1"),
    (r"training\.(optimizer|schedule)\.(?:kind|shape)", r"\1"),
    (r"training\.(\w+)\.(\w+)", r'\1={"\2": …}'),
    (r"training\.(\w+)", r"\1"),
    (r"data\.loader\.(\w+)", r"\1 of ps.Loader"),
    (r"data\.sources\.0\.(\w+)", r"\1 of ps.Source"),
    (r"model\.(\w+)", r"\1 of ps.build_model"),
)
"""Key of a run file → its form in Python."""


@final
@dataclass(frozen=True, kw_only=True)
class RunDocument:
    """A run file, and the objects that it cannot hold."""

    values: JsonObject
    """Values of the run file, with a placeholder for each object."""
    objects: dict[Place, Any] = field(default_factory=dict)
    """The objects by place."""

    def text(self) -> str:
        """The run file's text; its section `python` lists the objects."""
        values: JsonObject = copied(self.values)
        for place in self.objects:
            _put_plain(values, place)
        named = {dotted(place): described(one) for place, one in self.objects.items()}
        return write_yaml({**({PYTHON: named} if named else {}), **values}, "the run file")

    def settings(self, section: str, kind: type, call: str) -> Any:
        """A section, checked like one of a run file, with its objects in place.

        Args:
            section: Its name.
            kind: Its class.
            call: The function that was called, for errors.

        Raises:
            ConfigError: A key is unknown, or a value out of range.
        """
        model = {"training": _Training, "teacher": _Teacher}[section]
        made = getattr(check(Document(call, {section: self.values[section]}, {}), model), section)
        assert isinstance(made, kind)
        for place, given in self.objects.items():
            if place[0] == section:
                made = _put(made, place[1:], given)
        return made


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Training:
    """The part of a run file to check."""

    training: TrainSettings
    """How the model is trained."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Teacher:
    """The part of a run file to check."""

    teacher: DistillationSettings
    """The teachers."""


def training_section(
    given: Mapping[str, object], call: str, also: Sequence[str] = ()
) -> dict[str, Any]:
    """The section `training` that keyword arguments describe; values are unchanged.

    Args:
        given: Keyword arguments.
        call: The function that was called, for errors.
        also: Further parameters of the function.

    Raises:
        ConfigError: A name is unknown; the message suggests the likely one.
    """
    section = {}
    inner: dict[str, dict[str, Any]] = {}
    homes = {
        name: part
        for part, (kind, own) in SHORT.items()
        for name in field_names(kind)
        if name != own
    }
    for name, value in given.items():
        if name in homes:
            inner.setdefault(homes[name], {})[name] = value
        elif name in field_names(TrainSettings):
            section[name] = value
        elif name == "overwrite":
            raise ConfigError(
                f"{call}: a run is never overwritten, so there is no {name}; name another output, "
                "continue the run with resume=True, or remove its folder first"
            )
        else:
            raise ConfigError(f"{call}: unknown argument {name!r}; {_meant(name, [*homes, *also])}")
    for part, values in inner.items():
        section[part] = {**_as_section(part, section.get(part, {})), **values}
    for part in SHORT:
        if part in section:
            section[part] = _as_section(part, section[part])
    for part in ("preference", "policy"):
        if isinstance(section.get(part), str):
            section[part] = {"kind": section[part]}
    if "evaluators" in section:
        section["evaluators"] = _evaluators(section["evaluators"], call)
    return section


def _meant(name: str, others: Sequence[str]) -> str:
    known = [*field_names(TrainSettings), *others]
    text = suggestion(model_of(RunSettings), model_of(TrainSettings), ("training", name))
    if not text.startswith(
        ("did you mean data", "did you mean model", "did you mean training", "it is")
    ):
        return did_you_mean(name, sorted(known))
    for key, python in _PYTHON_NAMES:
        text = re.sub(key, python, text)
    return text


def _as_section(part: str, value: object) -> Any:
    if isinstance(value, str):
        return {SHORT[part][1]: value}
    if isinstance(value, type) or not (is_dataclass(value) or isinstance(value, Mapping)):
        kind, own = SHORT[part]
        raise ConfigError(
            f"ps.train: {part} is {value!r}; expected the name of its {own}, a mapping of "
            f"settings, or {kind.__name__}; each setting may also be given to ps.train directly"
        )
    return dict(plain(value, (), {})) if is_dataclass(value) else value


def _evaluators(given: object, call: str) -> JsonObject:
    """Evaluators by name, each with the keys of a run file."""
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{call}: evaluators is {given!r}; expected a mapping, name → dataset, source or "
            "function"
        )
    return {name: _evaluator(one) for name, one in given.items()}


def _evaluator(one: object) -> Any:
    if isinstance(one, TaskSettings):
        return {"kind": "task", "task": one}
    if isinstance(one, Source):
        return {"kind": "loss", "sources": [one]}
    if isinstance(one, Mixture):
        return {"kind": "loss", "sources": list(_without_changes(one).sources)}
    if isinstance(one, str) and not is_own_code(one):
        return {"kind": "loss", "data": one}
    return {"kind": "own", "function": one} if isinstance(one, str) or callable(one) else one


def _without_changes(mixture: Mixture) -> Mixture:
    if mixture.changes:
        raise ConfigError(
            "evaluators: a mixture to evaluate on has no changes of shares; leave them out"
        )
    return mixture


def data_section(data: DataSettings, objects: dict[Place, Any]) -> JsonObject:
    """The section `data` of a loader; objects that a file cannot hold go into `objects`."""
    section: JsonObject = plain(data, ("data",), objects)
    return section


def plain(value: object, place: Place, objects: dict[Place, Any]) -> Any:
    """A value in the form of a run file; settings become mappings of the values that differ from
    the defaults.

    Args:
        value: Settings, numbers, texts, lists, mappings, or an object.
        place: Place of the value in the run file.
        objects: Receives the objects that a file cannot hold, by place.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        # Some NumPy numbers are subclasses of these, and YAML cannot write them.
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Path | Fraction):
        return str(value)
    if place[-1:] == ("objective",):
        return _plain_objective(value, place, objects)
    if isinstance(value, Mapping):
        # Steps of a batch ramp are numbers, and keys of a run file are texts.
        return {str(name): plain(one, (*place, str(name)), objects) for name, one in value.items()}
    places = _places(value) if place[-1:] in (("path",), ("data",)) else []
    if len(places) == 1:
        return places[0]
    if places and place[-1] == "path":
        return places
    if isinstance(value, list | tuple):
        return [plain(one, (*place, number), objects) for number, one in enumerate(value)]
    if (
        is_dataclass(value)
        and not isinstance(value, type)
        and type(value).__module__.startswith("penstock.")
    ):
        return _plain_settings(value, place, objects)
    if (name := name_of(value)) is not None:
        return name
    objects[place] = value
    return OBJECT


def _places(value: Any) -> list[str]:
    """Where opened datasets are, and the paths between them; empty: there is no opened one."""
    if is_corpus(value):
        return [location_of(part) for part in value.parts]
    if not isinstance(value, list | tuple) or not any(map(is_corpus, value)):
        return []
    return [place for one in value for place in _places(one) or [str(one)]]


def _plain_objective(value: object, place: Place, objects: dict[Place, Any]) -> Any:
    """An objective, if a file gives exactly the same one back: states hold its repr, in which 3 is
    not 3.0.
    """
    if type(value) in (Causal, *KINDS):
        found = (
            "causal" if value == Causal() else _preset(value) or _plain_settings(value, place, {})
        )
        try:
            made = check(
                Document("objective", {"path": "data", "objective": found}, {}), Source
            ).objective
        except ConfigError:
            made = None
        if repr(made) == repr(value):
            return found
    elif isinstance(value, str | Mapping):
        return value
    objects[place] = value
    return "causal"


def _preset(value: Any) -> JsonObject | None:
    """A denoiser as a preset with the differing settings; None if no preset has its tasks."""
    for name, make in PRESETS.items():
        for modes in ({},) if name == "t5" else ({}, {"modes": None}):
            preset = make(**modes)
            if repr(getattr(value, "tasks", None)) == repr(preset.tasks):
                names = [
                    one.name
                    for one in fields(value)
                    if getattr(value, one.name) != getattr(preset, one.name)
                ]
                return {
                    "preset": name,
                    **modes,
                    **{one: plain(getattr(value, one), (), {}) for one in names},
                }
    return None


def _plain_settings(value: Any, place: Place, objects: dict[Place, Any]) -> JsonObject:
    found: JsonObject = {"kind": KINDS[type(value)]} if type(value) in KINDS else {}
    for one in fields(value):
        given = getattr(value, one.name)
        default = one.default if one.default_factory is MISSING else one.default_factory()
        if one.init and (default is MISSING or given != default):
            found[one.name] = plain(given, (*place, one.name), objects)
    return found


def described(given: Any) -> str:
    """Describe an object for readers of a run's folder; the same text in each process."""
    if callable(getattr(given, "parameters", None)):
        inner = getattr(given, "module", getattr(given, "inner", given))
        return (
            f"{type(inner).__name__}, {sum(weight.numel() for weight in given.parameters()):,} "
            "weights"
        )
    name, module = getattr(given, "__qualname__", None), getattr(given, "__module__", "")
    if name is not None:
        return f"{name} of {module}"
    return f"an object of {type(given).__module__}:{type(given).__qualname__}"


def _put_plain(values: Any, place: Place) -> None:
    for part in place[:-1]:
        values = values[part]
    values[place[-1]] = OBJECT


def _put(holder: Any, place: Place, given: Any) -> Any:
    """Replace the value at a place of settings by an object."""
    if not place:
        return given
    first, rest = place[0], place[1:]
    if isinstance(holder, Mapping):
        return {**holder, first: _put(holder[first], rest, given)}
    if isinstance(first, int):
        return type(holder)(
            _put(one, rest, given) if number == first else one for number, one in enumerate(holder)
        )
    return replace(holder, **{first: _put(getattr(holder, first), rest, given)})


def check_names(call: str, given: Mapping[str, object], keywords: type, *also: str) -> None:
    """Refuse unknown keyword arguments.

    Args:
        call: The function, for errors.
        given: Its keyword arguments.
        keywords: The TypedDict with the known names.
        also: The function's other parameters, which may have been meant.

    Raises:
        ConfigError: A name is unknown; the message suggests the likely one.
    """
    refuse_arguments(call, given, sorted([*get_type_hints(keywords), *also]))
