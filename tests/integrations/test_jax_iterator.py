"""Batches with a state: saved after any batch and restored, they go on as before; through Grain and
Orbax too.
"""

import json
import sys
from itertools import islice

import numpy as np
import pytest
from tiny_models import make_loader

jax = pytest.importorskip("jax")

from penstock import jax as psj  # noqa: E402
from penstock.core.errors import MissingExtraError, StateError  # noqa: E402


def tokens_of(batches):
    return [np.asarray(batch.tokens).tolist() for batch in batches]


def make(folder, *, ranks=(0, 1), max_epochs=1, **options):
    return psj.BatchIterator(make_loader(folder, ranks=ranks, max_epochs=max_epochs), **options)


@pytest.mark.parametrize("batch_size", [None, 4, 2, 1])
def test_it_goes_on_after_every_batch(counting, batch_size):
    whole = tokens_of(make(counting, batch_size=batch_size))
    assert len(whole) > 12
    walked = make(counting, batch_size=batch_size)
    for count in range(len(whole) + 1):
        state = json.loads(json.dumps(walked.get_state()))
        resumed = make(counting, batch_size=batch_size)
        resumed.set_state(state)
        assert resumed.get_state() == state
        assert resumed.step == count // (4 // (batch_size or 4))
        assert tokens_of(islice(resumed, 3)) == whole[count : count + 3]
        next(walked, None)


def test_an_iterator_is_moved_in_place(counting):
    iterator = make(counting, batch_size=2)
    first = tokens_of(islice(iterator, 3))
    state = iterator.get_state()
    after = tokens_of(islice(iterator, 4))
    iterator.set_state(state)
    assert tokens_of(islice(iterator, 4)) == after
    iterator.set_state(make(counting, batch_size=2).get_state())
    assert tokens_of(islice(iterator, 3)) == first
    iterator.close()
    assert list(iterator) == []


def test_states_of_other_processes_are_the_same_and_fit_other_numbers(counting):
    one, two = make(counting), [make(counting, ranks=(rank, 2)) for rank in range(2)]
    for iterator in (one, *two):
        list(islice(iterator, 3))
    assert [iterator.get_state()["loader"] for iterator in two] == [one.get_state()["loader"]] * 2
    assert two[0].get_state() == two[1].get_state()
    resumed = make(counting)
    resumed.set_state(two[1].get_state())
    expected = tokens_of([next(one)])
    assert tokens_of([next(resumed)]) == expected
    halves = tokens_of(next(iterator) for iterator in two)
    assert [halves[0] + halves[1]] == expected


def test_a_state_inside_a_step_fits_its_own_shape_only(counting):
    iterator = make(counting, batch_size=2)
    next(iterator)
    with pytest.raises(StateError, match=r"after 1.*2 batches.*1.*processes"):
        make(counting, batch_size=1).set_state(iterator.get_state())
    with pytest.raises(StateError, match=r"2.*batches.*2.*those"):
        make(counting, ranks=(0, 2), batch_size=1).set_state(iterator.get_state())
    for wrong in ({}, {"loader": {}}, None):
        with pytest.raises(StateError, match=r"state.*BatchIterator.*loader"):
            iterator.set_state(wrong)
    with pytest.raises(StateError, match="sequence_length"):
        psj.BatchIterator(make_loader(counting, sequence_length=64), batch_size=2).set_state(
            iterator.get_state()
        )


def test_grain_is_named_when_it_is_missing(counting, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    psj.iterator._grain_class.cache_clear()
    with pytest.raises(MissingExtraError, match=r"installed.*install"):
        psj.grain_iterator(make_loader(counting))


@pytest.mark.parametrize("handler", ["grain", "json"])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_orbax_saves_and_restores_it(counting, tmp_path, handler, batch_size):
    grain = pytest.importorskip("grain", reason="needs Grain")
    ocp = pytest.importorskip("orbax.checkpoint", reason="needs Orbax")

    def begin():
        return psj.grain_iterator(make_loader(counting, max_epochs=1), batch_size=batch_size)

    assert isinstance(begin(), grain.DatasetIterator)
    whole = tokens_of(begin())
    iterator = begin()
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        list(islice(iterator, 5))
        save = (
            grain.checkpoint.CheckpointSave
            if handler == "grain"
            else lambda one: ocp.args.JsonSave(one.get_state())
        )
        manager.save(5, args=ocp.args.Composite(data=save(iterator)))
        next(iterator)  # goes on while it is saved
        manager.wait_until_finished()
    iterator.close()
    with pytest.raises(ValueError, match="closed"):
        next(iterator)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        resumed = begin()
        if handler == "grain":
            manager.restore(
                5, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(resumed))
            )
        else:
            resumed.set_state(
                manager.restore(5, args=ocp.args.Composite(data=ocp.args.JsonRestore()))["data"]
            )
    assert tokens_of(resumed) == whole[5:]
