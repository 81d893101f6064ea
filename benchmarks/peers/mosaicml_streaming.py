"""MosaicML streaming: rows of 4,097 tokens in shards of 8 MB, shuffled by py1e, read from a store.

Arguments: the folder of the store's bucket, the store's endpoint. Needs mosaicml-streaming.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from streaming import MDSWriter, StreamingDataset
from torch.utils.data import DataLoader

bucket, endpoint = Path(sys.argv[1]), sys.argv[2]
os.environ |= {"S3_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
SLOTS = 4097
ROWS = 60_000_000 // (2 * SLOTS)
if not (bucket / "mds").exists():
    tokens = np.random.default_rng(0).integers(0, 50_000, ROWS * SLOTS, dtype=np.uint16)
    with MDSWriter(out=str(bucket / "mds"), columns={"tokens": "bytes"}, size_limit=8_000_000) as writer:
        for row in tokens.reshape(ROWS, SLOTS):
            writer.write({"tokens": row.tobytes()})


def rows_of(batch: list) -> np.ndarray:
    return np.stack([np.frombuffer(one["tokens"], np.uint16) for one in batch])


for _ in sys.stdin:
    local = tempfile.mkdtemp()
    begun = time.monotonic()
    data = StreamingDataset(
        remote="s3://bucket/mds", local=local, shuffle=True, shuffle_algo="py1e", batch_size=32, predownload=1024,
        num_canonical_nodes=1,
    )  # fmt: skip
    first, count = 0.0, 0
    for batch in DataLoader(data, batch_size=32, num_workers=0, collate_fn=rows_of):
        first = first or time.monotonic() - begun
        count += batch.size
    print(json.dumps({"seconds": time.monotonic() - begun, "tokens": count, "first": first}), flush=True)
    shutil.rmtree(local, ignore_errors=True)
