"""The settings of a loader: its keywords, one for one, and as one object."""

import inspect
import pickle
from dataclasses import MISSING, fields, replace

import numpy as np
import pytest
from penstock.errors import ConfigError
from penstock.loader import LoaderSettings

import penstock as ps
from penstock.plan.loader.data_parallel import DataParallel


@pytest.fixture
def dataset(tmp_path):
    documents = [np.arange(length) % 50 for length in range(3, 40)]
    return ps.write_dataset(tmp_path / "data", documents)


def test_the_keywords_of_a_loader_are_the_fields():
    keywords = [
        one
        for one in inspect.signature(ps.Loader.__init__).parameters.values()
        if one.kind is one.KEYWORD_ONLY
    ]
    defaults = {one.name: MISSING if one.default is one.empty else one.default for one in keywords}
    assert defaults == {one.name: one.default for one in fields(LoaderSettings)}


def test_a_loader_of_settings_gives_the_same_steps(dataset):
    settings = LoaderSettings(
        sequence_length=64, rows_per_step=2, seed=3, threads=0, attention="row"
    )
    loaders = [
        ps.Loader(dataset, sequence_length=64, rows_per_step=2, seed=3, threads=0, attention="row"),
        loader := ps.Loader.of(dataset, settings),
        pickle.loads(pickle.dumps(loader)),
        ps.Loader.of(dataset, replace(settings)),
    ]
    steps = [next(iter(one)) for one in loaders]
    for step in steps[1:]:
        assert step.resume_state == steps[0].resume_state
        for row, first in zip(step, steps[0], strict=True):
            np.testing.assert_array_equal(row.tokens, first.tokens)
            np.testing.assert_array_equal(row.cu_seqlens, first.cu_seqlens)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"threads": -1}, "threads must be at least 0"),
        ({"prefetch": 1.5}, "prefetch must be a whole number, got 1.5"),
        ({"pad_id": -1}, "pad_id must be a token id"),
        ({"requirements": 3}, "requirements must be penstock.InputRequirements, got 3$"),
        ({"requirements": dict}, r"got .*dict.*; call it: model\.requirements\(\)"),
        ({"data_parallel": 3}, "DeviceMesh, got 3$"),
        ({"data_parallel": DataParallel.from_env}, r"; call it: DataParallel\.from_env\(\)"),
        ({"cache_bytes": 0}, "cache_bytes must be at least 1"),
        ({"first_step": -1}, "numbered from 0"),
        ({"sequence_length": None}, "sequence_length must be a whole number, got None"),
    ],
)
def test_settings_are_checked_where_they_are_made(wrong, message):
    with pytest.raises(ConfigError, match=message):
        LoaderSettings(**{"sequence_length": 8, "rows_per_step": 1, **wrong})
