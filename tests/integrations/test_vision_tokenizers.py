"""The vision collator with vocabularies of SentencePiece's kind, which put spaces before texts and
take some along.
"""

import json

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from vision_makers import TinyImages, TinyProcessor

from makers.tokenizers import added_token, tokenizer_json
from penstock.core.errors import ConfigError
from penstock.integrations.huggingface.vision_collator import VisionCollator

TEMPLATE = (
    "{% for m in messages %}{{ m.role.upper() + ': ' }}{% for part in m.content %}{% if "
    "part.type == 'image' %}{{ '<image>\n' }}{% else %}{{ part.text }}{% endif %}{% endfor "
    "%}{{ '</s>' }}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def tokenizer(folder, scheme, strips):
    """A BPE over `▁` with byte fallback, as Llama's; `scheme` says where a space is put before a
    text.
    """
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁thewar",
        "▁t",
        "th",
        "he",
        "▁the",
        "▁▁",
    ]
    first = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    prepend = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    entries = [added_token("<unk>", 0)]
    for place, text in enumerate(("<image>", "</s>", "<s>")):
        entries.append(added_token(text, len(pieces) + place, rstrip=strips and text == "</s>"))
    model = {
        "type": "BPE", "vocab": {piece: i for i, piece in enumerate(pieces)}, "unk_token": "<unk>",
        "merges": ["▁ t", "t h", "h e", "▁t he", "▁ ▁"], "fuse_unk": True, "byte_fallback": True,
    }  # fmt: skip
    by_normalizer = scheme == "normalizer"
    normalizer = {"type": "Sequence", "normalizers": prepend} if by_normalizer else None
    parsed = tokenizer_json(
        model, entries, normalizer=normalizer, pre_tokenizer=None if by_normalizer else first
    )
    (folder / "tokenizer.json").write_text(json.dumps(parsed))
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="</s>", pad_token="<s>"
    )


def said(role, *parts):
    return {
        "role": role,
        "content": [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "image": np.ones((1, part))}
            for part in parts
        ],
    }


TALK = [
    said("user", 3, "the water <s> the"),
    said("assistant", "the wat 水 zz"),
    said("user", "a", 2, " the ", 1, "\n", "x"),
    said("assistant", " 12  the wheel"),
]


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("scheme", ["first", "always", "normalizer"])
def test_spaces_of_the_tokenizer_change_nothing(tmp_path, scheme, strips):
    own = tokenizer(tmp_path, scheme, strips)
    processor = TinyProcessor(TinyImages(), own, chat_template=TEMPLATE)
    processor.image_token, processor.image_token_id, processor.video_token = (
        "<image>",
        own.get_vocab()["<image>"],
        None,
    )
    batch = VisionCollator(processor)([TALK, TALK[:2]])
    pieces = [
        "".join(own.convert_ids_to_tokens(row[row != -100].tolist())) for row in batch["labels"]
    ]
    first = "▁the▁wat▁<0xE6><0xB0><0xB4>▁<0x7A><0x7A></s>"
    assert pieces == [first + "▁▁<0x31><0x32>▁▁the▁whee<0x6C></s>", first]


def test_a_tokenizer_whose_bytes_nobody_knows_is_refused(tmp_path):
    own = tokenizer(tmp_path, "first", False)
    parsed = json.loads((tmp_path / "tokenizer.json").read_text()) | {
        "normalizer": {"type": "Lowercase"}
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed))
    lossy = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="</s>", pad_token="<s>"
    )
    VisionCollator(TinyProcessor(TinyImages(), own, chat_template=TEMPLATE))
    with pytest.raises(ConfigError, match=r"compared.*template's.*boundaries"):
        VisionCollator(TinyProcessor(TinyImages(), lossy, chat_template=TEMPLATE))
