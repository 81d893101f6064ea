"""Sharded models on two and four ranks: gradients of one process, few collectives, texts; and a
mesh of one.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sharding_checks import MODELS, ROWS, THEIRS, a_row, backward, farthest, gradients, make
from training_makers import losses, train

from makers.ranks import run_ranks
from penstock.core.errors import ConfigError
from penstock.learn.training import sharding
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.settings import TrainSettings
from penstock.learn.training.sharding import GradientSync, shard

pytestmark = pytest.mark.usefixtures("plain_torch")

SCRIPT = Path(__file__).with_name("sharding_checks.py")


def asked(folder: Path, processes: int, *checks: str) -> dict:
    ended = run_ranks(SCRIPT, checks, processes, folder)
    assert [status for status, _, _ in ended] == [0] * processes, "\n".join(
        err[-3000:] for _, _, err in ended
    )
    return json.loads(ended[0][1].splitlines()[-1])


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Answers of two ranks."""
    checks = ("gradients", "documents", "theirs", "traffic", "texts", "muon")
    return asked(tmp_path_factory.mktemp("two"), 2, *checks)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_one_process(two, name):
    assert two["gradients"][f"{name} float32"] < 1e-6
    # In bfloat16, gradients are 0.8 to 2.4 percent from those in float64. Whole models round each
    # use of a weight by itself, and leave decays and LoRA in float32; sharded ones sum a pass's
    # uses in bfloat16, and gather all in it.
    wide = name == "recurrent" or "lora" in name
    assert two["gradients"][f"{name} bfloat16"] < (0.03 if wide else 0.01)


def test_gradients_by_document_are_those_of_one_process(two):
    for name, found in two["documents"].items():
        assert found < (0.03 if "bfloat16" in name else 1e-6), name


@pytest.mark.parametrize("name", THEIRS)
def test_gradients_of_models_of_transformers_are_those_of_one_process(two, name):
    assert two["theirs"][f"{name} float32"] < 1e-6
    # Gemma scales its embeddings in their dtype: of whole weights float32, of gathered ones
    # bfloat16.
    assert two["theirs"][f"{name} bfloat16"] < (0.05 if name == "gemma3" else 2e-3)


@pytest.mark.parametrize("name", [name for name in THEIRS if name != "gemma3"])
def test_casts_of_whole_weights_are_those_of_fsdp_bit_for_bit(name):
    whole, model = make(name, "bfloat16"), make(name, "bfloat16", sharded=True)
    rows = [a_row(seed) for seed in range(2)]
    with Ranks(torch.device("cpu")) as ranks:
        shard(model, ranks)
        for one in (whole, model):
            backward(one, rows)
        due, found = gradients(whole), gradients(model)
    # Gathered in bfloat16, the embedding gets its rows' gradients summed in it.
    embedding = {"inner.model.embed_tokens.weight"}
    assert {one for one in due if not torch.equal(due[one], found[one])} == embedding


def test_gradients_are_summed_over_ranks_in_the_last_pass(two):
    """Three blocks and the root; gathers in bfloat16, sums in float32."""
    waits, each = two["traffic"]["waits"], two["traffic"]["each"]
    assert waits["passes"] == 4
    assert (waits["reduce_scatter"], each["reduce_scatter"]) == (4, 16)
    # Forward and backward of four passes, without the root in the backward, and with weights that
    # stay gathered from a backward to the next forward.
    assert waits["all_gather"] == each["all_gather"] == 4 + 4 * 3
    for one in (waits, each):
        assert one["all_gather of"] == ["bfloat16"]
        assert one["reduce_scatter of"] == ["float32"]
        assert "all_reduce" not in one


def test_texts_are_those_of_one_process(two):
    assert two["texts"] == [0.0] * 4


def test_muon_is_torchs_and_exchanges_each_shape_once_there_and_back(two):
    found = two["muon"]
    assert (found["torch"]["matrices"], found["torch"]["shapes"]) == (21, 3)
    assert found["copied"]["difference"] == found["sharded"]["difference"] == 0
    assert found["copied"]["all_gather"] == 3
    assert found["sharded"]["all_to_all"] == 6
    for way in ("copied", "sharded"):
        [sent] = [value for name, value in found[way].items() if name.endswith(" of")]
        assert sent == ["bfloat16"]


@pytest.mark.slow
def test_hybrid_sharding_sums_between_groups_once(tmp_path):
    found = asked(tmp_path, 4, "hybrid")["hybrid"]
    assert found["held"] == 0.5
    for name, scatters in (("waits", 4), ("each", 8)):
        assert found[name]["difference"] < 1e-6
        assert (found[name]["reduce_scatter"], found[name]["all_reduce"]) == (scatters, 4)


@pytest.mark.parametrize("name", ["tied", "experts"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mesh_of_one(name, dtype):
    rows = [a_row(seed) for seed in range(2)]
    alone, model = make(name, dtype), make(name, dtype)
    backward(alone, rows)
    with Ranks(torch.device("cpu")) as ranks:
        shard(model, ranks)
        backward(model, rows)
        assert farthest(gradients(model), gradients(alone)) < (1e-6 if dtype == "float32" else 0.01)


def test_a_single_process_trains_and_resumes_sharded(data, tmp_path):
    steps, shard_it = "training.steps=4", "training.shard=true"
    due = losses(train(data, tmp_path / "plain", steps))
    with Ranks(torch.device("cpu")) as ranks:
        train(data, tmp_path / "run", steps, shard_it, until=2, ranks=ranks)
        found = train(data, tmp_path / "run", steps, shard_it, resume=True, ranks=ranks)
    np.testing.assert_allclose(losses(found), due, rtol=1e-6)
    # What it saved goes on without shards.
    found = train(data, tmp_path / "run", "training.steps=6", resume=True)
    assert [one["step"] for one in found] == [1, 2, 3, 4, 5, 6]


def test_without_room_gradients_are_summed_in_each_pass(monkeypatch):
    model = make("untied")
    count = sum(weight.numel() for weight in model.parameters())
    with Ranks(torch.device("cpu")) as ranks:
        shard(model, ranks)
        for room, waits in ((3.9, False), (4.1, True)):
            monkeypatch.setattr(sharding, "device_memory", lambda _, room=room: count * room / 0.4)
            assert GradientSync(model).waits is waits
    assert len(list(GradientSync(make("untied")).over(range(ROWS)))) == ROWS


def test_what_cannot_be_sharded_is_refused():
    with pytest.raises(ConfigError, match="number of ranks from 2, got 1"):
        TrainSettings(shard=1)
    with pytest.raises(ConfigError, match="shard and micro_sequences do not go together"):
        TrainSettings(shard=True, micro_sequences=2)
    with (
        Ranks(torch.device("cpu")) as ranks,
        pytest.raises(ConfigError, match="shard is 3, which does not divide"),
    ):
        shard(make("tied"), ranks, 3)
