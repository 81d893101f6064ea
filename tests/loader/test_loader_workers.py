"""A loader among torch's worker processes: iterating there is refused; steps and loaders go through
pickle.
"""

import multiprocessing
import pickle
from itertools import islice

import numpy as np
import pytest

from contracts import assert_same_step
from makers.datasets import random_documents
from patience import PATIENCE_SECONDS
from penstock import Loader, Mixture, ShareChange, Source, write_dataset
from penstock.core.errors import ConfigError, DistributedError, StateError

torch_data = pytest.importorskip("torch.utils.data")

# torch warns of more workers than cores, of which machines differ.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("workers") / "d", random_documents(400, 2, 90))


def build(dataset, **settings):
    mixture = Mixture([Source(dataset, max_epochs=3)], [ShareChange(step=2, shares={"d": 2.0})])
    return Loader(mixture, **{"sequence_length": 64, "rows_per_step": 4, "seed": 3, **settings})


class Rows(torch_data.IterableDataset):
    """What a user writes around a loader."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        for step in self.loader:
            yield from (row.tokens for row in step)


class Given(torch_data.IterableDataset):
    """Steps that were made before; worker 0 gives them."""

    def __init__(self, steps):
        self.steps = steps

    def __iter__(self):
        yield from self.steps if torch_data.get_worker_info().id == 0 else ()


def through_workers(dataset, how, number=2):
    options = {"num_workers": number, "multiprocessing_context": how, "timeout": PATIENCE_SECONDS}
    return list(torch_data.DataLoader(dataset, batch_size=None, **options))


@pytest.mark.parametrize(("how", "number"), [("fork", 2), ("spawn", 1)])
def test_a_worker_process_may_not_iterate(dataset, how, number):
    with pytest.raises(DistributedError, match=rf"worker 0.*{number}, .*num_workers=0"):
        through_workers(Rows(build(dataset)), how, number)


def test_without_worker_processes_every_row_comes_once(dataset):
    rows = list(torch_data.DataLoader(Rows(build(dataset)), batch_size=None, num_workers=0))
    plain = [row.tokens for step in build(dataset) for row in step]
    assert len(rows) == len(plain)
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(rows, plain, strict=True))


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_steps_come_out_of_a_worker_as_they_were(dataset, how):
    steps = list(islice(build(dataset, threads=2), 5))
    found = through_workers(Given(steps), how)
    for mine, theirs in zip(found, steps, strict=True):
        assert_same_step(mine, theirs)


def give_back(end, loader):
    """Send a loader's next step and that step's state to the other process."""
    (step,) = islice(loader, 1)
    end.send(step)


def test_a_loader_goes_on_in_another_process(dataset):
    """Its settings, its data and its state: here made with threads, at step 3 of rank 1 of 2."""
    loader = build(dataset, threads=2, data_parallel=(1, 2), packing="next_fit", pad_id=7)
    whole = list(islice(build(dataset, data_parallel=(1, 2), packing="next_fit", pad_id=7), 5))
    loader.seek(3)
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=give_back, args=(there, loader))
    child.start()
    there.close()
    step = here.recv()
    child.join()
    assert_same_step(step, whole[3])


def test_a_pickled_loader_is_the_same(dataset):
    loader = build(dataset, attention="row", threads=0, prefetch=5, pin_memory=False)
    twin = pickle.loads(pickle.dumps(loader))
    assert repr(twin) == repr(loader)
    assert twin.requirements == loader.requirements
    for mine, theirs in zip(islice(twin, 3), islice(loader, 3), strict=True):
        assert_same_step(mine, theirs)


class Companion:
    def begin(self, sources):
        return lambda row, pieces: None


def test_what_cannot_be_pickled_says_so(dataset):
    with pytest.raises(ConfigError, match=r"companion.*process"):
        pickle.dumps(build(dataset, companion=Companion()))
    loader = build(dataset)
    steps = iter(loader)
    next(steps)
    with pytest.raises(StateError, match="an iterator under way"):
        pickle.dumps(loader)
