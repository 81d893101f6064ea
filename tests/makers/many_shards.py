"""A dataset of very many shards, made in no time: each is a link to the same file."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock import write_dataset
from penstock.data.shards.format.manifest import Manifest
from penstock.data.stores.files import checksum

_LINKS = 30_000
"""Names that one file may have, on any file system."""


def many_shards(folder: Path, count: int, documents: list[list[int]]) -> None:
    """A dataset of `count` shards, each with these documents."""
    one = folder.with_name(f"{folder.name}-one")
    write_dataset(one, documents)
    manifest = Manifest.load(one)
    folder.mkdir()
    content = (one / manifest.shards[0].file).read_bytes()
    names = [f"{number:06}.arrow" for number in range(count)]
    for number, name in enumerate(names):
        if number % _LINKS == 0:
            target = folder / name
            target.write_bytes(content)
        else:
            os.link(target, folder / name)
    for name, kind in (("lengths.u32", "<u4"), ("batches.u64", "<u8")):
        np.tile(np.fromfile(one / name, kind), count).tofile(folder / name)
    (folder / "files.json").write_bytes((one / "files.json").read_bytes())
    totals = {
        name: getattr(manifest, name) * count
        for name in ("documents", "tokens", "trained_tokens", "text_bytes")
    }
    replace(
        manifest,
        shards=tuple(replace(manifest.shards[0], file=name) for name in names),
        checksums={
            name: checksum(np.fromfile(folder / name, np.uint8)) for name in manifest.checksums
        },
        histogram=tuple(number * count for number in manifest.histogram),
        **totals,
    ).save(folder)
