"""Shards, compiled blocks, activation checkpoints and precision in all combinations: gradients
against those of one process in float64.
"""

import json
from pathlib import Path

import pytest
from combination_runs import IN_ALL_WAYS, MODELS

from makers.ranks import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("combination_runs.py")


@pytest.mark.parametrize("name", MODELS)
def test_every_way_gives_the_gradients_of_float64(name, tmp_path):
    ended = run_ranks(SCRIPT, [name], 2, tmp_path)
    assert [status for status, _, _ in ended] == [0, 0], "\n".join(
        err[-3000:] for _, _, err in ended
    )
    found = json.loads(ended[0][1].splitlines()[-1])
    assert len(found) == (24 if name in IN_ALL_WAYS else 20)
    far = {
        way: apart
        for way, apart in found.items()
        if not apart < (5e-6 if "float32" in way else 0.05)
    }
    assert not far
    # Checkpoints change nothing at all; but where a recurrence cuts a compiled block in parts,
    # these add their gradients in another order.
    for way, apart in found.items():
        cut = name == "hybrid" and "compiled" in way
        if ("selective" in way or "full" in way) and not cut:
            plain = way.replace("selective ", "").replace("full ", "")
            assert apart == found[plain], way
