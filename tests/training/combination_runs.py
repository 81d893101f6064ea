"""Gradients of models that compute in every way, as test_combinations.py asks of two ranks.

Run as a program: the names of models. Rank 0 prints, for each model and way, how far the gradients
are from those of one process in float64. What is not sharded is computed by one of the ranks.
"""

import copy
import json
import os
import sys
from itertools import product
from typing import Any

import torch

from makers.models import tiny_huggingface
from makers.rows import random_row
from penstock.learn.training.computing import (
    checkpoint_activations,
    compile_blocks,
    precision_of,
    set_precision,
)
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.losses import row_loss
from penstock.learn.training.processes import gather
from penstock.learn.training.settings import TrainSettings
from penstock.learn.training.sharding import shard
from penstock.models.building import build_model
from penstock.models.settings import BlockSettings, ModelSettings
from penstock.models.theirs.model import HuggingFaceModel

OURS = {
    "ours": ModelSettings(layers=3, width=32, heads=4, kv_heads=2, vocab_size=61),
    "hybrid": ModelSettings(
        layers=4,
        width=32,
        heads=4,
        vocab_size=61,
        blocks={
            "near": BlockSettings(sliding_window=8),
            "delta": BlockSettings(mixer="gated_delta"),
        },
        pattern=("delta", "near"),
    ),
}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "gemma3": ("gemma3_text", {"head_dim": 8, "sliding_window": 8, "num_hidden_layers": 3}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}
MODELS = (*OURS, *THEIRS)
IN_ALL_WAYS = ("ours", "llama")
"""The others leave out half of the ways that are compiled and have checkpoints."""
LENGTHS = (20, 3, 9, 16)


def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A new model, the same each time."""
    if name in OURS:
        model: Any = build_model(OURS[name], vocab_size=61, dtype=dtype, seed=3)
        model.compute_in(dtype)
        return model
    kind, settings = THEIRS[name]
    inner = tiny_huggingface(kind, **settings).to(dtype)
    if dtype == torch.float64 and hasattr(inner.config, "num_experts"):
        # The products of groups know no float64.
        inner.set_experts_implementation("eager")
    return HuggingFaceModel(inner.train())


def gradients(model: Any, rows: list[Any], divisor: float) -> dict[str, torch.Tensor]:
    """Of the rows' losses, whole, in float64."""
    model.begin_step(seed=0, number=0, tokens=100)
    for row in rows:
        row_loss(model, model.tensors(row), divisor).loss.backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {
        name: (one.full_tensor() if hasattr(one, "full_tensor") else one).double()
        for name, one in found.items()
    }


def ways(name: str) -> list[tuple[bool, bool, str, str]]:
    """In what ways a model is computed: sharded, compiled, its checkpoints, and its precision.

    What is left out takes minutes to compile. Any three of the four are there in all combinations
    that are compiled, except that all ways without checkpoints are, to compare with.
    """
    found = product(
        (False, True), (False, True), ("none", "selective", "full"), ("float32", "bfloat16")
    )
    return [
        (sharded, compiled, kept, precision)
        for sharded, compiled, kept, precision in found
        if name in IN_ALL_WAYS
        or not compiled
        or kept == "none"
        or (sharded == (precision == "bfloat16")) == (kept == "full")
    ]


def main() -> None:
    """Print how far each way is."""
    rows = [random_row(LENGTHS, seed=seed) for seed in (0, 1)]
    divisor = float(sum(row.loss_weights.sum() for row in rows))
    answers: dict[str, float] = {}
    with Ranks(torch.device("cpu")) as ranks:
        rank = int(os.environ["RANK"])
        for name in sys.argv[1:]:
            due = gradients(made(name, torch.float64), rows, divisor)
            whole = torch.cat([one.flatten() for one in due.values()])
            for number, (sharded, compiled, kept, precision) in enumerate(ways(name)):
                if not sharded and number % 2 != rank:
                    continue
                settings = TrainSettings(
                    precision=precision,  # type: ignore[arg-type]
                    activation_checkpointing=kept,  # type: ignore[arg-type]
                )
                model = copy.deepcopy(made(name))
                model.packing(rows[0].sequence_length)
                set_precision(model, precision_of(settings, model), sharded=sharded)
                checkpoint_activations(model, settings)
                if sharded:
                    shard(model, ranks)
                if compiled:
                    with_eager_backend(model)
                found = gradients(model, [rows[rank]] if sharded else rows, divisor)
                assert found.keys() == due.keys()
                apart = torch.cat([found[key].flatten() for key in due]) - whole
                words = (
                    "sharded" * sharded,
                    "compiled" * compiled,
                    kept * (kept != "none"),
                    precision,
                )
                key = " ".join([name, *filter(None, words)])
                answers[key] = float(apart.norm() / whole.norm())
                torch._dynamo.reset()
        answers = {way: far for some in gather(answers) for way, far in some.items()}
    if rank == 0:
        print(json.dumps(answers))


def with_eager_backend(model: Any) -> None:
    """Compile without generated code, which would take minutes."""
    compile = torch.nn.Module.compile
    try:
        torch.nn.Module.compile = lambda self: compile(self, backend="aot_eager")  # type: ignore[assignment, method-assign]
        compile_blocks(model)
    finally:
        torch.nn.Module.compile = compile  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
