"""TRL's preparation of conversations with assistant_only_loss. Arguments: chats.jsonl,
tokenizer.json, template.jinja.

CPU seconds of all processes: reading, rendering, tokens and masks, as its SFTTrainer does it. The
tokenizer's EOS is <|im_end|>, as in the template.
"""

import json
import os
import resource
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import datasets
from transformers import PreTrainedTokenizerFast
from trl import SFTTrainer

os.environ["TOKENIZERS_PARALLELISM"] = "false"
datasets.disable_progress_bars()


def cpu_seconds() -> float:
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in spent)


def prepare(chats: str, tokenizer: PreTrainedTokenizerFast, cache: str) -> datasets.Dataset:
    data = datasets.load_dataset("json", data_files=chats, split="train", cache_dir=cache)
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=False)
    args = SimpleNamespace(
        dataset_num_proc=2,
        dataset_text_field="text",
        assistant_only_loss=True,
        max_length=None,
        truncation_mode="keep_start",
        shuffle_dataset=False,
    )
    return SFTTrainer._prepare_dataset(trainer, data, tokenizer, args, False, None, "train")


if __name__ == "__main__":
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=sys.argv[2], eos_token="<|im_end|>")
    tokenizer.chat_template = Path(sys.argv[3]).read_text(encoding="utf-8")
    for _ in sys.stdin:
        with tempfile.TemporaryDirectory() as cache:
            begun = cpu_seconds()
            prepared = prepare(sys.argv[1], tokenizer, cache)
            seconds = cpu_seconds() - begun
            trained = sum(label != -100 for labels in prepared["labels"] for label in labels)
            tokens = sum(map(len, prepared["input_ids"]))
            del prepared
        print(json.dumps({"seconds": seconds, "tokens": tokens, "trained": trained}), flush=True)
