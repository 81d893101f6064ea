"""What a tokenizer puts before a text: as transformers encodes with the same folder, whatever its
settings name.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from makers.tokenizers import byte_ranks, byte_tokenizer, tiny_tokenizer
from penstock import load_tokenizer
from penstock.tokenizers import Tokenizer
from tokenizers import Tokenizer as Encoder
from tokenizers import models, pre_tokenizers, processors

BOS, EOS = ("<s>", 1), ("</s>", 2)
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
PROCESSORS: dict[str, Any] = {
    "none": None,
    "positions": processors.ByteLevel(trim_offsets=True),
    "empty": processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[]),
    "bos": processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[BOS]),
    "both": processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B", special_tokens=[BOS, EOS]
    ),
    "eos": processors.TemplateProcessing(single="$A </s>", pair="$A $B </s>", special_tokens=[EOS]),
    "roberta": processors.RobertaProcessing(EOS, BOS),
    "sequence": processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[BOS]),
        ]
    ),
}
CLASSES = (
    "PreTrainedTokenizerFast",
    "GPT2Tokenizer",
    "LlamaTokenizer",
    "GPTNeoXTokenizerFast",
    "Qwen2Tokenizer",
)
VOCABULARY = {"<unk>": 0, "<s>": 1, "</s>": 2} | {
    letter: place + 3 for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
}


def make_folder(folder: Path, processor: Any, **config: Any) -> Path:
    folder.mkdir()
    encoder = Encoder(models.BPE(vocab=VOCABULARY, merges=[], unk_token="<unk>"))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.add_special_tokens(["<unk>", "<s>", "</s>"])
    if processor is not None:
        encoder.post_processor = processor
    encoder.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**ROLES, **config}))
    return folder


def begins(folder: Path) -> list[int]:
    """What transformers puts before a text."""
    ids: list[int] = transformers.AutoTokenizer.from_pretrained(folder)("a").input_ids
    return ids[: ids.index(VOCABULARY["a"])]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("kind", PROCESSORS)
def test_the_post_processor_decides(tmp_path: Path, kind: str, name: str) -> None:
    for says in ({}, {"add_bos_token": True}, {"add_bos_token": False}):
        folder = make_folder(
            tmp_path / f"t{len(says)}{says.get('add_bos_token')}",
            PROCESSORS[kind],
            **says,
            tokenizer_class=name,
        )
        assert list(load_tokenizer(folder).begin_ids) == begins(folder)


@pytest.mark.parametrize("name", [None, "GPT2Tokenizer", "RobertaTokenizer", "Qwen2Tokenizer"])
def test_without_a_tokenizer_json_the_configuration_decides(
    tmp_path: Path, name: str | None
) -> None:
    for says in (
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
    ):
        folder = tmp_path / f"{len(says)}{says.get('add_bos_token')}"
        folder.mkdir()
        (folder / "vocab.json").write_text(json.dumps(VOCABULARY))
        (folder / "merges.txt").write_text("#version: 0.2\n")
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
        named = {} if name is None else {"tokenizer_class": name}
        (folder / "tokenizer_config.json").write_text(json.dumps({**ROLES, **named, **says}))
        assert list(load_tokenizer(folder).begin_ids) == begins(folder)


@pytest.mark.real_data
def test_real_folders(tmp_path: Path, real_data: Path) -> None:
    import gzip

    for source in sorted((real_data / "tokenizers" / "hf").iterdir()):
        folder = tmp_path / source.name
        shutil.copytree(source, folder)
        for packed in folder.glob("*.gz"):
            packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
        first = theirs("a").input_ids[0]
        assert bool(ours.begin_ids) == (first == ours.bos_id), source.name


def test_tokenizers_without_a_file_that_says_it(tmp_path: Path) -> None:
    """Ours begin with BOS, as they always did; nobody puts BOS before the texts of a bare file that
    names none.
    """
    assert tiny_tokenizer(tmp_path, ["some words"], 270).begin_ids == (0,)
    assert byte_tokenizer("<bos>").begin_ids == ()
    ranks = json.dumps(
        {"pattern": r"\S+|\s+", "special_tokens": {"<|begin_of_text|>": 256}}
    ).encode()
    import base64

    lines = b"".join(
        base64.b64encode(token) + b" %d\n" % rank for token, rank in byte_ranks().items()
    )
    assert Tokenizer("t", {"tokenizer.tiktoken": lines, "encoding.json": ranks}).begin_ids == (256,)


@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_copy_that_begins_otherwise(tmp_path: Path, kind: str) -> None:
    folder = make_folder(tmp_path / "t", PROCESSORS[kind])
    known = load_tokenizer(folder)
    ends = transformers.AutoTokenizer.from_pretrained(folder)("a").input_ids[-1:] == [2]
    for begin in ((), (1,)):
        made = known.beginning_with(begin)
        assert (made.begin_ids, made.fingerprint) == (begin, known.fingerprint)
        made.save(tmp_path / f"to{len(begin)}")
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / f"to{len(begin)}")(
            "a"
        ).input_ids
        assert theirs == [*begin, VOCABULARY["a"], *([2] if ends else [])]
        assert made.beginning_with(begin) is made
    assert known.beginning_with(known.begin_ids) is known, "nothing is written anew without need"


def test_our_own_copy_says_what_it_does(tmp_path: Path) -> None:
    own = tiny_tokenizer(tmp_path / "own", ["some words"], 270)
    for begin in ((), (0,)):
        made = own.beginning_with(begin)
        made.save(tmp_path / f"to{len(begin)}")
        assert made.begin_ids == load_tokenizer(tmp_path / f"to{len(begin)}").begin_ids == begin
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / f"to{len(begin)}")
        assert theirs("some").input_ids == [*begin, *own.encode("some")]
