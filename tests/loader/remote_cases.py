"""What tests of sources in a store share: settings, objectives, and a source both on the disk and
in the store.
"""

from contextlib import contextmanager

import pytest

from makers.object_store import s3_store
from makers.objectives import PlainObjective
from penstock import Denoise, InputRequirements, Source
from penstock.plan.objectives import Written

SETTINGS = {"sequence_length": 256, "rows_per_step": 8, "seed": 3, "window_rows": 32}
BLOCK = {"shuffle": "block", "shuffle_runs": 2}
DENOISE = Denoise.ul2r(modes={"R": 901, "X": 902, "S": 903}, sentinels=range(700, 900))
NEED = InputRequirements(
    asked_by="a test",
    loss_weights=True,
    positions=True,
    document_ids=True,
    cu_seqlens=True,
    prefix=True,
)


class Reversed(PlainObjective):
    """Runs in Python."""

    def write(self, tokens, weights, key):
        return Written(tokens=tokens[::-1].copy(), weights=weights)


@contextmanager
def patient_store(folder, tmp_path, monkeypatch):
    """A store of a folder, with a cache of this test's own and short pauses between attempts."""
    pytest.importorskip("s3fs")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("penstock.data.stores.store.PAUSE_SECONDS", 0.01)
    with s3_store(folder, monkeypatch) as found:
        yield found


def pair(store, name, **options):
    """A source on the disk, and the same in the store."""
    return (
        Source(store.folder / "bucket" / name, name=name, **options),
        Source(f"s3://bucket/{name}", name=name, **options),
    )


def weighted_halves(documents):
    """Spans of loss weights for documents of ten tokens and more: 1 in the first half, 0.5 in the
    second.
    """
    return [
        [(1, len(one) // 2, 1.0), (len(one) // 2 + 1, len(one), 0.5)] if len(one) > 9 else None
        for one in documents
    ]
