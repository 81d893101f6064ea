"""TRL's SFTTrainer with packing on conversations with loss on some tokens.

Arguments: model folder, documents (JSON: input_ids and labels), slots, rows of a step, steps of a
turn, threads.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

disable_progress_bars()
folder, docs = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
slots, rows, steps, threads = map(int, sys.argv[3:])
torch.set_num_threads(threads)
model = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="sdpa"
)
tokens = 0


def count(module: Any, args: Any, named: dict[str, Any]) -> None:
    global tokens
    tokens += int((named["input_ids"] != -1).sum())


class Turns(TrainerCallback):  # type: ignore[misc]
    """Wait for a line before each turn; its first step is not counted, as for the others."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Called by transformers before the first step."""
        sys.stdin.readline()

    def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
        """Called by transformers after each optimizer step."""
        global tokens
        if state.global_step % (steps + 1) == 1:
            tokens, self.begun = 0, time.process_time()
        elif state.global_step % (steps + 1) == 0:
            print(
                json.dumps({"seconds": time.process_time() - self.begun, "tokens": tokens}),
                flush=True,
            )
            control.should_training_stop = not sys.stdin.readline()


model.register_forward_pre_hook(count, with_kwargs=True)
settings = SFTConfig(
    f"{folder}/trl",
    max_steps=1_000_000,
    per_device_train_batch_size=rows,
    learning_rate=1e-3,
    max_grad_norm=1.0,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    optim="adamw_torch_fused",
    lr_scheduler_type="constant",
    logging_strategy="no",
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    packing=True,
    packing_strategy="bfd",
    max_length=slots,
    dataset_kwargs={"skip_prepare_dataset": False},
)
trainer = SFTTrainer(
    model=model, args=settings, train_dataset=Dataset.from_list(docs), callbacks=[Turns()],
    processing_class=AutoTokenizer.from_pretrained(folder),
)  # fmt: skip
trainer.remove_callback(PrinterCallback)
trainer.train()
