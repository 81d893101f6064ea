"""The example in the docstring of `penstock.integrations.jax` runs as it stands, on one device and on four."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make_dataset

pytest.importorskip("jax")

SCRIPT = Path(__file__).with_name("jax_example_run.py")


@pytest.mark.parametrize("devices", [1, 4])
def test_the_example_of_the_docstring_runs(tmp_path, devices):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    data = make_dataset(tmp_path / "data")
    done = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, data], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found, shards, loss, traces = done.stdout.split()
    assert (int(found), int(shards), int(traces)) == (devices, devices, 1)
    # All tokens are equally likely at first, and less so after some steps.
    assert 0 < float(loss) < 4.15
