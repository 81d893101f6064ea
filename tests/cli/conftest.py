"""Runs that the verbs of models are tried on, made once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_runs import SETTINGS, train_on

from makers.datasets import prepare_here
from makers.texts import make_chat, make_texts
from makers.tokenizers import CHAT_CONTROLS, CHATML, tiny_tokenizer


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with `text/train`, `text/validation` and `chats`, and the runs `plain` and `chat`,
    which has LoRA.
    """
    folder = tmp_path_factory.mktemp("runs")
    tokenizer = folder / "tokenizer"
    tiny_tokenizer(tokenizer, make_texts(300), 340, CHAT_CONTROLS)
    prepare_here(iter(make_texts(200, 1)), tokenizer, folder / "text", validation=0.2)
    chats = map(make_chat, make_texts(60, 2), make_texts(60, 3))
    prepare_here(
        chats, tokenizer, folder / "chats", template=CHATML, max_tokens=64, too_long="drop"
    )
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    held_out = {"held out": {"data": str(folder / "text/validation"), "every": 100}}
    train_on(folder / "text/train", folder / "plain", training={**SETTINGS, "evaluators": held_out})
    train_on(
        folder / "chats",
        folder / "chat",
        model=f"from:{folder / 'plain'}",
        training={**SETTINGS, "lora": {}},
    )
    yield folder
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
