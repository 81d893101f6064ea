"""MosaicML streaming: rows of tokens in shards of MDS, shuffled by py1e, read from a store into
batches of int32.

Arguments: the store's bucket folder and endpoint, a file of uint16 tokens, tokens of a row, rows of
a batch. Each line of the input is a number of workers. Needs torch and mosaicml-streaming;
torchvision, which it imports for images, may be missing.
"""

import gc
import logging
import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch.utils.data import DataLoader

try:
    import torchvision  # noqa: F401
except ImportError:
    import transformers.feature_extraction_utils  # noqa: F401  # looks for torchvision, and must not find this one

    for name in (
        "torchvision",
        "torchvision.datasets",
        "torchvision.transforms",
        "torchvision.transforms.functional",
    ):
        sys.modules[name] = ModuleType(name)
    sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
    sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]

from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from timed_epoch import answer_lines

bucket, endpoint, tokens_file = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
slots, rows = map(int, sys.argv[4:6])
os.environ |= {
    "S3_ENDPOINT_URL": endpoint,
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench",
}
logging.getLogger("streaming").setLevel(logging.ERROR)
SHARD_BYTES = 8 << 20

if not (bucket / "mds" / "index.json").exists():
    tokens = np.fromfile(tokens_file, np.uint16)
    with MDSWriter(
        out=str(bucket / "mds"), columns={"tokens": "ndarray:uint16"}, size_limit=SHARD_BYTES
    ) as writer:
        for row in tokens[: len(tokens) // slots * slots].reshape(-1, slots):
            writer.write({"tokens": row})


def batch_of(samples: list) -> torch.Tensor:
    return torch.from_numpy(np.stack([one["tokens"] for one in samples]).astype(np.int32))


def batches(local: str, workers: int) -> DataLoader:
    data = StreamingDataset(
        remote="s3://bucket/mds", local=local, shuffle=True, shuffle_algo="py1e", batch_size=rows,
        predownload=64 * rows, num_canonical_nodes=1,
    )  # fmt: skip
    for stream in data.streams:
        # Forked workers would share the connection that brought the index, and read each other's
        # answers.
        stream._downloader.clean_up()
    return DataLoader(data, batch_size=rows, num_workers=workers, collate_fn=batch_of)


def clean() -> None:
    gc.collect()  # what is left of an epoch removes shared memory by name
    clean_stale_shared_memory()


clean()
answer_lines(batches, clean)
