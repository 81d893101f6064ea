"""How fast is training? Tokens a second, MFU and peak memory, against the loops that users choose.

    python benchmarks/gpu/07_training.py --output results

Rivals take turns on the same card, with as many slots a step. `ours`: `ps.train`, packed and
exact. `one document a row`: as many slots, each row one document, causal over the row; its speed
over ours is what isolation costs. `bare loop`: a Llama of transformers of the same size in the
shortest loop, as nanochat's: rows cut anywhere, causal over the row, bfloat16 by autocast, fused
AdamW, blocks compiled. `Trainer`: Hugging Face's with padding-free FlashAttention 2
(`DataCollatorWithFlattening`), where flash-attn is installed. torchtitan has a command of its own:
run it beside this with the same sizes.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import penstock as ps
from common import (
    SIZES,
    TOY,
    Data,
    Figures,
    MissingError,
    Report,
    folder,
    mfu,
    need,
    operations_per_token,
    own_model,
    peak_gb,
    seconds,
    train,
)

FAST = {"precision": "bfloat16", "deterministic": False}


class Rivals:
    """All that train a model of one size on rows of one length."""

    def __init__(self, report: Report, place: Path, size: str, slots: int, rows: int) -> None:
        self.report, self.place, self.size, self.slots, self.rows = report, place, size, slots, rows
        self.steps = 3 if report.toy else 15
        self.vocabulary = 400 if report.toy else 50304

    def with_mfu(self, found: Figures, attended: float) -> Figures:
        """With the share of the peak."""
        model = own_model(self.report, self.size)
        operations = operations_per_token(model, attended)
        return {"mfu": mfu(operations, found["tokens_per_second"]), **found}

    def ours(self, data: Path, attended: float, **settings: Any) -> Figures:
        """`ps.train`."""
        loader = ps.Loader(ps.Source(data), sequence_length=self.slots, rows_per_step=self.rows)
        model = own_model(self.report, self.size)
        found = train(self.report, model, loader, steps=self.steps, **{**FAST, **settings})
        return self.with_mfu(found, attended)

    def whole_rows(self) -> Path:
        """A dataset in which each document fills a row."""
        place = self.place / f"rows-{self.slots}"
        if not place.exists():
            tokenizer = ps.load_tokenizer(self.place / "tokenizer")
            generator = np.random.default_rng(2)
            count = self.rows * (self.steps + 2)
            ids = [generator.integers(3, 200, self.slots) for _ in range(count)]
            ps.write_dataset(place, ids, tokenizer=tokenizer)
        return place

    def bare(self) -> Figures:
        """The shortest loop."""
        transformers = need("transformers")
        made = TOY if self.report.toy else SIZES[self.size]
        heads = made["heads"]
        config = transformers.LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=made["width"],
            intermediate_size=made["width"] * 8 // 3 // 64 * 64 or 64,
            num_hidden_layers=made["layers"],
            num_attention_heads=heads,
            num_key_value_heads=made.get("kv_heads", heads),
            max_position_embeddings=self.slots,
            attn_implementation="sdpa",
        )
        model = transformers.LlamaForCausalLM(config).to(self.report.device).train()
        if not self.report.toy:
            for block in model.model.layers:
                block.compile()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        generator = np.random.default_rng(3)
        device = self.report.device

        def step() -> None:
            for _ in range(self.rows):
                ids = torch.from_numpy(generator.integers(3, 200, (1, self.slots + 1))).to(device)
                with torch.autocast(device.type, torch.bfloat16):
                    logits = model(ids[:, :-1]).logits
                cross_entropy(logits[0].float(), ids[0, 1:]).div(self.rows).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        took = seconds(step, self.steps, warm=1 if self.report.toy else 4)
        found = {
            "step_seconds": took,
            "tokens_per_second": self.rows * self.slots / took,
            "peak_gb": peak_gb(),
        }
        return self.with_mfu(found, self.slots / 2)

    def trainer(self) -> Figures:
        """Hugging Face's Trainer, padding-free."""
        need("flash_attn")
        transformers = need("transformers")
        made = SIZES[self.size]
        config = transformers.LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=made["width"],
            intermediate_size=made["width"] * 8 // 3 // 64 * 64,
            num_hidden_layers=made["layers"],
            num_attention_heads=made["heads"],
            num_key_value_heads=made.get("kv_heads", made["heads"]),
            max_position_embeddings=self.slots,
            attn_implementation="flash_attention_2",
        )
        model = transformers.LlamaForCausalLM(config).to(self.report.device, torch.bfloat16)
        generator = np.random.default_rng(4)
        texts = [
            {"input_ids": generator.integers(3, 200, int(n)).tolist()}
            for n in generator.integers(100, 1500, 4000)
        ]
        batch = max(1, self.slots // 800)
        arguments = transformers.TrainingArguments(
            output_dir=str(self.place / "trainer"),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=self.rows,
            max_steps=self.steps,
            bf16=True,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            optim="adamw_torch_fused",
            torch_compile=True,
        )
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=texts,
            data_collator=transformers.DataCollatorWithFlattening(),
        )
        done = trainer.train()
        tokens = batch * self.rows * self.steps * 800
        return {
            "tokens_per_second": tokens / done.metrics["train_runtime"],
            "peak_gb": peak_gb(),
        }


def torchtitan() -> Figures:
    """Said, not run."""
    need("torchtitan")
    raise MissingError("run torchtitan's own command with the same sizes")


def main() -> None:
    report = Report(__file__, __doc__)
    with folder() as place:
        data = Data(place, 400 if report.toy else 6000, 20.0 if report.toy else 800.0)
        plans = [("125M", 8192, 4), ("1B", 8192, 2)]
        for size, slots, rows in [("125M", 64, 2)] if report.toy else plans:
            rivals = Rivals(report, place, size, slots, rows)
            mean = data.attended
            for turn in range(1 if report.toy else 2):
                at = f"{size}, {slots} slots, turn {turn + 1}"
                report.part(f"ours, {at}", rivals.ours, data.web, mean)
                if not report.toy:
                    report.part(f"ours, compiled, {at}", rivals.ours, data.web, mean, compile=True)
                report.part(
                    f"one document a row, {at}", rivals.ours, rivals.whole_rows(), slots / 2
                )
                report.part(f"bare loop, {at}", rivals.bare)
            report.part(
                f"ours, deterministic, {size}", rivals.ours, data.web, mean, deterministic=True
            )
            report.part(f"Trainer, {size}", rivals.trainer)
    report.part("torchtitan", torchtitan)
    report.done()


if __name__ == "__main__":
    main()
