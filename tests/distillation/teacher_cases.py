"""Small tokenizers and corpora for tests of teacher rows, and the obvious way to list a row's
chunks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from makers.texts import WATER, make_chat, make_texts
from makers.tokenizers import tiny_tokenizer
from penstock import ModelInput
from penstock.tokenizers import Tokenizer

WORDS = [*WATER, "12", "345"]
LONG = [
    "penstock",
    "hydraulic",
    "generator",
    "pressure",
    "reservoir",
    "governor",
    "waterwheel",
    "themselves",
]
CAPITALS = (
    "{{ '<|begin|>' }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + '\n\n' }}"
    "{% else %}{{ 'ASSISTANT:' + message['content'] + '<|done|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def water_texts(count: int, seed: int = 1, longest: int = 60) -> list[str]:
    return make_texts(count, seed, words=WORDS + LONG, shortest=1, longest=longest, end="")


def student_tokenizer(folder: Path, controls: Sequence[str] = ()) -> Tokenizer:
    return tiny_tokenizer(
        folder, make_texts(100, words=WORDS, shortest=20, longest=20), 320, controls
    )


def teacher_tokenizer(folder: Path, controls: Sequence[str] = ()) -> Tokenizer:
    """One that learned other words, and so cuts texts at other places."""
    words = [*LONG[::-1], "er the", "water"]
    return tiny_tokenizer(
        folder, make_texts(100, words=words, shortest=20, longest=20), 420, controls
    )


def make_chats(count: int) -> list[dict[str, Any]]:
    """Conversations of 1 to 3 turns."""
    texts = iter(make_texts(6 * count, 7, words=WORDS, shortest=1, longest=9, end=""))
    return [
        make_chat(*(f"{next(texts)} {number}".strip() for _ in range(2 * (1 + number % 3))))
        for number in range(count)
    ]


def ends(tokenizer: Tokenizer, ids: Any) -> list[int]:
    """Byte position after each token."""
    return np.cumsum(tokenizer.byte_table.lengths[np.asarray(ids, np.int64)]).tolist()


def slow_chunks(
    row: ModelInput, teacher: ModelInput, student_tokenizer: Tokenizer, teacher_tokenizer: Tokenizer
) -> list[tuple[int, int, int, int, float, int]]:
    """(student begin, end, teacher begin, end, weight, document) of each trained chunk of text,
    token by token.
    """
    found = []
    for document in range(row.num_documents):
        mine, theirs = (np.flatnonzero(side.document_ids == document) for side in (row, teacher))
        my_ends, their_ends = (
            ends(student_tokenizer, row.tokens[mine]),
            ends(teacher_tokenizer, teacher.tokens[theirs]),
        )
        begin, other = 0, next((i for i, end in enumerate(their_ends) if end), 0)
        for place, end in enumerate(my_ends):
            if (
                end not in their_ends or end == ([0, *my_ends])[place]
            ):  # a control token has no bytes
                continue
            last = their_ends.index(end) + 1
            weights = [
                float(row.loss_weights[0][mine[0] + i - 1]) if i else 0.0
                for i in range(begin, place + 1)
            ]
            if begin > 0 and other > 0 and all(weights):
                weight = sum(weights) / len(weights)
                found.append(
                    (
                        mine[0] + begin,
                        mine[0] + place + 1,
                        theirs[0] + other,
                        theirs[0] + last,
                        weight,
                        document,
                    )
                )
            begin, other = place + 1, last
    return found
