"""A GPTModel of megatron-core on the CPU over packed batches, as one of the ranks of a grid: what
it saw and computed.

`python megatron_run.py SETTINGS.json OUTPUT.json` with RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT set. Transformer Engine's attention for packed sequences needs a GPU; here a core
attention by `PackedSeqParams` takes its place. Layers, rotary positions in the packed form, tensor
parallelism and the division of losses are Megatron's.
"""

# ruff: noqa: E402

import json
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from megatron.core.transformer import TransformerConfig

import penstock as ps
from penstock.integrations.megatron.layout import pack_rows

# Megatron puts rotary positions on the current GPU.
torch.cuda.current_device = lambda: "cpu"


class PackedAttention(torch.nn.Module):
    """Causal attention in each document of `packed_seq_params`; padding inside a document is left
    out.
    """

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(
        self, query: Any, key: Any, value: Any, *_: Any, packed_seq_params: Any, **__: Any
    ) -> torch.Tensor:
        out = torch.zeros_like(query)
        places = packed_seq_params.cu_seqlens_q_padded.tolist()
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        for begin, length in zip(places, lengths, strict=False):
            part = slice(begin, begin + length)
            q, k, v = (one[part].transpose(0, 1) for one in (query, key, value))
            found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            out[part] = found.transpose(0, 1)
        return out.flatten(1)


def make_model(tensor_ranks: int) -> Any:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor_ranks,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        init_method_std=0.3,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    torch.manual_seed(0)
    return GPTModel(
        config,
        spec,
        vocab_size=64,
        max_sequence_length=4096,
        position_embedding_type="rope",
        parallel_output=True,
    )


def forward_step(data_iterator: Any, model: Any) -> Any:
    batch = next(data_iterator)
    output = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
        packed_seq_params=ps.megatron.packed_seq_params(batch),
    )  # fmt: skip
    return batch, output, partial(ps.megatron.step_loss, model.config, batch)


def loss_of(model: Any, tokens: Any, targets: Any, weights: Any) -> float:
    """Sum of weighted losses of a row whose slots are one document."""
    made = ps.ModelInput(
        tokens=tokens,
        targets=targets[None],
        loss_weights=weights[None],
        positions=np.arange(len(tokens)),
        document_ids=None,
        cu_seqlens=np.array([0, len(tokens)], np.int32),
        max_seqlen=len(tokens),
        num_tokens=len(tokens),
        source_ids=np.zeros(1, np.int32),
    )
    packed = pack_rows([made])
    batch = {
        name: torch.from_numpy(getattr(packed, name))
        for name in ("cu_seqlens", "cu_seqlens_padded")
    }
    ids, places, labels = (
        torch.from_numpy(one)[None] for one in (packed.tokens, packed.position_ids, packed.labels)
    )
    parameters = ps.megatron.packed_seq_params({**batch, "max_seqlen": packed.max_seqlen})
    with torch.no_grad():
        output = model(ids, places, None, labels=labels, packed_seq_params=parameters)
    return float((output[0] * torch.from_numpy(packed.loss_mask)).sum())


def first_step_alone(model: Any, data: str, rows: int) -> dict[str, float]:
    """Loss of the first step, each document by itself; and, as a control, with documents that see
    each other.
    """
    step = next(
        iter(
            ps.Loader(ps.Source(data, name="data"), sequence_length=64, rows_per_step=rows, seed=3)
        )
    )
    alone = leaking = 0.0
    for row in step:
        arrays = row.tokens, row.targets[0], row.loss_weights[0]
        leaking += loss_of(model, *arrays)
        for begin, end in zip(row.cu_seqlens.tolist(), row.cu_seqlens[1:].tolist(), strict=False):
            if begin < row.num_tokens:
                alone += loss_of(model, *(one[begin:end] for one in arrays))
    return {"alone": alone / step.loss_denominator, "leaking": leaking / step.loss_denominator}


def train(
    data: str,
    *,
    tensor_ranks: int,
    steps: int,
    rows: int,
    state: dict[str, Any] | None,
    weights: Any = None,
    **options: Any,
) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_ranks)
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    place = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    loader = None
    if tensor_rank == 0:
        loader = ps.Loader(
            ps.Source(data, name="data"),
            sequence_length=64,
            rows_per_step=rows,
            seed=3,
            data_parallel=place,
        )
    group = parallel_state.get_tensor_model_parallel_group() if ranks > 1 else None
    batches = ps.megatron.Batches(loader, group=group, **options)
    if state is not None:
        batches.load_state_dict(state)
    model = make_model(tensor_ranks)
    alone = first_step_alone(model, data, rows) if ranks == 1 else {}
    if weights is not None:
        given = weights if ranks == 1 else weights[rank]
        for name, weight in model.named_parameters():
            weight.data.copy_(torch.tensor(given[name]))
    saved = {}
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    seen, losses, states = [], [], []
    for _ in range(steps):
        optimiser.zero_grad()
        part, number, total = 0.0, 0, 1
        while number < total:
            batch, output, loss = forward_step(batches, model)
            total = batch["num_microbatches"]
            logged: list[Any] = []
            scaled, _ = forward_step_calc_loss(
                model,
                output,
                loss,
                model.config,
                None,
                False,
                total,
                logged,
                cp_group_size=1,
                is_last_stage=True,
            )
            scaled.backward()
            part += float(logged[0]["lm loss"])
            seen.append(
                {
                    name: batch[name].tolist()
                    for name in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens")
                }
            )
            number += 1
        # What Megatron's DistributedDataParallel does: the mean over data-parallel ranks.
        for weight in model.parameters():
            dist.all_reduce(weight.grad, group=parallel_state.get_data_parallel_group())
            weight.grad /= place[1]
        optimiser.step()
        sums = torch.tensor(part, dtype=torch.float64)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        losses.append(float(sums))
        states.append(batches.state_dict())
        if len(states) == 2:
            saved = {name: weight.tolist() for name, weight in model.named_parameters()}
    return {
        "seen": seen,
        "losses": losses,
        "states": states,
        "place": [tensor_rank, *place],
        "weights": saved,
        **alone,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = train(**json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(found))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
