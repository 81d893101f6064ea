"""What is read of settings without importing them is what they are: names, types, defaults and
texts; and the keywords that are written of them are current.
"""

import ast
import inspect
import re
import sys
import types
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from penstock.core.declarations import declared
from penstock.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "packaging"))
import write_keywords as keywords  # noqa: E402

CLASSES = [
    "penstock.chat.masks.mask_settings.MaskSettings",
    "penstock.chat.records.layout_settings.LayoutSettings",
    "penstock.data.prepare.settings.PrepareSettings",
    "penstock.learn.generation.settings.Sampling",
    "penstock.learn.training.settings.TrainSettings",
    "penstock.media.images.ImageSettings",
    "penstock.plan.loader.loader_settings.LoaderSettings",
    "penstock.use.serving.settings.ServeSettings",
]
FUNCTIONS = [
    "penstock.data.prepare.preparation.prepare",
    "penstock.data.shards.opening.open_dataset",
    "penstock.use.runs.opening.load_opened",
    "penstock.use.runs.run.Run.plot",
]


def found(address: str) -> Any:
    parts = address.split(".")
    place = next(size for size in range(len(parts), 0, -1) if is_module(parts[:size]))
    thing: Any = import_module(".".join(parts[:place]))
    for name in parts[place:]:
        thing = getattr(thing, name)
    return thing


def is_module(parts: list[str]) -> bool:
    path = (ROOT / "src").joinpath(*parts)
    return path.is_dir() or path.with_suffix(".py").is_file()


def choices(hint: Any) -> tuple[str, ...]:
    """The slow twin of `Shape.choices`, of the evaluated type."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, types.UnionType, tuple):
        return next((inner for one in get_args(hint) if (inner := choices(one))), ())
    return ()


def note(settings: type, name: str) -> str | None:
    """The text below a field, from the class's own source."""
    lines = inspect.getsource(settings).splitlines()
    begun = [number for number, line in enumerate(lines) if line.startswith(f"    {name}: ")]
    if not begun:
        return None  # declared by a base
    text = "\n".join(lines[begun[0] :])
    found = re.search(r'"""(.*?)"""', text, re.DOTALL)
    return None if found is None else " ".join(found[1].split())


@pytest.mark.parametrize("address", CLASSES)
def test_fields_are_read_as_they_are(address: str) -> None:
    settings = found(address)
    read, hints = declared(address), get_type_hints(settings)
    given = [one for one in fields(settings) if one.init]
    assert [*read] == [one.name for one in given]
    for one in given:
        declaration = read[one.name]
        assert declaration.shape().choices == choices(hints[one.name]), one.name
        assert (declaration.default is None) == (
            one.default is MISSING and one.default_factory is MISSING
        )
        if declaration.value is not None:
            assert declaration.value == one.default, one.name
        if (said := note(settings, one.name)) is not None:
            assert declaration.note == said != ""


@pytest.mark.parametrize("address", FUNCTIONS)
def test_parameters_are_read_as_they_are(address: str) -> None:
    parameters = inspect.signature(found(address)).parameters
    for name, declaration in declared(address).items():
        default = parameters[name].default
        assert (declaration.default is None) == (default is inspect.Parameter.empty), name
        assert declaration.note, f"{name} stands in no Args"
        if declaration.value is not None:
            assert declaration.value == default


def test_a_text_of_several_lines_and_a_default_by_name() -> None:
    plot = declared("penstock.use.runs.run.Run.plot")["output"]
    assert plot.note.endswith("None: curves.html in the run's folder.")
    sizes = declared("penstock.use.serving.settings.ServeSettings")
    assert (sizes["messages"].value, sizes["image_bytes"].value) == (4096, 20 << 20)
    smoothing = declared("penstock.learn.training.curves.View")["smoothing"]
    assert isinstance(smoothing.default, ast.Name)
    assert smoothing.value == 0.01


@pytest.mark.parametrize("address", ["penstock.core.nothing.At", "penstock.core.folders.Nothing"])
def test_what_is_not_there_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match=rf"{address}: no class"):
        declared(address)


@pytest.mark.parametrize("path", keywords.texts(), ids=lambda path: path.stem)
def test_written_keywords_are_current(path: Path) -> None:
    """`make keywords` writes them."""
    assert path.read_text() == keywords.texts()[path]


def test_main_words_and_mappings_stand_for_settings() -> None:
    hints = get_type_hints(import_module("penstock.use.runs.keywords").TrainKeywords)
    assert {"adamw", "muon"} <= {
        value for one in get_args(hints["optimizer"]) for value in get_args(one)
    }
    required = import_module("penstock.plan.loader.loader_keywords").LoaderKeywords
    assert required.__required_keys__ == {"sequence_length", "rows_per_step"}
