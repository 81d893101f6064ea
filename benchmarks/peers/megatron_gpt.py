"""Megatron-core's GPTDataset with torch's default collate. Arguments: folder with tokens.npy and
lengths.npy, slots.

Rows carry tokens, labels, loss mask and position ids, as Megatron makes them; it cuts documents at
row edges.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split
from torch.utils.data import default_collate

torch.set_num_threads(1)
folder, slots = Path(sys.argv[1]), int(sys.argv[2])
tokens, lengths = np.load(folder / "tokens.npy"), np.load(folder / "lengths.npy")
ends = np.cumsum(lengths)
prefix = str(folder / "megatron")
builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
for begin, end in zip(ends - lengths, ends, strict=True):
    builder.add_document(torch.from_numpy(tokens[begin:end].astype(np.int64)), [int(end - begin)])
builder.finalize(f"{prefix}.idx")


class Tokenizer:
    """What GPTDataset asks of a tokenizer."""

    eod, pad, vocab_size, unique_identifiers = 0, 1, 8192, {"class": "bench"}


config = GPTDatasetConfig(
    random_seed=1,
    sequence_length=slots,
    blend=([prefix], None),
    split="100,0,0",
    reset_position_ids=True,
    reset_attention_mask=False,
    eod_mask_loss=False,
    create_attention_mask=False,
    tokenizer=Tokenizer(),
    path_to_cache=str(folder / "cache"),
    mid_level_dataset_surplus=0.005,
)
rows = int(ends[-1]) // slots - 1
data = GPTDataset(
    IndexedDataset(prefix),
    prefix,
    np.arange(len(lengths), dtype=np.int32),
    rows,
    Split.train,
    config,
)
order = np.random.default_rng(0).permutation(len(data))[:400].tolist()
for _ in sys.stdin:
    begun = time.process_time()
    for first in range(0, len(order), 8):
        default_collate([data[i] for i in order[first : first + 8]])
    print(
        json.dumps({"seconds": time.process_time() - begun, "tokens": len(order) * slots}),
        flush=True,
    )
