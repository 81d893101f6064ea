"""Grain's concat-then-split packing (torchtitan's route), batches of 8.

Arguments: folder with tokens.npy and lengths.npy, slots.
"""

import json
import sys
import time
from itertools import islice
from pathlib import Path

import grain
import numpy as np
from grain.experimental import ConcatThenSplitIterDataset

folder, slots = Path(sys.argv[1]), int(sys.argv[2])
tokens, lengths = np.load(folder / "tokens.npy"), np.load(folder / "lengths.npy")
documents = np.split(tokens.astype(np.int32), np.cumsum(lengths)[:-1])
stream = (
    grain.MapDataset.source(documents)
    .shuffle(seed=1)
    .repeat()
    .map(lambda d: {"tokens": d})
    .to_iter_dataset(grain.ReadOptions(num_threads=0))
)
rows = iter(ConcatThenSplitIterDataset(stream, length_struct={"tokens": slots}).batch(8))
next(rows)
for _ in sys.stdin:
    begun = time.process_time()
    for _batch in islice(rows, 12):
        pass
    print(
        json.dumps({"seconds": time.process_time() - begun, "tokens": 12 * 8 * slots}), flush=True
    )
