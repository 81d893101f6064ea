"""Datasets that these tests share; without the extra `huggingface` the tests are not collected."""

from importlib.util import find_spec

import pytest
from tiny_models import make_dataset

collect_ignore_glob = (
    []
    if all(find_spec(name) for name in ("torch", "transformers", "accelerate"))
    else ["test_*.py"]
)


@pytest.fixture(scope="session")
def counting(tmp_path_factory):
    """Documents that count upwards; read only."""
    return make_dataset(tmp_path_factory.mktemp("counting") / "data")


@pytest.fixture(scope="session")
def weighted(tmp_path_factory):
    """The same documents, some with loss weights; read only."""
    return make_dataset(tmp_path_factory.mktemp("weighted") / "data", spans=True)
