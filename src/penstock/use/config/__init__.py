"""The run file: one YAML file with the data, model and training of a run, fully validated; unknown
keys are errors.

The settings are the frozen classes of the other rooms. This room only reads them from a file,
checks them with pydantic and assembles them. `penstock schema` prints the JSON Schema with which
editors complete and check run files.
"""

from penstock.core.lazy_imports import public_names
from penstock.use.config.run_file import (
    DataSettings,
    RunSettings,
    load_data,
    load_run,
    make_loader,
    run_file_of,
    run_schema,
)

__all__ = [
    "DataSettings",
    "RunSettings",
    "load_data",
    "load_run",
    "make_loader",
    "run_file_of",
    "run_schema",
]

__dir__ = public_names(__name__)
