"""torchtitan's dataloader: microbatches, states, refusals; its own Trainer on the CPU, resumed, on
1 and 2 ranks.
"""

import json
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make_dataset

pytest.importorskip(
    "torchtitan.components.dataloader",
    reason="torchtitan is not installed: pip install torchtitan==0.3.0",
)

import penstock as ps
from makers.processes import free_port, rank_environment
from patience import PATIENCE_SECONDS
from penstock.core.errors import ConfigError, StateError

pytestmark = pytest.mark.filterwarnings("ignore")


def build(
    data: Any, *, size: int = 2, rank: int = 0, ranks: int = 1, rows: int = 8, **settings: Any
) -> Any:
    """As torchtitan's trainer builds it."""
    given = {"dataset_path": str(data)} if isinstance(data, Path) else {"mixture": data}
    config = ps.torchtitan.DataLoader.Config(rows_per_step=rows, seed=3, **given, **settings)
    return config.build(
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer=None,
        seq_len=64,
        local_batch_size=size,
        snapshot_every_n_steps=None,
    )


def take(iterator: Any, count: int) -> list[Any]:
    return [
        [inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist()]
        for inputs, labels in islice(iterator, count)
    ]


def test_microbatches_are_the_rows(counting: Path) -> None:
    batches = iter(build(counting))
    steps = ps.Loader(counting, sequence_length=64, rows_per_step=8, seed=3)
    for step in islice(steps, 3):
        labels_of_step = 0
        for first in range(0, 8, 2):
            inputs, labels = next(batches)
            assert set(inputs) == {"input", "positions"}
            assert {one.dtype for one in (*inputs.values(), labels)} == {torch.int64}
            for place, row in enumerate(step[first : first + 2]):
                assert inputs["input"][place].tolist() == row.tokens.tolist()
                assert inputs["positions"][place].tolist() == row.positions.tolist()
                assert labels[place].tolist() == row.targets[0].tolist()
            labels_of_step += int((labels != -100).sum())
        assert labels_of_step == step.loss_denominator


def test_torchtitan_finds_our_documents(counting: Path) -> None:
    """Its own masks have the borders of the rows, and padding is one document."""
    common = pytest.importorskip(
        "torchtitan.models.common.attention", reason="torchtitan's models need triton"
    )
    step = next(iter(ps.Loader(counting, sequence_length=64, rows_per_step=8, seed=3)))
    assert any(row.sequence_length - row.num_tokens > 1 for row in step)
    batches = iter(build(counting))
    for first in range(0, 8, 2):
        inputs, _ = next(batches)
        found = common.create_varlen_metadata_for_document(inputs["positions"])
        rows = step[first : first + 2]
        wanted = np.concatenate([rows[0].cu_seqlens, rows[1].cu_seqlens[1:] + 64])
        assert found.cu_seq_q.tolist()[: len(wanted)] == wanted.tolist()
        mask = common.get_document_mask_mod(inputs["positions"])
        for place, row in enumerate(rows):
            slots = torch.arange(64)
            same = mask(torch.tensor(place), torch.tensor(0), slots[:, None], slots[None, :])
            ids = torch.tensor(row.document_ids)
            assert torch.equal(same, ids[:, None] == ids[None, :])


def test_resumed_at_every_step_on_any_number_of_ranks(counting: Path) -> None:
    whole = take(iter(build(counting)), 16)
    loader = build(counting)
    batches = iter(loader)
    for step in range(1, 4):
        take(batches, 4)
        state = json.loads(json.dumps(loader.state_dict()))
        again = build(counting)
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert take(iter(again), 16 - 4 * step) == whole[4 * step :]
        ranks = [build(counting, rank=rank, ranks=2) for rank in range(2)]
        for one in ranks:
            one.load_state_dict(state)
        halves = [take(iter(one), 2) for one in ranks]
        assert [*halves[0], *halves[1]] == whole[4 * step : 4 * step + 4]


def test_state_of_other_things_is_refused(counting: Path, tmp_path: Path) -> None:
    loader = build(counting)
    loader.load_state_dict({})
    take(iter(loader), 3)
    with pytest.raises(StateError, match=r"8 rows: 1.*training.global_batch_size"):
        loader.state_dict()
    with pytest.raises(StateError, match=r"dp_rank_0, world_size.*penstock's"):
        loader.load_state_dict({"dp_rank_0": b"", "world_size": 1})
    other = build(make_dataset(tmp_path / "other", documents=30, seed=9))
    with pytest.raises(StateError, match="other documents"):
        other.load_state_dict(build(counting).state_dict())


def test_last_short_step_is_filled_up(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", documents=29, seed=2)
    source = ps.Source(data, max_epochs=1, name="data")
    steps = list(ps.Loader(source, sequence_length=64, rows_per_step=8, seed=3))
    assert len(steps[-1]) % 8
    batches = list(build(source))
    assert len(batches) == 4 * len(steps)
    empty = [(inputs, labels) for inputs, labels in batches if (labels == -100).all()]
    assert sum(int((labels != -100).sum()) for _, labels in batches) == sum(
        step.loss_denominator for step in steps
    )
    assert empty
    assert all(inputs["positions"].tolist() == [list(range(64))] * 2 for inputs, _ in empty)


def test_refusals(counting: Path, weighted: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows_per_step.*6.*4"):
        build(counting, rows=6, ranks=2)
    with pytest.raises(ConfigError, match="weights"):
        build(weighted)
    with pytest.raises(ConfigError, match="not both and not none"):
        ps.torchtitan.DataLoader.Config(rows_per_step=8).build(
            dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=64, local_batch_size=2
        )
    denoise = ps.Denoise([ps.objectives.PrefixLM(mode=None)], sentinels=[60])
    with pytest.raises(ConfigError, match="prefix"):
        build(ps.Source(counting, objective=denoise))


def test_config_is_torchtitans(counting: Path) -> None:
    """It goes to JSON with the rest of the configuration, and its fields can be set on the command
    line.
    """
    import tyro

    config = ps.torchtitan.DataLoader.Config(
        dataset_path=str(counting), mixture=None, rows_per_step=8
    )
    assert json.loads(json.dumps(config.to_dict()))["rows_per_step"] == 8
    changed = tyro.cli(
        ps.torchtitan.DataLoader.Config,
        default=config,
        args=["--rows-per-step", "16", "--seed", "4"],
    )
    assert (changed.rows_per_step, changed.seed) == (16, 4)


# -- its trainer
# --------------------------------------------------------------------------------------------------


def train(folder: Path, ranks: int, **settings: Any) -> list[dict[str, Any]]:
    (folder / "out").mkdir(exist_ok=True, parents=True)
    port, processes = free_port(), []
    for rank in range(ranks):
        source = folder / f"settings-{rank}.json"
        source.write_text(
            json.dumps(
                {"output": str(folder / "out"), "rows": 4, "interval": 2, "steps": 4, **settings}
            )
        )
        program = str(Path(__file__).with_name("torchtitan_run.py"))
        command = [
            sys.executable,
            "-W",
            "ignore",
            program,
            str(source),
            str(folder / f"found-{rank}.json"),
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        processes.append(
            subprocess.Popen(command, env=rank_environment(rank, ranks, port), text=True, **pipes)
        )
    outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(outputs)[-4000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(ranks)]


def without_loss(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != "loss"}


@pytest.mark.slow
def test_trainer_of_torchtitan_resumes_exactly(tmp_path: Path, counting: Path) -> None:
    """New processes, on one and two ranks; batches, losses and denominators."""
    pytest.importorskip(
        "torchtitan.trainer", reason="torchtitan's trainer needs triton and spmd_types"
    )
    (one,) = train(tmp_path / "one", 1, data=str(counting), size=2)
    batches = one["seen"]
    assert len(batches) == 8
    assert sum(batch["loss"] for batch in batches[:2]) == pytest.approx(one["alone"], rel=1e-5)
    assert abs(one["leaking"] - one["alone"]) > 1e-3
    steps = ps.Loader(counting, sequence_length=64, rows_per_step=4, seed=3)
    wanted = [step.loss_denominator for step in islice(steps, 4) for _ in range(2)]
    assert [batch["denominator"] for batch in batches] == wanted

    # Stopped after two steps, and started again in a new process.
    shutil.rmtree(tmp_path / "one" / "out" / "checkpoint" / "step-4")
    (again,) = train(tmp_path / "one", 1, data=str(counting), size=2)
    assert again["seen"] == batches[4:]

    # Two ranks have the same rows and denominators, and resume to the same losses.
    two = train(tmp_path / "two", 2, data=str(counting), size=1)
    for step in range(4):
        rows = [batch for rank in two for batch in rank["seen"][2 * step : 2 * step + 2]]
        assert [row for batch in rows for row in batch["input"]] == [
            row for batch in batches[2 * step : 2 * step + 2] for row in batch["input"]
        ]
        assert {batch["denominator"] for batch in rows} == {int(wanted[2 * step])}
    shutil.rmtree(tmp_path / "two" / "out" / "checkpoint" / "step-4")
    resumed = train(tmp_path / "two", 2, data=str(counting), size=1)
    for rank in range(2):
        assert resumed[rank]["seen"] == two[rank]["seen"][4:]

    # One rank goes on with the checkpoint of two: the same rows, and the same loss of the step.
    shutil.rmtree(tmp_path / "two" / "out" / "checkpoint" / "step-4")
    (single,) = train(tmp_path / "two", 1, data=str(counting), size=2)
    assert [without_loss(batch) for batch in single["seen"]] == [
        without_loss(batch) for batch in batches[4:]
    ]
    for step in range(2):
        theirs = sum(
            batch["loss"] for rank in two for batch in rank["seen"][4 + 2 * step : 6 + 2 * step]
        )
        ours = sum(batch["loss"] for batch in single["seen"][2 * step : 2 * step + 2])
        assert ours == pytest.approx(theirs, rel=1e-4)
