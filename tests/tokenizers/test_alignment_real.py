"""Alignment of real tokenizers on real texts: all of a student's tokens are in chunks whose bytes
are equal.
"""

import gzip
import json
import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from penstock import load_tokenizer
from penstock.tokenizers import Aligner
from penstock.tokenizers.alignment import EQUIVALENT

pytestmark = pytest.mark.real_data

GPT2, QWEN, LLAMA = "hf/gpt2", "hf_derived/qwen2.5", "hf/phi-3-mini"
"""Phi-3 has Llama 2's vocabulary."""
MISTRAL, TEKKEN, BERT = (
    "spm/mistral-v3.model",
    "tekken/tekken_240911.json.gz",
    "hf/bert-base-uncased",
)


def real_texts(real_data: Path) -> dict[str, str]:
    folder = real_data / "text"
    lines = (folder / "c4_demo.jsonl").read_text(encoding="utf-8").splitlines()[:20]
    prose = "\n\n".join(json.loads(line)["text"] for line in lines)[:11_000]
    numbers = random.Random(0)
    digits = "\n".join(str(numbers.randrange(10**5, 10**12)) for _ in range(800))
    sentences = [
        line
        for path in sorted((folder / "tatoeba").iterdir())
        if path.suffix != ".eng"
        for line in path.read_text(encoding="utf-8").splitlines()[:8]
    ]
    with gzip.open(
        folder / "code" / "cpython311_stdlib_sample.jsonl.gz", "rt", encoding="utf-8"
    ) as file:
        code = json.loads(next(file))["text"][:15_000]
    multilingual = "\n".join(sentences)
    decomposed = unicodedata.normalize("NFD", multilingual)
    return {
        "prose": prose,
        "digits": digits,
        "multilingual": multilingual,
        "code": code,
        "NFD": decomposed,
    }


@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        (GPT2, QWEN),
        (LLAMA, QWEN),
        (GPT2, LLAMA),
        (QWEN, GPT2),
        (MISTRAL, QWEN),
        (QWEN, MISTRAL),
        (LLAMA, TEKKEN),
    ],
)
def test_every_token_is_in_a_chunk(real_data: Path, student: str, teacher: str) -> None:
    ours, theirs = (load_tokenizer(real_data / "tokenizers" / name) for name in (student, teacher))
    aligner = Aligner(ours, theirs)
    for name, text in real_texts(real_data).items():
        ids = ours.encode(text), theirs.encode(text)
        found = aligner.align(*ids)
        assert found.coverage >= 0.999, name
        assert found.orphaned == 0
        if ours.normalization is None:  # else its ids spell another form of the text
            np.testing.assert_array_equal(aligner.teacher_ids(ids[0]), ids[1])
        normal = unicodedata.normalize("NFC", text)
        found = aligner.align(ours.encode(normal), theirs.encode(normal))
        assert (found.coverage, found.method) == (1, "bytes")


def test_decomposed_text_is_equal_once_normalised(real_data: Path) -> None:
    ours, theirs = (load_tokenizer(real_data / "tokenizers" / name) for name in (GPT2, QWEN))
    text = real_texts(real_data)["NFD"]
    ids = ours.encode(text), theirs.encode(text)
    found = Aligner(ours, theirs).align(*ids)
    assert found.method == "normalised"
    for kind, (a, b), (c, d) in zip(
        found.kinds, found.student_bounds, found.teacher_bounds, strict=True
    ):
        left, right = (
            one.byte_table.spell(side) for one, side in ((ours, ids[0][a:b]), (theirs, ids[1][c:d]))
        )
        if kind == EQUIVALENT:
            assert unicodedata.normalize("NFC", left.tobytes().decode()).encode() == right.tobytes()
        else:
            assert left.tobytes() == right.tobytes()


def test_word_pieces_against_bytes(real_data: Path) -> None:
    ours, theirs = (load_tokenizer(real_data / "tokenizers" / name) for name in (GPT2, BERT))
    text = real_texts(real_data)["prose"]
    found = Aligner(ours, theirs).align(ours.encode(text), theirs.encode(text))
    assert found.method == "strings"
    assert found.coverage >= 0.98
