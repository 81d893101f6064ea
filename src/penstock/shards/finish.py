"""Makes finished shards a dataset: joins their side files, fingerprints the content, writes the manifest last."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from penstock.errors import ConfigError, OutputError
from penstock.shards._kernels import DOCUMENTS_PER_BATCH
from penstock.shards.files import (
    Array,
    checksum,
    map_file,
    output_errors,
    sync,
    write_json,
)
from penstock.shards.layout import ShardLayout
from penstock.shards.manifest import (
    BATCHES,
    FILES,
    LENGTHS,
    WEIGHT_SUMS,
    DamagedSource,
    Manifest,
    ShardInfo,
    TokenizerInfo,
    add_histograms,
    common_ends,
)
from penstock.shards.sides import UNFINISHED, side_batches, side_lengths, side_weight_sums


def finish_dataset(
    folder: Path,
    *,
    shards: Sequence[ShardInfo],
    layout: ShardLayout,
    tokenizer: TokenizerInfo,
    configuration: str,
    files: Sequence[str],
    sealed: Sequence[str] = (),
    damaged: Sequence[DamagedSource] = (),
) -> Manifest:
    """Join finished shards into a dataset.

    The manifest is renamed into place when all else is on the disk; killed before that, call it again with the same
    shards. Reads the shards' checksums (1.6 % of their bytes) for the fingerprint.

    Args:
        folder: The dataset's, holding the shards and their side files.
        shards: As `ShardWriter.finish` or `load_shard` gave them, in the order of the dataset.
        layout: That of all shards.
        tokenizer: Whose ids the tokens are.
        configuration: Fingerprint of the settings that made the dataset.
        files: Names of the origin files, which the shards' origins index.
        sealed: Names of more files that lie in the folder, for the manifest to hold their checksums.
        damaged: Files of the input that could not be read whole.

    Raises:
        OutputError: The folder cannot be written, or a side file is missing.
        ConfigError: The shards were written for another vocabulary.
    """
    folder = Path(folder)
    if layout.vocab_size != tokenizer.vocab_size:
        raise ConfigError(
            f"the shards have a vocabulary of {layout.vocab_size}, the tokenizer of {tokenizer.vocab_size}"
        )
    kept = [shard for shard in shards if shard.documents]
    fractional = any(shard.fractional_weights for shard in kept)

    try:
        _join_sides(folder / LENGTHS, kept, side_lengths)
        _join_sides(folder / BATCHES, kept, side_batches)
        if fractional:
            _join_sides(folder / WEIGHT_SUMS, kept, side_weight_sums)
        else:
            (folder / WEIGHT_SUMS).unlink(missing_ok=True)  # of an earlier try with other shards
        fingerprint = content_fingerprint(
            ((map_file(folder / s.file), side_batches(folder, s), side_lengths(folder, s)) for s in kept), layout
        )
    except FileNotFoundError as error:
        raise OutputError(f"{error.filename}: missing, so the dataset cannot be finished; prepare again") from None
    write_json(folder / FILES, list(files))
    names = [LENGTHS, BATCHES, FILES, *([WEIGHT_SUMS] if fractional else []), *sealed]
    manifest = Manifest(
        documents=sum(shard.documents for shard in kept),
        tokens=sum(shard.tokens for shard in kept),
        trained_tokens=sum(shard.trained_tokens for shard in kept),
        text_bytes=sum(shard.text_bytes for shard in kept),
        longest=max((shard.longest for shard in kept), default=0),
        token_bytes=layout.token_dtype.itemsize,
        documents_per_batch=DOCUMENTS_PER_BATCH,
        has_spans=layout.has_spans,
        has_text=layout.has_text,
        fractional_weights=fractional,
        shards=tuple(kept),
        files=len(files),
        tokenizer=tokenizer,
        configuration=configuration,
        fingerprint=fingerprint,
        histogram=add_histograms(kept),
        ends=common_ends(kept),
        checksums={name: checksum(map_file(folder / name)) for name in names},
        damaged=tuple(damaged),
    )
    sync(folder)
    manifest.save(folder)
    sync(folder)
    for shard in shards:
        if not shard.documents:
            (folder / shard.file).unlink(missing_ok=True)
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    return manifest


def content_fingerprint(shards: Iterable[tuple[Array, Array, Array]], layout: ShardLayout) -> str:
    """A hash of all tokens and loss weights, by their checksums, in order; shards and batches leave no trace.

    Args:
        shards: (file uint8 [bytes], batch table uint64 [batches, 9], lengths uint32 [documents, 2]) of each.
        layout: That of all shards.

    Returns:
        32 hexadecimal digits.
    """
    words = hashlib.blake2b(digest_size=16)
    counts = hashlib.blake2b(digest_size=16)
    for data, batches, lengths in shards:
        counts.update(np.ascontiguousarray(lengths[:, 0]).data)
        for number, line in enumerate(batches):
            rows = min(DOCUMENTS_PER_BATCH, len(lengths) - number * DOCUMENTS_PER_BATCH)
            total = int(data[int(line[2]) :][: 8 * (rows + 1)].view("<i8")[-1])
            words.update(data[int(line[3]) :][: 8 * total].data)
    kind = f"penstock 1, {layout.token_dtype.itemsize} bytes, spans {layout.has_spans}"
    whole = hashlib.blake2b(kind.encode(), digest_size=16)
    whole.update(words.digest())
    whole.update(counts.digest())
    return whole.hexdigest()


def _join_sides(path: Path, shards: Sequence[ShardInfo], part: Callable[[Path, ShardInfo], Array]) -> None:
    """Write the side files of all shards end to end, forced to the disk, then renamed."""
    partial = path.with_name(path.name + ".partial")
    with output_errors(path), open(partial, "wb") as file:
        for shard in shards:
            file.write(np.ascontiguousarray(part(path.parent, shard)).data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
