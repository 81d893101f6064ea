"""Prepared datasets as `datasets.Dataset`: contents, no copy of tokens, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    "datasets", reason="datasets is not installed: pip install 'penstock[huggingface]'"
)

import penstock as ps
from penstock.core.errors import ConfigError, CorruptionError


def make(
    folder: Path, *, weight: float = 1.0, vocab_size: int = 64, **settings: Any
) -> tuple[Any, list[Any]]:
    random = np.random.default_rng(0)
    tokens = [random.integers(0, vocab_size, random.integers(0, 30)) for _ in range(2500)]
    spans = [
        None if i % 3 or len(ids) < 2 else [(len(ids) // 2, len(ids), weight)]
        for i, ids in enumerate(tokens)
    ]
    settings = {"spans": spans, **settings}
    return ps.write_dataset(
        folder, tokens, vocab_size=vocab_size, documents_per_shard=1100, **settings
    ), tokens


@pytest.mark.parametrize("vocab_size", [64, 100_000])
@pytest.mark.parametrize("targets", ["assistant_masks", "labels", "loss_weights"])
def test_rows_are_the_documents(tmp_path: Path, targets: Any, vocab_size: int) -> None:
    data, tokens = make(tmp_path / "data", vocab_size=vocab_size)
    found = data.to_datasets(targets)
    assert found.column_names == ["input_ids", targets]
    assert len(found) == len(tokens)
    for number, (row, ids) in enumerate(zip(found, tokens, strict=True)):
        weights = data[number].loss_weights
        assert row["input_ids"] == ids.tolist()
        trained = weights != 0
        wanted = {
            "assistant_masks": trained,
            "labels": np.where(trained, ids, -100),
            "loss_weights": weights,
        }[targets]
        assert row[targets] == wanted.tolist()


def test_tokens_are_not_copied(tmp_path: Path) -> None:
    """Arrow's buffers lie in the mapped shards."""
    data, _ = make(tmp_path / "data", spans=None)
    found = data.to_datasets(verify=False)
    assert found.column_names == ["input_ids"]
    begins, sizes = data.table.shard_addresses.tolist(), data.table.shard_bytes.tolist()
    mapped = [(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]
    for chunk in found.data.column("input_ids").chunks:
        address = chunk.values.buffers()[1].address
        assert any(begin <= address < end for begin, end in mapped)


def test_datasets_can_work_with_it(tmp_path: Path) -> None:
    data, tokens = make(tmp_path / "data")
    found = data.to_datasets()
    lengths = found.map(
        lambda row: {"length": len(row["input_ids"])}, remove_columns=found.column_names
    )
    assert lengths["length"][:] == [len(ids) for ids in tokens]
    assert found.shuffle(seed=1).select(range(3))[0]["input_ids"] in [
        ids.tolist() for ids in tokens
    ]
    found.save_to_disk(tmp_path / "saved")
    # The same data have the same fingerprint, by which `datasets` finds what it cached.
    assert (
        data.to_datasets()._fingerprint
        == found._fingerprint
        != data.to_datasets("labels")._fingerprint
    )


def test_damage_is_found(tmp_path: Path) -> None:
    data, _ = make(tmp_path / "data")
    shard = data.table.paths[1]
    place = int(data.table.batches[int(data.table.shard_first_batch[1])]["tokens"])
    with open(shard, "r+b") as file:
        file.seek(place + 10)
        byte = file.read(1)[0]
        file.seek(place + 10)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(CorruptionError, match=r"00001.arrow.*11\d\d"):
        ps.Dataset.open(data.path).to_datasets()


@pytest.mark.parametrize("row", [100, 1024])
def test_offsets_never_lead_outside(tmp_path: Path, row: int) -> None:
    """One in the middle, and the last of the batch."""
    data, _ = make(tmp_path / "data", spans=None)
    with open(data.table.paths[0], "r+b") as file:
        file.seek(int(data.table.batches[0]["token_offsets"]) + 8 * row)
        file.write(np.int64(2**40).tobytes())
    with pytest.raises(CorruptionError, match=r"token offsets of batch 0 leave the file"):
        ps.Dataset.open(data.path).to_datasets(verify=False)


def test_what_columns_do_not_express_is_refused(tmp_path: Path) -> None:
    data, _ = make(tmp_path / "fractional", weight=0.5)
    with pytest.raises(ConfigError, match=r"weights.*0.*1.*express"):
        data.to_datasets("labels")
    assert data.to_datasets("loss_weights").column_names == ["input_ids", "loss_weights"]
    with pytest.raises(ConfigError, match="targets must be one of"):
        data.to_datasets("masks")
    tree = ps.shards.build_tree([[1, 2, 3], [1, 2, 4]], values={"rank": [0, 1]})
    spans = [[(i, i + 1, float(weight)) for i, weight in enumerate(tree.loss_weights) if weight]]
    pairs = ps.write_dataset(
        tmp_path / "pairs", [tree.tokens], trees=[tree.tree], spans=spans, vocab_size=64
    )
    with pytest.raises(ConfigError, match=r"penstock.trl.preference_pairs"):
        pairs.to_datasets()


def test_an_empty_dataset(tmp_path: Path) -> None:
    data = ps.write_dataset(tmp_path / "data", [[], []], vocab_size=8)
    assert list(data.to_datasets("labels")) == [{"input_ids": [], "labels": []}] * 2
