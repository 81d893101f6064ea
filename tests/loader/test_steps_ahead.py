"""Consumers that take steps ahead of training, as Lightning does: no state past what was trained is
ever saved.
"""

import json
import threading
import time
from itertools import islice

import pytest

from contracts import assert_same_step
from makers.datasets import random_documents
from penstock import Loader, Source, write_dataset
from penstock.core.errors import CorruptionError, StateError
from penstock.plan.loader.step_iterator import StepPipeline

REFUSED = (
    r"an iterator under way, after step \d+: .*save `step.resume_state` of the last step that was "
    r"trained"
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("ahead") / "d", random_documents(200, 2, 90))


def build(dataset, threads=0):
    return Loader(
        Source(dataset, max_epochs=1), sequence_length=64, rows_per_step=8, threads=threads
    )


class Fetcher:
    """Lightning 2.6's `_PrefetchDataFetcher`: of a loader without `len()` it takes one batch
    ahead.
    """

    def __init__(self, loader):
        self.iterator, self.batches, self.done = iter(loader), [], False
        self._fetch()

    def __iter__(self):
        return self

    def __next__(self):
        if not self.batches:
            raise StopIteration
        batch = self.batches.pop(0)
        self._fetch()
        return batch

    def _fetch(self):
        if not self.done:
            try:
                self.batches.append(next(self.iterator))
            except StopIteration:
                self.done = True


@pytest.mark.parametrize("threads", [0, 2])
def test_no_step_is_lost_at_any_moment(dataset, threads):
    """Stopped after any number of trained steps, also in the midst of one, and resumed."""
    whole = list(build(dataset))
    for trained in range(1, len(whole) + 1):
        loader = build(dataset, threads)
        fetcher = Fetcher(loader)
        steps = list(islice(fetcher, trained))
        with pytest.raises(StateError, match=REFUSED):
            loader.state_dict()
        resumed = build(dataset)
        resumed.load_state_dict(json.loads(json.dumps(steps[-1].resume_state)))
        for mine, theirs in zip(resumed, whole[trained:], strict=True):
            assert_same_step(mine, theirs)


def test_an_error_while_a_step_ahead_is_made_changes_nothing(tmp_path):
    folder = write_dataset(tmp_path / "d", [[7] * 50 for _ in range(200)]).path
    (shard,) = folder.glob("*.arrow")
    content = bytearray(shard.read_bytes())
    content[content.index(bytes([7, 0] * 5000)) + 8000] ^= 4
    shard.write_bytes(content)
    loader = Loader(Source(folder, max_epochs=1), sequence_length=64, rows_per_step=4)
    fetcher = Fetcher(loader)
    with pytest.raises(CorruptionError, match="document 80"):
        list(fetcher)
    with pytest.raises(StateError, match=REFUSED):
        loader.state_dict()


@pytest.mark.parametrize("threads", [0, 2])
def test_at_rest_a_loader_knows_its_place(dataset, threads):
    loader = build(dataset, threads)
    first = loader.state_dict()
    assert first["step"] == 0
    iterator = iter(loader)
    assert loader.state_dict() == first, "nothing was given"
    for step in loader:
        if step.index == 2:
            break
    assert loader.state_dict() == step.resume_state
    next(iterator)
    with pytest.raises(StateError, match=REFUSED):
        loader.state_dict()
    loader.seek(1)
    assert loader.state_dict()["step"] == 1, "the iterator was ended"
    loader.load_state_dict(first)
    assert loader.state_dict() == first
    last = list(loader)[-1]
    assert loader.state_dict() == last.resume_state


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("most", "due"), [(1, 1), (100, 1), (250, 2), (1000, 4)])
def test_waiting_results_are_bounded_in_bytes(threads, most, due):
    """Results of 100 bytes: as many as fit are made or wait, but always one."""
    made, taken, alive, peak = [], [], set(), []
    lock = threading.Lock()

    def fill(number):
        with lock:
            alive.add(number)
            peak.append(len(alive))
        time.sleep(0.002)
        made.append(number)
        return number

    numbers = iter(range(30))
    run = StepPipeline(lambda: next(numbers, None), fill, threads, 4, lambda _: 100, most)
    while (item := run.next()) is not None:
        with lock:
            alive.discard(item[1])
        taken.append(item[1])
        time.sleep(0.005)
    run.join()
    assert taken == list(range(30))
    assert max(peak) <= due + (1 if most >= 200 else 0)
    assert max(peak) >= min(due, 2)


def test_a_pipeline_that_waits_for_bytes_can_be_stopped():
    run = StepPipeline(iter(range(9)).__next__, lambda number: number, 2, 4, lambda _: 100, 100)
    assert run.next() == (0, 0)
    run.stop()
    run.join()
