"""Both sides of a row: nothing lost, nothing twice, targets and weights the row's own."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makers.rows import make_row
from penstock import ModelInput
from penstock.core.errors import ConfigError
from penstock.plan.inputs import IGNORE, encoder_decoder

START, PAD = 1, 0

DOCUMENTS = st.lists(
    st.integers(1, 7).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n), st.booleans())),
    max_size=5,
)
"""(tokens of the prefix, tokens, goes on past the row) of each document."""


def counting_row(documents: list[tuple[int, int, bool]], padding: int, **fields: Any) -> ModelInput:
    """Tokens count up from 10 over the row; a document that goes on has 999 as its next token."""
    tokens, targets = [], []
    for prefix, length, more in documents:
        own = [10 + len(tokens) + i for i in range(length)]
        following = [*own[1:], 999 if more else IGNORE]
        targets += [
            target if place >= prefix - 1 else IGNORE for place, target in enumerate(following)
        ]
        tokens += own
    targets_ = np.array([targets + [IGNORE] * padding], np.int32)
    given = {
        "tokens": np.array(tokens + [PAD] * padding, np.int32),
        "targets": targets_,
        "loss_weights": np.where(targets_ == IGNORE, 0, np.arange(targets_.size) + 0.5).astype(
            np.float32
        ),
        "prefix_lengths": np.array([prefix for prefix, _, _ in documents], np.int32),
        **dict.fromkeys(("positions", "document_ids", "max_seqlen", "prefix")),
    }
    return make_row([length for _, length, _ in documents], padding, **{**given, **fields})


def view(row: ModelInput, encoder: int, decoder: int) -> dict[str, Any]:
    found = encoder_decoder(
        row, encoder_length=encoder, decoder_length=decoder, start_id=START, pad_id=PAD
    )
    return {name: getattr(found, name) for name in found.__dataclass_fields__}


def twin(row: ModelInput, encoder: int, decoder: int) -> dict[str, Any]:
    """Document by document, in lists."""
    sides: dict[str, list[Any]] = {}

    def add(**values: Any) -> None:
        for name, value in values.items():
            sides.setdefault(name, []).append(value)

    assert row.loss_weights is not None
    assert row.prefix_lengths is not None
    begin, counts = 0, [0, 0]
    for number, prefix in enumerate(row.prefix_lengths.tolist()):
        end = int(row.cu_seqlens[number + 1])
        for place in range(prefix):
            add(
                encoder_tokens=row.tokens[begin + place],
                encoder_document_ids=number,
                encoder_positions=place,
            )
            counts[0] += 1
        given = START
        for place, slot in enumerate(range(begin + prefix - 1, end)):
            target = row.targets[0, slot]
            if slot == end - 1 and target == IGNORE:
                break
            add(
                decoder_tokens=given,
                decoder_targets=target,
                decoder_loss_weights=row.loss_weights[0, slot],
            )
            add(decoder_document_ids=number, decoder_positions=place)
            given, counts[1] = target, counts[1] + 1
        begin = end
    for place in range(encoder - counts[0]):
        add(
            encoder_tokens=PAD,
            encoder_document_ids=len(row.prefix_lengths),
            encoder_positions=place,
        )
    for place in range(decoder - counts[1]):
        add(decoder_tokens=PAD, decoder_targets=IGNORE, decoder_loss_weights=0)
        add(decoder_document_ids=len(row.prefix_lengths), decoder_positions=place)
    return {**sides, "num_encoder_tokens": counts[0], "num_decoder_tokens": counts[1]}


@settings(deadline=None)
@given(DOCUMENTS, st.integers(0, 3))
def test_view_is_the_twin(documents: list[tuple[int, int, bool]], padding: int) -> None:
    if not documents and not padding:
        return
    row = counting_row(documents, padding)
    whole = any(length > prefix for prefix, length, _ in documents) and not any(
        more for _, _, more in documents
    )
    spare = 0 if whole else 1
    found, due = (
        make(row, row.sequence_length + spare, row.sequence_length) for make in (view, twin)
    )
    assert found.keys() == due.keys()
    for name, value in due.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    np.testing.assert_allclose(found["decoder_loss_weights"].sum(), row.loss_weights.sum())
    assert (found["decoder_targets"] != IGNORE).sum() == (row.targets != IGNORE).sum()


def test_a_row_by_hand() -> None:
    found = view(counting_row([(2, 4, False), (3, 3, False), (1, 2, True)], 1), 8, 6)
    assert found["encoder_tokens"].tolist() == [10, 11, 14, 15, 16, 17, PAD, PAD]
    assert found["encoder_document_ids"].tolist() == [0, 0, 1, 1, 1, 2, 3, 3]
    assert found["encoder_positions"].tolist() == [0, 1, 0, 1, 2, 0, 0, 1]
    assert found["decoder_tokens"].tolist() == [START, 12, START, 18, PAD, PAD]
    assert found["decoder_targets"].tolist() == [12, 13, 18, 999, IGNORE, IGNORE]
    assert found["decoder_document_ids"].tolist() == [0, 0, 2, 2, 3, 3]
    assert found["decoder_positions"].tolist() == [0, 1, 0, 1, 0, 1]
    assert found["decoder_loss_weights"].tolist() == [1.5, 2.5, 7.5, 8.5, 0, 0]
    assert (found["num_encoder_tokens"], found["num_decoder_tokens"]) == (6, 4)


def test_without_weights_each_target_counts_one() -> None:
    found = view(counting_row([(2, 4, False)], 1, loss_weights=None), 4, 4)
    assert found["decoder_loss_weights"].tolist() == [1, 1, 0, 0]
    assert found["decoder_loss_weights"].dtype == np.float32


def test_integers_keep_the_dtype_of_the_tokens() -> None:
    row = counting_row([(2, 4, False)], 1)
    found = view(counting_row([(2, 4, False)], 1, tokens=row.tokens.astype(np.int64)), 4, 4)
    kinds = {name: value.dtype for name, value in found.items() if isinstance(value, np.ndarray)}
    assert kinds.pop("decoder_loss_weights") == np.float32
    assert set(kinds.values()) == {np.dtype(np.int64)}


@pytest.mark.parametrize(
    ("encoder", "decoder", "message"),
    [
        (
            1,
            4,
            (
                r"needs 2 encoder slots and one for padding, and 2 decoder slots; .* "
                r"encoder_length=1 and decoder_"
            ),
        ),
        (2, 4, "needs 2 encoder slots and one for padding"),
        (
            3,
            1,
            (
                r"needs 2 encoder slots, and 2 decoder slots; there are encoder_length=3 and "
                r"decoder_length=1"
            ),
        ),
    ],
)
def test_a_side_that_is_too_short_is_refused(encoder: int, decoder: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        view(counting_row([(2, 4, False)], 0), encoder, decoder)


def test_exactly_full_sides_fit() -> None:
    assert view(counting_row([(2, 4, False)], 0), 2, 2)["decoder_tokens"].tolist() == [START, 12]


def test_a_document_without_prefix_is_refused() -> None:
    row = counting_row([(2, 4, False), (1, 3, False)], 0, prefix_lengths=np.array([2, 0], np.int32))
    with pytest.raises(ConfigError, match=r"document 1.*\(3 tokens, 1.*2"):
        view(row, 9, 9)
    with pytest.raises(ConfigError, match=r"document 0 of the row .* has no prefix"):
        view(counting_row([(2, 4, False)], 0, prefix_lengths=None), 9, 9)


def test_targets_inside_a_prefix_are_refused() -> None:
    row = counting_row([(2, 4, False), (3, 4, False)], 0)
    row.targets[0, 4] = 15
    with pytest.raises(ConfigError, match=r"document.*1.*targets.*inside.*4\)"):
        view(row, 9, 9)


def test_more_distances_are_refused() -> None:
    row = counting_row([(2, 4, False)], 0)
    with pytest.raises(ConfigError, match="the row has 2 distances"):
        view(counting_row([(2, 4, False)], 0, targets=np.repeat(row.targets, 2, 0)), 9, 9)
