"""A loader's packed rows for T5: both sides together give every document back, and the loss its
denominator.
"""

from collections import Counter

import numpy as np
import pytest

import penstock as ps
from makers.datasets import tokenizer_info
from penstock.plan.inputs import IGNORE, AttentionRule, encoder_decoder

SENTINELS = range(900, 1000)
BOS, EOS, START, PAD = 1, 2, 0, 0
SLOTS = 128
NEEDS = ps.InputRequirements(loss_weights=True, cu_seqlens=True, prefix=True)


@pytest.fixture(scope="module")
def documents():
    numbers = np.random.default_rng(0)
    return [[BOS, *numbers.integers(3, 900, n).tolist(), EOS] for n in numbers.integers(2, 90, 150)]


def make_loader(folder, documents, **options):
    info = tokenizer_info(bos_id=BOS, eos_id=EOS)
    data = ps.write_dataset(folder / "data", documents, tokenizer=info)
    objective = ps.Denoise.t5(sentinels=tuple(SENTINELS))
    source = ps.Source(data, objective=objective, max_epochs=1, **options)
    return ps.Loader(
        source, sequence_length=SLOTS, rows_per_step=4, seed=5, threads=0, requirements=NEEDS
    )


def filled_in(read: list[int], predicted: list[int]) -> list[int]:
    """The document that a model read with its spans in place of the sentinels."""
    spans: dict[int, list[int]] = {}
    for token in predicted:
        if token in SENTINELS:
            spans[token] = []
        elif token != EOS:
            spans[max(spans)].append(token)
    document = [
        word for token in read for word in (spans[token] if token in SENTINELS else [token])
    ]
    return document + [token for token in predicted if token == EOS]


def test_rows_give_documents_back(tmp_path, documents):
    found: Counter[tuple[int, ...]] = Counter()
    for step in make_loader(tmp_path, documents):
        weight = 0.0
        for row in step:
            sides = encoder_decoder(
                row, encoder_length=SLOTS, decoder_length=SLOTS, start_id=START, pad_id=PAD
            )
            weight += float(sides.decoder_loss_weights.sum())
            for number in range(row.num_documents):
                read = sides.encoder_tokens[sides.encoder_document_ids == number].tolist()
                own = sides.decoder_document_ids == number
                predicted = sides.decoder_targets[own].tolist()
                assert IGNORE not in predicted
                assert sides.decoder_tokens[own].tolist() == [START, *predicted[:-1]]
                found[tuple(filled_in(read, predicted))] += 1
        assert weight == pytest.approx(step.loss_denominator, abs=0)
    assert found == Counter(map(tuple, documents))


def test_parts_without_words_are_read_and_predict_nothing(tmp_path):
    """BOS and EOS alone; and a document one token longer than its row takes, whose EOS is split
    off.
    """
    limit = ps.Denoise.t5(sentinels=tuple(SENTINELS)).document_limit(SLOTS)
    documents = [[BOS, EOS], [BOS, *range(3, limit + 2), EOS], [BOS, 5, 6, EOS]]
    bare, steps = [], list(make_loader(tmp_path, documents, too_long="split"))
    for row in (row for step in steps for row in step):
        sides = encoder_decoder(
            row, encoder_length=SLOTS + 1, decoder_length=SLOTS, start_id=START, pad_id=PAD
        )
        for number in np.flatnonzero(row.prefix_lengths == 0):
            bare.append(sides.encoder_tokens[sides.encoder_document_ids == number].tolist())
            assert number not in sides.decoder_document_ids
        assert sides.decoder_loss_weights.sum() == (row.targets != IGNORE).sum()
        assert (sides.decoder_tokens == START).sum() == len(
            sides.decoder_tokens
        ) - sides.num_decoder_tokens + (
            len(set(sides.decoder_document_ids[: sides.num_decoder_tokens].tolist()))
        )
    assert sorted(bare) == [[BOS, EOS], [EOS]]


def test_prefixes_of_rows_look_ahead_and_nothing_else_does(tmp_path, documents):
    row = next(iter(next(iter(make_loader(tmp_path, documents)))))
    rule = AttentionRule.of(row)
    np.testing.assert_array_equal(rule.prefix, row.prefix)
    assert rule.bidirectional
    ahead = np.triu(rule.dense_mask(), 1)
    assert (ahead.any(1) <= row.prefix).all()
    assert (row.targets[0][:-1][row.prefix[1:]] == IGNORE).all(), (
        "what is seen ahead is never predicted"
    )
