"""Trackers of experiments that get the figures of a run: TensorBoard, Weights & Biases, trackio and
MLflow; each is imported only when requested.

`RUN/trackers.json` keeps the id of the run in each, so a resumed run continues its curves there.
`RUN/sent.jsonl` has a line for each step that one of them took: what a killed run sent is known
however often it is killed again, and what a tracker missed is sent when the step is done again.
"""

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from textwrap import indent
from time import time
from types import MappingProxyType
from typing import Any, Literal, Protocol, final

import yaml

from penstock.core.errors import ConfigError, MissingExtraError, OutputError, PenstockError
from penstock.core.json_values import JsonMapping

TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
"""Where figures can go besides the run's folder."""

_log = logging.getLogger("penstock.training")

KNOWN_RUNS, SENT = "trackers.json", "sent.jsonl"
TENSORBOARD, WANDB = "tensorboard", "wandb"
"""Folders in the run's folder."""
PROJECT = "penstock"
_BATCH = 100
"""Parameters in one request to MLflow, which takes no more."""
_OF_THE_MACHINE = frozenset(
    {"seconds", "wait_seconds", "seconds_left", "percent", "tokens_per_second", "mfu",
     "peak_memory"}
)  # fmt: skip
"""Figures that may differ where a step is done again; `percent` follows from the run's steps."""
_UNKNOWN_TO_MLFLOW = re.compile(r"[^\w./ -]")


class Tracker(Protocol):
    """A destination of records."""

    replaces: bool
    """Whether a step that is done again after a resume takes the place of the earlier one."""

    def see(self, record: JsonMapping) -> None:
        """Take a record; its `step` is the number of steps done."""

    def close(self, failed: bool) -> None:
        """Write what is left, and say whether the run has failed."""


def open_trackers(
    names: Sequence[TrackerName],
    run: Path,
    done: int,
    *,
    project: str | None = None,
    name: str | None = None,
    config: Mapping[str, object] = MappingProxyType({}),
) -> list[Tracker]:
    """Begin, or continue, a run in each tracker.

    Args:
        names: The trackers.
        run: The run's folder.
        done: Steps that are done already.
        project: Project of W&B and trackio, experiment of MLflow; None: what the tracker's own
            environment variable says, else `penstock`.
        name: The run's name there; None: that of its folder.
        config: The run file's values, shown next to the curves.

    Raises:
        MissingExtraError: A package is not installed.
        ConfigError: A tracker refuses to begin.
    """
    known = _KnownRuns(run / KNOWN_RUNS)
    start = _Start(run, done, project, name or run.name, config, known)
    begun: list[Tracker] = []
    with contextlib.ExitStack() as on_error:
        for tracker in names:
            opened = _begin(tracker, start)
            on_error.callback(opened.close, failed=True)
            if opened.replaces:
                begun.append(opened)
                continue
            sent = _SentSteps(run / SENT, [tracker, known.of(tracker)], done)
            on_error.callback(sent.close)
            begun.append(_EachOnce(opened, sent))
        on_error.pop_all()
    return begun


def _begin(name: TrackerName, start: "_Start") -> "_Careful":
    try:
        return _Careful(name, _TRACKERS[name](start))
    except PenstockError:
        raise
    except Exception as error:
        raise ConfigError(
            f"training.log: {name} cannot begin: {error}; {_CURES[name]}, or leave {name} out"
        ) from error


@final
class TensorBoard:
    """Event files in `RUN/tensorboard`. After a resume TensorBoard hides the records after the
    starting step.
    """

    replaces = True

    def __init__(self, start: "_Start") -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError("tensorboard", "tensorboard") from None
        self._writer: Any = SummaryWriter(
            str(start.run / TENSORBOARD),
            # Also of a new run: it may have been killed before its first checkpoint.
            purge_step=start.done + 1,
        )
        if start.config:
            # Four spaces make it code, as TensorBoard reads Markdown.
            text = yaml.safe_dump(dict(start.config), sort_keys=False, allow_unicode=True)
            self._writer.add_text("run file", indent(text, "    "), start.done)

    def see(self, record: JsonMapping) -> None:
        """Write the numbers and texts of a record."""
        for name, value in _figures(record):
            self._writer.add_scalar(name, value, record["step"])
        for name, value in record.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, record["step"])

    def close(self, failed: bool) -> None:
        """Write what is left."""
        self._writer.close()


@final
class WandB:
    """A run of Weights & Biases. Figures are drawn over `step`: W&B's own count only rises, and
    would drop the steps that a resumed run does again.
    """

    replaces = False

    def __init__(self, start: "_Start") -> None:
        wandb = _package("wandb")
        identity = start.known.of("wandb")
        self._run: Any = wandb.init(
            project=start.project or os.environ.get("WANDB_PROJECT") or PROJECT,
            name=start.name,
            dir=str(start.run),
            id=identity,
            resume="allow",
            config=dict(start.config),
        )
        if identity is not None:
            # Without this permission a resumed run keeps its old values.
            self._run.config.update(dict(start.config), allow_val_change=True)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        start.known.keep("wandb", str(self._run.id))

    def see(self, record: JsonMapping) -> None:
        """Send all numbers of a record."""
        self._run.log({"step": record["step"], **dict(_figures(record))})

    def close(self, failed: bool) -> None:
        """Send what is left; a run that has failed is shown as failed."""
        self._run.finish(exit_code=int(failed))


@final
class Trackio:
    """A run of trackio, which keeps figures on this machine or in a Space of the Hub."""

    replaces = False

    def __init__(self, start: "_Start") -> None:
        trackio = _package("trackio")
        resumed = start.known.of("trackio")
        self._run: Any = trackio.init(
            project=start.project or PROJECT,
            name=resumed or start.name,
            config=dict(start.config),
            resume="allow" if resumed else "never",
            embed=False,
        )
        start.known.keep("trackio", str(self._run.name))

    def see(self, record: JsonMapping) -> None:
        """Write all numbers of a record."""
        self._run.log(dict(_figures(record)), step=record["step"])

    def close(self, failed: bool) -> None:
        """Write what is left; trackio has no failed runs."""
        self._run.finish()


@final
class MLflow:
    """A run of MLflow, at `MLFLOW_TRACKING_URI` or where MLflow's own default is."""

    replaces = False

    def __init__(self, start: "_Start") -> None:
        mlflow = _package("mlflow")
        entities = self._entities = import_module("mlflow.entities")
        self._client: Any = mlflow.MlflowClient()
        identity = start.known.of("mlflow")
        if identity is None:
            experiment = start.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            identity = self._client.create_run(
                self._experiment(experiment), run_name=start.name
            ).info.run_id
            parameters = [
                entities.Param(_mlflow_name(key), str(value)[:6000])
                for key, value in _leaves(start.config)
            ]
            for first in range(0, len(parameters), _BATCH):
                self._client.log_batch(identity, params=parameters[first : first + _BATCH])
        else:
            # Parameters cannot be changed in MLflow; those of the first start stay.
            self._client.update_run(identity, status="RUNNING")
        self._identity: str = identity
        start.known.keep("mlflow", identity)

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def see(self, record: JsonMapping) -> None:
        """Send all numbers of a record."""
        now = int(1000 * time())
        self._client.log_batch(
            self._identity,
            metrics=[
                self._entities.Metric(_mlflow_name(name), value, now, record["step"])
                for name, value in _figures(record)
            ],
        )

    def close(self, failed: bool) -> None:
        """Say that the run has ended, and how."""
        self._client.set_terminated(self._identity, "FAILED" if failed else "FINISHED")


@final
class _Careful:
    """Passes records on until the tracker fails: its failure must not end the training."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.replaces = tracker.replaces
        self.failed = False
        self._name, self._tracker = name, tracker

    def see(self, record: JsonMapping) -> None:
        if self.failed:
            return
        try:
            self._tracker.see(record)
        except Exception as error:
            self.failed = True
            _log.warning(
                "%s took no figures from step %s on (%s); the run goes on, and its metrics.jsonl "
                "has them all",
                self._name,
                record["step"],
                error,
            )

    def close(self, failed: bool) -> None:
        """Also after a failure: else the run would be shown as running."""
        try:
            self._tracker.close(failed)
        except Exception as error:
            _log.warning(
                "%s could not be closed (%s) and may lack the last figures; metrics.jsonl has "
                "them all",
                self._name,
                error,
            )


@final
class _EachOnce:
    """Leaves out steps that a tracker has already, with the same figures."""

    replaces = False

    def __init__(self, tracker: _Careful, sent: "_SentSteps") -> None:
        self._tracker, self._sent = tracker, sent

    def see(self, record: JsonMapping) -> None:
        if not self._sent.has(record):
            self._tracker.see(record)
            if not self._tracker.failed:
                self._sent.add(record)

    def close(self, failed: bool) -> None:
        self._tracker.close(failed)
        self._sent.close()


@final
class _SentSteps:
    """Which steps a tracker took, over all starts of the run.

    Args:
        path: The file, which all trackers share; it only grows.
        to: The tracker's name, and the run's id there: another run there has none of them.
        done: Steps that are done already.

    Raises:
        OutputError: The file cannot be written.
    """

    def __init__(self, path: Path, to: Sequence[str | None], done: int) -> None:
        self._path, self._to = path, list(to)
        self._figures: dict[int, str] = {}
        try:
            if path.exists():
                for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                    self._read(line, done)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._cannot(error) from error

    def _read(self, line: str, done: int) -> None:
        """Keep a line's figures, if it is of this tracker, and of a step that will be done again or
        of the last one, which may be completed; a kill may have cut the line.
        """
        with contextlib.suppress(ValueError, TypeError, KeyError):
            found = json.loads(line)
            if found["to"] == self._to and found["step"] >= done:
                self._figures[found["step"]] = found["figures"]

    def has(self, record: JsonMapping) -> bool:
        """Whether the tracker took this step, with these figures."""
        return self._figures.pop(record["step"], None) == _digest(record)

    def add(self, record: JsonMapping) -> None:
        """The tracker took it."""
        line = {"step": record["step"], "to": self._to, "figures": _digest(record)}
        try:
            # The line end comes first: the line before may have been cut by a kill.
            self._file.write(f"\n{json.dumps(line)}")
            self._file.flush()
        except OSError as error:
            raise self._cannot(error) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def _cannot(self, error: OSError) -> OutputError:
        return OutputError(
            f"{self._path}: cannot be written: {error.strerror}; make room, then resume"
        )


def _digest(record: JsonMapping) -> str:
    """Of the figures that are the same when an interrupted step is done again."""
    same = sorted(
        (name, repr(value))
        for name, value in _figures(record)
        if name not in _OF_THE_MACHINE and not name.endswith("/seconds")
    )
    return blake2b(repr(same).encode(), digest_size=8).hexdigest()


@final
class _KnownRuns:
    """The ids of this run in the trackers, in a small file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {}
        self._ids: dict[str, str] = found if isinstance(found, dict) else {}

    def of(self, tracker: str) -> str | None:
        return self._ids.get(tracker)

    def keep(self, tracker: str, identity: str) -> None:
        if self._ids.get(tracker) != identity:
            self._ids[tracker] = identity
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_name(f"{self._path.name}.partial")
            partial.write_text(json.dumps(self._ids, indent=1) + "\n", encoding="utf-8")
            os.replace(partial, self._path)


@final
@dataclass(frozen=True)
class _Start:
    """What a tracker needs to begin or continue; see `open_trackers`."""

    run: Path
    done: int
    project: str | None
    name: str
    config: Mapping[str, object]
    known: _KnownRuns


_TRACKERS: Mapping[TrackerName, Callable[[_Start], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
    "mlflow": MLflow,
}
_CURES: Mapping[TrackerName, str] = {
    "tensorboard": "see that the run's folder can be written",
    "wandb": "log in with `wandb login`, set WANDB_MODE=offline",
    "trackio": "see TRACKIO_DIR and TRACKIO_SPACE_ID",
    "mlflow": "see MLFLOW_TRACKING_URI",
}


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise MissingExtraError(name, name) from None


def _figures(record: JsonMapping) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name != "step" and isinstance(value, int | float):
            yield name, float(value)


def _leaves(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + str(name), value


def _mlflow_name(name: str) -> str:
    return _UNKNOWN_TO_MLFLOW.sub("_", name)
