"""Our reader of Arrow's own numbers finds what pyarrow finds, and reads nothing where they are
wrong.
"""

import numpy as np
import pyarrow as pa
import pytest
from shard_data import make_dataset

from penstock.core.compiled import address_of
from penstock.core.errors import FormatError
from penstock.data.shards import ShardLayout
from penstock.data.shards.format.arrow_file import read_places
from penstock.data.shards.format.layout import batch_positions, schema_of


@pytest.mark.parametrize("spans", [False, True])
@pytest.mark.parametrize("texts", [False, True])
def test_places_are_those_of_pyarrow(tmp_path, spans, texts):
    words = [f"text {i}" for i in range(2500)] if texts else None
    dataset = make_dataset(tmp_path / "d", 2500, spans=spans, longest=30, texts=words)
    data = np.fromfile(tmp_path / "d" / "00000.arrow", np.uint8)
    layout = ShardLayout(vocab_size=1000, has_spans=spans, has_text=texts)
    reader, base = pa.ipc.open_file(pa.py_buffer(data)), address_of(data)
    found = read_places(data, schema_of(layout))
    assert len(found) == reader.num_record_batches == 3
    for number, places in enumerate(found):
        batch = reader.get_batch(number)
        assert places.rows == batch.num_rows
        due = [buffer for column in batch.columns for buffer in column.buffers()]
        assert len(due) == len(places.buffers)
        for buffer, (place, size) in zip(due, places.buffers.tolist(), strict=True):
            assert (0 if buffer is None else buffer.size) == size
            assert buffer is None or not size or buffer.address - base == place
    assert (batch_positions(data, layout, len(dataset)) == dataset.table.batches).all()
    with pytest.raises(FormatError, match="not a sound Arrow IPC file: columns are"):
        read_places(data, schema_of(ShardLayout(vocab_size=2**20, has_spans=spans, has_text=texts)))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "does not begin and end with ARROW1"),
        (b"ARROW1" * 10, "a footer of"),
        (b"ARROW1\0\0" + bytes(40) + (20).to_bytes(4, "little") + b"ARROW1", "Arrow IPC file: "),
    ],
)
def test_what_is_no_arrow_file(data, match):
    with pytest.raises(FormatError, match=match):
        read_places(np.frombuffer(data, np.uint8), schema_of(ShardLayout(vocab_size=9)))


def test_any_changed_byte_of_its_numbers_is_harmless(tmp_path):
    make_dataset(tmp_path / "d", 20, longest=9)
    data, layout = (
        np.fromfile(tmp_path / "d" / "00000.arrow", np.uint8),
        ShardLayout(vocab_size=1000, has_spans=True),
    )
    schema, ends = schema_of(layout), {"read": 0, "refused": 0}
    (size,) = data[-10:-6].view("<i4").tolist()
    for place in range(len(data) - size - 10, len(data)):
        for value in (0, 1, 127, 128, 255):
            changed = data.copy()
            changed[place] = value
            try:
                places = read_places(changed, schema)
            except FormatError:
                ends["refused"] += 1
            else:
                ends["read"] += 1
                assert all((batch.buffers.sum(1) <= len(data)).all() for batch in places)
    assert ends["refused"] > 500
    assert ends["read"] > 500
