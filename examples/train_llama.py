"""Train a small Llama on a prepared dataset with a loop of your own; stop it at any time and start
it again.

    penstock prepare web/*.jsonl --tokenizer tokenizer.json --output data/web
    python examples/train_llama.py data/web run

Needs `pip install 'penstock[huggingface]'`. One process; for several, ps.huggingface.Trainer does
what is needed. The loader's state is saved with the weights, so a restart trains exactly the steps
that are left, on exactly the rows that they would have had.
"""

import argparse
import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import penstock as ps


def main(data: str, run: Path, steps: int, sequence_length: int, rows_per_step: int) -> None:
    """Train up to `steps` steps, from the checkpoint in `run` if there is one."""
    dataset = ps.open_dataset(data)
    loader = ps.Loader(
        ps.Source(dataset), sequence_length=sequence_length, rows_per_step=rows_per_step, seed=7
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=dataset.manifest.tokenizer.vocab_size,
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=sequence_length,
        )
    ).to(device)
    ps.check_isolation(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    checkpoint = run / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        loader.load_state_dict(saved["loader"])
        print(f"goes on at step {loader.step}")

    for step in loader:
        if step.index >= steps:
            break
        loss = 0.0
        for row in step:
            part = ps.huggingface.loss(model, row, step.loss_denominator)
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        print(f"step {step.index}: loss {loss:.4f}, {step.num_tokens} tokens", flush=True)
        if (step.index + 1) % 20 == 0 or step.index + 1 == steps:
            run.mkdir(parents=True, exist_ok=True)
            saved = {
                "model": model.state_dict(),
                "optimiser": optimiser.state_dict(),
                "loader": step.resume_state,
            }
            torch.save(saved, run / "checkpoint.new")
            os.replace(run / "checkpoint.new", checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="a folder that `penstock prepare` wrote")
    parser.add_argument("run", type=Path, help="where the checkpoint is kept")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--rows-per-step", type=int, default=8)
    main(**vars(parser.parse_args()))
