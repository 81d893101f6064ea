"""A GPT of Megatron-Core on packed rows, tensor- and data-parallel; stop it at any time and start
it again.

    penstock prepare web/*.jsonl --tokenizer tokenizer.json --output data/web
    torchrun --nproc-per-node 4 examples/megatron_packed.py data/web run --tensor 2

Needs `pip install 'penstock[train]' megatron-core`. On GPUs, attention is Transformer Engine's
where it is installed. Else (and on CPUs, to try it) it is the few lines below. Megatron's own
schedules take the same `Batches` and `step_loss`.
"""

import argparse
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig

import penstock as ps

ON_GPU = torch.cuda.is_available()


class DocumentAttention(torch.nn.Module):
    """Causal attention, document by document, for where there is no Transformer Engine."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(
        self, query: Any, key: Any, value: Any, *_: Any, packed_seq_params: Any, **__: Any
    ) -> torch.Tensor:
        """[slots, heads, width] → [slots, heads · width]."""
        sizes = packed_seq_params.cu_seqlens_q.diff().tolist()
        parts = zip(*(one.split(sizes) for one in (query, key, value)), strict=True)
        attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
        found = [attend(*(one.transpose(0, 1) for one in part)).transpose(0, 1) for part in parts]
        return torch.cat(found).flatten(1)


def make_model(vocab_size: int, slots: int, tensor_ranks: int) -> Any:
    """A small GPT; learned positions on CPUs, because Megatron makes rotary ones on a GPU."""
    config = TransformerConfig(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor_ranks,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )
    if ON_GPU and find_spec("transformer_engine"):
        spec = get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = get_gpt_layer_local_spec()
        spec.submodules.self_attention.submodules.core_attention = DocumentAttention
    kind = "rope" if ON_GPU else "learned_absolute"
    padded = -(-vocab_size // (128 * tensor_ranks)) * 128 * tensor_ranks
    return GPTModel(
        config, spec, vocab_size=padded, max_sequence_length=slots, position_embedding_type=kind
    )


def main(
    data: str, run: Path, tensor: int, steps: int, sequence_length: int, rows_per_step: int
) -> None:
    """Train up to `steps` steps, from the checkpoint in `run` if there is one."""
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    device = (
        torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        if ON_GPU
        else torch.device("cpu")
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    if ON_GPU:
        torch.cuda.set_device(device)
        tensor_parallel.model_parallel_cuda_manual_seed(7)
    place = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()

    dataset, loader = ps.open_dataset(data), None
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        loader = ps.Loader(
            dataset,
            sequence_length=sequence_length,
            rows_per_step=rows_per_step,
            seed=7,
            data_parallel=place,
        )
    group = parallel_state.get_tensor_model_parallel_group()
    batches = ps.megatron.Batches(loader, rows_per_microbatch=2, group=group, device=device)
    torch.manual_seed(7)
    model = make_model(dataset.tokenizer.vocab_size, sequence_length, tensor).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first, checkpoint = 0, run / f"rank-{dist.get_rank()}.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        batches.load_state_dict(saved["batches"])
        first = saved["step"]

    for number in range(first, steps):
        loss, microbatch, count = torch.zeros((), device=device), 0, 1
        while microbatch < count:
            batch = next(batches)
            count, microbatch = batch["num_microbatches"], microbatch + 1
            output = model(
                batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
                packed_seq_params=ps.megatron.packed_seq_params(batch),
            )  # fmt: skip
            scaled, logged = ps.megatron.step_loss(model.config, batch, output)
            (scaled / count).backward()
            loss += logged["lm loss"]
        data_group = parallel_state.get_data_parallel_group()
        for weight in model.parameters():
            if weight.grad is not None:
                dist.all_reduce(weight.grad, group=data_group)
                weight.grad /= place[1]
        optimiser.step()
        optimiser.zero_grad()
        dist.all_reduce(loss, group=data_group)
        if dist.get_rank() == 0:
            print(f"step {number}: loss {loss.item():.4f}", flush=True)
        if (number + 1) % 20 == 0 or number + 1 == steps:
            run.mkdir(parents=True, exist_ok=True)
            saved = {
                "model": model.state_dict(),
                "optimiser": optimiser.state_dict(),
                "step": number + 1,
            }
            torch.save(
                {**saved, "batches": batches.state_dict()}, checkpoint.with_suffix(".partial")
            )
            checkpoint.with_suffix(".partial").replace(checkpoint)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("run", type=Path)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--rows-per-step", type=int, default=8)
    main(**vars(parser.parse_args()))
