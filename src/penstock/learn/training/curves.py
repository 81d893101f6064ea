"""Curves of runs from `metrics.jsonl`: read, thinned, smoothed, and written as an HTML page or as a
PNG. No torch.

A page (`curve_page.py`) holds all that it needs. The PNG needs matplotlib.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, final

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonObject
from penstock.learn.training.figure_names import DISTANCE, PARTS, SOURCE, TASK, is_evaluation
from penstock.learn.training.metrics import read_metrics

EVEN, EARLY = 400, 200
"""Bins of a long curve: of equal size, as many as a screen can show; and growing ones, for a
logarithmic axis.
"""
POINTS = EVEN + EARLY
"""Maximum points per curve."""
SMOOTHING = 0.01
"""Default half-life of the smoothing, as a share of the horizontal axis: a curve of few points
stays as it is.
"""

PANELS = (
    ("Loss, nats per target", "loss"),
    ("Useful tokens per second", "tokens_per_second"),
    ("Model FLOPs utilisation", "mfu"),
    ("Learning rate", "learning_rate"),
    ("Gradient norm, before clipping", "gradient_norm"),
)
"""(title, figure) of the first panels; each part of the loss and each figure of an evaluation
follows in its own.
"""
SCHEDULED = "learning_rate"
LARGEST = 1e30
"""Largest value that is drawn; larger steps, tokens and figures are left out, like values that are
not numbers.
"""

Over = Literal["step", "tokens"]
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b88a00", "#56b4e9", "#7f7f7f", "#7a4fb5")
"""Eight colours that colour-blind readers can distinguish (after Okabe and Ito 2008)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One figure of one run, in bins, one per drawn point."""

    run: str
    """Name of the run."""
    number: int
    """Number of the run, from 0; decides its colour."""
    x: tuple[float, ...]
    """Steps or tokens at the end of each bin, rising."""
    mean: tuple[float, ...]
    """Mean of the figure in each bin."""
    low: tuple[float, ...]
    """Minimum in each bin."""
    high: tuple[float, ...]
    """Maximum in each bin."""
    count: tuple[int, ...]
    """Values in each bin."""
    breaks: tuple[int, ...] = ()
    """Bins before which the line is interrupted, because values there were no numbers."""
    lost: tuple[float, ...] = ()
    """Steps or tokens of values that were no numbers, at most one a bin."""
    lost_count: int = 0
    """Number of all such values."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How curves are drawn.

    Raises:
        ConfigError: The smoothing is not from 0 to 1.
    """

    smoothing: float = SMOOTHING
    """Share of the horizontal axis after which a value weighs half in the smoothed curve; 0 draws
    only the values.
    """
    log_x: bool = False
    """Whether the horizontal axis is logarithmic."""
    log_y: bool = False
    """Whether the vertical axes are logarithmic; a panel without a value above 0 stays linear."""

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing <= 1:
            raise ConfigError(
                f"smoothing is {self.smoothing}; expected a share of the axis, from 0 to 1"
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Curves that share their axes."""

    title: str
    """Title above the panel."""
    over: Over
    """Horizontal axis."""
    curves: tuple[Curve, ...]
    """One for each run that has the figure."""
    is_smoothed: bool = True
    """Whether its curves are smoothed; what a schedule sets has no noise."""
    shared: tuple[float, ...] = ()
    """Steps or tokens that the horizontal axis also covers, so that all panels have the same
    one.
    """

    @property
    def places(self) -> list[float]:
        """All that the horizontal axis covers."""
        return [*self.shared, *(x for curve in self.curves for x in curve.x)]


def read_panels(runs: Sequence[str | Path], *, over: Over = "step") -> list[Panel]:
    """The panels of one or several runs.

    Args:
        runs: Folders of runs, or their metrics.jsonl.
        over: The horizontal axis.

    Raises:
        ConfigError: No run has any figure yet.
        FormatError: A path is not a run.
    """
    records = {
        name: _continued(read_metrics(Path(run)))
        for name, run in zip(_names(runs), runs, strict=True)
    }
    found = [
        Panel(title=title, over=over, curves=curves, is_smoothed=figure != SCHEDULED)
        for title, figure in (*PANELS, *((_title(name), name) for name in _others(records)))
        if (curves := _curves(records, figure, over))
    ]
    if not found:
        raise ConfigError(
            f"{', '.join(map(str, runs))}: no figures yet; plot again after the first steps"
        )
    places = [x for panel in found for x in panel.places]
    shared = (min(places), min((x for x in places if x > 0), default=max(places)), max(places))
    return [replace(panel, shared=shared) for panel in found]


def _curves(
    records: dict[str, list[dict[str, object]]], figure: str, over: Over
) -> tuple[Curve, ...]:
    made = (
        _curve(run, number, had, figure, over) for number, (run, had) in enumerate(records.items())
    )
    return tuple(curve for curve in made if curve is not None)


def _continued(records: list[dict[str, object]]) -> list[JsonObject]:
    """Records with rising steps: where a restart repeats steps, the later records replace the
    earlier ones.
    """
    kept: list[JsonObject] = []
    for record in records:
        while kept and kept[-1]["step"] > record["step"]:
            kept.pop()
        if kept and kept[-1]["step"] == record["step"]:
            kept[-1] = {**kept[-1], **record}
        else:
            kept.append(record)
    return kept


def _curve(
    run: str, number: int, records: list[JsonObject], figure: str, over: Over
) -> Curve | None:
    """The figure's values in bins; None if it has no number."""
    points = [
        (float(record[over]), float(value) if _is_drawn(value) else None)
        for record in records
        if _is_drawn(record.get(over)) and _is_figure(value := record.get(figure, ""))
    ]
    points.sort(key=lambda point: point[0])
    bins: list[list[tuple[float, float]]] = []
    breaks: list[int] = []
    lost: list[float] = []
    is_broken = False
    for begin, end in pairwise(bin_edges(len(points))):
        part = points[begin:end]
        lost += [x for x, y in part if y is None][:1]
        if values := [(x, y) for x, y in part if y is not None]:
            if bins and (is_broken or part[0][1] is None):
                breaks.append(len(bins))
            bins.append(values)
        is_broken = part[-1][1] is None
    if not bins:
        return None
    heights = [[y for _, y in part] for part in bins]
    return Curve(
        run=run,
        number=number,
        x=tuple(part[-1][0] for part in bins),
        mean=tuple(sum(ys) / len(ys) for ys in heights),
        low=tuple(map(min, heights)),
        high=tuple(map(max, heights)),
        count=tuple(map(len, heights)),
        breaks=tuple(breaks),
        lost=tuple(lost),
        lost_count=sum(y is None for _, y in points),
    )


def bin_edges(count: int) -> list[int]:
    """Edges of at most `POINTS` bins of `count` points: fine enough for a linear and for a
    logarithmic axis.
    """
    if count <= POINTS:
        return [*range(count + 1)]
    even = (count * number // EVEN for number in range(EVEN + 1))
    early = (round(count ** (number / EARLY)) for number in range(EARLY))
    return sorted({*even, *early})


def smoothed(curve: Curve, half: float, *, is_log: bool = False) -> tuple[float, ...]:
    """The exponential average of a curve, without the bias of a first value: at distance `half` a
    value weighs half.

    Distances are those on the axis, so runs with records at other steps are smoothed alike. With
    values at distance 1 it is Adam's corrected average (Kingma and Ba 2015) with a decay of 2^(-1 /
    half).

    Args:
        curve: The curve.
        half: The half-life, in steps or tokens; with `is_log`, in powers of ten of these. 0: the
            values themselves.
        is_log: Whether the axis is logarithmic; the values at 0 and below have no place there, and
            are as they are.
    """
    if half <= 0:
        return curve.mean
    total = weight = 0.0
    before, found = None, []
    for x, y, count in zip(curve.x, curve.mean, curve.count, strict=True):
        if is_log and x <= 0:
            found.append(y)
            continue
        place = math.log10(x) if is_log else x
        kept = 0.5 ** ((place - before) / half) if before is not None else 1.0
        total, weight, before = total * kept + count * y, weight * kept + count, place
        found.append(total / weight)
    return tuple(found)


def half_life(panel: Panel, view: View) -> float:
    """The half-life of a panel's smoothing, for all of its runs: steps or tokens, or powers of ten
    of these.
    """
    xs = panel.places
    if is_log_x(panel, view):
        xs = [math.log10(x) for x in xs if x > 0]
    return view.smoothing * (max(xs) - min(xs)) if panel.is_smoothed else 0.0


def is_log_x(panel: Panel, view: View) -> bool:
    """Whether the horizontal axis is logarithmic: as asked, unless no number is above 0."""
    return view.log_x and any(x > 0 for x in panel.places)


def is_log_y(panel: Panel, view: View) -> bool:
    """Whether the vertical axis is logarithmic: as asked, unless no value is above 0."""
    return view.log_y and any(y > 0 for curve in panel.curves for y in curve.mean)


def shown_parts(curve: Curve, log_x: bool, log_y: bool) -> list[list[int]]:
    """The bins of each line without an interruption; a logarithmic axis leaves out numbers that are
    not above 0.
    """
    parts: list[list[int]] = [[]]
    for i in range(len(curve.x)):
        if i in curve.breaks:
            parts.append([])
        if (log_x and curve.x[i] <= 0) or (log_y and curve.mean[i] <= 0):
            parts.append([])
        else:
            parts[-1].append(i)
    return [part for part in parts if part]


def range_ends(curve: Curve, part: Sequence[int], log_y: bool) -> list[float]:
    """Lower ends of ranges; on a logarithmic axis a range that reaches 0 ends at the lowest one
    that does not.
    """
    if not log_y:
        return [curve.low[i] for i in part]
    lowest = min((curve.low[i] for i in part if curve.low[i] > 0), default=math.inf)
    return [curve.low[i] if curve.low[i] > 0 else min(lowest, curve.mean[i]) for i in part]


def lost_note(panel: Panel) -> str:
    """How many values of a panel were no numbers; empty: none."""
    lost = sum(curve.lost_count for curve in panel.curves)
    return (
        f"{lost:,} {'value was no number' if lost == 1 else 'values were no numbers'} (×)"
        if lost
        else ""
    )


def notes_of(panel: Panel, view: View) -> list[str]:
    """What a panel does not show as a line."""
    found = [note] if (note := lost_note(panel)) else []
    for wanted, is_log, values, axis in (
        (
            view.log_x,
            is_log_x(panel, view),
            [x for curve in panel.curves for x in curve.x],
            "horizontal",
        ),
        (
            view.log_y,
            is_log_y(panel, view),
            [y for curve in panel.curves for y in curve.mean],
            "vertical",
        ),
    ):
        hidden = sum(value <= 0 for value in values)
        if wanted and not is_log:
            found.append(f"no number is above 0, so the {axis} axis stays linear")
        elif wanted and hidden:
            found.append(
                f"{hidden:,} of {len(values):,} points are not above 0, and not on the {axis} axis"
            )
    return found


def _is_drawn(value: object) -> bool:
    """Whether the value is a number that can be drawn: small enough that differences and sums stay
    finite.
    """
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -LARGEST <= value <= LARGEST
    )


def _is_figure(value: object) -> bool:
    """Whether the value is a number, or stands for one that was not finite; texts and flags are
    neither.
    """
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _others(records: dict[str, list[dict[str, object]]]) -> list[str]:
    """Names of the loss parts, then of the evaluations' figures, that hold numbers; in order of
    first appearance.
    """
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
    """The last part of each path, or the whole path if two runs would share a name."""
    paths = [Path(run).resolve() for run in runs]
    paths = [path.parent if path.is_file() else path for path in paths]
    short = [path.name for path in paths]
    return [
        name if short.count(name) == 1 else str(run) for name, run in zip(short, runs, strict=True)
    ]


def colour(number: int) -> str:
    """Colour of a run by its number."""
    return COLOURS[number % len(COLOURS)]
