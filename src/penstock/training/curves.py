"""Curves of runs: which figures of `metrics.jsonl` are drawn together, and how many points are enough. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from penstock.errors import ConfigError
from penstock.training.figure_names import DISTANCE, PARTS, SOURCE, TASK, is_evaluation
from penstock.training.metrics import read_metrics

POINTS = 400
"""Points of a drawn curve, at most: more than a screen shows apart."""

PANELS = (
    ("Loss, nats a target", "loss"),
    ("Useful tokens a second", "tokens_per_second"),
    ("Learning rate", "learning_rate"),
    ("Gradient norm, before clipping", "gradient_norm"),
)
"""Title and figure of the panels that come first; after them each part of the loss and each figure of an evaluation has
one of its own."""
LARGEST = 1e30
"""Of what is drawn: steps, tokens and figures beyond it are left out, as those that are no numbers."""

Over = Literal["step", "tokens"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One figure of one run, in as many bins as are drawn."""

    run: str
    """Name of the run."""
    number: int
    """Of the run, from 0: its colour."""
    x: tuple[float, ...]
    """Steps or tokens, rising."""
    mean: tuple[float, ...]
    """Mean of the figure in each bin."""
    low: tuple[float, ...]
    """Its least value there."""
    high: tuple[float, ...]
    """Its greatest value there."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Curves that share their axes."""

    title: str
    """What is drawn."""
    over: Over
    """What it is drawn over."""
    curves: tuple[Curve, ...]
    """One a run that has the figure."""


def read_panels(runs: Sequence[str | Path], *, over: Over = "step") -> list[Panel]:
    """The panels of one or several runs.

    Args:
        runs: Folders of runs, or their metrics.jsonl.
        over: The horizontal axis.

    Raises:
        ConfigError: No run has any figure yet.
        FormatError: One is no run.
    """
    records = {name: read_metrics(Path(run)) for name, run in zip(_names(runs), runs, strict=True)}
    found = [
        Panel(title=title, over=over, curves=curves)
        for title, figure in (*PANELS, *((_title(name), name) for name in _others(records)))
        if (curves := _curves(records, figure, over))
    ]
    if not found:
        raise ConfigError(f"{', '.join(map(str, runs))}: no figures yet; plot again after the first steps")
    return found


def _curves(records: dict[str, list[dict[str, Any]]], figure: str, over: Over) -> tuple[Curve, ...]:
    made = (_curve(run, number, had, figure, over) for number, (run, had) in enumerate(records.items()))
    return tuple(curve for curve in made if curve is not None)


def _curve(run: str, number: int, records: list[dict[str, Any]], figure: str, over: Over) -> Curve | None:
    """The figure's points, in bins of equally many; None where there are none."""
    points = [
        (float(record[over]), float(record[figure]))
        for record in records
        if _is_drawn(record.get(figure)) and _is_drawn(record.get(over))
    ]
    if not points:
        return None
    size = math.ceil(len(points) / POINTS)
    bins = [points[begin : begin + size] for begin in range(0, len(points), size)]
    values = [[y for _, y in part] for part in bins]
    return Curve(
        run=run,
        number=number,
        x=tuple(part[-1][0] for part in bins),
        mean=tuple(sum(ys) / len(ys) for ys in values),
        low=tuple(map(min, values)),
        high=tuple(map(max, values)),
    )


def _is_drawn(value: Any) -> bool:
    """Whether it is a number that fits a drawing; not so large that differences or sums have none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def _others(records: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Parts of the loss, then figures of evaluations, that are numbers, in the order in which they came."""
    names = {
        name: None
        for had in records.values()
        for record in had
        for name, value in record.items()
        if (name.startswith(PARTS) or is_evaluation(name)) and _is_drawn(value)
    }
    return sorted(names, key=is_evaluation)


def _title(name: str) -> str:
    for begin, what in ((SOURCE, "source"), (TASK, "task"), (DISTANCE, "target distance")):
        if name.startswith(begin):
            return f"Loss of {what} {name.removeprefix(begin)}"
    return name


def _names(runs: Sequence[str | Path]) -> list[str]:
    """The last part of each path; the whole path where two would be the same."""
    paths = [Path(run).resolve() for run in runs]
    paths = [path.parent if path.is_file() else path for path in paths]
    short = [path.name for path in paths]
    return [name if short.count(name) == 1 else str(run) for name, run in zip(short, runs, strict=True)]
