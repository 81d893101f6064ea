"""Chooses who prepares the parts: this process, child processes, or a Ray cluster; the result is the same."""

from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.errors import ConfigError
from penstock.prepare.folder import OutputFolder
from penstock.prepare.part import WORK, Workshop
from penstock.prepare.pool import Crew
from penstock.prepare.processes import Processes
from penstock.prepare.ray_node import end_earlier_runs
from penstock.prepare.ray_tasks import RayTasks, import_ray
from penstock.prepare.transform import Transform, require_picklable
from penstock.sources import Part
from penstock.system import usable_processors

EXECUTORS = ("processes", "ray")
"""`processes`: of this machine. `ray`: tasks of a Ray cluster, of which all nodes see the output folder."""

WORTH_A_PROCESS = 8 << 20
"""Raw bytes that a further process starts for, where the number is left to us: starting takes it a second or two."""

Hire = Callable[[Workshop, OutputFolder], Crew | None]


def choose_executor(
    executor: str, *, processes: int | None, parts: Sequence[Part] | None, transform: Transform | None
) -> Hire:
    """Settle who will do the work, and refuse what cannot be done before anything is written.

    Args:
        executor: One of `EXECUTORS`.
        processes: Parts at once; None: one for each core, of this machine or of the cluster, as far as there is work.
        parts: The work; None when it is not known before.
        transform: The user's function.

    Returns:
        Makes the crew, when the folder is ours.

    Raises:
        ConfigError: There is no such executor, or child processes cannot import the transform.
        MissingExtraError: Ray is not installed.
    """
    if executor not in EXECUTORS:
        raise ConfigError(f"executor must be one of {', '.join(EXECUTORS)}; got {executor!r}")
    if executor == "ray":
        import_ray()
        return lambda shop, folder: RayTasks(shop, _cleared(folder), processes)
    count = processes or usable_processors()
    if parts is not None:
        count = min(count, max(len(parts), 1))
        if processes is None and transform is None:
            count = min(count, 1 + sum(part.size_bytes for part in parts) // WORTH_A_PROCESS)
    if transform is not None and count > 1:
        require_picklable(transform)

    def hire(shop: Workshop, folder: OutputFolder) -> Crew | None:
        _cleared(folder)
        return Processes(shop, count, (folder.lock,)) if count > 1 else None

    return hire


def _cleared(folder: OutputFolder) -> Path:
    """The working folder, when no Ray task of a killed run writes there any more."""
    end_earlier_runs(folder.path / WORK)
    return folder.path / WORK
