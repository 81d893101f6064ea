"""Ranks that share rows: the sum of their losses and of their gradients is that of the whole
row.
"""

import json
from typing import Any

import pytest

from makers.ranks import run_processes

pytestmark = pytest.mark.slow

SCRIPT = """
    import json, os, warnings
    from dataclasses import replace
    import torch
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from makers.models import tiny_huggingface, tiny_model
    from makers.rows import random_row
    from makers.trees import random_forest
    from penstock.core.errors import PenstockError
    from penstock.plan.inputs import RowSlice
    from penstock.models.theirs.model import HuggingFaceModel
    from penstock.models.ours.micro_sequences import backward_in_parts
    from penstock.models.own_model import OwnModel
    from penstock.models.settings import BlockSettings
    from penstock.learn.training import row_loss
    from penstock.learn.training.losses import loss

    class Own(torch.nn.Module):
        vocab_size = 61

        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(61, 8)

        def forward(self, row):
            return self.embedding(row.tokens)

        def logits(self, hidden):
            return hidden @ self.embedding.weight.T

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    def learn(model, row, tensors, distances=1):
        model.zero_grad()
        found = row_loss(model, tensors, [3.0] * distances, z_loss=1e-3)
        found.loss.backward()
        gradients = torch.cat([w.grad.flatten() for w in model.parameters() if w.requires_grad])
        return [found.loss.detach(), found.cross_entropy, torch.tensor(float(found.num_targets))], gradients

    def by_document(model, row):
        # A function of the sums that weighs each document differently.
        def sums(tensors):
            model.zero_grad()
            found = loss(model, tensors, by="document", z_loss=1e-3)
            (found.losses * torch.arange(1.0, len(found) + 1)).sum().backward()
            gradients = torch.cat([w.grad.flatten() for w in model.parameters()])
            return [found.losses.detach(), found.weights, found.targets.double(), found.right.double()], gradients

        whole, due = sums(model.tensors(row))
        mine, gradients = sums(model.slice_tensors(RowSlice.of(row, rank, size)))
        for one in (*mine, gradients):
            dist.all_reduce(one)
        losses = max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(mine, whole))
        return losses, float((gradients - due).abs().max() / due.abs().max())

    def compare(model, row, group=None, distances=1, chunks=8, backend="auto", part_of=lambda row: row):
        whole, due = learn(model, row, model.tensors(row), distances)
        part = RowSlice.of(part_of(row), rank, size, chunks=chunks)
        mine, gradients = learn(model, row, model.slice_tensors(part, group, backend), distances)
        for one in (*mine, gradients):
            dist.all_reduce(one)
        losses = max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(mine, whole))
        return losses, float((gradients - due).abs().max() / due.abs().max())

    lengths = (150, 1, 37, 2, 9)                # one document is most of the row, and lies on all ranks
    long = random_row(lengths, padding=13, seed=1)
    prefixes = random_row(lengths, padding=13, prefixes=(70, 1, 20, 0, 9), seed=2)
    plain = tiny_model(61, dtype=torch.float64)
    found = {
        "documents": compare(plain, long),
        "a mesh": compare(plain, long, init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))),
        "one chunk": compare(plain, long, chunks=1),
        "dense": compare(plain, long, backend="dense"),
        "prefixes": compare(plain, prefixes),
        "trees": [max(off) for off in zip(*(compare(plain, random_forest(seed, padding=seed)) for seed in range(5)))],
        "distances": compare(
            tiny_model(61, dtype=torch.float64, prediction_heads=3), random_row(lengths, distances=3), distances=3
        ),
        "windows": compare(tiny_model(61, dtype=torch.float64, sliding_window=11), long),
        "softcap": compare(tiny_model(61, dtype=torch.float64, attention_softcap=2.0), prefixes),
        "by document": by_document(plain, long),
        "prefixes by document": by_document(plain, prefixes),
        "a rank without targets": compare(plain, random_row((2, 2, 1), padding=40)),
    }
    inner = tiny_huggingface(max_position_embeddings=256).double().train()
    hugging = HuggingFaceModel(inner)
    found["transformers"] = compare(hugging, long)
    warnings.simplefilter("ignore", FutureWarning)
    inner.gradient_checkpointing_enable()
    found["checkpoints"] = compare(hugging, long)
    gemma = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 11, "max_position_embeddings": 256}
    found["transformers with windows"] = compare(HuggingFaceModel(tiny_huggingface("gemma2", **gemma).double()), long)

    refused = {}
    def refuse(name, call):
        try:
            call()
        except PenstockError as error:
            refused[name] = str(error)
    part = RowSlice.of(long, rank, size)
    dp_cp = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "cp"))
    delta = BlockSettings(mixer="gated_delta", heads=2, head_width=5, state_width=4)
    refuse("place", lambda: plain.slice_tensors(RowSlice.of(long, (rank + 1) % size, size)))
    refuse("dimensions", lambda: plain.slice_tensors(part, dp_cp))
    refuse("recurrent", lambda: tiny_model(61, blocks={"delta": delta}, pattern=("delta",)).slice_tensors(part))
    refuse("experts", lambda: tiny_model(
        61, blocks={"sparse": BlockSettings(experts=3)}, pattern=("sparse",)).slice_tensors(part))
    refuse("positions", lambda: plain.slice_tensors(RowSlice.of(replace(long, positions=None), rank, size)))
    refuse("ids", lambda: tiny_model(7, dtype=torch.float64).slice_tensors(part))
    theirs, rope = tiny_huggingface("bloom"), {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    growing = tiny_huggingface(rope_parameters=rope, max_position_embeddings=32)
    refuse("attention", lambda: HuggingFaceModel(theirs).slice_tensors(part))
    refuse("growing", lambda: HuggingFaceModel(growing).slice_tensors(part))
    refuse("own module", lambda: OwnModel(Own()).slice_tensors(part))
    refuse("parts", lambda: backward_in_parts(plain, plain.slice_tensors(part), 1, None))
    print(json.dumps([found, refused]), flush=True)
    dist.barrier()
    # Gloo's threads may still hold tensors, and abort an interpreter that ends (pytorch/pytorch#179291).
    os._exit(0)
"""  # noqa: E501

CASES = (
    "documents",
    "a mesh",
    "one chunk",
    "dense",
    "prefixes",
    "trees",
    "distances",
    "windows",
    "softcap",
    "by document",
    "prefixes by document",
    "a rank without targets",
    "transformers",
    "checkpoints",
    "transformers with windows",
)
IN_FLOAT32 = {"transformers with windows": 1e-6}
"""Gemma's norms are in float32, whatever the model is in: how far gradients may be off."""


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank found: the relative errors of losses and gradients by case, and what was
    refused.
    """
    pytest.importorskip("transformers")
    script = tmp_path_factory.mktemp("context") / "script.py"
    ended = run_processes(script, SCRIPT, processes=request.param)
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


@pytest.mark.parametrize("case", CASES)
def test_the_sum_over_ranks_is_the_whole_row(ranks: list[Any], case: str) -> None:
    for found, _ in ranks:
        losses, gradients = found[case]
        assert losses <= 1e-12
        assert gradients <= IN_FLOAT32.get(case, 1e-12)


def test_each_case_is_looked_at(ranks: list[Any]) -> None:
    assert set(ranks[0][0]) == set(CASES)


REFUSALS = {
    "place": "split the row by the group's rank and size",
    "dimensions": "takes one dimension of a mesh, such as mesh['cp']",
    "recurrent": "recurrent blocks need whole documents",
    "experts": "the balance loss of experts needs whole documents",
    "positions": "the row has no positions",
    "ids": "token id 60 in slot",
    "attention": "runs with its own attention",
    "growing": "its rotary embedding (dynamic) depends on the longest document",
    "own module": "a module of your own gets no slices of rows",
    "parts": "micro-sequences do not support slices of rows",
}


def test_what_is_not_exact_is_refused_on_all_ranks(ranks: list[Any]) -> None:
    for _, refused in ranks:
        assert set(refused) == set(REFUSALS)
        for name, message in REFUSALS.items():
            assert message in refused[name]
