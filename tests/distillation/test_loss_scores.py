"""Scores of documents, by which a teacher is chosen."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from loss_makers import teacher_outputs

from penstock.learn.distillation.teacher_rows import TeacherRow
from penstock.learn.distillation.teachers import document_scores
from penstock.plan.inputs import pack_documents

LENGTHS, BYTES = (5, 1, 4), (20, 3, 0)


def row_of(lengths, text_bytes, multiple=8) -> TeacherRow:
    row, starts = pack_documents(
        [np.arange(n, dtype=np.int32) for n in lengths], np.zeros(len(lengths)), multiple=multiple
    )
    none = np.zeros((0, 2), np.int32)
    return TeacherRow(
        input=row,
        student_bounds=none,
        teacher_bounds=none,
        weights=np.zeros(0, np.float32),
        documents=np.zeros(0, np.int32),
        starts=starts,
        text_bytes=np.array(text_bytes, np.int64),
        pieces=np.zeros((len(lengths), 4), np.int64),
        same_tokenizer=False,
    )


@pytest.mark.parametrize("top_k", [None, 3])
def test_scores_are_means_of_each_document(top_k):
    torch.manual_seed(0)
    row = row_of(LENGTHS, BYTES)
    slots = len(row.input.tokens)
    assert slots == 16
    logits = torch.randn(slots, 7, dtype=torch.float64)
    outputs = teacher_outputs(
        logits, torch.randint(7, (slots,)), torch.ones(7, dtype=torch.bool), top_k=top_k
    )
    likely, sure, best = (
        document_scores(outputs, row, score) for score in ("likelihood", "entropy", "confidence")
    )
    probabilities = torch.softmax(logits, -1)
    begin = 0
    for number, (tokens, text_bytes) in enumerate(zip(LENGTHS, BYTES, strict=True)):
        part = slice(begin, begin + tokens)
        begin += tokens
        if tokens == 1:
            assert likely[number] == sure[number] == best[number] == -torch.inf
            continue
        expected = outputs.token_log_probs[part].sum() / max(text_bytes, 1)
        torch.testing.assert_close(likely[number], expected)
        torch.testing.assert_close(
            sure[number], (probabilities[part] * probabilities[part].log()).sum(-1).mean()
        )
        torch.testing.assert_close(best[number], probabilities[part].amax(-1).mean())
    assert likely.shape == sure.shape == best.shape == (3,)


def test_a_document_alone_scores_what_it_does_among_others():
    torch.manual_seed(1)
    logits, tokens = torch.randn(16, 7), torch.randint(7, (16,))
    everything = torch.ones(7, dtype=torch.bool)
    among = teacher_outputs(logits, tokens, everything)
    alone = teacher_outputs(logits[6:10], tokens[6:10], everything)
    for score in ("entropy", "confidence"):
        found = document_scores(among, row_of(LENGTHS, BYTES), score)[2]
        torch.testing.assert_close(
            found, document_scores(alone, row_of((4,), (0,), multiple=1), score)[0]
        )


@pytest.mark.parametrize("score", ["likelihood", "entropy", "confidence"])
def test_documents_that_see_each_other_have_scores_of_their_own(score):
    """Their positions run on through the row (attention="row")."""
    torch.manual_seed(2)
    row = row_of(LENGTHS, BYTES)
    slots = len(row.input.tokens)
    outputs = teacher_outputs(
        torch.randn(slots, 7), torch.randint(7, (slots,)), torch.ones(7, dtype=torch.bool)
    )
    joined = replace(row, input=replace(row.input, positions=np.arange(slots, dtype=np.int32)))
    found, due = (document_scores(outputs, one, score) for one in (joined, row))
    assert found.isfinite().all()
    torch.testing.assert_close(found[[0, 2]], due[[0, 2]])
