"""TRL's DPOTrainer on given pairs of token ids: its losses on the first batch, then passes over all
batches.

Arguments: folder with `policy`, `reference` and `pairs.json`, pairs of a batch, threads.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from tokenizers import Tokenizer

disable_progress_bars()
folder, size, threads = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(threads)
pairs = json.loads((folder / "pairs.json").read_text())
words = Tokenizer(WordLevel({"a": 0, "b": 1, "<pad>": 2}, unk_token="a"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")


def load(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder / name, dtype=torch.float32, attn_implementation="sdpa"
    )


def trainer(kind: str, smoothing: float) -> Any:
    settings = DPOConfig(
        output_dir=str(folder / "out"),
        report_to="none",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=size,
        gradient_checkpointing=False,
        beta=0.1,
        disable_tqdm=True,
        loss_type=[kind],
        label_smoothing=smoothing,
        max_length=None,
    )
    some = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "a"}] * size)
    return DPOTrainer(
        model=load("policy"), ref_model=load("reference"), args=settings, train_dataset=some,
        processing_class=tokenizer,
    )  # fmt: skip


losses = {}
for kind, smoothing in (
    ("sigmoid", 0.0),
    ("hinge", 0.0),
    ("robust", 0.1),
    ("ipo", 0.0),
    ("sigmoid_norm", 0.0),
):
    one = trainer(kind, smoothing)
    with torch.no_grad():
        losses[kind] = float(one.compute_loss(one.model, one.data_collator(pairs[:size])))
one = trainer("sigmoid", 0.0)
batches = [one.data_collator(pairs[at : at + size]) for at in range(0, len(pairs), size)]
tokens = sum(int(batch["input_ids"].numel()) for batch in batches)
for _ in sys.stdin:
    begun = time.process_time()
    for batch in batches:
        one.compute_loss(one.model, batch).backward()
    one.model.zero_grad()
    print(
        json.dumps({"seconds": time.process_time() - begun, "losses": losses, "tokens": tokens}),
        flush=True,
    )
