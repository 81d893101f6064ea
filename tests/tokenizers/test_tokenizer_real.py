"""Real tokenizers of every format against golden ids, their own packages, and real text in 18
languages.
"""

import gzip
import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock import load_tokenizer
from penstock.core.errors import TokenizerError
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.huggingface import HuggingFaceVocabulary
from penstock.tokenizers.piece_encoder import piece_encoder

pytestmark = pytest.mark.real_data

GOLDEN = {
    "gpt-2": "hf/gpt2/tokenizer.json.gz",
    "falcon": "hf/falcon/tokenizer.json.gz",
    "phi-3": "hf/phi-3-mini",
    "llama-spm": "hf/phi-3-mini",
    "qwen2": "hf_derived/qwen2.5",
    "bert-bge": "hf/bert-base-uncased",
}
FAST = [
    "hf/gpt2",
    "hf/olmo2-dolma2",
    "hf/phi-2",
    "hf/phi-3-mini",
    "hf/pythia-neox20b",
    "hf_derived/qwen2.5",
    "spm/mistral-v3.model",
    "tekken/tekken_240911.json.gz",
    "tiktoken/cl100k_base.tiktoken.gz",
    "tiktoken/r50k_base.tiktoken",
]
BY_PIECES = ["hf/falcon", "hf/torchtitan-tiny"]
SLOW = {
    "hf/bert-base-uncased": "WordPiece",
    "hf/t5-small": "Unigram",
    "spm/t5-base.model": "unigram",
}
WITHOUT_TABLE = ["hf/bert-base-uncased", "hf/t5-small", "spm/t5-base.model"]


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest, real_data: Path) -> Tokenizer:
    """The tokenizer at the path of the parameter, loaded once for all tests of it."""
    return load_tokenizer(real_data / "tokenizers" / request.param)


def real_texts(real_data: Path) -> list[str]:
    """Sentences in many languages, web text, code, and the strings of llama.cpp's tests; no literal
    ▁.
    """
    texts = llama_strings(real_data, "gpt-2")
    for path in sorted((real_data / "text" / "tatoeba").iterdir()):
        texts += path.read_text(encoding="utf-8").splitlines()[:25]
    lines = (real_data / "text" / "c4_demo.jsonl").read_text(encoding="utf-8").splitlines()
    texts += [json.loads(line)["text"] for line in lines[:40]]
    with gzip.open(
        real_data / "text" / "code" / "cpython311_stdlib_sample.jsonl.gz", "rt", encoding="utf-8"
    ) as file:
        texts += [json.loads(next(file))["text"][:20000] for _ in range(5)]
    return texts


def llama_strings(real_data: Path, name: str) -> list[str]:
    raw = (real_data / "tokenizers" / "vectors" / "llama.cpp" / f"{name}.inp").read_bytes().decode()
    return raw.split("\n__ggml_vocab_test__\n")


@pytest.mark.parametrize(("name", "path"), GOLDEN.items())
def test_golden_ids_of_llama_cpp(real_data: Path, name: str, path: str) -> None:
    golden = (
        (real_data / "tokenizers" / "vectors" / "llama.cpp" / f"{name}.out").read_text().split("\n")
    )
    batch = load_tokenizer(real_data / "tokenizers" / path).encode_batch(
        pa.array(llama_strings(real_data, name))
    )
    assert [row.tolist() for row in batch] == [
        [int(word) for word in line.split()] for line in golden
    ]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("gpt2", "tiktoken/r50k_base.tiktoken"),
        ("gpt2", "hf/gpt2"),
        ("gpt_3.5_turbo", "tiktoken/cl100k_base.tiktoken.gz"),
    ],
)
def test_golden_ids_of_microsoft(real_data: Path, name: str, path: str) -> None:
    vectors = real_data / "tokenizers" / "vectors" / "microsoft"
    text = (vectors / "lib.rs.txt").read_bytes().decode()
    tokenizer = load_tokenizer(real_data / "tokenizers" / path)
    assert tokenizer.encode(text).tolist() == json.loads(
        (vectors / f"tokens_{name}.json").read_text()
    )


@pytest.mark.parametrize("loaded", FAST, indirect=True)
def test_fast_and_exact(real_data: Path, loaded: Tokenizer) -> None:
    tokenizer = loaded
    texts = real_texts(real_data)
    assert tokenizer.check_encoder(texts) is None
    assert tokenizer.encoder == "gigatoken"
    if tokenizer.normalization == "NFC":
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    array = pa.array(texts)
    ids = tokenizer.encode_batch(array)
    ends = tokenizer.token_ends_batch(array, ids)
    for text, row, row_ends in zip(texts, ids, ends, strict=True):
        assert tokenizer.decode(row) == text
        assert row_ends[-1:].tolist() == ([len(text.encode())] if len(row) else [])


@pytest.mark.parametrize(
    "loaded",
    [path for path in [*FAST, *BY_PIECES] if path.startswith("hf") and path != "hf/phi-3-mini"],
    indirect=True,
)
def test_pieces_give_the_own_ids(real_data: Path, loaded: Tokenizer) -> None:
    """Also of vocabularies that gigatoken takes, and again from the cache."""
    vocabulary = loaded._vocabulary
    assert isinstance(vocabulary, HuggingFaceVocabulary)
    added = [text for text, number in vocabulary._added.items() if number in vocabulary._content]
    encoder = piece_encoder(vocabulary._scrubbed_json, vocabulary._scrubbed, added)
    texts = pa.array(real_texts(real_data), pa.large_string())
    own = _by_own_encoder(loaded, texts)
    for _ in range(2):
        ids, left_out = encoder.encode_batch(texts)
        wrong = [
            row
            for row, (found, expected) in enumerate(zip(ids, own, strict=True))
            if found.tolist() != expected.tolist()
        ]
        assert set(wrong) <= set(left_out.tolist())
        assert len(left_out) < len(texts) / 2


@pytest.mark.parametrize("loaded", BY_PIECES, indirect=True)
def test_what_gigatoken_cannot_encode_is_encoded_by_pieces(
    real_data: Path, loaded: Tokenizer
) -> None:
    assert loaded.check_encoder(real_texts(real_data)) is None
    assert (loaded.encoder, loaded.fallback_reason) == ("penstock", None)


@pytest.mark.parametrize(("loaded", "reason"), SLOW.items(), indirect=["loaded"])
def test_what_falls_back_says_why(loaded: Tokenizer, reason: str) -> None:
    assert loaded.encoder in ("tokenizers", "sentencepiece")
    assert reason in str(loaded.fallback_reason)


@pytest.mark.parametrize("loaded", WITHOUT_TABLE, indirect=True)
def test_what_has_no_table_says_so(loaded: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="no exact byte table"):
        _ = loaded.byte_table


@pytest.mark.parametrize(
    "loaded", [path for path in [*FAST, *BY_PIECES, *SLOW] if path.startswith("hf")], indirect=True
)
def test_without_control_entries_ordinary_text_keeps_its_ids(
    real_data: Path, loaded: Tokenizer
) -> None:
    """The rule for added entries: content stays (runs of spaces of Phi-2 and NeoX), so no id of
    ordinary text moves.
    """
    from tokenizers import Tokenizer as Original

    tokenizer = loaded
    original = Original.from_str(tokenizer.source_bytes["tokenizer.json"].decode())
    original.no_truncation()
    original.no_padding()
    texts = [
        text
        for text in real_texts(real_data)
        if not any(entry in text for entry in tokenizer.special_tokens)
    ]
    batch = tokenizer.encode_batch(pa.array(texts))
    for text, row in zip(texts, batch, strict=True):
        assert row.tolist() == original.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("loaded", [*FAST, *BY_PIECES, *SLOW], indirect=True)
def test_text_never_becomes_a_control_token(loaded: Tokenizer) -> None:
    tokenizer = loaded
    unknown = {tokenizer.special_tokens.get(name) for name in ("<unk>", "[UNK]")}
    controls = set(tokenizer.special_tokens.values()) - unknown
    shown = list(tokenizer.special_tokens)
    array = pa.array([*shown, *(f"a {text}{text} b" for text in shown), "".join(shown)])
    for batch in (tokenizer.encode_batch(array), _by_own_encoder(tokenizer, array)):
        assert not controls & set(np.unique(batch.values).tolist())


def _by_own_encoder(tokenizer: Tokenizer, array: Any) -> Any:
    own = Tokenizer(tokenizer.name, tokenizer.source_bytes, fallback_reason="asked for")
    assert own.encoder == own._vocabulary.own_encoder
    return own.encode_batch(array)


def test_the_rule_on_real_entries(real_data: Path) -> None:
    def load(path: str) -> Tokenizer:
        return load_tokenizer(real_data / "tokenizers" / path)

    phi2, phi3 = load("hf/phi-2"), load("hf/phi-3-mini")
    assert list(phi2.special_tokens) == ["<|endoftext|>"]
    assert phi2.byte_table[50286] == b"  "
    assert (phi3.bos_id, phi3.eos_id) == (1, 32000)
    assert list(load("hf/pythia-neox20b").special_tokens) == ["<|endoftext|>", "<|padding|>"]
    assert "|||IP_ADDRESS|||" in load("hf/olmo2-dolma2").special_tokens
    assert "<tool_call>" in load("hf_derived/qwen2.5").special_tokens
    assert load("spm/mistral-v3.model").special_tokens["[INST]"] == 3
    assert load("tekken/tekken_240911.json.gz").special_tokens["[INST]"] == 3


def test_a_tokenizer_that_drops_bytes_is_found(real_data: Path) -> None:
    tokenizer = load_tokenizer(real_data / "tokenizers" / "hf" / "torchtitan-tiny")
    with pytest.raises(TokenizerError, match="the ids spell other bytes than the text"):
        tokenizer.token_ends("Führer", tokenizer.encode("Führer"))
