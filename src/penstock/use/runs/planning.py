"""Plans the data of a run file without training. Needs no torch."""

import os
from collections.abc import Sequence
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.suggestions import suggests
from penstock.learn.training.run_folder import RUN_FILE
from penstock.use.config.run_file import (
    load_data,
    make_loader,
    run_file_of,
    written_start,
    written_steps,
)
from penstock.use.inspection.plan_report import PlanReport, dry_run

STEPS = 100
"""Steps that are planned of a run file that says nothing of them."""


@suggests
def plan_run(
    run_file: str | Path, *, steps: int | None = None, assignments: Sequence[str] = ()
) -> PlanReport:
    """Plan the first steps of a run file without training: rows, tokens, shares, epochs, padding,
    drops, memory. Of a run that continues from another one, those from there on.

    ```python
    report = ps.plan_run("run.yaml", steps=20)
    print(report.padding_share, report.warnings)
    ```

    Args:
        run_file: The run file, or a run's folder.
        steps: Steps to plan; None: those of the run, else 100.
        assignments: Changes of the file's settings, such as `data.loader.rows_per_step=8`.

    Raises:
        ConfigError: A setting is unknown or out of range; names file and line.
        FormatError: A source is no dataset.
    """
    if os.path.isdir(run_file) and not (Path(run_file) / RUN_FILE).is_file():
        raise ConfigError(
            f"{run_file}: is a folder without {RUN_FILE}; expected a run file, or the folder of a "
            "run; `penstock inspect` shows what is in a dataset"
        )
    place, given = run_file_of(str(run_file)), list(assignments)
    data, start = load_data(place, given), written_start(place, given)
    if steps is None:
        written = written_steps(place, given)
        steps = STEPS if written is None else max(1, written - start.step)
    loader = make_loader(
        data, run_file=place, data_parallel=(0, data.loader.ramp.divisor), **start.arguments
    )
    return dry_run(loader, steps)
