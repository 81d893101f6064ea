"""Packed microbatches for Megatron: arrays, states, sharing in a group, and what is refused. Needs
no Megatron.
"""

import json
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make_dataset, make_loader

import penstock as ps
from makers.ranks import run_processes
from penstock.core.errors import ConfigError, DistributedError, StateError
from penstock.integrations.megatron.layout import pack_rows

FIELDS = ("tokens", "labels", "position_ids", "loss_mask")


def documents_of(row: Any) -> list[tuple[int, int]]:
    """[begin, end) of each document of a row, padding left out."""
    borders = sorted({*row.cu_seqlens[row.cu_seqlens <= row.num_tokens].tolist()})
    return list(pairwise(borders))


def slot_of(row: Any, slot: int, position: int) -> tuple[int, int, int, float]:
    target = int(row.targets[0][slot])
    return int(row.tokens[slot]), max(target, 0), position, float(row.loss_weights[0][slot])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("multiple", "more"), [(1, 0), (1, 9), (2, 0), (8, 64)])
def test_packed_rows_slot_by_slot(weighted: Path, seed: int, multiple: int, more: int) -> None:
    """Against a plain walk over documents and slots."""
    step = next(iter(make_loader(weighted, seed=seed, rows=3)))
    padding = (0, 0, None, 0.0)
    wanted: list[Any] = []
    lengths, places = [0], [0]
    for row in step:
        for begin, end in documents_of(row):
            wanted += [slot_of(row, slot, slot - begin) for slot in range(begin, end)]
            wanted += [padding] * (-(end - begin) % multiple)
            lengths.append(lengths[-1] + end - begin)
            places.append(len(wanted))
        if multiple == 1 and row.num_tokens < row.sequence_length:
            wanted += [padding] * (row.sequence_length - row.num_tokens)
            lengths.append(len(wanted))
            places.append(len(wanted))
    slots = len(wanted) + more if more else None
    if more:
        wanted += [padding] * more
        lengths.append(lengths[-1] + more)
        places.append(len(wanted))
    found = pack_rows(list(step), document_multiple=multiple, slots=slots)
    for slot, (token, label, position, weight) in enumerate(wanted):
        assert (found.tokens[slot], found.labels[slot], found.loss_mask[slot]) == (
            token,
            label,
            np.float32(weight),
        )
        assert position is None or found.position_ids[slot] == position
    assert len(found.tokens) == len(wanted)
    assert found.cu_seqlens.tolist() == lengths
    assert found.cu_seqlens_padded.tolist() == places
    starts = found.cu_seqlens_padded[:-1]
    assert (found.position_ids[starts] == 0).all()
    assert found.max_seqlen == np.diff(found.cu_seqlens_padded).max()


def test_batches_are_the_rows_with_all_weights(weighted: Path) -> None:
    batches = ps.megatron.Batches(make_loader(weighted), rows_per_microbatch=2)
    assert batches.num_microbatches == 2
    for step in islice(make_loader(weighted), 3):
        weights = 0.0
        for first in (0, 2):
            batch = next(batches)
            assert batch["tokens"].tolist() == [
                np.concatenate([row.tokens for row in step[first : first + 2]]).tolist()
            ]
            assert batch["denominator"] == step.loss_denominator
            assert (batch["num_microbatches"], batch["data_parallel_size"]) == (2, 1)
            assert batch["cu_seqlens"].dtype == torch.int32
            assert batch["attention_mask"] is None
            weights += float(batch["loss_mask"].double().sum())
        assert weights == pytest.approx(step.loss_denominator)


def test_resumed_at_every_step(weighted: Path) -> None:
    def rest(batches: Any, count: int) -> list[Any]:
        return [[batch[name].tolist() for name in FIELDS] for batch in islice(batches, count)]

    whole = rest(ps.megatron.Batches(make_loader(weighted)), 16)
    batches = ps.megatron.Batches(make_loader(weighted))
    assert rest(batches, 0) == []
    for step in range(1, 4):
        rest(batches, 4)
        state = json.loads(json.dumps(batches.state_dict()))
        again = ps.megatron.Batches(make_loader(weighted))
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert rest(again, 16 - 4 * step) == whole[4 * step :]
    # The same object, moved back.
    batches.load_state_dict(state)
    assert rest(batches, 4) == whole[12:]


def test_last_short_step_is_filled_up(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", documents=29, seed=2)
    steps = list(make_loader(data, max_epochs=1))
    assert len(steps[-1]) % 4
    batches = list(ps.megatron.Batches(make_loader(data, max_epochs=1)))
    assert len(batches) == 4 * len(steps)
    assert batches[-1]["loss_mask"].sum() == 0
    assert batches[-1]["cu_seqlens"].tolist() == [0, 32]
    total = sum(float(batch["loss_mask"].sum()) for batch in batches)
    assert total == sum(step.loss_denominator for step in steps)


def test_state_in_the_middle_of_a_step_is_refused(counting: Path) -> None:
    batches = ps.megatron.Batches(make_loader(counting))
    next(batches)
    with pytest.raises(StateError, match=r"middle.*step.*3.*microbatches"):
        batches.state_dict()


def test_refusals(counting: Path) -> None:
    with pytest.raises(DistributedError, match=r"rank.*0.*tensor-parallel.*loader"):
        ps.megatron.Batches(None)
    with pytest.raises(ConfigError, match=r"rows_per_microbatch=3.*rank's 4"):
        ps.megatron.Batches(make_loader(counting), rows_per_microbatch=3)
    with pytest.raises(ConfigError, match="needs 32 slots, but slots=16"):
        next(ps.megatron.Batches(make_loader(counting), slots=16))
    wanted = ps.InputRequirements(
        target_distances=2, loss_weights=True, positions=True, cu_seqlens=True
    )
    with pytest.raises(ConfigError, match=r"target.*loader.*gives.*2"):
        ps.megatron.Batches(make_loader(counting, requirements=wanted))
    with pytest.raises(ConfigError, match=r"loader.*positions.*cu_seqlens"):
        ps.megatron.Batches(
            make_loader(counting, requirements=ps.InputRequirements(loss_weights=True))
        )
    prefixes = ps.Denoise([ps.objectives.PrefixLM(mode=None)], sentinels=[60])
    with pytest.raises(ConfigError, match="bidirectional prefixes"):
        ps.megatron.Batches(
            ps.Loader(ps.Source(counting, objective=prefixes), sequence_length=64, rows_per_step=4)
        )


GRID = """
    import json, sys
    import torch.distributed as dist
    import penstock as ps

    data, mode, output = sys.argv[1:4]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    place, first = rank // 2, rank % 2 == 0
    source = ps.Source(data, name="data", max_epochs=1)
    loader = ps.Loader(source, sequence_length=32, rows_per_step=4, seed=3, data_parallel=(place, 2)) if first else None
    batches = ps.megatron.Batches(loader, group=groups[place], slots=16 if mode == "fail" else None)
    found = []
    try:
        for batch in batches:
            names = ("tokens", "labels", "position_ids", "loss_mask", "cu_seqlens")
            found.append([batch[name].tolist() for name in names])
            found[-1] += [batch["denominator"], batch["max_seqlen"], batch["data_parallel_size"]]
            if len(found) % 2 == 0:
                found[-1].append(batches.state_dict())
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    open(f"{output}-{rank}.json", "w").write(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
"""  # noqa: E501


def run_grid(folder: Path, data: Path, mode: str) -> list[Any]:
    """Two tensor-parallel groups of two ranks (gloo)."""
    run_processes(folder / "grid.py", GRID, data, mode, folder / "found", processes=4)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.slow
def test_a_grid_of_two_by_two_ranks(tmp_path: Path, weighted: Path) -> None:
    found = run_grid(tmp_path, weighted, "train")
    assert found[0] == found[1]
    assert found[2] == found[3]
    steps = list(make_loader(weighted, max_epochs=1))
    rows = [
        row
        for number in range(len(steps))
        for group in (0, 2)
        for row in found[group][2 * number : 2 * number + 2]
    ]
    wanted = [row.tokens.tolist() for step in steps[:-1] for row in step]
    assert len(rows) == 4 * len(steps)
    assert [row[0][0] for row in rows[: len(wanted)]] == wanted
    assert found[1][0][5] == steps[0].loss_denominator
    assert found[3][0][7] == 2
    # What a rank without a loader saves is the state of the loader.
    assert found[3][3][-1] == json.loads(json.dumps(steps[1].resume_state))


@pytest.mark.slow
def test_an_error_of_the_loading_rank_reaches_its_group(tmp_path: Path, counting: Path) -> None:
    found = run_grid(tmp_path, counting, "fail")
    assert found[0][0].startswith("ConfigError: Megatron: a microbatch needs 32 slots")
    assert (
        found[1][0]
        == f"DistributedError: the loading rank of this tensor-parallel group failed: {found[0][0]}"
    )
