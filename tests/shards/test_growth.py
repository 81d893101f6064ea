"""The fingerprint of the first documents of a dataset is that of a dataset of these documents
alone.
"""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from makers.datasets import random_documents
from penstock.data.shards.format.layout import ShardLayout
from penstock.data.shards.growth import prefix_fingerprint
from penstock.data.shards.memory import write_dataset

COUNT = 2600
"""More than two batches of documents."""


def documents(count):
    return random_documents(COUNT, 0, 6)[:count]


def extras(kind, count):
    rows = documents(count)
    if kind == "weights":
        return {
            "spans": [
                [(0, len(row), 0.5)] if number % 3 and len(row) else None
                for number, row in enumerate(rows)
            ]
        }
    if kind == "texts":
        return {"texts": [f"text {number}" for number in range(count)]}
    if kind == "columns":
        return {"columns": {"advantage": [np.arange(len(row), dtype=np.float32) for row in rows]}}
    return {}


@pytest.fixture(scope="module", params=["plain", "weights", "texts", "columns"])
def whole(request, tmp_path_factory):
    """Datasets of all documents, in one shard and in several."""
    folder = tmp_path_factory.mktemp("growth")
    more = extras(request.param, COUNT)
    made = [
        write_dataset(folder / str(size), documents(COUNT), documents_per_shard=size, **more)
        for size in (10_000, 700)
    ]
    return request.param, made, folder


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 1400, 2100, 2599, 2600])
def test_of_any_number_of_documents(whole, count):
    kind, made, folder = whole
    alone = write_dataset(folder / f"first {count}", documents(count), **extras(kind, count))
    assert [prefix_fingerprint(one, count) for one in made] == 2 * [alone.fingerprint]
    assert isinstance(alone.manifest.layout, ShardLayout)


def test_nothing_else_has_it(whole):
    _, (one, other), folder = whole
    assert prefix_fingerprint(one, 0) is None
    assert prefix_fingerprint(one, COUNT + 1) is None
    changed = [row.copy() for row in documents(COUNT)]
    number = next(i for i in range(100, COUNT) if len(changed[i]))
    changed[number][-1] += 1
    third = write_dataset(folder / "changed", changed, vocab_size=2000, **extras(whole[0], COUNT))
    assert prefix_fingerprint(third, number) == prefix_fingerprint(other, number)
    assert prefix_fingerprint(third, number + 1) != prefix_fingerprint(other, number + 1)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.data())
def test_of_lists(tmp_path_factory, sizes, data):
    folder = tmp_path_factory.mktemp("lists")
    begins = np.cumsum([0, *sizes])
    for number, (begin, end) in enumerate(pairwise(begins)):
        ps.write_dataset(
            folder / str(number), [[5, int(i)] for i in range(begin, end)], vocab_size=1000
        )
    corpus = ps.open_dataset([folder / str(number) for number in range(len(sizes))])
    count = data.draw(st.integers(1, sum(sizes)))
    last = int(np.searchsorted(begins, count)) - 1
    ps.write_dataset(folder / "cut", [[5, i] for i in range(begins[last], count)], vocab_size=1000)
    due = ps.open_dataset([*(folder / str(number) for number in range(last)), folder / "cut"])
    assert prefix_fingerprint(corpus, count) == due.fingerprint
