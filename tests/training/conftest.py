"""Data that the tests of the trainer share."""

import pytest
from training_makers import make_data


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Datasets, tokenizer and run file; read only."""
    return make_data(tmp_path_factory.mktemp("trainer"))
