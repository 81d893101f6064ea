"""Records that kernels read: each field has a writer and a reader, and what is stored keeps its
bytes.
"""

import ast
from pathlib import Path

import numpy as np
import pytest

from penstock import Denoise, Loader, MaskedDiffusion, Source, write_dataset
from penstock.data.shards.format._kernels import BATCH
from penstock.plan.loader import _document_kernels as k
from penstock.plan.loader._fill_kernels import PYTHON_ARRAYS, ROW_ARRAYS
from penstock.plan.loader._plan_kernels import CURSOR, PIECE, PROGRESS
from penstock.plan.loader._target_kernels import UNTRAINED
from penstock.plan.loader.state import _columns
from penstock.plan.sampling._kernels import ENTRY, SKIPPED

SOURCE = Path(__file__).parents[2] / "src" / "penstock"
RECORDS = {
    "ENTRY": ENTRY,
    "SKIPPED": SKIPPED,
    "PIECE": PIECE,
    "CURSOR": CURSOR,
    "PROGRESS": PROGRESS,
    "SOURCE_RECORD": k.SOURCE_RECORD,
    "UNTRAINED": UNTRAINED,
    "LOCATION": k.LOCATION,
    "ROW_ARRAYS": ROW_ARRAYS,
    "PYTHON_ARRAYS": PYTHON_ARRAYS,
    "BATCH": BATCH,
}


def used_in_kernels():
    """Names after a dot in all kernels that work on records."""
    files = list(SOURCE.rglob("_*kernels.py"))
    assert len(files) >= 6
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    return {
        node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }


@pytest.mark.parametrize("name", RECORDS)
def test_kernels_use_every_field(name):
    """A field that a kernel misspells does not compile; one that no kernel uses would be found only
    by reading.

    Tokens and document ids of `ROW_ARRAYS` are passed as arrays, for their dtypes.
    """
    unused = set(RECORDS[name].names) - used_in_kernels() - {"document_ids"}
    assert unused == set()


def test_every_field_of_a_source_is_filled_in(tmp_path):
    """Each is 0 only where the data says so; a field that nobody fills in would be 0 for every
    source.
    """
    documents = [np.array([1, *range(5, 90), 2])] * 3
    info = {"vocab_size": 70_000, "spans": [[(0, 9, 0.5)]] * 3}
    weighted = write_dataset(tmp_path / "weighted", documents, **info)
    denoise = Denoise.t5(sentinels=range(100, 200))
    loader = Loader(
        Source(weighted, objective=denoise), sequence_length=64, rows_per_step=1, threads=0
    )
    [record] = loader._filling.fill._sources
    zero = {name for name in k.SOURCE_RECORD.names if not record[name]}
    assert zero == {"begins_with_bos", "ends_with_eos", "own_targets"}, "the dataset has neither"
    masked = Source(weighted, objective=MaskedDiffusion(mask_token=3))
    [other] = Loader(masked, sequence_length=64, rows_per_step=1, threads=0)._filling.fill._sources
    assert other["own_targets"]
    table = weighted.table
    assert (record["num_shards"], record["token_bytes"], record["id_limit"]) == (1, 4, 70_000)
    for name in (
        "documents_per_batch",
        "token_bytes",
        "offset_bytes",
        "has_checksums",
        "has_spans",
    ):
        assert record[name] == getattr(table, name), name


def test_states_keep_their_columns():
    """The bytes of a saved state are these columns, in this order."""
    assert CURSOR.names == ("position", "begin")
    assert SKIPPED.names == ("empty", "dropped", "dropped_tokens", "truncated_tokens")
    assert UNTRAINED.names == ("documents", "parts", "tokens")
    numbers = np.arange(12).reshape(3, 4)
    assert _columns(numbers.copy().view(SKIPPED)[:, 0]).tolist() == numbers.tolist()
    assert _columns(numbers[:, :2].copy().view(CURSOR)[:, 0]).tolist() == numbers[:, :2].tolist()


def test_the_batch_table_keeps_its_bytes():
    assert BATCH.itemsize == 72
    assert [(BATCH.fields[name][0].str, BATCH.fields[name][1]) for name in BATCH.names] == [
        ("<u8", 8 * number) for number in range(9)
    ]
    assert BATCH.names[:4] == ("token_offsets", "tokens", "checksum_offsets", "checksums")
    assert BATCH.names[4:] == (
        "span_bitmap",
        "span_offsets",
        "span_begins",
        "span_ends",
        "span_weights",
    )


def test_kernels_get_the_very_dtypes(tmp_path):
    """Numba knows a record's dtype by its object: an equal one is slower at every call, and each is
    kept for good.
    """
    dataset = write_dataset(tmp_path / "plain", [np.arange(3 + i % 20) for i in range(20_000)])
    loader = Loader(Source(dataset, max_epochs=1), sequence_length=256, rows_per_step=40, threads=0)
    plan = loader._planner.next()
    assert plan.pieces.dtype is PIECE
    start = plan.after.window_start
    state = next(iter(loader)).resume_state
    loader.load_state_dict(state)
    restored = loader._after.window_start
    assert start.cursors.dtype is restored.cursors.dtype is CURSOR
    assert start.skipped.dtype is restored.skipped.dtype is SKIPPED
    untrained = Loader(
        Source(write_dataset(tmp_path / "chats", [[1] * 30] * 9, spans=[[(25, 30, 1.0)]] * 9)),
        sequence_length=8,
        rows_per_step=1,
    )
    untrained.load_state_dict(next(iter(untrained)).resume_state)
    counts = (
        untrained._after.window_start.untrained,
        untrained._untrained,
        untrained._plan._tail_untrained,
    )
    assert all(array.dtype is UNTRAINED for array in counts)
    inner = loader._plan
    while len(inner._pieces) == 4096:
        assert inner.next_window() is not None
    held = (inner._pieces, inner._entries, inner._cursors, inner._skipped, inner._tail_skips)
    assert [
        array.dtype is kind
        for array, kind in zip(held, (PIECE, ENTRY, CURSOR, SKIPPED, SKIPPED), strict=True)
    ] == [True] * 5
