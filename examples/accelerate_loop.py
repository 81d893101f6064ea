"""Accelerate in a plain loop; killed and started again, with any number of ranks.

accelerate launch --num_processes 2 --cpu examples/accelerate_loop.py DATASET CHECKPOINTS --steps 40

The dataset must come with its tokenizer's size; the model is a small Llama of transformers with
random weights.
"""

import argparse
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed

import penstock as ps


def small_model(vocab_size):
    """A Llama that learns something in a minute."""
    set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config).train()


def train(accelerator, dataset, folder, steps, every=10):
    """Train to a step; the loss of each step that was trained here."""
    model = small_model(ps.open_dataset(dataset).tokenizer.vocab_size)
    ps.check_isolation(model, sequence_length=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = ps.Loader(
        dataset,
        sequence_length=64,
        rows_per_step=4,
        seed=1,
        requirements=ps.huggingface.REQUIREMENTS,
        data_parallel=(accelerator.process_index, accelerator.num_processes),
    )
    data = ps.accelerate.AcceleratorSteps(accelerator, loader)
    model, optimizer = accelerator.prepare(model, optimizer)
    if (folder / "newest").is_dir():
        accelerator.load_state(folder / "newest")
    losses = []
    for step in data if loader.step < steps else ():
        total = torch.zeros(1, device=accelerator.device)
        for rows in data.rows(step, model):
            loss = ps.huggingface.loss(model, rows, step.loss_denominator)
            data.backward(loss)
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        data.trained(step)
        losses.append(float(accelerator.reduce(total, "sum")))
        done = step.index + 1
        if done % every == 0 or done == steps:
            accelerator.save_state(folder / "newest")
            accelerator.print(f"step {done}: loss {losses[-1]:.4f}")
        if done == steps:
            break
    return losses


def main():
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    accelerator = Accelerator()
    train(accelerator, options.dataset, options.folder, options.steps)
    accelerator.end_training()


if __name__ == "__main__":
    main()
