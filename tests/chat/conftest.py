"""A tokenizer, and a folder for more of them, that the tests of a file share."""

import pytest
from chat_makers import small_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """Knows the markers that the tests' own templates write."""
    return small_tokenizer(tmp_path_factory)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")
