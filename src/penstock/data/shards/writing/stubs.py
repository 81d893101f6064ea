"""Stubs of shards: while a dataset is made, each stands in its folder for a shard that is in a
store already.

`part.arrow.stored` is a line of JSON, then what the fingerprint of the dataset needs of the shard:
the checksums of its tokens (2 % of its bytes for long documents), its trees, its records of images,
and the checksums of its columns. A stub belongs to one version of an object: if another object
takes its place, the stub stands for nothing any more.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from penstock.data.shards.format.images import assets_path
from penstock.data.shards.format.manifest import ShardInfo
from penstock.data.stores.files import checksum, map_file, write_file
from penstock.data.stores.store import Store, StoredFile

ENDING = ".stored"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stub:
    """A shard in a store."""

    name: str
    """Of the object, below the URL of the preparation."""
    shard: StoredFile
    checksum: int
    """Of the shard's bytes."""
    assets: StoredFile | None
    """The file of its images; None: it has none."""
    assets_checksum: int
    words: int
    """Bytes of checksums of tokens and loss weights, behind the line."""
    extras: int
    """Bytes of everything else of the fingerprint, behind them."""

    def fits(self, info: ShardInfo) -> bool:
        """Whether it stands for exactly this shard."""
        assets = 0 if self.assets is None else self.assets.size
        sizes = self.shard.size in (None, info.bytes) and assets in (None, info.assets)
        return sizes and self.checksum == info.checksum

    def objects(self) -> dict[str, StoredFile]:
        """Its objects, by name."""
        assets = {} if self.assets is None else {assets_name(self.name): self.assets}
        return {self.name: self.shard, **assets}


def assets_name(shard: str) -> str:
    """The name of the object with the images of a shard."""
    return str(assets_path(Path(shard)))


def stub_path(shard: Path) -> Path:
    """The path of the stub of a shard."""
    return shard.with_name(f"{shard.name}{ENDING}")


def upload_shard(
    store: Store, name: str, path: Path, info: ShardInfo, words: bytes, extras: bytes
) -> bytes:
    """Put a shard and its images into a store.

    Args:
        store: The store.
        name: Name of the object.
        path: Path of the shard.
        info: Its description.
        words: Its checksums of tokens and loss weights.
        extras: Everything else of the fingerprint.

    Returns:
        The stub's bytes.

    Raises:
        StoreError: The store cannot be written.
        CorruptionError: What arrived has another size.
    """
    assets = assets_path(path)
    stub = Stub(
        name=name,
        shard=store.put(name, path),
        checksum=info.checksum,
        assets=store.put(assets_name(name), assets) if info.assets else None,
        assets_checksum=checksum(map_file(assets)) if info.assets else 0,
        words=len(words),
        extras=len(extras),
    )
    return json.dumps(asdict(stub)).encode() + b"\n" + words + extras


def load_stub(shard: Path) -> Stub | None:
    """The stub of a shard; None: there is none, or it was cut."""
    try:
        with open(stub_path(shard), "rb") as file:
            line = file.readline()
            value = json.loads(line)
            whole = stub_path(shard).stat().st_size == len(line) + value["words"] + value["extras"]
        files = {
            key: StoredFile(**value[key]) if value[key] else None for key in ("shard", "assets")
        }
        return Stub(**{**value, **files}) if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def fingerprint_of(shard: Path) -> list[tuple[int, Any]]:
    """What the fingerprint needs of a shard with a stub: (0, checksums), (1, everything else)."""
    stub = load_stub(shard)
    if stub is None:
        raise FileNotFoundError(2, "is neither here nor in a store", str(shard))
    data = map_file(stub_path(shard))
    begin = len(data) - stub.words - stub.extras
    return [(0, data[begin : begin + stub.words].data), (1, data[begin + stub.words :].data)]


def save_stub(shard: Path, content: bytes) -> None:
    """Write the stub of a shard."""
    write_file(stub_path(shard), content)
