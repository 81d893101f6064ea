"""A state under a higher `max_epochs`: the rows are those of a loader that had it from the start,
or it is refused.
"""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from makers.datasets import random_documents
from penstock.core.errors import ConfigError, StateError

DOCUMENTS = random_documents(60, 1, 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("epochs")
    ps.write_dataset(folder / "a", DOCUMENTS)
    ps.write_dataset(folder / "b", DOCUMENTS[:15])
    ps.write_dataset(folder / "even", [[7, 8, 9, 10]] * 48)
    return folder


def make(folder, epochs, *others, name="a", **more):
    sources = [ps.Source(folder / name, max_epochs=epochs, share=3.0), *others]
    return ps.Loader(
        ps.Mixture(sources), **{"sequence_length": 32, "rows_per_step": 4, "threads": 0, **more}
    )


def rows_of(steps):
    return [[row.tokens.tolist() for row in step] for step in steps]


def resumed(loader, state):
    said = []
    loader.load_state_dict(json.loads(json.dumps(state)), say=said.append)
    return loader, said


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["best_fit", "best_fit_decreasing", "next_fit", "concat", "none"]),
    st.sampled_from([(1, 2), (1, None), (2, 5), (2, 1.5), (1.5, 2), (None, 3)]),
    st.integers(0, 60),
)
def test_rows_are_those_of_the_higher_limit_from_the_start(folder, packing, limits, at):
    """At any step whose window the old limit did not end; else nothing is lost, and nothing comes
    twice.
    """
    before, after = limits
    due = rows_of(
        step for step, _ in zip(make(folder, after, packing=packing), range(80), strict=False)
    )
    steps = [
        step for step, _ in zip(make(folder, before, packing=packing), range(at + 1), strict=False)
    ]
    rows, state = rows_of(steps), steps[-1].resume_state
    try:
        loader, said = resumed(make(folder, after, packing=packing), state)
    except StateError as refused:
        told = str(refused)
    else:
        told = ""
    if told:
        assert (
            "rows that were trained would be others" in told
            or "it cannot be lower than that" in told
        )
        # It is never refused where the rows are the same and there are more.
        assert rows != due[: len(rows)] or len(due) <= len(rows)
        return
    words = ["no limit" if limit is None else f"{limit:g}" for limit in limits]
    [sentence] = said
    assert sentence.startswith(f"max_epochs of source 'a' was {words[0]}, is {words[1]}")
    if "after the end" not in sentence:
        found = rows_of(step for step, _ in zip(loader, range(80 - len(rows)), strict=False))
        assert rows + found == due
    else:
        assert len(steps) < at + 1 or not rows_of(
            resumed(make(folder, before, packing=packing), state)[0]
        )


@pytest.mark.parametrize("packing", ["none", "next_fit", "concat", "best_fit"])
def test_after_the_end_of_full_steps(folder, packing):
    """Every row and every step is full when the sources end, so nothing of the old steps would be
    different.
    """
    settings_of = {
        "name": "even",
        "sequence_length": 8,
        "packing": packing,
        "rows_per_step": 4,
        "window_rows": 8,
    }
    first = list(make(folder, 3, **settings_of))
    loader, said = resumed(make(folder, 5, **settings_of), first[-1].resume_state)
    assert rows_of(first) + rows_of(loader) == rows_of(make(folder, 5, **settings_of))
    assert said == ["max_epochs of source 'a' was 3, is 5".replace("'a'", "'even'")]


@pytest.mark.parametrize("packing", ["best_fit", "concat", "none"])
def test_after_an_end_in_the_middle_of_a_row(folder, packing):
    options = {"packing": packing, "rows_per_step": {0: 4, 6: 6}}
    first = list(make(folder, 1, **options))
    loader, said = resumed(make(folder, 3, **options), first[-1].resume_state)
    assert said == ["max_epochs of source 'a' was 1, is 3: goes on after the end, in new rows"]
    second = list(loader)
    assert [step.index for step in second] == list(range(len(first), len(first) + len(second)))
    assert [len(step) for step in second[:-1]] == [
        4 if step.index < 6 else 6 for step in second[:-1]
    ]
    seen = Counter(
        token for step in second for row in step for token in row.tokens[: row.num_tokens].tolist()
    )
    assert seen == Counter(2 * [token for document in DOCUMENTS for token in document.tolist()])
    assert make_resumed(folder, options, first).count_steps() == len(first) + len(second)
    for number, step in enumerate(second):
        later, said = resumed(make(folder, 3, **options), step.resume_state)
        assert rows_of(later) == rows_of(second[number + 1 :])
        assert said == []
    # What this plan says of the steps before is not what was trained.
    with pytest.raises(ConfigError, match=rf"step 2.*known.*step.*{len(first)}"):
        later.seek(2)
    with pytest.raises(ConfigError, match="cannot seek to step 2"):
        later.explain(2)
    again = make_resumed(folder, options, first)
    list(again)
    assert rows_of(again.seek(len(first) + 1)) == rows_of(second[1:])
    # A second time, and a loader that starts fresh.
    third, said = resumed(make(folder, 4, **options), second[-1].resume_state)
    assert "was 3, is 4: goes on after the end" in said[0]
    assert next(iter(third)).index == len(first) + len(second)
    start = make(folder, 3, **options).state_dict()
    again.load_state_dict(start)
    assert rows_of(again) == rows_of(make(folder, 3, **options))


def make_resumed(folder, options, first):
    return resumed(make(folder, 3, **options), first[-1].resume_state)[0]


def test_a_source_that_had_ended_among_others(folder):
    """Rows since then went to the others, so the limit may be raised only when all have ended."""
    other = ps.Source(folder / "b", max_epochs=30)
    steps = list(make(folder, 1, other))
    resumed(make(folder, 2, other), steps[0].resume_state)
    with pytest.raises(StateError, match=r"'a'.*continue_from"):
        make(folder, 2, other).load_state_dict(steps[40].resume_state)
    loader, said = resumed(make(folder, 2, other), steps[-1].resume_state)
    assert len(said) == 1
    assert sum(row.num_tokens for step in loader for row in step) == sum(map(len, DOCUMENTS))


def test_lower_than_it_stands(folder):
    steps = list(make(folder, 3))
    with pytest.raises(StateError, match=r"'a': max_epochs.*3.*epoch 2"):
        make(folder, 1).load_state_dict(steps[-2].resume_state)


def test_other_changes_are_still_refused_with_the_cure(folder):
    state = next(iter(make(folder, 1))).resume_state
    with pytest.raises(StateError, match=r"made.*continue_from"):
        make(folder, 2, name="b").load_state_dict(state)
    with pytest.raises(StateError, match=r"num_sources was 1, is 2.*continue-from"):
        make(folder, 2, ps.Source(folder / "b", max_epochs=1)).load_state_dict(state)


def test_a_state_of_an_earlier_version(folder):
    """It does not say what the limits were."""
    state = next(iter(make(folder, 1))).resume_state
    del state["max_epochs"]
    make(folder, 1).load_state_dict(state)
    with pytest.raises(StateError, match=r"share.*objective"):
        make(folder, 2).load_state_dict(state)


def test_it_is_printed_by_one_rank(folder, capsys):
    state = next(iter(make(folder, 1))).resume_state
    for rank in range(2):
        make(folder, 2, data_parallel=(rank, 2)).load_state_dict(state)
    assert capsys.readouterr().err == "penstock: max_epochs of source 'a' was 1, is 2\n"
