"""The record of a prepared part, and the files that a part has: names, writing, reading,
removing.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from penstock.core.json_values import JsonObject
from penstock.data.prepare.hashes import HASH
from penstock.data.shards.format.images import assets_path
from penstock.data.shards.format.manifest import PREPARING
from penstock.data.shards.writing.stubs import stub_path
from penstock.data.stores.files import output_errors, write_json

WORK = PREPARING[0]
"""Folder inside the output for temporary files of a preparation; removed at the end."""

PARTS, REJECTED, HASHES = "parts.json", "rejected.jsonl", "hashes.bin"
"""Files of a finished preparation besides its report: the record of each part, the rejects of all
parts, and the hashes of their documents, if duplicates are dropped.
"""

UNSETTLED = "being dropped"
"""`PartRecord.drops` while the shards of a part are written again without duplicates."""


@final
@dataclass(slots=True)
class PartRecord:
    """The result of a part; a later run of the same preparation reuses it if its input is still the
    same.
    """

    identity: str
    """What was read: a path, and which stretch of the file; for records from Python, their hash."""
    stamp: str = ""
    """Sizes and times of its files when the work began."""
    digest: str = ""
    """Hash of the bytes that were read; empty if they are not on this machine."""
    files: list[int] = field(default_factory=list)
    """Numbers of its files among all files of the dataset, which its shards hold."""
    encoder: str = ""
    """`Tokenizer.encoder` that encoded its texts; with other input, the check of the encoder may
    choose another.
    """
    records: int = 0
    documents: int = 0
    weighted: int = 0
    """Records with loss weights of their own."""
    filtered: int = 0
    rejects: int = 0
    reasons: dict[str, list[Any]] = field(default_factory=dict)
    """Why records were rejected: reason → how many, and the first."""
    straddling: int = 0
    edge_controls: int = 0
    dropped: int = 0
    more_documents: int = 0
    chats: JsonObject | None = None
    raw_bytes: int = 0
    damaged: list[JsonObject] = field(default_factory=list)
    """Stretches of its files that could not be read, as `Damage`."""
    shards: dict[str, str] = field(default_factory=dict)
    """Split → file name, for the splits that got documents."""
    hashed: dict[str, int] = field(default_factory=dict)
    """Split → documents in the file of hashes, dropped ones too; empty if duplicates are not
    dropped.
    """
    hashes_checksum: int = 0
    """Of the bytes of these hashes."""
    duplicates: int = 0
    """Documents that were dropped because an earlier one is the same."""
    dropped_from: dict[str, dict[str, int]] = field(default_factory=dict)
    """Split → number of the file → dropped duplicates."""
    drops: str = ""
    """Hash of which documents were dropped; empty: none yet; or `UNSETTLED`."""


def shard_name(number: int) -> str:
    """File name of the shard of part `number`."""
    return f"part-{number:06}.arrow"


def record_path(output: Path, number: int) -> Path:
    """Path of the record of part `number`."""
    return output / WORK / f"part-{number:06}.json"


def rejects_path(output: Path, number: int) -> Path:
    """Path of the rejects of part `number`."""
    return output / WORK / f"part-{number:06}.rejected.jsonl"


def hashes_path(output: Path, number: int) -> Path:
    """Path of the hashes of the documents of part `number`."""
    return output / WORK / f"part-{number:06}.hashes"


def has_hashes(path: Path, record: PartRecord) -> bool:
    """Whether the hashes of a part are there, and its shards are not half written."""
    if record.drops == UNSETTLED or not record.hashed:
        return False
    return path.is_file() and path.stat().st_size == sum(record.hashed.values()) * HASH.itemsize


def save_record(output: Path, number: int, record: PartRecord) -> None:
    """Write the record that marks a part as finished."""
    write_json(record_path(output, number), asdict(record))


def forget_part(output: Path, number: int, record: PartRecord) -> None:
    """Remove a finished part, its record first."""
    with output_errors(output):
        record_path(output, number).unlink(missing_ok=True)
        rejects_path(output, number).unlink(missing_ok=True)
        hashes_path(output, number).unlink(missing_ok=True)
        for split, name in record.shards.items():
            for path in files_of(output / split / name):
                path.unlink(missing_ok=True)


def files_of(shard: Path) -> tuple[Path, Path, Path]:
    """The files that a shard may have: its own, that of its images, and its stub."""
    return shard, assets_path(shard), stub_path(shard)


def finished_numbers(output: Path) -> list[int]:
    """Numbers of the parts that have a record, in order."""
    return sorted(
        int(path.stem.removeprefix("part-")) for path in (output / WORK).glob("part-??????.json")
    )


def load_record(output: Path, number: int) -> PartRecord | None:
    """The record of a finished part; None if it is not finished."""
    try:
        return PartRecord(**json.loads(record_path(output, number).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
