"""TRL's best-fit-decreasing packing (`pack_dataset`), its default batch. Arguments: lengths.npy, slots."""

import json
import sys
import time

import numpy as np
import pyarrow as pa
from datasets import Dataset, disable_progress_bars
from trl.data_utils import pack_dataset

disable_progress_bars()
lengths, slots = np.load(sys.argv[1]), int(sys.argv[2])
offsets = np.concatenate([[0], np.cumsum(lengths)])
tokens = np.random.default_rng(0).integers(0, 50_000, offsets[-1])
dataset = Dataset(pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, pa.array(tokens))}))
for _ in sys.stdin:
    begun = time.process_time()
    packed = pack_dataset(dataset, slots, "bfd", map_kwargs={"load_from_cache_file": False, "keep_in_memory": True})
    seconds = time.process_time() - begun
    print(json.dumps({"seconds": seconds, "rows": len(packed), "documents": len(lengths)}), flush=True)
