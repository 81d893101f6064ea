"""Data that the tests of the trainer share, and torch's global settings put back after them."""

import pytest
import torch
from training_makers import make_data


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Datasets, tokenizer and run file; read only."""
    return make_data(tmp_path_factory.mktemp("trainer"))


@pytest.fixture
def plain_torch():
    """The trainer sets threads and determinism for the whole process; this sets them back."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
