"""The example in the docstring of `penstock.integrations.jax` runs as it stands, on one device and
on four.
"""

from pathlib import Path

import pytest
from tiny_models import make_dataset

from makers.processes import jax_environment, run_python

pytest.importorskip("jax")

SCRIPT = Path(__file__).with_name("jax_example_run.py")


@pytest.mark.parametrize("devices", [1, 4])
def test_the_example_of_the_docstring_runs(tmp_path, devices):
    data = make_dataset(tmp_path / "data")
    done = run_python("-W", "error", SCRIPT, data, env=jax_environment(devices), check=True)
    found, shards, loss, traces = done.stdout.split()
    assert (int(found), int(shards), int(traces)) == (devices, devices, 1)
    # All tokens are equally likely at first, and less so after some steps.
    assert 0 < float(loss) < 4.15
