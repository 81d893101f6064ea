"""The place of a loader in checkpoints of other loops: marked or yielded, in torch's checkpoints,
on other ranks.
"""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from rank_runs import losses_of, rows_of, run_on_ranks
from tiny_models import make_loader

from penstock.core.errors import ConfigError, DistributedError, StateError
from penstock.integrations import LoaderState


def tokens(step: Any) -> list[list[int]]:
    return [row.tokens.tolist() for row in step]


@pytest.fixture(scope="module")
def stream(counting: Path) -> list[list[list[int]]]:
    return [tokens(step) for step in islice(make_loader(counting), 8)]


def test_the_state_is_after_the_last_step_that_was_trained(
    counting: Path, stream: list[Any]
) -> None:
    """Whoever iterates, whatever was taken ahead, at every step."""
    for stop in range(4):
        loader = make_loader(counting)
        place, trained = LoaderState(loader), []
        steps = iter(loader)
        ahead = [next(steps), next(steps)]
        for _ in range(stop):
            place.trained(ahead[0])
            trained.append(tokens(ahead.pop(0)))
            ahead.append(next(steps))
        again = LoaderState(make_loader(counting))
        again.load_state_dict(place.state_dict())
        assert trained + [tokens(step) for step in islice(again.loader, 3)] == stream[: stop + 3]


def test_a_loop_over_it_goes_on_where_it_was_left(counting: Path, stream: list[Any]) -> None:
    """A step that was taken and not trained comes again, in this process too."""
    place, seen = LoaderState(make_loader(counting)), []
    for _ in range(3):
        for step in place:
            if len(seen) % 3 == 2:
                seen.append(tokens(step))
                break
            place.trained(step)
            seen.append(tokens(step))
    assert seen == [stream[i] for i in (0, 1, 2, 2, 3, 4, 4, 5, 6)]


def test_steps_that_are_not_marked_once_and_in_order_are_refused(counting: Path) -> None:
    place = LoaderState(make_loader(counting))
    steps = iter(place)
    first = next(steps)
    with pytest.raises(StateError, match=r"step 0.*trained.*call"):
        next(steps)
    place.trained(first)
    with pytest.raises(StateError, match=r"step.*0.*marked.*trained.*step.*1"):
        place.trained(first)
    place.loader.seek(5)
    with pytest.raises(StateError, match=r"step 5.*step 1.*load_state_dict"):
        next(iter(place))


def test_other_things_are_refused(counting: Path, weighted: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a penstock\.Loader, got 3"):
        LoaderState(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'taken'.*'marked'.*'yielded'"):
        LoaderState(make_loader(counting), trained="taken")  # type: ignore[arg-type]
    loader = make_loader(counting)
    steps = iter(loader)
    next(steps)
    with pytest.raises(StateError, match="with an iterator under way"):
        LoaderState(loader)
    place = LoaderState(make_loader(counting))
    with pytest.raises(StateError, match=r"state.*penstock.*LoaderState"):
        place.load_state_dict(make_loader(counting).state_dict())
    with pytest.raises(StateError, match="holds other documents"):
        place.load_state_dict(LoaderState(make_loader(weighted)).state_dict())


@pytest.mark.parametrize("threads", [0, 1])
def test_yielded_follows_the_convention_of_stateful_data_loaders(
    counting: Path, stream: list[Any], threads: int
) -> None:
    """After k items, the state gives item k + 1 next."""
    place = LoaderState(make_loader(counting, threads=threads), trained="yielded")
    states = [place.state_dict()]
    for step in place:
        states.append(place.state_dict())
        if step.index == 4:
            break
    for number, state in enumerate(states):
        again = LoaderState(make_loader(counting), trained="yielded")
        again.load_state_dict(state)
        assert [tokens(step) for step in islice(again, 2)] == stream[number : number + 2]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_torchdata_takes_it(counting: Path, stream: list[Any]) -> None:
    """In a StatefulDataLoader without workers; with them it is refused."""
    torchdata = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed: make test-integrations"
    )
    from torch.utils.data import IterableDataset

    class Steps(IterableDataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            self.place = LoaderState(make_loader(counting), trained="yielded")

        def __iter__(self) -> Any:
            return map(tokens, self.place)

        def state_dict(self) -> Any:
            return self.place.state_dict()

        def load_state_dict(self, state: Any) -> None:
            self.place.load_state_dict(state)

    for stop in (1, 3):
        first = torchdata.StatefulDataLoader(Steps(), batch_size=None, num_workers=0)
        seen = list(islice(first, stop))
        again = torchdata.StatefulDataLoader(Steps(), batch_size=None, num_workers=0)
        again.load_state_dict(first.state_dict())
        assert seen + list(islice(again, 2)) == stream[: stop + 2]
    with pytest.raises(DistributedError, match="set num_workers=0"):
        next(iter(torchdata.StatefulDataLoader(Steps(), batch_size=None, num_workers=1)))


@pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning", "ignore:.*no_dist:UserWarning"
)
def test_it_goes_through_torch_distributed_checkpoint(
    tmp_path: Path, counting: Path, stream: list[Any]
) -> None:
    import torch

    place = LoaderState(make_loader(counting))
    for step in place:
        place.trained(step)
        if step.index == 2:
            break
    dcp.save(
        {"loader": place, "weights": {"w": torch.ones(2)}},
        checkpoint_id=tmp_path / "saved",
        no_dist=True,
    )
    again = LoaderState(make_loader(counting))
    dcp.load(
        {"loader": again, "weights": {"w": torch.zeros(2)}},
        checkpoint_id=tmp_path / "saved",
        no_dist=True,
    )
    assert tokens(next(iter(again))) == stream[3]


@pytest.mark.slow
def test_the_fsdp_loop_resumes_on_another_number_of_ranks(tmp_path: Path, weighted: Path) -> None:
    """The rows and losses of one uninterrupted process, with a break and two ranks, then one."""
    settings = {"data": str(weighted), "every": 2}
    one = run_on_ranks(
        "fsdp_run.py", tmp_path / "one", 1, checkpoints=str(tmp_path / "whole"), steps=6, **settings
    )
    cut = {"checkpoints": str(tmp_path / "cut"), **settings}
    parts = [
        run_on_ranks("fsdp_run.py", tmp_path / f"{steps}", size, steps=steps, **cut)
        for steps, size in ((2, 2), (4, 1), (6, 2))
    ]
    assert [row for found in parts for row in rows_of(found, 2)] == rows_of(one, 6)
    losses = [loss for found in parts for loss in losses_of(found)]
    assert losses == pytest.approx(losses_of(one), rel=1e-4)
    # On as many ranks as before, to the last bit.
    whole = run_on_ranks(
        "fsdp_run.py",
        tmp_path / "two",
        2,
        checkpoints=str(tmp_path / "two_whole"),
        steps=2,
        **settings,
    )
    assert losses_of(whole) == losses_of(parts[0])


@pytest.mark.slow
def test_a_ddp_loop_resumes_in_new_processes(tmp_path: Path, weighted: Path) -> None:
    """The rows and losses of one uninterrupted process, and of documents run alone."""
    one = run_on_ranks(
        "ddp_run.py",
        tmp_path / "one",
        1,
        data=str(weighted),
        checkpoint=str(tmp_path / "1.pt"),
        steps=5,
    )
    settings = {"data": str(weighted), "checkpoint": str(tmp_path / "2.pt")}
    parts = [
        run_on_ranks("ddp_run.py", tmp_path / f"to_{steps}", 2, steps=steps, **settings)
        for steps in (2, 5)
    ]
    assert rows_of(parts[0], 2) + rows_of(parts[1], 3) == rows_of(one, 5)
    losses = [loss for found in parts for loss in losses_of(found)]
    assert losses == pytest.approx(losses_of(one), rel=1e-4)
    alone = [
        sum(each)
        for found in parts
        for each in zip(*(rank["alone"] for rank in found), strict=True)
    ]
    assert losses == pytest.approx(alone, rel=1e-4)
