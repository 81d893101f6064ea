"""Page-locked rows on a GPU: copies that do not wait must still hold what the row held."""

import numpy as np
import pytest

from penstock import Loader, Source, write_dataset

torch = pytest.importorskip("torch")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_copied_without_waiting_are_right(tmp_path):
    import penstock as ps

    generator = np.random.default_rng(0)
    dataset = write_dataset(tmp_path / "d", [generator.integers(0, 900, 300) for _ in range(200)])

    def loader(pin_memory):
        return Loader(
            Source(dataset, max_epochs=2),
            sequence_length=512,
            rows_per_step=4,
            pin_memory=pin_memory,
        )

    copied = [ps.to_torch(row, "cuda")["targets"] for step in loader(True) for row in step]
    torch.cuda.synchronize()
    plain = [row.targets for step in loader(False) for row in step]
    assert len(copied) == len(plain)
    for tensor, array in zip(copied, plain, strict=True):
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)
