"""Random numbers by place: one for each token of each sequence."""

import numpy as np

from penstock.compiled import kernel
from penstock.randomness import philox

_SHIFT_20 = np.uint64(20)
_SCALE = np.float64(2.0**-52)


@kernel
def uniforms(keys, places, out):
    """Numbers in [0, 1), each a multiple of 2^-52 and a function of its key and place alone.

    Args:
        keys: uint64 [n], of sequences.
        places: uint64 [n], below 2^32.
        out: float64 [n].
    """
    for i in range(len(out)):
        high, low, _, _ = philox(places[i], np.uint64(0), keys[i])
        out[i] = np.float64((high << _SHIFT_20) | (low >> np.uint64(12))) * _SCALE
