"""Meta's ranks, GPT-2's two files, files of others; and the chat template that goes along with a
vocabulary.
"""

import base64
import gzip
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import tiktoken
from tiny_tokenizers import make_ranks

import penstock as ps
from makers.datasets import prepare_here
from makers.tokenizers import CHAT_CONTROLS, tiny_tokenizer
from penstock import load_tokenizer
from penstock.core.errors import ConfigError, TokenizerError
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.ranks import LLAMA3_RANKS
from penstock.tokenizers.split_patterns import LLAMA3_PATTERN, QWEN2_PATTERN, SCHEMES

transformers = pytest.importorskip("transformers")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
ENDS_OF_TEXTS = [
    "a\n  ",
    "  \n\n  x",
    "x \r\n\r\n",
    "\n \n\n y",
    " 'S 'LL 1234567 x'Re",
    "ſ 'ſ",
    "İ'M K'K",
    "12345 ٣٣٣٣",
]


def write_ranks(path: Path, ranks: dict[bytes, int]) -> Path:
    path.write_bytes(
        b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    )
    return path


def llama3_ranks() -> dict[bytes, int]:
    """As many as Llama 3 has: some learned, one that no merges make, the others bytes that no text
    spells.
    """
    ranks = make_ranks()
    ranks |= {b" zqxjkvw": len(ranks), b"the water is zq": len(ranks) + 1}
    made = (b"\xff" + place.to_bytes(3, "big") for place in range(LLAMA3_RANKS))
    for token in made:
        if len(ranks) == LLAMA3_RANKS:
            break
        ranks.setdefault(token, len(ranks))
    return ranks


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Meta ships it."""
    folder = tmp_path_factory.mktemp("meta") / "Llama-3"
    folder.mkdir()
    write_ranks(folder / "tokenizer.model", llama3_ranks())
    return folder


def test_llama_3_as_meta_ships_it(meta: Path, hard_texts: list[str]) -> None:
    tokenizer = load_tokenizer(meta)
    assert (tokenizer.kind, tokenizer.name, tokenizer.vocab_size) == (
        "tiktoken",
        "Llama-3",
        128_256,
    )
    original = tiktoken.Encoding(
        "llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=llama3_ranks(), special_tokens={}
    )
    texts = [*hard_texts, *ENDS_OF_TEXTS, "a zqxjkvw zqxjkvwz zqxjkv"]
    assert [
        row.tolist() for row in tokenizer.encode_batch(pa.array(texts))
    ] == original.encode_ordinary_batch(texts)
    assert (tokenizer.encoder, tokenizer.check_encoder(texts)) == ("gigatoken", None)
    assert len(tokenizer.special_tokens) == 256
    ids = {
        "begin_of_text": 0,
        "end_of_text": 1,
        "start_header_id": 6,
        "end_header_id": 7,
        "eot_id": 9,
    }
    ids |= {
        f"reserved_special_token_{number}": place
        for number, place in ((0, 2), (3, 5), (4, 8), (5, 10), (250, 255))
    }
    assert {name: tokenizer.special_tokens[f"<|{name}|>"] - 128_000 for name in ids} == ids
    assert (tokenizer.bos_id, tokenizer.eos_id) == (128_000, 128_001)
    assert tokenizer.encode("a<|eot_id|>", allow_control=True)[-1] == 128_009
    assert 128_009 not in tokenizer.encode("a<|eot_id|>")


def test_later_llamas_call_control_entries_otherwise(meta: Path, tmp_path: Path) -> None:
    shutil.copy(meta / "tokenizer.model", tmp_path)
    (tmp_path / "params.json").write_text('{"use_scaled_rope": true}')
    tokenizer = load_tokenizer(tmp_path / "tokenizer.model")
    ids = {"finetune_right_pad_id": 4, "eom_id": 8, "eot_id": 9, "python_tag": 10}
    ids |= {
        f"reserved_special_token_{number}": place
        for number, place in ((0, 2), (1, 3), (2, 5), (3, 11), (247, 255))
    }
    assert {name: tokenizer.special_tokens[f"<|{name}|>"] - 128_000 for name in ids} == ids
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert (again.special_tokens, again.fingerprint) == (
        tokenizer.special_tokens,
        tokenizer.fingerprint,
    )


def test_ranks_of_nobody_known_want_a_pattern(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "tokenizer.model", make_ranks())
    with pytest.raises(
        TokenizerError,
        match=r"tokenizer.model: .*its \d+ ranks.*128,0",
    ):
        load_tokenizer(path)
    assert load_tokenizer(path, pattern=LLAMA3_PATTERN).encoder == "gigatoken"


@pytest.mark.parametrize("pattern", SCHEMES)
def test_every_known_way_of_cutting_is_fast_and_right(
    tiktoken_file: Path, hard_texts: list[str], pattern: str
) -> None:
    encoding = json.dumps({"pattern": pattern, "special_tokens": {}}).encode()
    tokenizer = Tokenizer(
        "x", {"tokenizer.tiktoken": tiktoken_file.read_bytes(), "encoding.json": encoding}
    )
    assert (tokenizer.encoder, tokenizer.check_encoder([*hard_texts, *ENDS_OF_TEXTS])) == (
        "gigatoken",
        None,
    )


@pytest.fixture
def halves(trained: Path, tmp_path: Path) -> Path:
    """The trained vocabulary as `vocab.json` and `merges.txt`."""
    model = json.loads((trained / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    vocab = {**model["vocab"], "<|endoftext|>": len(model["vocab"]) + 8}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges, encoding="utf-8")
    return tmp_path


def as_transformers(name: str, folder: Path) -> Any:
    return getattr(transformers, name).from_pretrained(folder)


def test_vocab_and_merges_are_gpt2s(halves: Path, hard_texts: list[str]) -> None:
    original = as_transformers("GPT2Tokenizer", halves)
    for path in (halves, halves / "vocab.json", halves / "merges.txt"):
        tokenizer = load_tokenizer(path)
        assert (tokenizer.kind, tokenizer.encoder) == ("byte-level BPE", "gigatoken")
        assert tokenizer.special_tokens == {"<|endoftext|>": original.eos_token_id}
        assert tokenizer.eos_id == original.eos_token_id
    for text in [*hard_texts, *ENDS_OF_TEXTS]:
        assert tokenizer.encode(text).tolist() == original.encode(text, add_special_tokens=False), (
            text
        )
    assert tokenizer.check_encoder(hard_texts) is None
    tokenizer.save(halves / "saved")
    assert load_tokenizer(halves / "saved").fingerprint == tokenizer.fingerprint


def test_other_classes_of_two_files(halves: Path, hard_texts: list[str]) -> None:
    vocab = json.loads((halves / "vocab.json").read_text())
    added = {str(len(vocab) + 20): {"content": "<|im_end|>", "special": True}}
    config = {
        "tokenizer_class": "Qwen2TokenizerFast",
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": added,
    }
    (halves / "tokenizer_config.json").write_text(json.dumps(config))
    qwen = load_tokenizer(halves)
    assert (qwen.normalization, qwen.eos_id, qwen.encoder) == ("NFC", len(vocab) + 20, "gigatoken")
    ranks = json.loads(qwen.source_bytes["tokenizer.json"])
    assert ranks["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] == QWEN2_PATTERN
    assert qwen.check_encoder([*hard_texts, *ENDS_OF_TEXTS]) is None
    (halves / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "RobertaTokenizer"})
    )
    (halves / "added_tokens.json").write_text(
        json.dumps({"<mask>": len(vocab) + 3, "<s>": len(vocab) + 4})
    )
    (halves / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    roberta = load_tokenizer(halves)
    assert (roberta.bos_id, roberta.special_tokens["<mask>"]) == (len(vocab) + 4, len(vocab) + 3)


def test_two_files_that_are_not_read(halves: Path) -> None:
    (halves / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "WhisperTokenizer"})
    )
    with pytest.raises(TokenizerError, match=r"Whisper.*GPT2Tokenizer.*tokenizer.json"):
        load_tokenizer(halves)
    (halves / "tokenizer_config.json").unlink()
    (halves / "vocab.json").write_text('{"a</w>": 0}')
    with pytest.raises(TokenizerError, match="its tokens end in </w>"):
        load_tokenizer(halves)
    (halves / "merges.txt").unlink()
    with pytest.raises(TokenizerError, match=r"vocab.json: vocab.json.*merges.txt"):
        load_tokenizer(halves)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "model.gguf",
            b"GGUF\x03\x00\x00\x00\xff\xfe",
            "this is a GGUF file, which holds a model for",
        ),
        ("tokenizer.model", b"GGUF\x03\x00\x00\x00", "this is a GGUF file"),
        (
            "rwkv_vocab_v20230424.txt",
            b"1 '\\x00' 1\n2 '\\x01' 1\n",
            "this is a vocabulary of RWKV, which has",
        ),
        (
            "rwkv.txt",
            b"257 b'\\xff\\xfe' 2\n",
            "this is a vocabulary of RWKV.*give the tokenizer.json of the model",
        ),
        (
            "tokenizer.bin",
            b"\x80\x05\x95\xff\xfe",
            r"not a vocabulary: .* begins with b'\\x80\\x05\\x95",
        ),
        (
            "consolidated.00.pth",
            b"PK\x03\x04\xff\xfe\xfd",
            "not a vocabulary: it is binary.*expected: tokenizer.json",
        ),
        ("tokenizer.json", b"\xff\xfe{\x00", "not a vocabulary: it is binary"),
    ],
)
def test_files_of_others_get_one_clear_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=f"{name}: {message}") as caught:
        load_tokenizer(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert "codec" not in str(caught.value)
    with pytest.raises(TokenizerError, match=f"other/{name}: no such file or folder"):
        load_tokenizer(f"other/{name}")


def test_a_folder_of_others_says_so(tmp_path: Path) -> None:
    (tmp_path / "model-Q4.gguf").write_bytes(b"GGUF\x03")
    with pytest.raises(TokenizerError, match=r"Q4.gguf.*GGUF file.*tokenizer.json"):
        load_tokenizer(tmp_path)


MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]


@pytest.fixture
def chatting(tmp_path: Path) -> Path:
    tiny_tokenizer(tmp_path / "own", ["a few words"] * 20, 280, CHAT_CONTROLS)
    return tmp_path / "own"


@pytest.mark.parametrize("place", ["file", "config", "default of several"])
def test_the_template_stays_with_the_tokenizer(chatting: Path, tmp_path: Path, place: str) -> None:
    if place == "file":
        (chatting / "chat_template.jinja").write_bytes(TEMPLATE.replace("\n", "\r\n").encode())
    else:
        several = [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}]
        config = json.loads((chatting / "tokenizer_config.json").read_text())
        config["chat_template"] = TEMPLATE if place == "config" else several
        (chatting / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(chatting)
    assert tokenizer.chat_template == TEMPLATE
    by_folder = ps.chat.encode(MESSAGES, tokenizer=chatting)
    assert "<|im_start|>assistant\nYes<|im_end|>" in tokenizer.decode(by_folder.tokens)
    for kept in (
        tokenizer,
        pickle.loads(pickle.dumps(tokenizer)),
        load_tokenizer(chatting / "tokenizer.json"),
    ):
        found = ps.chat.encode(MESSAGES, tokenizer=kept)
        assert found.tokens.tolist() == by_folder.tokens.tolist()
        assert found.loss_weights.tolist() == by_folder.loss_weights.tolist()
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").chat_template == TEMPLATE


def test_prepare_takes_the_template_of_a_tokenizer_object(chatting: Path, tmp_path: Path) -> None:
    (chatting / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    tokenizer = load_tokenizer(chatting)
    prepare_here(tmp_path / "chats.jsonl", tokenizer, tmp_path / "data", template="auto")
    kept = load_tokenizer(tmp_path / "data" / "tokenizer")
    assert kept.chat_template == TEMPLATE
    (document,) = ps.open_dataset(tmp_path / "data")
    assert document.tokens.tolist() == ps.chat.encode(MESSAGES, tokenizer=tokenizer).tokens.tolist()


def test_other_formats_keep_it_too(sentencepiece_file: Path, tmp_path: Path) -> None:
    shutil.copy(sentencepiece_file, tmp_path / "tokenizer.model")
    assert load_tokenizer(tmp_path).chat_template is None
    with pytest.raises(ConfigError, match=r"chat.*template.*template"):
        ps.chat.encode(MESSAGES, tokenizer=load_tokenizer(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert load_tokenizer(tmp_path / "tokenizer.model").chat_template == TEMPLATE


@pytest.mark.real_data
def test_real_gpt2_in_two_files(real_data: Path, tmp_path: Path) -> None:
    vocabularies = real_data / "tokenizers"
    model = json.loads(
        gzip.decompress((vocabularies / "hf" / "gpt2" / "tokenizer.json.gz").read_bytes())
    )["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8"
    )
    tokenizer, ranks = (
        load_tokenizer(tmp_path),
        load_tokenizer(vocabularies / "tiktoken" / "r50k_base.tiktoken"),
    )
    text = (vocabularies / "vectors" / "microsoft" / "lib.rs.txt").read_bytes().decode()
    assert tokenizer.encode(text).tolist() == ranks.encode(text).tolist()
    assert tokenizer.special_tokens == ranks.special_tokens
