"""`attention: row` in a run file reaches the loader's rows."""

import numpy as np
import pytest

from penstock import write_dataset
from penstock.core.errors import ConfigError
from penstock.use.config import load_run, make_loader


def test_attention_of_a_run_file(tmp_path):
    write_dataset(tmp_path / "d", [[1, 2, 3]] * 40)
    run = tmp_path / "run.yaml"
    run.write_text(
        f"data:\n  sources:\n    - path: {tmp_path / 'd'}\n  loader: {{sequence_length: 9, "
        "rows_per_step: 2}\n"
    )
    apart, together = (
        load_run(run, assignments).data for assignments in ([], ["data.attention=row"])
    )
    assert (apart.attention, together.attention) == ("document", "row")
    row = next(iter(make_loader(together)))[0]
    np.testing.assert_array_equal(row.positions, range(9))
    assert row.cu_seqlens.tolist() == [0, 9]
    assert next(iter(make_loader(apart)))[0].cu_seqlens.tolist() == [0, 3, 6, 9]
    with pytest.raises(ConfigError, match=r"attention.*'causal'.*'document'.*'row'"):
        load_run(run, ["data.attention=causal"])
