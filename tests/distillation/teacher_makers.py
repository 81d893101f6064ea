"""Tiny teachers, their tokenizer, and rows that they read; also what a child process of a test
loads.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from makers.models import tiny_model
from makers.rows import LENGTHS, random_tokens
from makers.tokenizers import bpe_without_merges
from penstock import load_tokenizer
from penstock.learn.distillation.outputs import TeacherOutputs
from penstock.learn.distillation.teacher_rows import TeacherRow
from penstock.tokenizers import Tokenizer
from tokenizers import Tokenizer as Builder
from tokenizers import models, pre_tokenizers

PADDED_VOCABULARY = 64
"""Logits of the tiny teacher; its tokenizer has 60 ids."""
WORDS = ["<eos>", " ", "a", "b", "c", "\n", "\t", ".", " a", "b ", "\r\n", " the", "the", "</s>"]


def word_tokenizer(size: int = 60) -> Tokenizer:
    """A byte-level BPE whose ids are readable: `WORDS`, then fillers; `<eos>` and `</s>` are
    control tokens.
    """
    letters = {" ": "Ġ", "\n": "Ċ", "\t": "ĉ", "\r": "č"}
    spelled = ["".join(letters.get(c, c) for c in word) for word in WORDS]
    ids = {
        text: place
        for place, text in enumerate(spelled + [f"z{n}" for n in range(size - len(spelled))])
    }
    controls = {text: ids.pop(text) for text in ("<eos>", "</s>")}
    return bpe_without_merges("words", ids, controls)


def word_pieces(folder: Path) -> Tokenizer:
    """A vocabulary that forgets whitespace and unknown words, so it has no bytes of its own."""
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "water", "##s", "flows", "turb", "##ine", "in"]
    builder = Builder(
        models.WordPiece({word: place for place, word in enumerate(words)}, unk_token="[UNK]")
    )
    builder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    builder.add_special_tokens(words[:3])
    builder.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder / "tokenizer.json")


def tiny_teacher(
    dtype: torch.dtype = torch.float32, seed: int = 0, vocab_size: int = PADDED_VOCABULARY
) -> Any:
    return tiny_model(vocab_size, dtype=dtype, seed=seed)


def make_teacher_row(
    lengths: tuple[int, ...] = LENGTHS, *, padding: int = 3, seed: int = 0
) -> TeacherRow:
    """A row of a teacher without any chunk."""
    none = np.empty((0, 2), np.int32)
    return TeacherRow(
        input=random_tokens(lengths, padding=padding, seed=seed),
        student_bounds=none,
        teacher_bounds=none,
        weights=np.empty(0, np.float32),
        documents=np.empty(0, np.int32),
        starts=np.cumsum([0, *lengths[:-1]]),
        text_bytes=np.ones(len(lengths), np.int64),
        pieces=np.array(
            [[0, number, 0, length] for number, length in enumerate(lengths)], np.int64
        ),
        same_tokenizer=False,
    )


def assert_same(left: TeacherOutputs, right: TeacherOutputs) -> None:
    """The same fields, bit for bit."""
    ours, theirs = left.tensors(), right.tensors()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def load(seed: int = 0, device: str = "cpu") -> tuple[Any, Tokenizer]:
    """What a child process loads."""
    return tiny_teacher(seed=seed).to(device), word_tokenizer()


def load_badly() -> Any:
    """A child that cannot load."""
    raise RuntimeError("no such weights")


def load_slowly() -> tuple[Any, Tokenizer]:
    """A child that is still busy when something happens to it."""
    time.sleep(60)
    return load()


def load_model_that_dies() -> tuple[Any, Tokenizer]:
    """A child that is killed in its first row."""
    model = tiny_teacher()
    model.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    return model, word_tokenizer()
