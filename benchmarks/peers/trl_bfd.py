"""TRL's best-fit-decreasing packing (`pack_dataset`) with its defaults. Arguments: tokens.npy,
lengths.npy, slots.

Also the time of its assignment alone: from its segment tree, made after sorting, to where it takes
the tokens.
"""

import json
import sys
import time

import numpy as np
import pyarrow as pa
import trl.data_utils
from datasets import Dataset, disable_progress_bars

tokens, lengths, slots = np.load(sys.argv[1]), np.load(sys.argv[2]), int(sys.argv[3])
offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
dataset = Dataset(
    pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens.astype(np.int32))})
)
assigned = 0.0


class _Tree(trl.data_utils._SegmentTree):
    def __init__(self, *arguments):
        global assigned
        assigned -= time.process_time()
        super().__init__(*arguments)


class _Compute:
    """pyarrow.compute; `take` is called when the assignment is over."""

    def __getattr__(self, name):
        return getattr(compute, name)

    def take(self, *arguments):
        global assigned
        assigned += time.process_time()
        return compute.take(*arguments)


compute, trl.data_utils.pc, trl.data_utils._SegmentTree = trl.data_utils.pc, _Compute(), _Tree
disable_progress_bars()
for _ in sys.stdin:
    begun, assigned = time.process_time(), 0.0
    options = {
        "load_from_cache_file": False,
        "keep_in_memory": True,
        "new_fingerprint": str(time.time()),
    }
    packed = trl.data_utils.pack_dataset(dataset, slots, "bfd", map_kwargs=options)
    seconds = time.process_time() - begun
    assert sum(map(len, packed.with_format("arrow")["seq_lengths"].to_pylist())) == len(lengths)
    print(json.dumps({"seconds": seconds, "rows": len(packed), "assigned": assigned}), flush=True)
