"""Every format is found, told by what it holds, and saved so that it loads again as the same
tokenizer.
"""

import gzip
import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import change_json

from makers.tokenizers import added_token
from penstock import load_tokenizer
from penstock.core.errors import MissingExtraError, OutputError, TokenizerError
from penstock.tokenizers import Tokenizer

WORDPIECE = {
    "type": "WordPiece",
    "unk_token": "[UNK]",
    "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 100,
}
UNIGRAM_PIECES = [
    ["<unk>", 0.0],
    ["</s>", 0.0],
    ["▁", -2.0],
    *([letter, -3.0] for letter in "abcs</>"),
]


def write_json(folder: Path, **sections: Any) -> Path:
    """A tokenizer.json with only these sections."""
    empty = dict.fromkeys(
        ["truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"]
    )
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], **empty, **sections})
    )
    return folder / "tokenizer.json"


@pytest.mark.parametrize(
    ("fixture", "kind", "bos", "eos"),
    [
        ("trained", "byte-level BPE", "<|bos|>", "<|eos|>"),
        ("sentencepiece_file", "SentencePiece BPE", "<s>", "</s>"),
        ("tiktoken_file", "tiktoken", None, "<|endoftext|>"),
        ("tekken_file", "tekken", "<s>", "</s>"),
    ],
)
def test_formats(
    request: pytest.FixtureRequest, fixture: str, kind: str, bos: str | None, eos: str
) -> None:
    tokenizer = load_tokenizer(request.getfixturevalue(fixture))
    assert tokenizer.kind == kind
    assert tokenizer.bos_id == (None if bos is None else tokenizer.special_tokens[bos])
    assert tokenizer.eos_id == tokenizer.special_tokens[eos]


def test_saved_is_the_same_tokenizer(exact: Tokenizer, tmp_path: Path) -> None:
    exact.save(tmp_path / "copy")
    copy = load_tokenizer(tmp_path / "copy")
    assert (copy.kind, copy.fingerprint, copy.special_tokens) == (
        exact.kind,
        exact.fingerprint,
        exact.special_tokens,
    )
    assert (copy.bos_id, copy.eos_id, copy.pad_id) == (exact.bos_id, exact.eos_id, exact.pad_id)
    assert copy.encode("the water").tolist() == exact.encode("the water").tolist()


def test_a_fingerprint_is_of_the_content(trained: Path, tmp_path: Path) -> None:
    plain = load_tokenizer(trained)
    (tmp_path / "other.json.gz").write_bytes(
        gzip.compress((trained / "tokenizer.json").read_bytes())
    )
    packed = load_tokenizer(tmp_path / "other.json.gz")
    changed = load_tokenizer(change_json(trained, tmp_path / "changed", normalizer={"type": "NFC"}))
    assert packed.fingerprint == plain.fingerprint != changed.fingerprint
    assert (plain.name, packed.name, changed.name) == (trained.name, "other.json.gz", "changed")


def test_the_config_names_the_roles(trained: Path, tmp_path: Path) -> None:
    config = {
        "bos_token": None,
        "eos_token": {"content": "<|user|>", "special": True},
        "pad_token": "<|eos|>",
    }
    path = change_json(trained, tmp_path)
    path.with_name("tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, 3, 1)
    path.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": "<|gone|>"}))
    with pytest.raises(TokenizerError, match=r"eos_token.*'<\|gone\|>'.*tokenizer.json"):
        load_tokenizer(tmp_path)


def test_a_role_makes_a_token_control(trained: Path, tmp_path: Path) -> None:
    model = json.loads((trained / "tokenizer.json").read_text())["model"]
    size = len(model["vocab"])
    model |= {
        "vocab": model["vocab"] | {"<|": size, "<|>": size + 1},
        "merges": [["<", "|"], ["<|", ">"]],
    }
    path = change_json(trained, tmp_path, model=model)
    assert load_tokenizer(path).encode("<|>").tolist() == [size + 1]
    path.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": "<|>"}))
    tokenizer = load_tokenizer(path)
    assert (tokenizer.eos_id, tokenizer.special_tokens["<|>"]) == (size + 1, size + 1)
    assert size + 1 not in tokenizer.encode("<|>").tolist()
    assert tokenizer.byte_table.is_control[size + 1]


def test_without_a_config_two_candidates_are_none(trained: Path, tmp_path: Path) -> None:
    added = [
        added_token(text, place) for place, text in enumerate(["<|bos|>", "<|eos|>", "<|pad|>"])
    ]
    assert load_tokenizer(change_json(trained, tmp_path, added_tokens=added)).eos_id == 1
    first = load_tokenizer(trained).vocab_size
    added.append(added_token("</s>", first))
    assert load_tokenizer(change_json(trained, tmp_path, added_tokens=added)).eos_id is None


def test_published_tiktoken_names_need_no_pattern(tiktoken_file: Path, tmp_path: Path) -> None:
    shutil.copy(tiktoken_file, tmp_path / "cl100k_base.tiktoken")
    tokenizer = load_tokenizer(tmp_path / "cl100k_base.tiktoken")
    assert tokenizer.special_tokens["<|endofprompt|>"] == 100276
    assert tokenizer.vocab_size == 100277
    shutil.copy(tiktoken_file, tmp_path / "mine.tiktoken")
    with pytest.raises(TokenizerError, match=r"'mine'.*gpt2, r50k_base"):
        load_tokenizer(tmp_path / "mine.tiktoken")
    own = load_tokenizer(tmp_path / "mine.tiktoken", pattern=r"\S+|\s+")
    assert "does not know the splitting pattern" in str(own.fallback_reason)
    assert own.decode(own.encode("the water")) == "the water"


def test_wordpiece_and_unigram_keep_text_apart_from_control(tmp_path: Path) -> None:
    added = [added_token("[MASK]", 1)]
    model = WORDPIECE | {"vocab": {"[UNK]": 0, "[MASK]": 1, "a": 2, "##b": 3}}
    tokenizer = load_tokenizer(
        write_json(
            tmp_path, model=model, added_tokens=added, pre_tokenizer={"type": "WhitespaceSplit"}
        )
    )
    assert (tokenizer.kind, tokenizer.encoder) == ("WordPiece", "tokenizers")
    assert tokenizer.encode("ab [MASK]").tolist() == [2, 3, 0]
    assert tokenizer.encode("ab [MASK]", allow_control=True).tolist() == [2, 3, 1]
    added = [added_token("</s>", 1)]
    pieces = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    model = {"type": "Unigram", "unk_id": 0, "vocab": UNIGRAM_PIECES}
    tokenizer = load_tokenizer(
        write_json(tmp_path, model=model, added_tokens=added, pre_tokenizer=pieces)
    )
    assert tokenizer.kind == "Unigram"
    assert tokenizer.encode("a</s>").tolist() == [2, 3, 7, 8, 6, 9]
    assert 1 in tokenizer.encode("a</s>", allow_control=True).tolist()


def test_an_untyped_model_of_the_first_releases(trained: Path, tmp_path: Path) -> None:
    model = json.loads((trained / "tokenizer.json").read_text())["model"]
    del model["type"]
    model["merges"] = [" ".join(merge) for merge in model["merges"]]
    old = load_tokenizer(change_json(trained, tmp_path, model=model))
    assert old.encode("the water").tolist() == load_tokenizer(trained).encode("the water").tolist()
    assert (old.kind, old.encoder) == ("byte-level BPE", "gigatoken")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{", "not a vocabulary that can be read: JSONDecodeError"),
        ("tokenizer.json", b'{"a": 1}', r"expected: a tokenizer.json .* found \['a'\]"),
        ("tokenizer.json", b"[1]", "not a vocabulary that can be read"),
        ("x.model", b"\xff\xff\xff", "not a SentencePiece model: it ends inside a number"),
        ("x.model", b"", "not a SentencePiece model: it holds no pieces"),
        ("x.model", b"\x0a\x7fab", "not a SentencePiece model: byte 0 starts no field"),
        (
            "gpt2.tiktoken",
            b"IQ== 0\nnonsense\n",
            "line 2 of the ranks is b'nonsense', expected: base64",
        ),
        ("gpt2.tiktoken", b"", "the file of ranks is empty"),
        ("x.json.gz", b"{}", "not a vocabulary that can be read: BadGzipFile"),
    ],
)
def test_broken_files_say_so(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=f"{name}: {message}"):
        load_tokenizer(tmp_path / name)


def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TokenizerError, match=r"vocabulary.*tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match=r"nothing\.json: no such file or folder"):
        load_tokenizer(tmp_path / "nothing.json")
    for name in ("a.model", "b.model"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"2.*files.*\(a.model.*b.model\)"):
        load_tokenizer(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match="huggingface_hub is not installed"):
        load_tokenizer("some/name")


def test_a_hub_name_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def refuse(*arguments: Any, **options: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with pytest.raises(TokenizerError, match=r"OSError.*offline"):
        load_tokenizer("some/name")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "LocalEntryNotFoundError",
            r"^toke: .* here \(did you mean tokn\?\), and the hub cannot be reached",
        ),
        ("RepositoryNotFoundError", "nothing by that name, or it is private: log in"),
        ("GatedRepoError", "accepted its terms"),
        ("RevisionNotFoundError", "not this revision"),
    ],
)
def test_what_errors_of_the_hub_mean(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str, said: str
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    kind = getattr(importlib.import_module("huggingface_hub.errors"), error)

    def refuse(*arguments: Any, **options: Any) -> str:
        raise kind.__new__(kind)

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokn").mkdir()
    with pytest.raises(TokenizerError, match=said):
        load_tokenizer("toke")


def test_a_hub_name(monkeypatch: pytest.MonkeyPatch, trained: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked: list[Any] = []

    def give(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        return str(trained)

    monkeypatch.setattr(hub, "snapshot_download", give)
    tokenizer = load_tokenizer("some/name", revision="v2")
    assert (tokenizer.name, asked) == ("some/name", [("some/name", "v2")])


def test_a_folder_that_cannot_be_written(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot save the tokenizer there"):
        load_tokenizer(trained).save(tmp_path / "file")
