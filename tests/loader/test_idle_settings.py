"""A setting that would have no effect is refused, or has none on purpose; all packings and shuffles
are looked at.
"""

import inspect
import re
from itertools import islice, product

import numpy as np
import pytest

from penstock import InputRequirements, Loader, Source, write_dataset
from penstock.core.errors import ConfigError
from penstock.plan.loader import PlanSettings
from penstock.plan.packing import PACKINGS
from penstock.plan.sampling.order import SHUFFLE_CODES
from penstock.use.config import load_run


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    generator = np.random.default_rng(0)
    # More than block shuffle keeps together, in an order that tells them apart.
    documents = [np.full(n, i % 60_000) for i, n in enumerate(generator.integers(2, 100, 1500))]
    return write_dataset(tmp_path_factory.mktemp("idle") / "d", documents, vocab_size=60_000)


def build(dataset, *, too_long=None, shuffle="full", slice=(0.0, 1.0), max_epochs=1, **settings):
    source = Source(dataset, too_long=too_long, shuffle=shuffle, slice=slice, max_epochs=max_epochs)
    defaults = {
        "sequence_length": 64,
        "rows_per_step": 8,
        "seed": 3,
        "window_rows": 32,
        "threads": 0,
    }
    return Loader(source, **{**defaults, **settings})


def rows_of(loader, steps=60):
    return [row.tokens.tolist() for step in islice(loader, steps) for row in step]


@pytest.mark.parametrize("too_long", ["split", "drop", "truncate", "error"])
def test_concat_has_nothing_that_is_too_long(dataset, too_long):
    wanted = (
        f"source 'd': too_long='{too_long}' has no effect with packing 'concat'.*leave too_long out"
    )
    with pytest.raises(ConfigError, match=wanted):
        build(dataset, packing="concat", too_long=too_long)
    assert rows_of(build(dataset, packing="concat"), 1)


def test_a_run_file_is_refused_alike(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "data:\n  sources:\n    - {path: d, too_long: drop}\n"
        "  loader: {sequence_length: 64, rows_per_step: 8, packing: concat}\n"
    )
    with pytest.raises(ConfigError, match=r"'d': too_long='drop'.*'concat'"):
        load_run(file)


def test_unset_is_split(dataset):
    """In rows and in states: what was saved with the one resumes with the other."""
    unset, split = build(dataset), build(dataset, too_long="split")
    assert rows_of(unset) == rows_of(split)
    build(dataset).load_state_dict(split.state_dict())


@pytest.mark.parametrize(("packing", "shuffle"), [*product(PACKINGS, SHUFFLE_CODES)])
def test_what_changes_rows_with_which_packing_and_shuffle(dataset, packing, shuffle):
    """The settings that a packing ignores, and no others, leave the rows as they are: those that
    the docs name.
    """

    def rows(**settings):
        return rows_of(build(dataset, packing=packing, **{"shuffle": shuffle, **settings}))

    plain = rows()
    changes = {
        "window_rows": rows(window_rows=7) != plain,
        "seed": rows(seed=4) != plain,
        "slice": rows(slice=(0.5, 1.0)) != plain,
        "max_epochs": rows(max_epochs=0.2) != plain,
        "sequence_length": rows(sequence_length=65) != plain,
    }
    if packing != "concat":
        changes |= {value: rows(too_long=value) != plain for value in ("drop", "truncate")}
    idle = {name for name, has_effect in changes.items() if not has_effect}
    expected = {"window_rows"} if packing in ("next_fit", "concat", "none") else set()
    assert idle == expected | ({"seed"} if shuffle == "none" else set())
    for name in expected:
        sentence = re.search(
            rf'    {name}: .*\n    """([^"]*)"""', inspect.getsource(PlanSettings)
        )[1]
        assert all(f"`{each}`" in sentence for each in ("next_fit", "concat", "none"))


def test_a_capacity_for_nothing(dataset):
    with pytest.raises(ConfigError, match=r"cu_seqlens_capacity.*9.*cu_seqlens"):
        build(dataset, requirements=InputRequirements(asked_by="a layer", cu_seqlens_capacity=9))
