"""`verify` finds every flipped bit and every cut, and names shard and document."""

import json

import numpy as np
import pytest
from shard_data import make_dataset

from makers.processes import call_penstock
from penstock.core.errors import FormatError, PenstockError
from penstock.data.shards import verify


def test_sound_dataset(tmp_path):
    make_dataset(tmp_path / "d", documents_per_shard=15, texts=[f"t{i}" for i in range(40)])
    report = verify(tmp_path / "d")
    assert report.sound
    assert report.documents == 40
    assert report.unchecked == ()
    (tmp_path / "d/report.json").write_text("{}")
    assert verify(tmp_path / "d").unchecked == ("report.json, which have no checksums",)


def test_every_flipped_bit_is_found(tmp_path):
    """Each byte of each file in turn, one of its bits flipped."""
    make_dataset(tmp_path / "d", 6, longest=70, texts=["some text"] * 6)
    for path in sorted((tmp_path / "d").iterdir()):
        if path.name == "manifest.json":
            continue
        data = np.memmap(path, np.uint8, "r+")
        for at in range(len(data)):
            bit = np.uint8(1 << at % 8)
            data[at] ^= bit
            report = verify(tmp_path / "d")
            assert any(path.name in fault.file for fault in report.faults), (
                f"{path.name}, byte {at}"
            )
            data[at] ^= bit
    assert verify(tmp_path / "d").sound


def test_every_flipped_bit_of_the_manifest_is_found(tmp_path):
    make_dataset(tmp_path / "d", 3)
    path = tmp_path / "d" / "manifest.json"
    whole = path.read_bytes()
    spaces = {at for at in range(len(whole)) if whole[at : at + 1].isspace()}
    for at in sorted(set(range(len(whole))) - spaces):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        with pytest.raises(PenstockError, match=r"manifest|version"):
            verify(tmp_path / "d")


@pytest.mark.parametrize("keep", [0, 1, 0.5, -2])
def test_every_cut_is_found(tmp_path, keep):
    make_dataset(tmp_path / "d", 20, documents_per_shard=15)
    for path in sorted((tmp_path / "d").iterdir()):
        whole = path.read_bytes()
        path.write_bytes(whole[: int(keep * len(whole)) if keep == 0.5 else keep])
        if path.name == "manifest.json":
            with pytest.raises(FormatError, match="not JSON"):
                verify(tmp_path / "d")
        else:
            assert any(path.name in fault.file for fault in verify(tmp_path / "d").faults), (
                path.name
            )
        path.write_bytes(whole)


def flip(path, at):
    data = np.memmap(path, np.uint8, "r+")
    data[at] ^= 1
    data.flush()


def test_faults_name_shard_and_document(tmp_path):
    dataset = make_dataset(tmp_path / "d", 40, documents_per_shard=15)
    line, first = dataset.table.batches[2].tolist(), int(dataset.table.shard_starts[2])
    shard = tmp_path / "d" / "00002.arrow"
    starts = np.frombuffer(shard.read_bytes(), np.int64, 11, line[0])
    spans = np.frombuffer(shard.read_bytes(), np.int64, 11, line[5])
    row, other = int(np.flatnonzero(np.diff(starts))[3]), int(np.flatnonzero(np.diff(spans))[-1])
    assert row != other
    flip(shard, line[1] + 2 * int(starts[row]))
    flip(shard, line[7] + 4 * int(spans[other]))
    found = {(fault.document, fault.reason) for fault in verify(tmp_path / "d").faults}
    assert found == {
        (first + row, "its tokens differ from their checksums"),
        (first + other, "its loss-weight spans differ from their checksum"),
    }


def test_damage_outside_documents_is_named_so(tmp_path):
    make_dataset(tmp_path / "d", 5, texts=["unmistakable"] * 5)
    shard = tmp_path / "d" / "00000.arrow"
    flip(shard, shard.read_bytes().index(b"unmistakable"))
    (fault,) = verify(tmp_path / "d").faults
    assert fault.document is None
    assert "origins, texts, or the structure" in fault.reason


def test_command(tmp_path):
    make_dataset(tmp_path / "d")
    done = call_penstock("verify", tmp_path / "d")
    assert done.exit_code == 0
    assert "every token id against the vocabulary" in done.stdout
    assert done.stdout.endswith("sound\n")
    (tmp_path / "d" / "files.json").rename(tmp_path / "files.json")
    done = call_penstock("verify", tmp_path / "d")
    assert "checked      presence and size of every file\n" in done.stdout
    assert done.stdout.endswith(
        "files.json: the file is missing; copy it again, or prepare again\n"
        "1 fault: copy the named files again, or prepare again\n"
    )
    (tmp_path / "files.json").rename(tmp_path / "d" / "files.json")
    flip(tmp_path / "d" / "lengths.u32", 8)
    done = call_penstock("verify", tmp_path / "d")
    assert done.exit_code == 1
    assert done.stdout.endswith("2 faults: copy the named files again, or prepare again\n")
    done = call_penstock("verify", tmp_path / "d", "--json")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert not report["sound"]
    assert {
        "file": str(tmp_path / "d" / "lengths.u32"),
        "document": None,
        "reason": "differs from its checksum",
    } in (report["faults"])
    assert 1 in [fault["document"] for fault in report["faults"]]
