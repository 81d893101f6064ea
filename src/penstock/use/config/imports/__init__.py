"""From a configuration of another library to a run file and the commands that prepare its data."""

from penstock.core.lazy_imports import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
