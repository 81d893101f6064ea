"""What a dataset gives for an index, what equals what, and what is printed."""

import numpy as np
import pytest

from penstock import Dataset, write_dataset
from penstock.core.errors import ConfigError

TOKENS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]


@pytest.fixture
def dataset(tmp_path):
    return write_dataset(tmp_path / "d", TOKENS, spans=[None, None, [(0, 1, 0.5)], None])


def test_numbers_and_slices(dataset):
    assert [document.tokens.tolist() for document in dataset] == TOKENS
    assert dataset[np.int64(-1)].tokens.tolist() == TOKENS[-1]
    for chosen in (slice(1, 3), slice(None), slice(3, 0, -2), slice(9, 20)):
        assert [document.tokens.tolist() for document in dataset[chosen]] == TOKENS[chosen]
    for outside in (4, -5):
        with pytest.raises(IndexError, match=f"document {outside} of 4"):
            dataset[outside]


@pytest.mark.parametrize("index", ["x", 1.0, None, (0, 1)])
def test_other_indices_are_refused(dataset, index):
    with pytest.raises(ConfigError, match="expected a whole number or a slice, got "):
        dataset[index]


def test_documents_are_equal_by_content(dataset, tmp_path):
    assert dataset[0] == dataset[0]
    assert dataset[0] != dataset[1]
    assert dataset[0] != "document"
    weighted = write_dataset(tmp_path / "weighted", TOKENS, spans=[None, None, [(0, 1, 1.0)], None])
    assert dataset[1] == weighted[1]
    assert dataset[2] != weighted[2]
    with pytest.raises(TypeError, match="unhashable"):
        hash(dataset[0])


def test_datasets_are_equal_by_fingerprint(dataset, tmp_path):
    again, other = Dataset.open(dataset.path), write_dataset(tmp_path / "other", TOKENS[1:])
    assert dataset == again
    assert hash(dataset) == hash(again)
    assert dataset != other
    assert dataset != "d"
    assert len({dataset, again, other}) == 2


def test_prints_are_one_short_line(tmp_path):
    dataset = write_dataset(tmp_path / "big", [list(range(100)) * 1000], spans=[[(5, 30, 1.0)]])
    assert repr(dataset[0]) == "Document(memory:0, 100000 tokens, 25 with loss weight)"
    assert repr(dataset) == f"Dataset({str(tmp_path / 'big')!r}, 1 documents, 100000 tokens)"
