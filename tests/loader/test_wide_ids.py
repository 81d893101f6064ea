"""Ids of 2^31 and more: never a negative number in a row, which as −100 would even be a target that
is none.
"""

import numpy as np
import pytest

from makers.objectives import PlainObjective
from penstock import Causal, InputRequirements, Loader, Source, write_dataset
from penstock.core.errors import ConfigError
from penstock.data.shards import open_npy
from penstock.plan.objectives import Written

WIDE, IGNORED = 2**31, 2**32 - 100
INT64 = InputRequirements(loss_weights=True, dtype="int64")


def load(dataset, **settings):
    return Loader(
        Source(dataset, max_epochs=1), sequence_length=16, rows_per_step=1, threads=0, **settings
    )


def in_place(tmp_path, documents):
    """A file of bare tokens, which says nothing of its vocabulary; each document ends with 1."""
    file = tmp_path / "tokens.npy"
    np.concatenate([[*tokens, 1] for tokens in documents]).astype(np.uint32).tofile(file)
    return open_npy(file, "uint32", 1)


@pytest.mark.parametrize("vocab_size", [2**31 + 1, 2**32])
def test_a_known_vocabulary_is_refused_at_once(tmp_path, vocab_size):
    dataset = write_dataset(tmp_path / "d", [[5, 6, 7]], vocab_size=vocab_size)
    with pytest.raises(ConfigError, match=rf"'d'.* {vocab_size} ids; .*int64"):
        load(dataset)


def test_the_widest_vocabulary_that_fits(tmp_path):
    dataset = write_dataset(tmp_path / "d", [[5, WIDE - 1, 7]], vocab_size=WIDE)
    ((row,),) = load(dataset)
    assert row.tokens[:3].tolist() == [5, WIDE - 1, 7]


@pytest.mark.parametrize("token", [WIDE, IGNORED, 2**32 - 1])
@pytest.mark.parametrize("place", [0, 1, 20, 35])
def test_an_unknown_vocabulary_is_checked_as_it_is_read(tmp_path, token, place):
    """Also where the id is only a target, of the part of a document that goes on in another row."""
    tokens = [5] * 36
    tokens[place] = token
    corpus = in_place(tmp_path, [tokens])
    with pytest.raises(ConfigError, match=r"document 0.*2\^31.*int32.*int64"):
        list(load(corpus))
    rows = [row for step in load(corpus, requirements=INT64) for row in step]
    assert np.concatenate([row.tokens[: row.num_tokens] for row in rows]).tolist() == [*tokens, 1]
    targets = np.concatenate([row.targets[0, : row.num_tokens] for row in rows]).tolist()
    assert targets == [*tokens[1:], 1, -100]


def test_a_target_past_the_row_is_checked_too(tmp_path):
    """Token 16 is the first of the second part; only the first row has it as a target."""
    tokens = [5] * 16 + [WIDE] + [5] * 10
    loader = load(in_place(tmp_path, [tokens]))
    with pytest.raises(ConfigError, match="document 0 has a token id of"):
        next(iter(loader))


class Backwards(PlainObjective):
    """Documents from their end to their beginning."""

    name = "backwards"

    def write(self, tokens, weights, key):
        assert tokens.min() >= 0
        return Written(tokens=tokens[::-1], weights=np.ones(len(tokens), np.float32))


@pytest.mark.parametrize("requirements", [None, INT64])
def test_objectives_take_no_such_ids(tmp_path, requirements):
    """They rewrite in int32, whatever the rows are of."""
    corpus = in_place(tmp_path, [[5, 6, IGNORED, 8]])
    loader = Loader(
        Source(corpus, objective=Backwards()),
        sequence_length=16,
        rows_per_step=1,
        requirements=requirements,
    )
    with pytest.raises(ConfigError, match=r"objective.*'backwards'.*works.*2\^31"):
        next(iter(loader))
    dataset = write_dataset(tmp_path / "d", [[5, 6, 7]], vocab_size=2**32)
    with pytest.raises(ConfigError, match=r"objective 'backwards'.*2\^31"):
        Loader(
            Source(dataset, objective=Backwards()),
            sequence_length=16,
            rows_per_step=1,
            requirements=requirements,
        )
    Loader(
        Source(dataset, objective=Causal()), sequence_length=16, rows_per_step=1, requirements=INT64
    )


def test_batches_of_jax_hold_no_such_ids(tmp_path):
    psj = pytest.importorskip("penstock.integrations.jax")
    need = psj.REQUIREMENTS.merge(InputRequirements(asked_by="me", dtype="int64"))
    low = load(in_place(tmp_path, [[5, 6, 7]]), requirements=need)
    ((batch, _),) = psj.batches(low)
    assert batch.tokens[0, :4].tolist() == [5, 6, 7, 1]
    wide = load(in_place(tmp_path, [[5, IGNORED, 7]]), requirements=need)
    with pytest.raises(ConfigError, match=r"step.*0.*row.*0.*token.*2\^31.*more"):
        list(psj.batches(wide))
