"""Datasets come from strangers: none crashes, reads outside its folder, takes memory, or is wrongly
called sound.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forging import at, make_victim, read_manifest, reseal, write_manifest

import penstock as ps
from makers.processes import run_python
from penstock import Dataset, open_dataset
from penstock.core.errors import CorruptionError
from penstock.data.shards import verify

PROGRAM = Path(__file__).with_name("fuzz_datasets.py")


def forge(folder: Path, seed: int, count: int) -> dict[str, Any]:
    """Run the forger in a process of its own, which a signal may end."""
    done = run_python(PROGRAM, folder, seed, count)
    now = folder / "now"
    last = now.read_text() if now.exists() else "before the first forgery"
    assert done.returncode == 0, f"ended with {done.returncode} at {last}: {done.stderr[-2000:]}"
    found: dict[str, Any] = json.loads(done.stdout)
    assert not found["wrong"], "\n".join(found["wrong"][:5])
    assert found["forgeries"] == count
    return found


@pytest.mark.slow
def test_all_forgeries(tmp_path: Path) -> None:
    known = forge(tmp_path, seed=1, count=1)["known"]
    assert known >= 5000
    (tmp_path / "all").mkdir()
    found = forge(tmp_path / "all", seed=1, count=known)
    assert (
        min(
            found["outcomes"][kind]
            for kind in ("refused", "refused when used", "found by verify alone")
        )
        > 250
    )


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    make_victim(tmp_path / "d")
    return tmp_path / "d"


def change(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    manifest = read_manifest(folder)
    edit(manifest)
    write_manifest(folder, manifest)


def set_number(folder: Path, name: str, kind: Any, place: int, value: int) -> None:
    numbers = np.fromfile(folder / name, kind)
    numbers[place] = value
    numbers.tofile(folder / name)
    reseal(folder)


@pytest.mark.parametrize("column", range(9))
def test_a_batch_table_that_leaves_the_shard(victim: Path, column: int) -> None:
    set_number(victim, "batches.u64", np.uint64, 9 + column, 2**40)
    with pytest.raises(CorruptionError, match=r"batches.u64: batch 1 .*its \d+ bytes"):
        open_dataset(victim)
    faults = [str(fault) for fault in verify(victim).faults]
    assert any(
        "00000.arrow: its batch 1 is not where batches.u64 says" in fault for fault in faults
    )


def test_two_batches_with_the_same_tokens(victim: Path) -> None:
    """Else a small dataset could hold as many tokens as it likes."""
    table = np.fromfile(victim / "batches.u64", np.uint64).reshape(-1, 9)
    table[1] = table[0]
    table.tofile(victim / "batches.u64")
    reseal(victim)
    with pytest.raises(CorruptionError, match=r"batch 1 of 00000\.arrow does not lie"):
        open_dataset(victim)


def test_batches_of_another_size(victim: Path) -> None:
    change(victim, lambda manifest: manifest.update(documents_per_batch=1))
    with pytest.raises(CorruptionError, match="documents_per_batch is 1, expected 1024"):
        open_dataset(victim)
    with pytest.raises(CorruptionError, match="documents_per_batch is 1, expected 1024"):
        verify(victim)


@pytest.mark.parametrize(
    "name",
    ["../secret.arrow", "/etc/secret.arrow", "a/b.arrow", "..", "a\0.arrow", "\x1b[2J.arrow"],
)
def test_names_that_lead_out_of_the_folder(victim: Path, name: str) -> None:
    (victim / "00001.arrow").rename(victim.parent / "secret.arrow")
    change(victim, lambda manifest: manifest["shards"][1].update(file=name))
    with pytest.raises(CorruptionError, match=r"not the name of a file|ends in .arrow"):
        open_dataset(victim)


@pytest.mark.parametrize("name", ["00001.arrow", "lengths.u32", "files.json", "manifest.json"])
def test_links_that_lead_out_of_the_folder(victim: Path, name: str) -> None:
    (victim / name).rename(victim.parent / name)
    (victim / name).symlink_to(victim.parent / name)
    with pytest.raises(CorruptionError, match=rf"{name}.*outside.*folder.*cp.*-rL"):
        open_dataset(victim)


def test_a_pipe_is_no_file(victim: Path) -> None:
    (victim / "00001.arrow").unlink()
    os.mkfifo(victim / "00001.arrow")
    with pytest.raises(CorruptionError, match=r"00001.arrow: is not a regular file"):
        open_dataset(victim)


def test_a_link_to_a_tokenizer(victim: Path) -> None:
    (victim.parent / "elsewhere").mkdir()
    (victim / "tokenizer").symlink_to(victim.parent / "elsewhere")
    with pytest.raises(CorruptionError, match="tokenizer: is a link"):
        _ = Dataset.open(victim).loaded_tokenizer
    assert any("is a link" in fault.reason for fault in verify(victim).faults)


@pytest.mark.parametrize("length", [4_000_000_000, 2**32 - 1])
def test_no_memory_for_tokens_that_are_not_there(victim: Path, length: int) -> None:
    set_number(victim, "lengths.u32", np.uint32, 2 * 7, length)
    dataset = open_dataset(victim)
    for use in (lambda: dataset[7], lambda: dataset.table.read(0, 20)):
        with pytest.raises(CorruptionError, match=r"document.*7.*length.*lengths"):
            use()
    loader = ps.Loader(
        ps.Source(dataset, max_epochs=1), sequence_length=128, rows_per_step=4, threads=0
    )
    with pytest.raises(CorruptionError, match="document 7: its length in the shard"):
        list(loader)


@pytest.mark.parametrize("offset", [-1, -(2**40), 2**40, 2**62, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("column", ["token_offsets", "checksum_offsets", "span_offsets"])
def test_offsets_that_leave_the_shard(victim: Path, column: str, offset: int) -> None:
    """The length still fits where both ends of a document are moved, and its place wraps around."""
    dataset = open_dataset(victim)
    place = int(dataset.table.batches[column][0])
    data = np.fromfile(victim / "00000.arrow", np.uint8)
    pair = data[place + 8 * 9 : place + 8 * 11].view(np.int64)
    with np.errstate(over="ignore"):
        pair += np.int64(offset)
    data.tofile(victim / "00000.arrow")
    reseal(victim)
    forged = open_dataset(victim)
    with pytest.raises(CorruptionError, match=r"document (8|9|10): "):
        forged.table.read(0, 20)
    loader = ps.Loader(
        ps.Source(forged, max_epochs=1), sequence_length=128, rows_per_step=4, threads=0
    )
    with pytest.raises(CorruptionError, match=r"document (8|9|10): "):
        list(loader)
    assert {fault.document for fault in verify(victim).faults} & {8, 9, 10}


def test_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    """An id that a table of the model does not have is found before it is trained."""
    ps.write_dataset(tmp_path / "d", [[1, 2, 3], [4, 900, 5]] * 9, vocab_size=1000)
    change(tmp_path / "d", lambda manifest: manifest["tokenizer"].update(vocab_size=700))
    dataset = open_dataset(tmp_path / "d")
    with pytest.raises(CorruptionError, match=r"document.*1.*outside.*vocabulary"):
        dataset.table.read(0, 4)
    loader = ps.Loader(
        ps.Source(dataset, max_epochs=1), sequence_length=16, rows_per_step=1, threads=0
    )
    with pytest.raises(CorruptionError, match="a token id lies outside the vocabulary"):
        list(loader)


def both(name: str, edit: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    """The same change in a shard and in the whole, so that sums still fit."""

    def apply(manifest: dict[str, Any]) -> None:
        for part in (manifest["shards"][1], manifest):
            part[name] = edit(part[name])

    return apply


def update(shards: list[dict[str, Any]], manifest: dict[str, Any], **values: Any) -> None:
    """The same values in some shards and in the whole."""
    for part in (*shards, manifest):
        part.update(values)


def setting(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def apply(manifest: dict[str, Any]) -> None:
        at(manifest, path[:-1])[path[-1]] = to

    return apply


def moved_bin(histogram: list[int]) -> list[int]:
    """One document in the next bin."""
    full = next(i for i, count in enumerate(histogram) if count)
    return [count - (i == full) + (i == full + 1) for i, count in enumerate(histogram)]


def no_weights(manifest: dict[str, Any]) -> None:
    update(manifest["shards"], manifest, fractional_weights=False)
    del manifest["checksums"]["weight_sums.f64"]


CONTRADICTIONS: dict[str, Callable[[dict[str, Any]], None]] = {
    "documents": both("documents", lambda count: count + 1),
    "tokens": both("tokens", lambda count: count + 1),
    "trained": both("trained_tokens", lambda count: count - 1),
    "longest of the whole": setting("longest", to=3),
    "longest": lambda manifest: update(manifest["shards"][:1], manifest, longest=499),
    "histogram of the whole": lambda manifest: manifest.update(
        histogram=moved_bin(manifest["histogram"])
    ),
    "histogram": both("histogram", moved_bin),
    "ends of the whole": setting("ends", to=[0, 0]),
    "ends": lambda manifest: update(manifest["shards"], manifest, ends=[1, 1]),
    "batches": setting("shards", 1, "batches", to=2),
    "bytes": setting("shards", 1, "bytes", to=100),
    "checksum": setting("shards", 1, "checksum", to=5),
    "token bytes": setting("token_bytes", to=4),
    "vocabulary": setting("tokenizer", "vocab_size", to=10),
    "end of text": setting("tokenizer", "eos_id", to=1000),
    "spans": setting("has_spans", to=False),
    "texts": setting("has_text", to=False),
    "weights": no_weights,
    "origins": setting("files", to=0),
    "more origins": setting("files", to=2),
    "fingerprint": setting("fingerprint", to="0" * 32),
    "checksum of a file": setting("checksums", "files.json", to=1),
    "another file": setting("checksums", "absent.json", to=1),
    "a file twice": setting("shards", 1, "file", to="00000.arrow"),
    "order of shards": lambda manifest: manifest["shards"].reverse(),
    "a shard left out": lambda manifest: manifest["shards"].pop(),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_verify_finds_what_a_manifest_says_wrongly(victim: Path, name: str) -> None:
    change(victim, CONTRADICTIONS[name])
    try:
        report = verify(victim)
    except CorruptionError as error:
        assert "manifest.json: damaged: " in str(error)  # noqa: PT017  (either is right)
        return
    assert not report.sound


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("documents",), "1140", "documents: expected a whole number, found '1140'"),
        (("documents",), True, "documents: expected a whole number, found True"),
        (("tokens",), 1e3, "tokens: expected a whole number, found 1000.0"),
        (("tokens",), float("nan"), "tokens: expected a whole number, found nan"),
        (
            ("shards", 0, "batches"),
            2**70,
            "batches: expected a whole number, found 1180591620717411303424",
        ),
        (("has_text",), 1, "has_text: expected true or false, found 1"),
        (("shards",), {}, "shards: expected a list, found {}"),
        (("shards", 0, "ends"), [1], r"shards\[0\].ends: expected a list of 2, found \[1\]"),
        (("tokenizer", "name"), "\ud800", r"tokenizer.name: expected text, found '\\ud800'"),
        (("tokenizer", "extra"), 1, "tokenizer.extra: unknown"),
        (("shards", 1, "documents"), -5, "batches is 1 for -5 documents"),
    ],
)
def test_types_and_ranges_of_the_manifest(
    victim: Path, path: tuple[Any, ...], value: Any, message: str
) -> None:
    change(victim, setting(*path, to=value))
    with pytest.raises(CorruptionError, match=f"manifest.json: damaged: .*{message}"):
        open_dataset(victim)


def test_a_field_that_is_missing(victim: Path) -> None:
    change(victim, lambda manifest: manifest.pop("longest"))
    with pytest.raises(CorruptionError, match=r"manifest\.json.*damaged.*longest"):
        open_dataset(victim)


def test_json_that_is_too_deep(victim: Path) -> None:
    (victim / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(CorruptionError, match="not JSON: nested too deeply"):
        open_dataset(victim)


@pytest.mark.parametrize("weights", [[np.nan], [np.inf], [0.25]])
def test_weight_sums_are_checked(victim: Path, weights: list[float]) -> None:
    sums = np.fromfile(victim / "weight_sums.f64")
    sums[9] = weights[0]
    sums.tofile(victim / "weight_sums.f64")
    reseal(victim)
    (fault,) = verify(victim).faults
    assert (fault.document, fault.reason) == (
        9,
        "its weights do not add up to what weight_sums.f64 says",
    )


def test_a_damaged_length_is_the_fault_of_one_document(victim: Path) -> None:
    set_number(victim, "lengths.u32", np.uint32, 2 * 7, 5_000)
    assert [fault.document for fault in verify(victim).faults] == [7]


def test_many_faults_are_counted(victim: Path) -> None:
    lengths = np.fromfile(victim / "lengths.u32", np.uint32)
    lengths[::2] += 1
    lengths.tofile(victim / "lengths.u32")
    reseal(victim)
    faults = verify(victim).faults
    assert len(faults) == 1000 + 1 + 80
    assert faults[1000].reason == "60 more documents are damaged"


@pytest.mark.parametrize("rows", [3, 998, 1 << 20, 1 << 40, 1 << 62])
def test_another_number_of_rows_in_arrows_own_numbers(tmp_path: Path, rows: int) -> None:
    # Of two checksums each, so that no offset of checksums is 997.
    ps.write_dataset(tmp_path / "d", [[1] * 300] * 997)
    (path,) = (tmp_path / "d").glob("*.arrow")
    told = (997).to_bytes(8, "little")
    assert path.read_bytes().count(told) > 5
    path.write_bytes(path.read_bytes().replace(told, rows.to_bytes(8, "little")))
    reseal(tmp_path / "d")
    (fault,) = verify(tmp_path / "d").faults
    assert "its batches are not those of 997 documents" in fault.reason


def test_bytes_of_texts_are_counted(tmp_path: Path) -> None:
    ps.write_dataset(tmp_path / "d", [[1, 2, 3]], texts=["größe"])
    assert (verify(tmp_path / "d").sound, verify(tmp_path / "d").unchecked) == (True, ())
    change(tmp_path / "d", lambda manifest: update(manifest["shards"], manifest, text_bytes=77))
    (fault,) = verify(tmp_path / "d").faults
    assert fault.reason == "text_bytes is 77 in manifest.json, but its texts have 7"


def test_what_verify_cannot_know_is_said(tmp_path: Path) -> None:
    ps.write_dataset(tmp_path / "d", [[1, 2, 3]])
    change(tmp_path / "d", lambda manifest: update(manifest["shards"], manifest, text_bytes=77))
    report = verify(tmp_path / "d")
    assert report.sound
    assert report.unchecked == (
        "text bytes of the manifest: they can only be counted in the raw texts",
    )


def test_chat_information_of_a_stranger(victim: Path) -> None:
    (victim / "chat.json").write_text(json.dumps({"stop_ids": [1.5]}))
    (victim / "chat_template.jinja").write_text("x")
    with pytest.raises(CorruptionError, match=r"chat.json: .*missing"):
        _ = Dataset.open(victim).chat
    assert not verify(victim).sound
