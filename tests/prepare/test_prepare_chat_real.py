"""Real chats through real templates: what is stored is what `chat.encode` says, and every record is
accounted for.
"""

import gzip
import json

import numpy as np
import pytest

from penstock import chat, load_tokenizer, prepare

SETS = (
    "oasst/en_100_tree.jsonl",
    "fastchat/dummy_conversation.json",
    "llamafactory/glaive_toolcall_en_demo.json",
)
TEMPLATES = (
    "axolotl/chatml",
    "llama.cpp/Qwen-Qwen3-0.6B",
    "trl/qwen2_5_training",
    "llama.cpp/google-gemma-2-2b-it",
)


@pytest.fixture(scope="module")
def qwen(real_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    packed = (real_data / "tokenizers/hf_derived/qwen2.5/tokenizer.json.gz").read_bytes()
    (folder / "tokenizer.json").write_bytes(gzip.decompress(packed))
    config = (real_data / "tokenizers/configs/qwen2.5.tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(config)
    return load_tokenizer(folder)


@pytest.mark.real_data
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chats", SETS)
def test_real_chats(tmp_path, real_data, qwen, chats, name):
    source, path = real_data / "chat" / chats, real_data / "chat_templates" / f"{name}.jinja"
    options = {
        "processes": 1,
        "progress": False,
        "on_error": "skip",
        "max_rejects": "100%",
        "on_missing_terminator": "allow",
    }
    dataset = prepare(source, tokenizer=qwen, template=path, output=tmp_path / "out", **options)
    report = dataset.report
    roles = report.chats["roles"]
    assert sum(role["tokens"] for role in roles.values()) == dataset.manifest.tokens
    assert sum(role["trained"] for role in roles.values()) == dataset.manifest.trained_tokens
    text = source.read_text()
    records = (
        json.loads(text)
        if chats.endswith(".json")
        else [json.loads(line) for line in text.splitlines()]
    )
    rejected = []
    if report.rejects:
        rejected = [
            json.loads(line)["line"]
            for line in (tmp_path / "out/rejected.jsonl").read_text().splitlines()
        ]
    assert len(records) == len(dataset) + len(rejected)
    template = chat.load_template(path, tokenizer=qwen)
    if not rejected:
        for document, record in zip(dataset[:25], records[:25], strict=True):
            read = chat.read_conversation(record)
            while read.messages[-1]["role"] != "assistant":
                read = read.head(len(read.messages) - 1)
            due = chat.encode(
                read, tokenizer=qwen, template=template, on_missing_terminator="allow"
            )
            np.testing.assert_array_equal(document.tokens, due.tokens)
            np.testing.assert_array_equal(document.loss_weights, due.loss_weights)
