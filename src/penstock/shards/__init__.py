"""Shards: documents of tokens on disk, and the tables that locate them.

Write with `ShardWriter` and `finish_dataset` (or `write_dataset` from memory), open with `open_dataset`. Kernels of
other rooms read documents by address through `DocumentTable`, and check them with `token_checksum`.
"""

from penstock.core.lazy_imports import public_names
from penstock.shards._kernels import CHUNK_TOKENS, token_checksum
from penstock.shards.convert import import_corpus, write_megatron
from penstock.shards.dataset import Dataset
from penstock.shards.document import Corpus, Document, DocumentTable, Origin, is_corpus
from penstock.shards.files import checksum, new_folder, output_errors, usual_mode, write_json, write_text
from penstock.shards.finish import finish_dataset, load_shard
from penstock.shards.in_place import InPlaceCorpus, open_npy
from penstock.shards.joined import (
    JoinedCorpus,
    corpus_name,
    dataset_paths,
    knows_origins,
    open_dataset,
    part_of,
    read_origins,
)
from penstock.shards.layout import SPAN, TOKENIZER_FOLDER, ShardLayout
from penstock.shards.manifest import ChatInfo, DamagedSource, Manifest, ShardInfo, TokenizerInfo
from penstock.shards.megatron import open_megatron
from penstock.shards.memory import write_dataset
from penstock.shards.store import ShardStore, reopen_dataset
from penstock.shards.verify import Fault, Report, verify
from penstock.shards.writer import ShardWriter, SpanBlock

__all__ = [
    "CHUNK_TOKENS",
    "SPAN",
    "TOKENIZER_FOLDER",
    "ChatInfo",
    "Corpus",
    "DamagedSource",
    "Dataset",
    "Document",
    "DocumentTable",
    "Fault",
    "InPlaceCorpus",
    "JoinedCorpus",
    "Manifest",
    "Origin",
    "Report",
    "ShardInfo",
    "ShardLayout",
    "ShardStore",
    "ShardWriter",
    "SpanBlock",
    "TokenizerInfo",
    "checksum",
    "corpus_name",
    "dataset_paths",
    "finish_dataset",
    "import_corpus",
    "is_corpus",
    "knows_origins",
    "load_shard",
    "new_folder",
    "open_dataset",
    "open_megatron",
    "open_npy",
    "output_errors",
    "part_of",
    "read_origins",
    "reopen_dataset",
    "token_checksum",
    "usual_mode",
    "verify",
    "write_dataset",
    "write_json",
    "write_megatron",
    "write_text",
]

__dir__ = public_names(__name__)
