"""Wrong values are refused by name where they come in; what is printed of a step is short; long
replays show a bar.
"""

import sys

import numpy as np
import pytest

from penstock import (
    DataParallel,
    InputRequirements,
    Loader,
    Mixture,
    ShareChange,
    Source,
    write_dataset,
)
from penstock.core.errors import ConfigError, DistributedError, StateError
from penstock.plan.loader import step_planner as replay


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    generator = np.random.default_rng(0)
    return write_dataset(
        tmp_path_factory.mktemp("arguments") / "d",
        [generator.integers(0, 9, 9) for _ in range(500)],
    )


def build(dataset, **kwargs):
    return Loader(dataset, **{"sequence_length": 32, "rows_per_step": 4, "threads": 0, **kwargs})


@pytest.mark.parametrize(
    "name",
    ["sequence_length", "rows_per_step", "seed", "window_rows", "threads", "prefetch", "pad_id"],
)
@pytest.mark.parametrize("value", ["x", 8.5, None])
def test_whole_numbers(dataset, name, value):
    with pytest.raises(ConfigError, match=f"{name} .*whole number, got {value!r}"):
        build(dataset, **{name: value})


def test_steps(dataset):
    loader = build(dataset)
    for move in (loader.seek, loader.explain):
        with pytest.raises(ConfigError, match="step must be a whole number, got '3'"):
            move("3")
        with pytest.raises(ConfigError, match="steps are numbered from 0, got -1"):
            move(-1)
    with pytest.raises(ConfigError, match="row must be a whole number, got 'x'"):
        loader.explain(0, "x")
    assert loader.seek(np.int64(3)).step == 3


def test_sources_and_places(dataset):
    with pytest.raises(ConfigError, match=r"source.*'d'.*number.*'tokens'.*'x'"):
        Source(dataset, share="x")
    for field, value in (("max_epochs", "x"), ("slice", (0, "x"))):
        with pytest.raises(ConfigError, match=f"'d': {field} .*a number, got 'x'"):
            Source(dataset, **{field: value})
    with pytest.raises(ConfigError, match=r"slice.*fractions.*0.5"):
        Source(dataset, slice=0.5)
    with pytest.raises(ConfigError, match="step must be a whole number, got 'x'"):
        ShareChange(step="x", shares={})
    with pytest.raises(ConfigError, match=r"change.*step.*3.*'d'.*number.*'x'"):
        Mixture([Source(dataset)], [ShareChange(step=3, shares={"d": "x"})])
    with pytest.raises(ConfigError, match=r"data_parallel.*'a'"):
        DataParallel.of(("a", 2))


def test_things_that_are_something_else(dataset):
    for source in (5, None):
        with pytest.raises(ConfigError, match=rf"source.*dataset.*got.*{source}"):
            build(source)
    with pytest.raises(ConfigError, match=r"penstock\.Causal\(\).*'causal'"):
        Source(dataset, objective="causal")
    with pytest.raises(ConfigError, match=r"penstock\.InputRequirements.*'all'"):
        build(dataset, requirements="all")
    with pytest.raises(ConfigError, match=r"target_distances.*'2'"):
        InputRequirements(target_distances="2")
    with pytest.raises(ConfigError, match=r"pad_id must be a token id, .* got -1"):
        build(dataset, pad_id=-1)
    with pytest.raises(ConfigError, match="row must be 0 … 3 in this step, got 99"):
        build(dataset).explain(0, 99)
    assert [source.name for source in Mixture(dataset).sources] == ["d"]


@pytest.mark.parametrize("name", ["step", "row", "window", "rows"])
def test_states_with_counts_below_zero(dataset, name):
    with pytest.raises(StateError, match=r"it was damaged .*a count below 0"):
        build(dataset).load_state_dict({**build(dataset).state_dict(), name: -4})


def test_an_environment_that_is_no_number(monkeypatch):
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DistributedError, match=r"RANK.*'first'.*WORLD_SIZE.*'2'.*numbers"):
        DataParallel.from_env()


def test_prints_are_one_short_line(dataset):
    step = next(iter(build(dataset, sequence_length=100_000, rows_per_step=2)))
    assert repr(step).startswith(
        "Step(0: 2 rows here; over all ranks 199998 tokens, loss_denominator "
    )
    row = repr(step[0])
    assert row.startswith(
        "ModelInput(11111 documents, 99999 tokens; tokens int32[100000], targets int32[1, 100000], "
    )
    loader = repr(build([dataset, Source(dataset, name="again")]).seek(7))
    assert loader == "Loader(d, again: steps of 4 rows of 32 tokens, at step 7, rank 0 of 1)"
    for text in (repr(step), row):
        assert "\n" not in text
        assert len(text) < 300


class Terminal:
    def __init__(self, is_terminal):
        self.text, self.isatty = "", lambda: is_terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize(
    ("is_terminal", "rank", "shown"), [(True, 0, True), (False, 0, False), (True, 1, False)]
)
def test_a_long_replay_shows_how_far_it_is(dataset, monkeypatch, is_terminal, rank, shown):
    monkeypatch.setattr(sys, "stderr", Terminal(is_terminal))
    loader = build(dataset, window_rows=1, data_parallel=(rank, 2))
    loader.seek(200)
    assert sys.stderr.text == ""
    monkeypatch.setattr(replay, "SHOW_AFTER", 0.0)
    loader.explain(500)
    assert ("replaying the plan" in sys.stderr.text) == shown
    loader.seek(900)
    assert ("100%" in sys.stderr.text) == shown


def test_elsewhere_a_very_long_replay_says_so_in_a_line(dataset, monkeypatch, capsys):
    monkeypatch.setattr(replay, "PLAIN_SECONDS", 0.0)
    build(dataset).seek(500)
    assert capsys.readouterr().err.startswith("replaying the plan: 100%")


@pytest.mark.parametrize("share", [1, True, np.float64(1)])
def test_a_state_does_not_ask_how_a_share_was_written(dataset, share):
    def make(value):
        mixture = Mixture(
            [Source(dataset, 0.5, "a"), Source(dataset, 0.5, "b")],
            [ShareChange(step=3, shares={"a": value})],
        )
        return Loader(mixture, sequence_length=8, rows_per_step=1)

    make(1.0).load_state_dict(make(share).state_dict())
