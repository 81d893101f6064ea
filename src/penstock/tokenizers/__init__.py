"""Any tokenizer behind one interface: load or train one, encode fast, and know the bytes of every
id.

`ps.load_tokenizer` reads tokenizer.json, Hugging Face folders and hub names, tiktoken ranks (also
Meta's Llama 3), SentencePiece models, tekken.json, and vocab.json with merges.txt;
`ps.train_tokenizer` makes a byte-level BPE; `add_tokens` adds control entries to one; `align` cuts
two tokenizations of a text into chunks with equal bytes. Text becomes a control token only on
request.
"""

from penstock.core.lazy_imports import public_names
from penstock.tokenizers.alignment import Aligner, Alignment, align
from penstock.tokenizers.byte_table import ByteTable
from penstock.tokenizers.extension import add_tokens
from penstock.tokenizers.shown_tokens import ShownTokens
from penstock.tokenizers.tokenizer import Tokenizer

__all__ = [
    "Aligner",
    "Alignment",
    "ByteTable",
    "ShownTokens",
    "Tokenizer",
    "add_tokens",
    "align",
]

__dir__ = public_names(__name__)
