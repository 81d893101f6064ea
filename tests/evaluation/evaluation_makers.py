"""Small random models as subjects, and made data."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from makers.models import tiny_model
from makers.texts import write_json_lines
from makers.tokenizers import CHAT_CONTROLS, CHATML, added_token, tiny_tokenizer, tokenizer_json
from penstock import load_tokenizer
from penstock.chat import load_template
from penstock.learn.evaluation.subject import Subject
from penstock.learn.generation import Generated, Sampling
from penstock.tokenizers import Tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog. Answer: A B C D",
    "Question: how many? 12 + 3 = 15 ####",
]


def make_tokenizer(folder: Path) -> Tokenizer:
    return tiny_tokenizer(folder, TEXTS * 20, 300, CHAT_CONTROLS)


def spaced_tokenizer(folder: Path) -> Tokenizer:
    """Puts a space before a text that stands alone, as SentencePiece does; letters come with and
    without one.
    """
    pieces = ["<unk>", "<|im_start|>", "<|im_end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"ABCDabcdefghijklmnopqrstuvwxyz?:\n", *(f"▁{letter}" for letter in "ABCD")]
    model = {
        "type": "BPE",
        "vocab": {piece: number for number, piece in enumerate(pieces)},
        "merges": [f"▁ {letter}" for letter in "ABCD"],
        "unk_token": "<unk>",
        "byte_fallback": True,
    }
    spaces = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    added = [added_token(pieces[place], place) for place in range(3)]
    described = tokenizer_json(
        model, added, normalizer={"type": "Sequence", "normalizers": spaces},
        decoder={"type": "Sequence", "decoders": decoders},
    )  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    return load_tokenizer(folder)


def make_subject(
    tokenizer: Tokenizer,
    *,
    seed: int = 1,
    context_length: int = 256,
    extra: int = 0,
    **model_settings: Any,
) -> Subject:
    """A random model with `extra` rows of the embedding that the tokenizer has no ids for."""
    model = tiny_model(
        tokenizer.vocab_size + extra, seed=seed, init_std=0.02, **model_settings
    ).eval()
    with torch.no_grad():
        for weights in model.parameters():
            # Logits of a model at its start are so alike that every choice would be one of
            # rounding.
            weights.mul_(3.0)
    return Subject(
        model,
        tokenizer,
        context_length=context_length,
        stop_ids=(tokenizer.special_tokens["<|im_end|>"],),
        template=load_template(CHATML, tokenizer=tokenizer),
        slots=3,
    )


def write_mmlu(
    folder: Path, questions: dict[str, int], *, solved: int = 5, header: bool = False
) -> Path:
    """A folder in MMLU's layout with this number of questions per subject."""
    for split in ("dev", "test"):
        (folder / split).mkdir(parents=True, exist_ok=True)
        for subject, count in questions.items():
            with (folder / split / f"{subject}_{split}.csv").open(
                "w", newline="", encoding="utf-8"
            ) as file:
                rows = csv.writer(file)
                if header:
                    rows.writerow(
                        ["question", "choice0", "choice1", "choice2", "choice3", "answer"]
                    )
                for number in range(solved if split == "dev" else count):
                    right = (7 * number + 3 * len(subject)) % 4
                    choices = [f"{number + place} {subject}, so" for place in range(4)]
                    rows.writerow(
                        [f"{split} {number}?\nWhich", *choices, right if header else "ABCD"[right]]
                    )
    return folder


def write_gsm8k(folder: Path, count: int) -> Path:
    for split in ("train", "test"):
        rows = [
            {
                "question": f"{split}: {n} and {n}?",
                "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}",
            }
            for n in range(count)
        ]
        write_json_lines(folder / f"{split}.jsonl", rows)
    return folder


class Writer:
    """A subject that writes texts by turns, and keeps what it was asked."""

    notes = ()

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts, self.prompts, self.sampling = list(texts), [], []

    def prompt_ids(self, text: str) -> list[int]:
        return list(text.encode())

    def chat_ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        return list(json.dumps(messages).encode())

    def room(self, max_tokens: int | None) -> int:
        return 400

    def fingerprint(self) -> str:
        return "writer"

    def write(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]
    ) -> list[Generated]:
        self.prompts += [bytes(prompt).decode() for prompt in prompts]
        self.sampling += sampling
        texts = [self.texts[place % len(self.texts)] for place in range(len(prompts))]
        return [Generated(tokens=(), text=text, finish_reason="stop") for text in texts]

    @property
    def subject(self) -> Subject:
        return cast("Subject", self)
