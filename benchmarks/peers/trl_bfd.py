"""TRL's best-fit-decreasing packing (`pack_dataset`), its default batch. Arguments: lengths.npy, slots."""

import json
import sys
import time

import numpy as np
from datasets import Dataset, disable_progress_bars
from trl.data_utils import pack_dataset

disable_progress_bars()
lengths, slots = np.load(sys.argv[1]), int(sys.argv[2])
dataset = Dataset.from_dict({"input_ids": [[1] * int(n) for n in lengths]})
for _ in sys.stdin:
    begun = time.process_time()
    packed = pack_dataset(dataset, slots, "bfd", map_kwargs={"load_from_cache_file": False, "keep_in_memory": True})
    seconds = time.process_time() - begun
    print(json.dumps({"seconds": seconds, "rows": len(packed), "documents": len(lengths)}), flush=True)
