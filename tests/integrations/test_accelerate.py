"""Accelerate: state in save_state, rows and losses on any ranks, and what is refused."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate_run import train
from rank_runs import losses_of, rows_of, run_on_ranks
from tiny_models import make_loader, make_model

import penstock as ps
from penstock.core.errors import ConfigError, DistributedError, StateError
from penstock.integrations.accelerate import AcceleratorSteps


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    """Accelerate keeps its state for the whole process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_stopped_and_resumed_equals_uninterrupted(tmp_path: Path, weighted: Path) -> None:
    """And its losses are those of documents run alone, over the weights of the whole step."""
    whole = train(str(weighted), str(tmp_path / "whole"), 6)
    for stop in (1, 4):
        first = train(str(weighted), str(tmp_path / str(stop)), stop)
        second = train(str(weighted), str(tmp_path / str(stop)), 6)
        assert first["seen"] + second["seen"] == whole["seen"]
        assert first["losses"] + second["losses"] == whole["losses"]
    assert whole["losses"] == pytest.approx(whole["alone"], rel=1e-5)
    assert train(str(weighted), str(tmp_path / "whole"), 6)["losses"] == []


@pytest.mark.slow
def test_two_ranks_and_one_take_turns(tmp_path: Path, weighted: Path) -> None:
    whole = train(str(weighted), str(tmp_path / "whole"), 6)
    settings = {"data": str(weighted), "folder": str(tmp_path / "cut")}
    parts = [
        run_on_ranks("accelerate_run.py", tmp_path / str(steps), size, steps=steps, **settings)
        for steps, size in ((2, 2), (4, 1), (6, 2))
    ]
    assert [rows for found in parts for rows in rows_of(found, 2)] == whole["seen"]
    losses = [loss for found in parts for loss in losses_of(found)]
    assert losses == pytest.approx(whole["losses"], rel=1e-4)
    alone = [
        sum(each)
        for found in parts
        for each in zip(*(rank["alone"] for rank in found), strict=True)
    ]
    assert losses == pytest.approx(alone, rel=1e-4)


def test_preparing_changes_no_rows(weighted: Path) -> None:
    """Neither of the steps nor of the loader."""
    accelerator = Accelerator(cpu=True)
    data = AcceleratorSteps(accelerator, make_loader(weighted))
    loader = make_loader(weighted)
    assert accelerator.prepare(data) is data
    assert accelerator.prepare(loader) is loader
    for found, wanted in zip(islice(data, 1), make_loader(weighted), strict=False):
        assert [row.tokens.tolist() for row in found] == [row.tokens.tolist() for row in wanted]


def test_passes_of_several_rows_add_up(weighted: Path) -> None:
    accelerator = Accelerator(cpu=True)
    data = AcceleratorSteps(accelerator, make_loader(weighted))
    model = accelerator.prepare(make_model())
    step = next(iter(data))
    gradients = []
    for size in (1, 3, 4):
        model.zero_grad()
        sizes = []
        for rows in data.rows(step, model, rows_per_pass=size):
            sizes.append(len(rows))
            data.backward(ps.huggingface.loss(model, rows, step.loss_denominator))
        assert sizes == {1: [1] * 4, 3: [3, 1], 4: [4]}[size]
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], gradients[2])
    with pytest.raises(ConfigError, match="rows_per_pass must be at least 1, got 0"):
        next(data.rows(step, rows_per_pass=0))


def test_a_state_is_that_of_the_last_trained_step(tmp_path: Path, weighted: Path) -> None:
    accelerator = Accelerator(cpu=True)
    data = AcceleratorSteps(accelerator, make_loader(weighted))
    steps = iter(data)
    data.trained(next(steps))
    next(steps)
    accelerator.save_state(tmp_path / "saved")
    with pytest.raises(StateError, match="step 1 is not marked as trained"):
        next(steps)
    accelerator.load_state(tmp_path / "saved")
    assert next(iter(data)).index == 1


def test_what_cannot_be_right_is_refused(weighted: Path) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(DistributedError, match=r"rank.*1.*2.*Accelerator.*process.*1"):
        AcceleratorSteps(accelerator, make_loader(weighted, ranks=(1, 2)))
    with pytest.raises(ConfigError, match=r"expected a penstock\.Loader, got 3"):
        AcceleratorSteps(accelerator, 3)  # type: ignore[arg-type]
    data = AcceleratorSteps(accelerator, make_loader(weighted))
    accelerator.gradient_accumulation_steps = 4
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=4"):
        data.backward(torch.ones(1))
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=4"):
        AcceleratorSteps(accelerator, make_loader(weighted))


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM"])
def test_engines_are_refused(weighted: Path, kind: str) -> None:
    from accelerate.utils import DistributedType

    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType[kind]
    with pytest.raises(ConfigError, match=rf"{kind}.*supported.*decide"):
        AcceleratorSteps(accelerator, make_loader(weighted))


def test_a_torch_data_loader_around_it_is_refused(weighted: Path) -> None:
    """Accelerate would share out its rows a second time."""
    data = torch.utils.data.DataLoader(make_loader(weighted), batch_size=None)  # type: ignore[arg-type]
    batches = iter(Accelerator(cpu=True).prepare(data))
    with pytest.raises(TypeError, match="has no len"):
        next(batches)
