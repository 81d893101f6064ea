"""Opens whatever dataset is at a path."""

from pathlib import Path

from penstock.shards.dataset import Dataset


def open_dataset(path: str | Path) -> Dataset:
    """Open a dataset in place.

    Args:
        path: A folder that `penstock prepare` made.

    Raises:
        FormatError: Nothing that penstock can read is there.
    """
    return Dataset.open(path)
