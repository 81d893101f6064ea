"""Runs that the verbs of models are tried on, made once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_runs import SETTINGS, TEMPLATE, sentences, train_on

from penstock.prepare import prepare
from penstock.tokenizers import train_tokenizer


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with `text/train`, `text/validation` and `chats`, and the runs `plain` and `chat`, which has LoRA."""
    folder = tmp_path_factory.mktemp("runs")
    common = {"tokenizer": folder / "tokenizer", "processes": 1, "progress": False}
    train_tokenizer(
        sentences(300, 0), vocab_size=340, output=folder / "tokenizer", special_tokens=["<|im_start|>", "<|im_end|>"],
        progress=False,
    )  # fmt: skip
    prepare(iter(sentences(200, 1)), output=folder / "text", validation=0.2, **common)
    chats = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}
        for asked, answered in zip(sentences(60, 2), sentences(60, 3), strict=True)
    ]
    prepare(iter(chats), output=folder / "chats", template=TEMPLATE, max_tokens=64, too_long="drop", **common)
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    held_out = {"held out": {"data": str(folder / "text/validation"), "every": 100}}
    train_on(folder / "text/train", folder / "plain", training={**SETTINGS, "evaluators": held_out})
    train_on(folder / "chats", folder / "chat", model=f"from:{folder / 'plain'}", training={**SETTINGS, "lora": {}})
    yield folder
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
