"""What recurrent layers cost over packed rows: against a loop over documents, transformers' code,
and padded rows.

    python benchmarks/bench_recurrent.py [--threads 1] [--repeats 5] [--only operations|models]

Forward and backward, float32, CPU time, medians of interleaved turns. Operations: a row of T slots
in equal documents. "Loop": the same function once for each document, ours or that of transformers,
whichever is faster. One document: transformers' function for the whole row. Models: four layers of
width 256 with a head, rows of 2,048 slots, 32 documents of lognormal lengths; the same documents
one at a time without padding, and each in a row of 2,048.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.functional import normalize, pad, softplus
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from common import against, arguments, cpu_seconds, table, take_turns
from penstock.models.recurrent import (
    Borders,
    causal_convolution,
    gated_delta_rule,
    linear_scan,
    state_space_scan,
)
from penstock.models.theirs.model import HuggingFaceModel
from penstock.plan.inputs.model_input import ModelInput

DOCUMENTS = {"one document": 0, "of 128 tokens": 128, "of 32 tokens": 32, "of 8 tokens": 8}
GOALS = {32: 4.0, 128: 1.3, 8: 1.0}
ALONE = {"gated delta": 1.3, "Mamba-2": 1.3, "KDA": 8.0, "Mamba-1": 8.0, "convolution": 0.9}
SLOTS, SHARED = (
    2048,
    {
        "vocab_size": 2048,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 768,
        "head_dim": 64,
        "max_position_embeddings": 4096,
    },
)
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "lfm2": {"layer_types": ["conv", "conv", "conv", "full_attention"]},
    "falcon_h1": {
        "mamba_d_ssm": 512,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 128,
    },
}


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape)


@dataclass
class Operation:
    """One operation of both sides."""

    slots: int
    inputs: list[Tensor]
    """[T, …] each."""
    ours: Callable[..., Tensor]
    """(inputs, borders) → [T, …]."""
    theirs: Callable[..., Tensor]
    """(inputs [1, n, …] of one document) → its outputs."""

    def run_ours(self, cu: Any) -> float:
        """CPU seconds of ours for documents with these borders, in one call."""
        return cpu_seconds(lambda: self.ours(*self.inputs, Borders(cu)).sum().backward())

    def loop_ours(self, cu: Any) -> float:
        """CPU seconds of ours, called once for each document."""

        def work() -> None:
            found = [
                self.ours(*inputs, Borders([0, len(inputs[0])])) for inputs in self.documents(cu)
            ]
            torch.cat(found).sum().backward()

        return cpu_seconds(work)

    def loop_theirs(self, cu: Any) -> float:
        """CPU seconds of transformers' function, called once for each document."""

        def work() -> None:
            found = [self.theirs(*(x[None] for x in inputs)) for inputs in self.documents(cu)]
            sum((one[0] if isinstance(one, tuple) else one).sum() for one in found).backward()

        return cpu_seconds(work)

    def documents(self, cu: Any) -> list[list[Tensor]]:
        """The inputs of each document."""
        return [[x[begin:end] for x in self.inputs] for begin, end in pairwise(cu.tolist())]


def operations() -> dict[str, Operation]:
    """By name."""
    total, heads, width, small, channels, states = 4096, 4, 64, 1024, 128, 16
    q, k = (normalize(numbers(total, heads, width), dim=-1) for _ in range(2))
    v, g, beta = numbers(total, heads, width), -torch.rand(total, heads), torch.rand(total, heads)
    channel_g = -torch.rand(2048, 2, width)
    keys = [numbers(total, 1, width) for _ in range(2)]
    decay, weight, decays = (
        -torch.rand(heads),
        numbers(3 * heads * width, 4),
        -torch.rand(channels, states),
    )
    small_keys = [numbers(small, states) for _ in range(2)]

    def delta(*inputs: Any) -> Tensor:
        return gated_delta_rule(*inputs, keep=False)[0]

    def space(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, borders: Borders) -> Tensor:
        return state_space_scan(x, dt, decay, b, c, borders, keep=False)[0]

    def their_space(x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Any:
        return mamba2.mamba2_chunk_scan(x, dt, decay, b, c, chunk_size=64)

    def selective(u: Tensor, dt: Tensor, b: Tensor, c: Tensor, borders: Borders) -> Tensor:
        h, _ = linear_scan(
            (dt[..., None] * decays).exp(), (dt * u)[..., None] * b[:, None], borders, keep=False
        )
        return (h @ c[..., None])[..., 0]

    def their_selective(u: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Any:
        u, dt, b, c = (x.transpose(1, 2) for x in (u, dt, b, c))
        return mamba.mamba_selective_scan(u, dt, decays, b, c)

    def convolution(row: Tensor, borders: Borders) -> Tensor:
        return causal_convolution(row, weight, None, borders)

    def their_convolution(row: Tensor) -> Any:
        return qwen.causal_conv1d_fn(row.transpose(1, 2), weight, None)

    def made(inputs: list[Tensor], ours: Any, theirs: Any) -> Operation:
        return Operation(len(inputs[0]), [x.clone().requires_grad_() for x in inputs], ours, theirs)

    few = [x[:2048, :2] for x in (q, k, v)]
    return {
        "gated delta": made([q, k, v, g, beta], delta, qwen.torch_chunk_gated_delta_rule),
        "KDA": made([*few, channel_g, beta[:2048, :2]], delta, kimi.chunk_kimi_delta_attention),
        "Mamba-2": made([v, softplus(g), *keys], space, their_space),
        "Mamba-1": made(
            [numbers(small, channels), torch.rand(small, channels), *small_keys],
            selective,
            their_selective,
        ),
        "convolution": made([numbers(total, 3 * heads * width)], convolution, their_convolution),
    }


def time_operations(repeats: int) -> None:
    for name, one in operations().items():
        rows = []
        for title, length in DOCUMENTS.items():
            cu = np.arange(0, one.slots + 1, length or one.slots)
            rivals = {"ours": partial(one.run_ours, cu), "theirs": partial(one.loop_theirs, cu)}
            if length:
                rivals["loop"] = partial(one.loop_ours, cu)
            if length and name == "KDA":
                del rivals["theirs"]  # slower than our loop by far, and minutes long
            found = take_turns(rivals, repeats if length else max(1, repeats // 2))
            best = min(value for rival, value in found.items() if rival != "ours")
            note = ", ".join(f"{rival} {1000 * value:.0f} ms" for rival, value in found.items())
            peer = "a loop over documents" if length else "transformers' function"
            against("Recurrent layers", f"{name}, {title}", peer, ours=found["ours"], theirs=best)
            rows.append(
                (
                    title,
                    f"{best / found['ours']:.2f} x",
                    f"goal {GOALS.get(length, ALONE[name])}; {note}",
                )
            )
        table(f"{name}, {one.slots} slots", rows)


def row_of(lengths: Any, slots: int, tokens: Any) -> ModelInput:
    pieces = [*lengths, slots - sum(lengths)] if sum(lengths) < slots else [*lengths]
    return ModelInput(
        tokens=tokens,
        targets=np.full((1, slots), -100),
        loss_weights=np.zeros((1, slots), np.float32),
        positions=np.concatenate([np.arange(length) for length in pieces]),
        document_ids=np.repeat(np.arange(len(pieces)), pieces),
        cu_seqlens=np.concatenate([[0], np.cumsum(pieces)]).astype(np.int32),
        max_seqlen=int(max(pieces)),
        num_tokens=int(sum(lengths)),
        source_ids=np.zeros(len(lengths), np.int32),
    )


def time_models(repeats: int, count: int = 32) -> None:
    draw = np.random.default_rng(0)
    shares = draw.lognormal(0, 1, count)
    lengths = np.maximum(4, shares / shares.sum() * SLOTS * 0.95).astype(int)
    lengths[lengths.argmax()] += SLOTS - lengths.sum()
    tokens = draw.integers(3, 2000, SLOTS)
    cuts, rows = np.cumsum([0, *lengths]).tolist(), []
    documents = [torch.from_numpy(tokens[begin:end])[None] for begin, end in pairwise(cuts)]
    padded = [pad(ids, (0, SLOTS - ids.shape[1])) for ids in documents]
    for kind, settings in HYBRIDS.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **SHARED, **settings)
        inner = transformers.AutoModelForCausalLM.from_config(config)
        model = HuggingFaceModel(inner)
        packed = model.tensors(row_of(lengths.tolist(), SLOTS, tokens))
        found = take_turns(
            {
                "packed": partial(
                    step, inner, lambda model=model, row=packed: [model.logits(model(row))]
                ),
                "single": partial(
                    step, inner, lambda inner=inner: (logits(inner, ids) for ids in documents)
                ),
                "padded": partial(
                    step, inner, lambda inner=inner: (logits(inner, ids) for ids in padded)
                ),
            },
            max(1, repeats // 2),
        )
        note = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in found.items())
        rows.append(
            (
                f"{kind}: unpadded single documents",
                f"{found['single'] / found['packed']:.2f} x",
                "goal 1.3",
            )
        )
        rows.append(
            (
                f"{kind}: a padded row each",
                f"{found['padded'] / found['packed']:.2f} x",
                f"goal 5; {note}",
            )
        )
    table(f"Hybrids, {count} documents in a row of {SLOTS}", rows)


def logits(inner: Any, ids: Tensor) -> Tensor:
    found: Tensor = inner(input_ids=ids, use_cache=False).logits.float()
    return found


def step(inner: Any, passes: Callable[[], Iterable[Tensor]]) -> float:
    """CPU seconds of forward and backward passes."""
    inner.zero_grad()

    def work() -> None:
        for found in passes():
            found.logsumexp(-1).sum().backward()

    return cpu_seconds(work)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["operations", "models"])
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(50)
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    if asked.only != "models":
        time_operations(asked.repeats)
    if asked.only != "operations":
        time_models(asked.repeats)


if __name__ == "__main__":
    main()
