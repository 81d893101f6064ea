"""The run file: one YAML file that says what flows, validated, with every unknown key refused.

The settings are the rooms' own frozen classes; this room only reads them from a file, checks them with pydantic
and puts them together. `penstock schema` prints the JSON Schema that editors complete and check with.
"""

from penstock.config.run import DataSettings, RunSettings, load_run, make_loader, run_schema

__all__ = ["DataSettings", "RunSettings", "load_run", "make_loader", "run_schema"]
