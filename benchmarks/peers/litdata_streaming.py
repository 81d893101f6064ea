"""litdata: rows of tokens in chunks, shuffled, read from a store into batches of int32.

Arguments: the store's bucket folder and endpoint, a file of uint16 tokens, tokens of a row, rows of
a batch. Each line of the input is a number of workers. Needs torch and litdata. Its obstore reads
only TLS unless it is told otherwise, for which litdata has no setting.
"""

import logging
import os
import sys
from pathlib import Path

import numpy as np
import torch

os.environ |= {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench",
    "AWS_DEFAULT_REGION": "us-east-1",
    "DISABLE_VERSION_CHECK": "1",
}
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize
from litdata.streaming import downloader
from timed_epoch import answer_lines

bucket, endpoint, tokens_file = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
slots, rows = map(int, sys.argv[4:6])
downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
logging.disable(logging.WARNING)
CHUNK_BYTES = 8 << 20


def parts_of(part: int):
    tokens = np.fromfile(tokens_file, np.uint16)
    chunk = CHUNK_BYTES // 2 // slots * slots
    for begin in range(0, len(tokens) // slots * slots, chunk):
        yield torch.from_numpy(
            tokens[begin : begin + chunk][: len(tokens[begin : begin + chunk]) // slots * slots]
        )


def batch_of(samples: list) -> torch.Tensor:
    return torch.stack(samples).to(torch.int32)


def batches(local: str, workers: int) -> StreamingDataLoader:
    data = StreamingDataset(
        "s3://bucket/litdata",
        cache_dir=local,
        item_loader=TokensLoader(block_size=slots),
        shuffle=True,
        storage_options={"endpoint_url": endpoint},
        max_pre_download=4,
    )
    return StreamingDataLoader(data, batch_size=rows, num_workers=workers, collate_fn=batch_of)


if __name__ == "__main__":
    if not (bucket / "litdata" / "index.json").exists():
        optimize(
            parts_of,
            [0],
            str(bucket / "litdata"),
            chunk_bytes=CHUNK_BYTES,
            num_workers=1,
            verbose=False,
            item_loader=TokensLoader(block_size=slots),
        )
    answer_lines(batches)
