"""Which tokens begin at a boundary."""

from pathlib import Path

import numpy as np
import pytest
from teacher_makers import WORDS, word_pieces, word_tokenizer

from penstock import load_tokenizer
from penstock.core.errors import TokenizerError
from penstock.learn.distillation.projection import project
from penstock.learn.distillation.teachers import starts_boundary


def test_whitespace_and_control_tokens_begin_one() -> None:
    tokenizer = word_tokenizer()
    found = starts_boundary(tokenizer)
    assert found.shape == (tokenizer.vocab_size,)
    assert found.dtype == np.bool_
    begin = {WORDS[number] for number in np.flatnonzero(found)}
    assert begin == {"<eos>", "</s>", " ", "\n", "\t", " a", "\r\n", " the"}


def test_a_tokenizer_without_bytes_is_told_what_goes_with_it(tmp_path: Path) -> None:
    forgetful = word_pieces(tmp_path)
    with pytest.raises(TokenizerError, match="set debias to false, or use loss uld"):
        starts_boundary(forgetful)
    for pair in ((forgetful, word_tokenizer()), (word_tokenizer(), forgetful)):
        with pytest.raises(TokenizerError, match=r"compared.*bytes.*debias"):
            project(*pair)


@pytest.mark.real_data
@pytest.mark.parametrize("name", ["hf/gpt2", "spm/mistral-v3.model"])
def test_first_byte_decides(real_data: Path, name: str) -> None:
    """For byte-level and SentencePiece vocabularies alike."""
    tokenizer = load_tokenizer(real_data / "tokenizers" / name)
    table, found = tokenizer.byte_table, starts_boundary(tokenizer)
    for token in range(0, tokenizer.vocab_size, 7):
        assert found[token] == (
            table[token][:1] in (b" ", b"\t", b"\n", b"\r") or bool(table.is_control[token])
        )
