"""Teacher rows of real tokenizers on real text and chats: nearly every trained token has its
chunk.
"""

import numpy as np
import pytest

from makers.datasets import prepare_here
from penstock import Loader, Source, load_tokenizer
from penstock.learn.distillation.teacher_rows import TeacherRows, TeacherText

pytestmark = pytest.mark.real_data

CHATS = ("oasst/en_100_tree.jsonl", "fastchat/dummy_conversation.json")
PAIRS = [
    ("gpt2", "phi-3-mini"),
    ("gpt2", "olmo2-dolma2"),
    ("phi-3-mini", "gpt2"),
    ("falcon", "pythia-neox20b"),
]


def covered(row):
    """(trained targets that could have a chunk, those that do)."""
    (made,) = row.distillation
    expected = row.loss_weights[0] > 0
    expected[np.flatnonzero(np.diff(row.document_ids))] = (
        False  # a target in the next part of a split document
    )
    listed = np.zeros(row.sequence_length, bool)
    for begin, end in made.student_bounds:
        listed[begin - 1 : end - 1] = True
    return expected.sum(), (listed & expected).sum()


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_texts(real_data, tmp_path, student, teacher):
    mine, theirs = (
        load_tokenizer(real_data / "tokenizers" / "hf" / name) for name in (student, teacher)
    )
    lines = (real_data / "text" / "c4_demo.jsonl").read_text().splitlines()[:150]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    prepare_here(tmp_path / "text.jsonl", mine, tmp_path / "data")
    companion = TeacherRows(mine, [TeacherText(theirs)])
    loader = Loader(
        Source(tmp_path / "data", max_epochs=1),
        sequence_length=2048,
        rows_per_step=2,
        threads=2,
        companion=companion,
    )
    rows = [row for step in loader for row in step]
    expected, found = np.sum([covered(row) for row in rows], axis=0)
    documents = sum(row.num_documents for row in rows)
    assert expected > 30_000
    # The first chunk of a document has a predictor on both sides only where both have BOS.
    assert expected - found <= 1.2 * documents
    assert (found + documents) / expected >= 0.999


@pytest.mark.parametrize("chats", CHATS)
def test_chats(real_data, tmp_path, chats):
    """ChatML on one side, Phi-3's template on the other: every trained token has its chunk, turn by
    turn.
    """
    hf, templates = real_data / "tokenizers" / "hf", real_data / "chat_templates" / "axolotl"
    sides = {"olmo2-dolma2": "chatml.jinja", "phi-3-mini": "phi_3.jinja"}
    for name, template in sides.items():
        prepare_here(
            real_data / "chat" / chats, hf / name, tmp_path / name, template=templates / template
        )
    student, teacher = (load_tokenizer(hf / name) for name in sides)
    companion = TeacherRows(
        student, [TeacherText(teacher, {"olmo2-dolma2": tmp_path / "phi-3-mini"})]
    )
    loader = Loader(
        Source(tmp_path / "olmo2-dolma2", max_epochs=1),
        sequence_length=4096,
        rows_per_step=2,
        companion=companion,
    )
    expected = found = ends = 0
    for row in (row for step in loader for row in step):
        here, there = covered(row)
        expected, found = expected + here, found + there
        (made,) = row.distillation
        ends += int(
            (row.tokens[made.student_bounds[:, 0]] == student.special_tokens["<|im_end|>"]).sum()
        )
    assert expected > 5_000
    assert ends > 100
    assert found / expected >= 0.999
