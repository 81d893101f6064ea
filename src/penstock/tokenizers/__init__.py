"""Any tokenizer behind one face: load or train one, encode fast, and know the bytes of every id.

`load_tokenizer` reads tokenizer.json, Hugging Face folders and hub names, tiktoken ranks (also Meta's Llama 3),
SentencePiece models, tekken.json, and vocab.json with merges.txt; `train_tokenizer` makes a byte-level BPE;
`add_tokens` adds control entries to one; `align` cuts two tokenizations of a text into chunks with equal bytes. Text
never becomes a control token unless that is asked for.
"""

from penstock.tokenizers.adding import add_tokens
from penstock.tokenizers.alignment import Aligner, Alignment, align
from penstock.tokenizers.byte_table import ByteTable
from penstock.tokenizers.loading import load_tokenizer
from penstock.tokenizers.tokenizer import Tokenizer, template_in
from penstock.tokenizers.training import train_tokenizer

__all__ = [
    "Aligner",
    "Alignment",
    "ByteTable",
    "Tokenizer",
    "add_tokens",
    "align",
    "load_tokenizer",
    "template_in",
    "train_tokenizer",
]
