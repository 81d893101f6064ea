"""What test_sharding.py asks of two or four ranks, each answer of which rank 0 prints as JSON.

Run as a program: the names of checks.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import penstock as ps
from makers.models import tiny_huggingface
from penstock.learn.training.computing import set_precision
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.losses import loss, row_loss
from penstock.learn.training.optimizer_settings import OptimizerSettings
from penstock.learn.training.optimizers import Optimizers
from penstock.learn.training.sharding import GradientSync, shard, take_share
from penstock.models.lora.lora import add_lora
from penstock.models.lora.settings import LoraSettings
from penstock.models.settings import BlockSettings
from penstock.models.theirs.model import HuggingFaceModel
from penstock.plan.inputs.model_input import ModelInput

SLOTS, ROWS = 48, 8
PLAIN: dict[str, Any] = {"layers": 3, "width": 32, "heads": 2, "vocab_size": 97}
MODELS: dict[str, dict[str, Any]] = {
    "tied": PLAIN,
    "untied": {**PLAIN, "tied": False},
    "three heads": {**PLAIN, "prediction_heads": 3},
    "experts": {
        **PLAIN,
        "blocks": {"sparse": BlockSettings(experts=3, balance=0.3), "full": BlockSettings()},
        "pattern": ("sparse", "full"),
    },
    "recurrent": {
        **PLAIN,
        "blocks": {"delta": BlockSettings(mixer="gated_delta"), "full": BlockSettings()},
        "pattern": ("delta", "full"),
    },
    "lora": {**PLAIN, "tied": False},
    "lora and embeddings": PLAIN,
}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 8}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}
"""Kinds of transformers; Gemma's embedding is tied and scaled, the last two have experts."""
LORA = {
    "lora": LoraSettings(rank=2, modules_to_save=("norm",)),
    "lora and embeddings": LoraSettings(rank=2, train_embeddings="all"),
}


def make(name: str, dtype: str = "float32", *, sharded: bool = False) -> Any:
    """A model, the same each time; `sharded`: as it is before it will be."""
    model: Any
    if name in THEIRS:
        kind, more = THEIRS[name]
        inner = tiny_huggingface(kind, vocab_size=97, num_hidden_layers=3, **more)
        model = HuggingFaceModel(inner.train())
        set_precision(model, getattr(torch, dtype), sharded=sharded)
        return model
    model = ps.build_model(**MODELS[name], dtype=dtype, seed=3)
    if name in LORA:
        add_lora(model, LORA[name])
        # As it begins, half of LoRA is zero and the other half has no gradient.
        generator = torch.Generator().manual_seed(4)
        for at, weight in model.named_parameters():
            if ".lora_B" in at:
                weight.data.normal_(generator=generator).mul_(0.01)
    model.begin_step(seed=0, number=0, tokens=SLOTS * ROWS)
    return model


def a_row(seed: int, distances: int = 1, *, targets: bool = True) -> ModelInput:
    """Two documents."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, PLAIN["vocab_size"], SLOTS).astype(np.int32)
    wanted = np.full((distances, SLOTS), -100, np.int32)
    cut = 11 + seed
    if targets:
        for distance in range(distances):
            wanted[distance, : SLOTS - 4] = np.roll(tokens, -1 - distance)[: SLOTS - 4]
    return ModelInput(
        tokens=tokens,
        targets=wanted,
        loss_weights=(wanted != -100).astype(np.float32),
        positions=np.concatenate([np.arange(cut), np.arange(SLOTS - cut)]).astype(np.int32),
        document_ids=(np.arange(SLOTS) >= cut).astype(np.int32),
        cu_seqlens=np.array([0, cut, SLOTS], np.int32),
        max_seqlen=max(cut, SLOTS - cut),
        num_tokens=SLOTS,
        source_ids=np.zeros(2, np.int32),
    )


def backward(model: Any, rows: list[ModelInput]) -> None:
    sync = GradientSync(model)
    for row in sync.over(rows):
        denominators = [float(SLOTS * ROWS)] * len(model.prediction_weights)
        row_loss(model, model.tensors(row), denominators).loss.backward()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def farthest(found: dict[str, torch.Tensor], due: dict[str, torch.Tensor]) -> float:
    """Largest difference of a gradient by the largest of that gradient."""
    assert found.keys() == due.keys()
    return max(float((found[n] - due[n]).norm() / due[n].norm().clamp(min=1e-12)) for n in due)


class Counted(TorchDispatchMode):
    """Inside, collectives are noted: kind → (elements, dtype) of what each is given."""

    KINDS = MappingProxyType(
        {
            "_allgather_base_": "all_gather",
            "_reduce_scatter_base_": "reduce_scatter",
            "allreduce_": "all_reduce",
            "alltoall_base_": "all_to_all",
            "broadcast_": "broadcast",
            "all_reduce": "all_reduce",
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[tuple[int, str]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and (kind := self.KINDS.get(func._opname)):
            given = args[1] if kind in ("all_gather", "reduce_scatter", "all_to_all") else args[0]
            given = given[0] if isinstance(given, list) else given
            self.calls.setdefault(kind, []).append((given.numel(), str(given.dtype)[6:]))
        return func(*args, **(kwargs or {}))

    def summary(self) -> dict[str, Any]:
        """Calls of each kind, and the dtypes."""
        dtypes = {f"{kind} of": sorted({d for _, d in each}) for kind, each in self.calls.items()}
        return {**{kind: len(each) for kind, each in self.calls.items()}, **dtypes}


def share_of(ranks: Ranks, rows: list[ModelInput]) -> list[ModelInput]:
    each = len(rows) // ranks.place.size
    return rows[ranks.place.rank * each : (ranks.place.rank + 1) * each]


def check_gradients(ranks: Ranks) -> Any:
    """Of each model and dtype, how far the gradients are from those of one process."""
    return gradients_of(ranks, MODELS)


def check_theirs(ranks: Ranks) -> Any:
    """The same of models of transformers."""
    return gradients_of(ranks, THEIRS)


def gradients_of(ranks: Ranks, names: Iterable[str]) -> dict[str, float]:
    """Of each model and dtype, how far the gradients are from those of one process."""
    found = {}
    for name in names:
        for dtype in ("float32", "bfloat16"):
            alone, model = make(name, dtype), make(name, dtype, sharded=True)
            distances = len(model.prediction_weights)
            rows = [a_row(seed, distances) for seed in range(ROWS)]
            backward(alone, rows)
            shard(model, ranks)
            backward(model, share_of(ranks, rows))
            found[f"{name} {dtype}"] = farthest(gradients(model), gradients(alone))
    return found


def check_traffic(ranks: Ranks) -> Any:
    """Collectives of a step of four passes, and of one whose gradients are summed in each."""
    found = {}
    for name in ("waits", "each"):
        model = make("untied", "bfloat16")
        shard(model, ranks)
        rows = share_of(ranks, [a_row(seed) for seed in range(ROWS)])
        backward(model, rows)
        sync = GradientSync(model)
        sync.waits &= name == "waits"
        with Counted() as calls:
            for row in sync.over(rows):
                row_loss(model, model.tensors(row), 1.0).loss.backward()
        found[name] = {
            "passes": len(rows),
            **calls.summary(),
        }
    return found


def check_documents(ranks: Ranks) -> Any:
    """Gradients of a function of the documents' losses, which come in the backward pass."""

    def learn(model: Any, rows: list[ModelInput]) -> None:
        for row in GradientSync(model).over(rows):
            found = loss(model, row, by="document").losses
            (found * torch.arange(1.0, 3.0)).square().sum().backward()

    rows, found = [a_row(seed) for seed in range(ROWS)], {}
    for name, dtype in product(("tied", "untied", "lora"), ("float32", "bfloat16")):
        alone, model = make(name, dtype), make(name, dtype)
        learn(alone, rows)
        shard(model, ranks)
        learn(model, share_of(ranks, rows))
        found[f"{name} {dtype}"] = farthest(gradients(model), gradients(alone))
    return found


def check_texts(ranks: Ranks) -> Any:
    """Logits of a prompt and two steps through the cache, sharded and whole."""
    found = []
    for name, dtype in product(("three heads", "llama"), ("float32", "bfloat16")):
        steps = []
        for sharded in (False, True):
            model = make(name, dtype, sharded=sharded)
            if sharded:
                shard(model, ranks)
            cache = model.new_cache(2, 8)
            with torch.no_grad():
                prompt = torch.tensor([[5, 6, 7], [8, 9, 0]])
                logits = [model.extend(prompt, torch.tensor([3, 2]), cache)]
                logits += [
                    model.extend(torch.full((2, 1), token), torch.tensor([1, 1]), cache)
                    for token in (3, 4)
                ]
            steps.append(torch.stack(logits))
        found.append(float((steps[0] - steps[1]).abs().max()))
        # Training goes on with the newest weights.
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(0)
        backward(model, [a_row(1, len(model.prediction_weights))])
    return found


def check_muon(ranks: Ranks) -> Any:
    """Three steps with shards, with copies, and by torch's Muon: equal weights, few collectives."""
    settings = OptimizerSettings(kind="muon", learning_rate=0.01)
    trained, found = {}, {}
    for way in ("torch", "copied", "sharded"):
        # Rows that do not divide by ranks, and fewer matrices of a shape than ranks.
        model = ps.build_model(**{**PLAIN, "width": 28, "mlp_width": 77}, seed=3)
        if way == "sharded":
            shard(model, ranks)
        optimizers = Optimizers(model, settings, together=way != "torch")
        matrices = [p for group in optimizers.members[0].param_groups for p in group["params"]]
        generator = torch.Generator().manual_seed(5)
        for _ in range(3):
            for weight in model.parameters():
                weight.grad = torch.zeros_like(weight)
                take_share(weight.grad, torch.randn(weight.shape, generator=generator))
            with Counted() as calls:
                optimizers.members[0].step()
        shapes = {tuple(p.shape) for p in matrices}
        found[way] = {**calls.summary(), "matrices": len(matrices), "shapes": len(shapes)}
        trained[way] = {
            name: getattr(p, "full_tensor", lambda p=p: p)().detach()
            for name, p in model.named_parameters()
        }
    for way in ("copied", "sharded"):
        found[way]["difference"] = max(
            float((trained[way][name] - due).abs().max()) for name, due in trained["torch"].items()
        )
    return found


def check_hybrid(ranks: Ranks) -> Any:
    """Two groups of two: gradients of one process; sums between groups once a step."""
    found = {}
    rows = [a_row(seed) for seed in range(ROWS)]
    alone = make("untied")
    backward(alone, rows)
    for name in ("waits", "each"):
        model = make("untied")
        shard(model, ranks, 2)
        sync = GradientSync(model)
        sync.waits &= name == "waits"
        with Counted() as calls:
            for row in sync.over(share_of(ranks, rows)):
                row_loss(model, model.tensors(row), float(SLOTS * ROWS)).loss.backward()
        found[name] = {
            "difference": farthest(gradients(model), gradients(alone)),
            **calls.summary(),
        }
    [held] = {p.to_local().numel() / p.numel() for p in model.parameters() if p.shape[0] % 2 == 0}
    return {**found, "held": held}


CHECKS: dict[str, Callable[[Ranks], Any]] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    with Ranks(torch.device("cpu")) as all_ranks:
        answers = {name: CHECKS[name](all_ranks) for name in sys.argv[1:]}
        all_ranks.barrier()
    print(json.dumps(answers), flush=True)
    # Gloo's threads may still hold tensors, and abort an interpreter that ends
    # (pytorch/pytorch#179291).
    os._exit(0)
