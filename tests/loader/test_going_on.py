"""A loader that goes on from another's place: what was seen does not come again in its epoch, and
all else comes.
"""

import json
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from makers.datasets import random_documents
from penstock.core.errors import ConfigError, StateError
from penstock.core.randomness import key_for, mix
from penstock.plan.loader.standing import place_after, what_becomes
from penstock.plan.loader.step_planner import StepPlanner
from penstock.plan.sampling import Permutation
from penstock.use.inspection import dry_run

DOCUMENTS = random_documents(120, 1, 60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("places")
    for count in (20, 50, 51, 70, 120):
        # Their documents are divided in other ways into shards and batches.
        ps.write_dataset(
            folder / str(count), DOCUMENTS[:count], documents_per_shard=13 if count == 70 else 1000
        )
    ps.write_dataset(folder / "more", DOCUMENTS[50:])
    ps.write_dataset(folder / "other", random_documents(30, 1, 60, seed=1))
    return folder


def make(sources, **more):
    return ps.Loader(
        ps.Mixture(sources),
        **{"sequence_length": 32, "rows_per_step": 3, "seed": 2, "threads": 0, **more},
    )


def pieces_of(loader, steps=10_000):
    """(source, epoch, document, first token, tokens) of each piece in order, and the place after
    the last step.
    """
    plan = loader.new_plan()
    planner, found, place, sizes = StepPlanner(plan, 1), [], None, plan.sizes
    while steps and (step := planner.next()) is not None:
        for piece in step.pieces:
            source = plan.mixture.sources[piece["source"]].name
            epoch = int(piece["position"] // sizes[piece["source"]])
            found.append(
                (source, epoch, int(piece["document"]), int(piece["begin"]), int(piece["tokens"]))
            )
        place, steps = place_after(plan, step), steps - 1
    return found, json.loads(json.dumps(place))


def tokens_of(pieces):
    """How often each (source, epoch, document, token) is there."""
    return Counter((*piece[:3], piece[3] + i) for piece in pieces for i in range(piece[4]))


def all_tokens(source, documents, epoch):
    return {
        (source, epoch, number, token)
        for number in documents
        for token in range(len(DOCUMENTS[number]))
    }


def source(folder, count=50, share=1.0, **more):
    return ps.Source(folder / str(count), share, **{"name": "a", "max_epochs": 2, **more})


packings = st.sampled_from(["best_fit", "best_fit_decreasing", "next_fit", "concat", "none"])


@settings(deadline=None, max_examples=60)
@given(
    packings,
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
    st.sampled_from(["full", "none", "block"]),
)
def test_nothing_is_lost_and_nothing_comes_twice(folder, packing, stops, shuffle):
    """A chain of loaders with other shares and other steps: together they see each token of two
    epochs once.
    """
    seen, place = Counter(), None
    for number, stop in enumerate([*stops, 10_000]):
        sources = [
            source(folder, share=1 + number, shuffle=shuffle),
            source(folder, 20, name="b", max_epochs=3),
        ]
        loader = make(
            sources,
            packing=packing,
            rows_per_step=3 + number,
            window_rows=16 * (number + 1),
            continue_from=place,
        )
        found, after = pieces_of(loader, stop)
        seen.update(tokens_of(found))
        place = after or place
    due = set().union(*(all_tokens("a", range(50), epoch) for epoch in range(2)))
    due |= set().union(*(all_tokens("b", range(20), epoch) for epoch in range(3)))
    assert set(seen) == due
    assert set(seen.values()) == {1}


@settings(deadline=None, max_examples=60)
@given(
    packings,
    st.integers(1, 60),
    st.integers(1, 20),
    st.sampled_from(["full", "none"]),
    st.sampled_from([51, 70, 120]),
)
def test_a_dataset_that_grows(folder, packing, first, second, shuffle, count):
    """It grows twice: the epoch under way has all its documents once, those of earlier ones once,
    of later ones all.
    """
    one, place = pieces_of(
        make([source(folder, 50, max_epochs=3, shuffle=shuffle)], packing=packing), first
    )
    under_way = place["sources"]["a"]["epoch"]
    grown = source(folder, count, max_epochs=3, shuffle=shuffle)
    two, place = pieces_of(make([grown], packing=packing, continue_from=place), second)
    again = place["sources"]["a"]["epoch"]
    largest = source(folder, 120, max_epochs=3, shuffle=shuffle)
    three, _ = pieces_of(make([largest], packing=packing, continue_from=place))
    sizes = [50 if epoch < under_way else count if epoch < again else 120 for epoch in range(3)]
    seen = tokens_of(one + two + three)
    assert set(seen) == set().union(
        *(all_tokens("a", range(size), epoch) for epoch, size in enumerate(sizes))
    )
    assert set(seen.values()) == {1}


def slow_order(size, epoch, shuffle):
    key = int(mix(np.uint64(key_for(2, "source", "a")), np.uint64(epoch)))
    return Permutation(size=size, key=key, shuffle=shuffle).images().tolist()


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 40), st.sampled_from(["full", "none"]), st.sampled_from([50, 70]), st.booleans()
)
def test_documents_come_in_the_order_of_their_epochs(folder, stop, shuffle, count, packs):
    """Rows of one document each show the order: that of each epoch over all documents, without
    those that were seen.
    """
    packing = "best_fit" if packs else "none"
    seen, place = pieces_of(
        make([source(folder, shuffle=shuffle)], packing=packing, sequence_length=64), stop
    )
    grown = source(folder, count, shuffle=shuffle)
    found, _ = pieces_of(make([grown], packing="none", sequence_length=64, continue_from=place))
    before = {(epoch, document) for _, epoch, document, _, _ in seen}
    due = []
    for epoch in range(place["sources"]["a"]["epoch"], 2):
        due += [
            (epoch, document)
            for document in slow_order(count, epoch, shuffle)
            if (epoch, document) not in before
        ]
    assert [(epoch, document) for _, epoch, document, _, _ in found] == due


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 12),
    packings,
    packings,
    st.sampled_from([20, 32, 64]),
    st.sampled_from(["split", "truncate", "keep_end"]),
)
def test_rows_of_another_length(folder, stop, before, after, slots, too_long):
    """No token is lost; one comes twice only in a document that was cut, where its beginning was
    not seen.
    """
    first = source(folder, max_epochs=1, too_long=None if before == "concat" else too_long)
    one, place = pieces_of(make([first], packing=before), stop)
    second = source(folder, max_epochs=1)
    two, _ = pieces_of(make([second], packing=after, sequence_length=slots, continue_from=place))
    seen = tokens_of(one + two)
    cut = [number for number in range(50) if len(DOCUMENTS[number]) > 32]
    twice = {key[2] for key, count in seen.items() if count > 1}
    lost = {key[2] for key in all_tokens("a", range(50), 0) - set(seen)}
    assert twice <= set(cut)
    # Only what was truncated before its place, which is what truncation means.
    assert lost <= (set() if too_long == "split" or before == "concat" else set(cut))
    if slots == 32 and too_long == "split":
        assert not twice or {before, after} & {"concat"}


def test_a_state_in_a_loader_that_goes_on(folder):
    _, place = pieces_of(make([source(folder)]), 11)
    loader = make(
        [source(folder, 70), ps.Source(folder / "other", max_epochs=1)], continue_from=place
    )
    steps = list(loader)
    rows = [[row.tokens.tolist() for row in step] for step in steps]
    for number, step in enumerate(steps):
        later = make(
            [source(folder, 70), ps.Source(folder / "other", max_epochs=1)],
            continue_from=place,
            threads=1,
        )
        later.load_state_dict(json.loads(json.dumps(step.resume_state)))
        assert [[row.tokens.tolist() for row in step] for step in later] == rows[number + 1 :]
    with pytest.raises(StateError, match=r"places.*sources.*\(continue_from\)"):
        make([source(folder, 70), ps.Source(folder / "other", max_epochs=1)]).load_state_dict(
            steps[0].resume_state
        )
    _, another = pieces_of(make([source(folder)]), 12)
    with pytest.raises(StateError, match="the places at which the sources begin"):
        make(
            [source(folder, 70), ps.Source(folder / "other", max_epochs=1)], continue_from=another
        ).load_state_dict(steps[0].resume_state)


def test_the_place_of_a_step_that_was_made_ahead_in_threads(folder):
    loader, found = make([source(folder)], threads=2, prefetch=4), []
    for number, step in enumerate(loader):
        found.append(step.place)
        assert step.place == pieces_of(make([source(folder)]), number + 1)[1]
    assert [place["step"] for place in found] == list(range(1, len(found) + 1))


def test_what_becomes_of_each_source_is_said(folder):
    one = make(
        [source(folder), ps.Source(folder / "other", max_epochs=1), source(folder, 20, name="gone")]
    )
    _, place = pieces_of(one, 6)
    now = [
        source(folder, 70, max_epochs=None),
        ps.Source(folder / "other"),
        source(folder, 20, name="fresh"),
    ]
    loader = make(now, continue_from=place)
    index = place["sources"]["other"]["drawn"][0][1]
    assert what_becomes(loader.new_plan()) == [
        (
            "source 'a' has grown by 20 documents to 70: they come in epoch 0, with those of it "
            "that were not seen"
        ),
        f"source 'other' goes on after {index} of 30 documents of epoch 0",
        "source 'fresh' is new: begins at its beginning",
        "source 'gone' is no longer there",
    ]


def test_a_list_of_the_old_dataset_and_a_new_one_has_grown(folder):
    one, place = pieces_of(make([source(folder, max_epochs=1)]), 8)
    both = ps.Source([folder / "50", folder / "more"], name="a", max_epochs=1)
    two, after = pieces_of(make([both], continue_from=place), 5)
    # A list that gets longer, and its first part alone.
    three = ps.Source([folder / "50", folder / "more", folder / "other"], name="a", max_epochs=1)
    make([three], continue_from=after)
    seen = tokens_of(one + two + pieces_of(make([both], continue_from=after))[0])
    assert set(seen) == all_tokens("a", range(120), 0)
    assert set(seen.values()) == {1}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"path": "other"},
            "source 'a' cannot go on where it stood: it had 50 documents in use, and has 30",
        ),
        ({"path": "more"}, "its first 50 documents are others than then"),
        ({"slice": (0.0, 0.5)}, "it had 50 documents in use, and has 25"),
        ({"slice": (0.2, 1.0)}, "first document of its slice was 0, is 10"),
        ({"shuffle": "none"}, "shuffle was full, is none"),
        ({"seed": 3}, "seed was 2, is 3"),
        ({"max_epochs": 0.1}, r"max_epochs is 0\.1, and it stands in epoch 0 .*give 1 or more"),
        ({"path": "70", "max_epochs": 0.9}, r"max_epochs is 0\.9, and it stands in epoch 0"),
    ],
)
def test_a_source_that_cannot_go_on(folder, change, told):
    _, place = pieces_of(make([source(folder)]), 8)
    change = dict(change)
    seed = change.pop("seed", 2)
    path = folder / change.pop("path", "50")
    given_source = ps.Source(path, name="a", **{"max_epochs": 2, **change})
    with pytest.raises(ConfigError, match=told):
        make([given_source], continue_from=place, seed=seed)
    # Under another name it is new.
    make([ps.Source(path, name="another", **change)], continue_from=place, seed=seed)


def test_a_source_that_has_ended(folder):
    sources = [source(folder, 20, max_epochs=1, share=3.0), ps.Source(folder / "50", name="b")]
    _, place = pieces_of(make(sources), 40)
    found, _ = pieces_of(make(sources, continue_from=place), 10)
    assert {piece[0] for piece in found} == {"b"}
    raised = [source(folder, 20, max_epochs=2, share=3.0), sources[1]]
    assert {piece[:2] for piece in pieces_of(make(raised, continue_from=place), 10)[0]} >= {
        ("a", 1)
    }


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda place: {}, "this is not a place in the data"),
        (lambda place: {**place, "format": 2}, "the place: place in the data format version 2"),
        (lambda place: {**place, "sources": []}, "this is not a place"),
        (
            lambda place: with_source(place, drawn=[]),
            "this is not a place in the data, or it was damaged",
        ),
        (lambda place: with_source(place, drawn=[[50, 51]]), "or it was damaged"),
        (lambda place: with_source(place, epoch=-1), "or it was damaged"),
        (lambda place: with_source(place, seen=[3, "x"]), "or it was damaged"),
    ],
)
def test_what_is_no_place(folder, damage, told):
    _, place = pieces_of(make([source(folder)]), 4)
    with pytest.raises(StateError, match=told):
        make([source(folder)], continue_from=damage(place))


def with_source(place, **values):
    return {**place, "sources": {"a": {**place["sources"]["a"], **values}}}


def test_a_copy_and_a_look_begin_there_too(folder, capsys):
    _, place = pieces_of(make([source(folder)]), 11)
    loader = make([source(folder)], continue_from=place, first_step=11)
    rows = [[row.tokens.tolist() for row in step] for step in loader]
    copy = pickle.loads(pickle.dumps(make([source(folder)], continue_from=place, first_step=11)))
    assert copy.step == 11
    assert [[row.tokens.tolist() for row in step] for step in copy] == rows
    report = dry_run(
        make([source(folder)], continue_from=place, first_step=11, data_parallel=(0, 3)), 4
    )
    assert report.tokens == sum(len(piece) for step in rows[:4] for piece in step) - report.padding
    ps.inspect(make([source(folder)], continue_from=place, first_step=11), step=12)
    assert "penstock" not in capsys.readouterr().err


def test_a_run_is_not_begun_by_a_loader_that_goes_on(folder, tmp_path):
    _, place = pieces_of(make([source(folder)]), 11)
    model = ps.build_model(layers=1, width=16, heads=2, vocab_size=900)
    for given_start in ({"continue_from": place}, {"first_step": 3}):
        with pytest.raises(ConfigError, match="continue_from=RUN"):
            ps.train(model, make([source(folder)], **given_start), output=tmp_path / "run", steps=2)
