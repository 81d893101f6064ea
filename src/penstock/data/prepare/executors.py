"""Who does the work of `prepare`: processes of this machine, or tasks of a Ray cluster."""

from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.system import usable_processors
from penstock.data.prepare.folder import OutputFolder
from penstock.data.prepare.part import Workshop
from penstock.data.prepare.part_record import WORK
from penstock.data.prepare.pool import Crew, Processes
from penstock.data.prepare.ray_tasks import RayTasks, end_earlier_runs, import_ray
from penstock.data.prepare.transform import Transform, require_picklable
from penstock.data.sources import Part

EXECUTORS = ("processes", "ray")
"""`processes`: of this machine. `ray`: tasks of a Ray cluster."""

WORTH_A_PROCESS = 8 << 20
"""Raw bytes per process if their number is chosen automatically: starting one takes a second or
two.
"""

MakeCrew = Callable[[Workshop, OutputFolder], Crew | None]


def choose_executor(
    executor: str,
    *,
    processes: int | None,
    parts: Sequence[Part] | None,
    transform: Transform | None,
) -> MakeCrew:
    """Choose who will do the work, and refuse impossible choices before anything is written.

    Args:
        executor: One of `EXECUTORS`.
        processes: Parts at once; None: one per core of this machine or the cluster, as far as there
            is work.
        parts: The work; None if it is not known beforehand.
        transform: The user's function.

    Returns:
        A function that makes the crew, once the folder is locked.

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

    def make_crew(shop: Workshop, folder: OutputFolder) -> Crew | None:
        _cleared(folder)
        return Processes(shop, count, (folder.lock,)) if count > 1 else None

    return make_crew


def _cleared(folder: OutputFolder) -> Path:
    """The working folder, once no Ray task of a killed run writes to it any more."""
    end_earlier_runs(folder.path / WORK)
    return folder.path / WORK
