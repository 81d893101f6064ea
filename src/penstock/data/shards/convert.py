"""Converts documents between formats: a foreign corpus to a dataset, any dataset to Megatron's
`.bin` and `.idx`.

Tokens are checked as far as the source format allows.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from penstock.core.arrays import Array
from penstock.core.errors import ConfigError, OutputError
from penstock.core.folders import local_path
from penstock.core.ragged import Ragged
from penstock.core.terminal import Progress
from penstock.data.shards.dataset import Dataset
from penstock.data.shards.foreign.in_place import InPlaceCorpus
from penstock.data.shards.foreign.megatron import HEADER, MAGIC, READABLE, TYPES, megatron_prefix
from penstock.data.shards.format._kernels import DOCUMENTS_PER_BATCH
from penstock.data.shards.format.layout import ShardLayout
from penstock.data.shards.format.manifest import TOKENIZER_FOLDER, ShardInfo, TokenizerInfo
from penstock.data.shards.joined import JoinedCorpus
from penstock.data.shards.writing.finish import finish_dataset
from penstock.data.shards.writing.writer import ShardWriter
from penstock.data.stores.files import new_folder, output_errors, sync
from penstock.tokenizers import Tokenizer

SHARD_BYTES = 2**28
"""Size at which a shard is closed."""


def import_corpus(
    corpus: InPlaceCorpus | JoinedCorpus,
    output: str | Path,
    tokenizer: Tokenizer | TokenizerInfo | None = None,
    *,
    progress: bool = False,
) -> Dataset:
    """Copy a Megatron or `.npy` corpus into a dataset with checksums.

    Args:
        corpus: The result of `open_megatron` or `open_npy`, or several of these joined.
        output: A new or empty folder.
        tokenizer: The tokenizer of the ids; a whole tokenizer is saved with the dataset. None:
            unknown; a nameless one is recorded, with as many ids as the corpus's type can hold.
        progress: Show a bar.

    Raises:
        OutputError: The folder is not empty, or cannot be written.
        ConfigError: A token id is outside the tokenizer's vocabulary.
    """
    table = corpus.table
    if tokenizer is None:
        info = TokenizerInfo(
            name="", fingerprint="", vocab_size=2**16 if table.token_bytes == 2 else 2**31
        )
    elif isinstance(tokenizer, TokenizerInfo):
        info = tokenizer
    else:
        info = TokenizerInfo.of(tokenizer)
    layout = ShardLayout(vocab_size=info.vocab_size)
    shards: list[ShardInfo] = []
    with new_folder(output) as folder:
        if isinstance(tokenizer, Tokenizer):
            tokenizer.save(folder / TOKENIZER_FOLDER)
        documents = _documents(corpus, progress)
        block = next(documents, None)
        while block is not None:
            with ShardWriter(folder, f"{len(shards):05}.arrow", layout) as writer:
                while block is not None and writer.size_bytes < SHARD_BYTES:
                    first, tokens = block
                    numbers = np.arange(first, first + len(tokens))
                    files = np.searchsorted(table.shard_starts, numbers, side="right") - 1
                    writer.write(tokens, files=files, lines=numbers - table.shard_starts[files])
                    block = next(documents, None)
                shards.append(writer.finish())
        finish_dataset(
            folder,
            shards=shards,
            layout=layout,
            tokenizer=info,
            configuration=corpus.fingerprint,
            files=corpus.files,
        )
    return Dataset.open(folder)


def write_megatron(
    corpus: Dataset | InPlaceCorpus | JoinedCorpus,
    output: str | Path,
    *,
    drop_spans: bool = False,
    progress: bool = False,
) -> Path:
    """Write documents as a Megatron corpus, one sequence per document.

    Args:
        corpus: The documents.
        output: Target path without ending; `.bin` and `.idx` are added. The index is written last.
        drop_spans: Allow losing loss weights, which the format cannot hold.
        progress: Show a bar.

    Returns:
        The prefix.

    Raises:
        ConfigError: Loss weights would be lost, or an id does not fit int32.
        OutputError: The files already exist, or cannot be written.
    """
    output, table = megatron_prefix(local_path(output, "a Megatron corpus")), corpus.table
    if corpus.media is not None:
        raise ConfigError(
            f"{corpus.name} has images, which a Megatron corpus cannot hold; train it with "
            "penstock's loader"
        )
    if table.has_spans and not drop_spans:
        raise ConfigError(
            f"{corpus.name} has loss-weight spans, which a Megatron corpus cannot hold: all "
            "tokens would be trained; set drop_spans to lose them"
        )
    token_type = "uint16" if table.token_bytes == 2 else "int32"
    paths = [output.with_name(output.name + ending) for ending in (".bin", ".idx")]
    for path in paths:
        if path.exists():
            raise OutputError(f"{path}: already exists; choose another prefix")
    partial = [path.with_name(path.name + ".partial") for path in paths]
    with output_errors(paths[0]):
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        with open(partial[0], "wb") as file:
            for _, tokens in _documents(corpus, progress):
                file.write(_as_megatron(tokens.values, token_type).data)
        _write_index(partial[1], table.lengths[:, 0], token_type)
        for part, path in zip(partial, paths, strict=True):
            sync(part)
            os.replace(part, path)
    return output


def _documents(
    corpus: Dataset | InPlaceCorpus | JoinedCorpus, progress: bool
) -> Iterator[tuple[int, Ragged]]:
    """All documents in order, in blocks: (number of the first, uint32 tokens)."""
    with Progress("converting", total=len(corpus), unit="documents", enabled=progress) as bar:
        for first in range(0, len(corpus), DOCUMENTS_PER_BATCH):
            tokens = corpus.table.read(first, min(first + DOCUMENTS_PER_BATCH, len(corpus)))
            yield first, tokens
            bar.advance(len(tokens), tokens=len(tokens.values))


def _as_megatron(tokens: Array, token_type: str) -> Array:
    if token_type == "int32" and len(tokens) and int(tokens.max()) >= 2**31:
        raise ConfigError(f"token id {tokens.max()} does not fit Megatron's int32")
    return tokens.astype(token_type)


def _write_index(path: Path, lengths: Array, token_type: str) -> None:
    """Write an index with one sequence per document; see `megatron.py` for its layout."""
    if len(lengths) and int(lengths.max()) >= 2**31:
        raise ConfigError(f"a document of {lengths.max()} tokens; Megatron's lengths are int32")
    code = next(code for code, name in TYPES.items() if name == token_type)
    ends = np.cumsum(lengths, dtype=np.int64) * READABLE[token_type]
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").data)
        file.write(np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1]]).data)
        file.write(np.arange(len(lengths) + 1, dtype=np.int64).data)
