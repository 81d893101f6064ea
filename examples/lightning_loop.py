"""Lightning, on any number of processes; killed and started again.

python examples/lightning_loop.py DATASET RUN --steps 40 --processes 2

The model is a small Llama of transformers with random weights.
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint

import penstock as ps


class SmallLlama(pl.LightningModule):
    """One batch is this rank's part of a step; its loss is a part of the step's."""

    def __init__(self, vocab_size):
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="sdpa",
        )
        self.model = transformers.LlamaForCausalLM(config).train()
        ps.check_isolation(self.model, sequence_length=64)
        self.losses = []

    def training_step(self, step, batch_idx):
        """Lightning averages gradients over ranks; `scaled` makes a sum of that."""
        loss = ps.huggingface.loss(self.model, step, step.loss_denominator)
        scaled = self.trainer.datamodule.scaled(loss)
        self.log("loss", scaled, sync_dist=True)
        self.losses.append(float(loss.detach()))
        return scaled

    def configure_optimizers(self):
        """As you like."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(dataset, folder, steps, processes=1, every=10):
    """Train to a step, from the last checkpoint in the folder if there is one; what this rank has
    of each loss.
    """
    pl.seed_everything(0, verbose=False)
    model = SmallLlama(ps.open_dataset(dataset).tokenizer.vocab_size)
    data = ps.lightning.LoaderDataModule(
        lambda ranks: ps.Loader(
            dataset,
            sequence_length=64,
            rows_per_step=4,
            seed=1,
            requirements=ps.huggingface.REQUIREMENTS,
            data_parallel=ranks,
        )
    )
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="auto",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, save_last=True, every_n_train_steps=every)],
    )
    last = folder / "last.ckpt"
    trainer.fit(model, data, ckpt_path=last if last.exists() else None)
    trainer.print(
        f"step {trainer.global_step}: loss {trainer.callback_metrics.get('loss', float('nan')):.4f}"
    )
    return model.losses


def main():
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    train(options.dataset, options.folder, options.steps, options.processes)


if __name__ == "__main__":
    main()
