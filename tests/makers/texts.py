"""Texts of random words, chats, and files of JSON lines."""

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

WORDS = (
    "the",
    "a",
    "one",
    "cat",
    "dog",
    "tree",
    "river",
    "sees",
    "likes",
    "finds",
    "under",
    "over",
    "small",
    "big",
    "old",
)
WATER = [
    "water",
    "wheel",
    "pipe",
    "turbine",
    "the",
    "and",
    "flows",
    "größe",
    "水",
    "🙂",
    "\n",
    "a",
    "steel",
]
"""Words in several scripts, and one that is a line break."""


def make_texts(
    count: int,
    seed: int = 0,
    *,
    words: Sequence[str] = WORDS,
    shortest: int = 3,
    longest: int = 30,
    end: str = ".",
) -> list[str]:
    """Texts of `shortest` to `longest` random words, the same on every machine."""
    chance = random.Random(seed)
    return [
        " ".join(chance.choices(words, k=chance.randint(shortest, longest))) + end
        for _ in range(count)
    ]


def make_chat(*contents: str) -> dict[str, Any]:
    """A record whose messages are by user and assistant in turn."""
    roles = ("user", "assistant")
    return {
        "messages": [
            {"role": roles[place % 2], "content": content} for place, content in enumerate(contents)
        ]
    }


def json_lines(records: Iterable[Any]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def write_json_lines(path: Path, records: Iterable[Any]) -> Path:
    """Write a file of JSON lines; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json_lines(records), encoding="utf-8")
    return path


def write_texts(path: Path, texts: Iterable[str]) -> Path:
    """Write a file of JSON lines whose records are texts."""
    return write_json_lines(path, ({"text": text} for text in texts))
