"""axolotl's scanners for role boundaries. Arguments: ids.npy [rows, n], boundaries.json, reference
or vectorized.
"""

import json
import sys
import time

import numpy as np
import torch
from axolotl import processing_strategies as axolotl

# With more threads axolotl takes its reference scanner instead of the vectorized one.
torch.set_num_threads(1)
ids = torch.from_numpy(np.load(sys.argv[1]).astype(np.int64))
with open(sys.argv[2]) as file:
    boundaries = [axolotl.RoleBoundary(role, start, end) for role, start, end in json.load(file)]
scanners = {
    "reference": axolotl._compute_role_keep_mask,
    "vectorized": axolotl._compute_role_keep_mask_vectorized,
}
for _ in sys.stdin:
    begun = time.process_time()
    keep = scanners[sys.argv[3]](ids, boundaries, {"assistant"}, "turn")
    seconds = time.process_time() - begun
    print(json.dumps({"seconds": seconds, "trained": int(keep.sum())}), flush=True)
