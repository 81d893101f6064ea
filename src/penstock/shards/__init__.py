"""Shards: documents of tokens on disk, and the numbers that lead to each of them.

Write with `ShardWriter` and `finish_dataset` (or `write_dataset` from memory), open with `open_dataset`. Kernels of
other rooms read documents by address through `DocumentTable`, and check them with `token_checksum`.
"""

from penstock.shards._kernels import CHUNK_TOKENS, token_checksum
from penstock.shards.blocks import SpanBlock
from penstock.shards.chat import ChatInfo
from penstock.shards.convert import import_corpus, write_megatron
from penstock.shards.dataset import Dataset
from penstock.shards.document import Corpus, Document, Origin
from penstock.shards.files import checksum, new_folder, output_errors, usual_mode, write_json, write_text
from penstock.shards.finish import finish_dataset
from penstock.shards.in_place import InPlaceCorpus
from penstock.shards.layout import SPAN, TOKENIZER_FOLDER, ShardLayout
from penstock.shards.manifest import DamagedSource, Manifest, ShardInfo, TokenizerInfo
from penstock.shards.megatron import open_megatron
from penstock.shards.memory import write_dataset
from penstock.shards.npy import open_npy
from penstock.shards.opening import open_dataset
from penstock.shards.origins import read_origins
from penstock.shards.sides import load_shard
from penstock.shards.store import ShardStore, reopen_dataset
from penstock.shards.table import DocumentTable
from penstock.shards.verify import Fault, Report, verify
from penstock.shards.writer import ShardWriter

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
    "finish_dataset",
    "import_corpus",
    "load_shard",
    "new_folder",
    "open_dataset",
    "open_megatron",
    "open_npy",
    "output_errors",
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
