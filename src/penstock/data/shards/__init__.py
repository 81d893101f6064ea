"""Shards: documents of tokens on disk, and the tables that locate them.

Write with `ShardWriter` and `finish_dataset` (or `ps.write_dataset` from memory), open with
`ps.open_dataset`. Kernels of other rooms read documents by address through `DocumentTable`.
"""

from penstock.core.lazy_imports import public_names
from penstock.data.shards.convert import import_corpus, write_megatron
from penstock.data.shards.copying import copy_dataset
from penstock.data.shards.extend import extend_dataset, write_side
from penstock.data.shards.foreign.in_place import InPlaceCorpus
from penstock.data.shards.foreign.megatron import open_megatron
from penstock.data.shards.foreign.npy import open_npy
from penstock.data.shards.format.layout import ShardLayout
from penstock.data.shards.format.manifest import (
    ChatInfo,
    DamagedSource,
    Manifest,
    ShardInfo,
    TokenizerInfo,
)
from penstock.data.shards.format.tree_building import TreeDocument, build_tree
from penstock.data.shards.format.trees import Tree
from penstock.data.shards.joined import JoinedCorpus
from penstock.data.shards.shard_faults import Fault
from penstock.data.shards.tables.corpus import Corpus
from penstock.data.shards.tables.document import Document, Origin
from penstock.data.shards.tables.table import DocumentTable
from penstock.data.shards.verify import Report, verify
from penstock.data.shards.writing.blocks import SpanBlock
from penstock.data.shards.writing.finish import finish_dataset
from penstock.data.shards.writing.writer import ShardWriter

__all__ = [
    "ChatInfo",
    "Corpus",
    "DamagedSource",
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
    "ShardWriter",
    "SpanBlock",
    "TokenizerInfo",
    "Tree",
    "TreeDocument",
    "build_tree",
    "copy_dataset",
    "extend_dataset",
    "finish_dataset",
    "import_corpus",
    "open_megatron",
    "open_npy",
    "verify",
    "write_megatron",
    "write_side",
]

__dir__ = public_names(__name__)
