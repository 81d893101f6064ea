"""Masked and block diffusion: against the slow definition, in rows, and the bound that it
estimates.
"""

import itertools
import math
from dataclasses import dataclass

import diffusion_reference as slow
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from contracts import assert_exact_resume, assert_ranks_share_steps
from makers.datasets import tokenizer_info
from penstock import BlockDiffusion, MaskedDiffusion
from penstock.core.errors import ConfigError
from penstock.plan.inputs import AttentionRule
from penstock.plan.objectives import Facts, Written, check_objective

MASK, BOS, EOS = 999, 1, 2
KEYS = st.integers(0, 2**64 - 1)
NEED = ps.InputRequirements(
    loss_weights=True, positions=True, document_ids=True, cu_seqlens=True, prefix=True, trees=True
)


@dataclass
class Vocabulary:
    """What objectives ask of a tokenizer."""

    special_tokens: dict[str, int]
    name: str = "small"
    vocab_size: int = 1000
    eos_id: int | None = EOS


def resolved(objective, tokenizer=None, sequence_length=512):
    known = tokenizer or Vocabulary({"<|mask|>": MASK})
    return objective.resolve(
        Facts(
            where="source 'web'",
            tokenizer=lambda: known,
            sequence_length=sequence_length,
            longest=100,
        )
    )


def make_data(folder, *, framed=True, weighted=False, count=120, longest=90):
    numbers = np.random.default_rng(len(str(folder)))
    documents, spans = [], []
    for length in numbers.integers(1, longest, count):
        words = numbers.integers(3, 900, length).tolist()
        documents.append([BOS, *words, EOS] if framed else words)
        begin = int(numbers.integers(0, len(documents[-1])))
        spans.append([(begin, len(documents[-1]), 0.5)] if begin % 3 else None)
    info = tokenizer_info(vocab_size=1000, bos_id=BOS, eos_id=EOS)
    return ps.write_dataset(folder, documents, tokenizer=info, spans=spans if weighted else None)


def loader(data, objective, **given):
    given = {"sequence_length": 128, "rows_per_step": 4, "seed": 3, "threads": 0, **given}
    given.setdefault("requirements", NEED)
    return ps.Loader(ps.Source(data, objective=objective, max_epochs=2), **given)


OBJECTIVES = {
    "masked": MaskedDiffusion(mask_token=MASK),
    "blocks": BlockDiffusion(mask_token=MASK, block=8),
    "prefix": BlockDiffusion(mask_token=MASK, block=8, form="prefix"),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_it_keeps_the_contract(name):
    check_objective(OBJECTIVES[name])


@pytest.mark.parametrize("form", ["copies", "prefix"])
@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("block", [1, 3, 8])
def test_limits_are_the_longest_that_fit(form, fill, block):
    """With a BOS outside or without one; the next longer document would not fit without one."""
    objective = BlockDiffusion(mask_token=MASK, block=block, form=form, fill_blocks=fill)

    def slots(length):
        return int(objective.measure(np.array([length]), np.zeros(1, np.uint64))[0])

    for row in range(block + 1, 60):
        limit = objective.document_limit(row)
        assert slots(limit) <= row
        assert limit == 1 or slots(limit - 1) + 1 <= row
        assert slots(limit + 1) > row - fill


@given(
    st.lists(st.integers(0, 900), min_size=1, max_size=60) | st.just([*range(700)]),
    st.none() | st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=700, max_size=700),
    KEYS,
    st.sampled_from([1e-3, 0.3, 1e-9]),
    st.sampled_from([None, 1, 3, 8, 64]),
    st.sampled_from(["copies", "prefix"]),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_it_writes_the_slow_definition(tokens, weights, key, epsilon, block, form, fill):
    weights = None if weights is None else weights[: len(tokens)]
    if block is None:
        objective = MaskedDiffusion(mask_token=MASK, epsilon=epsilon)
    else:
        objective = BlockDiffusion(
            mask_token=MASK, epsilon=epsilon, block=block, form=form, fill_blocks=fill
        )
        objective = resolved(objective)
    wanted, sizes, parents, denominator = slow.write(
        tokens,
        weights,
        key,
        mask=MASK,
        epsilon=epsilon,
        block=block,
        form=form,
        fill=EOS if fill else None,
    )
    given = None if weights is None else np.array(weights, np.float32)
    found = objective.write(np.array(tokens, np.int32), given, key)
    assert (
        len(found.tokens)
        == objective.measure(np.array([len(tokens)]), np.array([key], np.uint64))[0]
    )
    assert found.tokens.tolist() == [token for token, _, _ in wanted]
    assert found.targets.tolist() == [target for _, target, _ in wanted]
    np.testing.assert_allclose(found.weights, [weight for _, _, weight in wanted], rtol=1e-6)
    assert found.denominator == pytest.approx(denominator)
    assert found.prefix == len(wanted)
    if block is not None:
        nodes = objective.nodes(len(wanted))
        assert np.diff(nodes.begins, append=len(wanted)).tolist() == sizes
        assert nodes.positions.tolist() == slow.positions(sizes, parents)
        pieces = np.stack([nodes.begins, *[np.append(nodes.begins[1:], len(wanted))] * 2], axis=1)
        rule = AttentionRule(pieces, nodes.reach)
        if len(wanted) < 150:
            assert rule.dense_mask().tolist() == slow.seen(sizes, parents)
        assert rule.positions.tolist() == slow.positions(sizes, parents)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_rows_hold_what_it_writes(tmp_path, name, framed, weighted):
    """The compiled fill against `write`, with BOS outside and EOS inside."""
    data = make_data(tmp_path / "data", framed=framed, weighted=weighted)
    steps = loader(data, OBJECTIVES[name])
    [rewriting] = steps._plan.rewritings
    trained = masks = 0
    while (plan := steps._planner.next()) is not None:
        step = steps._filling.step(plan)
        total = 0.0
        for number, row in enumerate(step):
            at = 0
            begin, end = plan.row_starts[number : number + 2]
            for piece in plan.pieces[begin:end]:
                written = rewriting.write(piece)
                here = slice(at, at + len(written.tokens))
                assert row.tokens[here].tolist() == written.tokens.tolist()
                assert row.targets[0, here].tolist() == written.targets.tolist()
                assert row.loss_weights[0, here].tolist() == written.weights.tolist()
                total += written.denominator
                if framed and piece["begin"] == 0:
                    assert row.tokens[at] == BOS
                    assert row.targets[0, at] == -100
                at = here.stop
            assert (row.targets[0, at:] == -100).all()
            rule = AttentionRule.of(row)
            assert row.positions.tolist() == rule.positions.tolist()
            assert row.prefix[:at].all()
            assert not row.prefix[at:].any()
            masks += int((row.tokens == MASK).sum())
            trained += int((row.targets == EOS).sum())
        assert step.loss_denominator == pytest.approx(total)
    assert masks > 500
    assert (trained > 20) == framed


@pytest.mark.parametrize("name", OBJECTIVES)
def test_runs_resume_and_ranks_share(tmp_path, name):
    data = make_data(tmp_path / "data", weighted=True)
    assert_exact_resume(lambda: loader(data, OBJECTIVES[name]), 6)
    assert_ranks_share_steps(
        lambda rank: loader(data, OBJECTIVES[name], data_parallel=rank), (2, 4), 4
    )


def test_the_estimate_is_the_bound():
    """Over all levels and masks, the mean loss is the evidence bound, here for a model that is a
    table of probabilities: enumerated, then estimated.
    """
    numbers = np.random.default_rng(0)
    tokens = np.array([0, 2, 1], np.int32)
    # Log-probability of the right token at each place, given which places are masked.
    table = {
        masked: numbers.uniform(-3, -0.1, 3)
        for masked in itertools.product([False, True], repeat=3)
    }
    bound = 0.0
    for masked, logs in table.items():
        count = sum(masked)
        if count:
            # ∫ t^count (1 − t)^(3 − count) / t dt
            share = math.gamma(count) * math.gamma(4 - count) / math.gamma(4)
            bound -= share * logs[list(masked)].sum()
    objective = MaskedDiffusion(mask_token=3, epsilon=1e-9)
    total, draws = 0.0, 200_000
    squares = 0.0
    for key in np.random.default_rng(1).integers(0, 2**64, draws, np.uint64):
        written = objective.write(tokens, None, int(key))
        loss = -(written.weights * table[tuple((written.tokens == 3).tolist())]).sum()
        total, squares = total + loss, squares + loss**2
    mean = total / draws
    error = math.sqrt((squares / draws - mean**2) / draws)
    assert abs(mean - bound) < 5 * error
    assert error < 0.02 * bound


@dataclass(frozen=True)
class Bert:
    """BERT's masked language model, with its 80 / 10 / 10, as an objective of one's own."""

    mask: int
    vocab_size: int
    name: str = "bert"
    bidirectional: bool = True
    writes_targets: bool = True

    def document_limit(self, sequence_length):
        return sequence_length

    def measure(self, lengths, keys):
        return lengths

    def write(self, tokens, weights, key):
        numbers = np.random.default_rng(key)
        chosen = numbers.random(len(tokens)) < 0.15
        if weights is not None:
            chosen &= weights > 0
        how, others = numbers.random(len(tokens)), numbers.integers(0, self.vocab_size, len(tokens))
        shown = np.where(how < 0.8, self.mask, np.where(how < 0.9, others, tokens))
        return Written(
            tokens=np.where(chosen, shown, tokens),
            targets=np.where(chosen, tokens, -100),
            prefix=len(tokens),
        )


def test_berts_rates(tmp_path):
    """An objective of one's own with targets: its rates by chi-square, from rows of a loader."""
    objective = Bert(mask=MASK, vocab_size=900)
    check_objective(objective)
    data = make_data(tmp_path / "data", framed=False, count=1000)
    found = np.zeros(4)
    for step in loader(data, objective):
        for row in step:
            tokens, targets = row.tokens[: row.num_tokens], row.targets[0, : row.num_tokens]
            chosen = targets != -100
            kept = chosen & (tokens == targets)
            masked = chosen & (tokens == MASK)
            found += [(~chosen).sum(), masked.sum(), kept.sum(), (chosen & ~kept & ~masked).sum()]
            assert (row.loss_weights[0, : row.num_tokens] == chosen).all()
        assert step.loss_denominator > 0
    shares = np.array([0.85, 0.15 * 0.8, 0.15 * (0.1 + 0.1 / 900), 0.15 * 0.1 * 899 / 900])
    expected = shares * found.sum()
    assert ((found - expected) ** 2 / expected).sum() < 16.27  # 3 degrees of freedom, p = 0.001
    assert_exact_resume(lambda: loader(data, objective), 4)


def test_rates_of_masks():
    """Levels are uniform and tokens masked at them: chi-square over ten levels, and each place."""
    objective = MaskedDiffusion(mask_token=MASK, epsilon=0.1)
    keys = np.random.default_rng(5).integers(0, 2**64, 20_000, np.uint64)
    levels, masked = [], np.zeros(8)
    for key in keys:
        written = objective.write(np.arange(8, dtype=np.int32), None, int(key))
        hidden = written.tokens == MASK
        masked += hidden
        levels += (1 / written.weights[hidden][:1]).tolist()
    # A document with a mask has t with density ∝ 1 − (1 − t)^8.
    edges = np.linspace(0.1, 1, 10)
    whole = np.array(
        [(b - a) + ((1 - b) ** 9 - (1 - a) ** 9) / 9 for a, b in itertools.pairwise(edges)]
    )
    expected = whole / whole.sum() * len(levels)
    found = np.histogram(levels, edges)[0]
    assert ((found - expected) ** 2 / expected).sum() < 26.12  # 8 degrees, p = 0.001
    share = 0.55  # the mean of t
    spread = len(keys) * share * (1 - share)
    assert (((masked - len(keys) * share) ** 2) / spread).max() < 16


class Late:
    """Targets without saying so."""

    name = "late"
    document_limit = staticmethod(lambda sequence_length: sequence_length)
    measure = staticmethod(lambda lengths, keys: lengths)

    def __repr__(self):
        return "Late()"

    def write(self, tokens, weights, key):
        return Written(tokens=tokens, targets=tokens)


class BadShape(Late):
    writes_targets = True

    def write(self, tokens, weights, key):
        return Written(tokens=tokens, targets=tokens[1:])


class BadId(BadShape):
    def write(self, tokens, weights, key):
        return Written(tokens=tokens, targets=np.full(len(tokens), -1))


class BadDenominator(BadShape):
    def write(self, tokens, weights, key):
        return Written(tokens=tokens, targets=tokens, denominator=math.nan)


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        (Late(), "wrote targets, but its writes_targets is not True"),
        (BadShape(), "targets for 1 slots"),
        (BadId(), "targets outside 0"),
        (BadDenominator(), "wrote the denominator nan"),
    ],
)
def test_wrong_targets_are_refused(tmp_path, objective, said):
    with pytest.raises(ConfigError, match=said):
        check_objective(objective)
    data = make_data(tmp_path / "data")
    with pytest.raises(ConfigError, match=said.replace("for 1 slots", "for")):
        list(loader(data, objective))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: MaskedDiffusion(epsilon=0), "epsilon must be a level of noise above 0"),
        (lambda: MaskedDiffusion(epsilon=1.0), "epsilon must be a level of noise above 0"),
        (lambda: BlockDiffusion(epsilon=True), "epsilon must be a level of noise above 0"),
        (lambda: MaskedDiffusion(mask_token=-1), "mask_token must be a token's id or name"),
        (lambda: BlockDiffusion(block=0), "block must be a number of tokens, from 1"),
        (lambda: BlockDiffusion(form="whole"), "form must be copies or prefix, got 'whole'"),
        (
            lambda: resolved(MaskedDiffusion(), Vocabulary({})),
            "has no mask .*tokenizer add",
        ),
        (
            lambda: resolved(MaskedDiffusion(mask_token="<m>")),
            "mask_token is '<m>', which is no control entry",
        ),
        (
            lambda: resolved(BlockDiffusion(block=64), sequence_length=64),
            "a block has 64 tokens, and rows of 64 slots",
        ),
        (
            lambda: resolved(
                BlockDiffusion(fill_blocks=True), Vocabulary({"[MASK]": 5}, eos_id=None)
            ),
            "fills a block up with EOS, and small has none",
        ),
        (
            lambda: MaskedDiffusion().write(np.zeros(3, np.int32), None, 1),
            "the id of the mask is not known yet",
        ),
    ],
)
def test_bad_settings(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"packing": "concat"}, "packing 'concat' cuts documents"),
        ({"requirements": ps.InputRequirements(prefix=True)}, "trees=True"),
        (
            {"requirements": ps.InputRequirements(prefix=True, trees=True)},
            "asks for no loss weights",
        ),
        (
            {"requirements": NEED.merge(ps.InputRequirements(target_distances=2))},
            r"asks for 2 \(prediction_heads\); set 1",
        ),
        (
            {"requirements": NEED.merge(ps.InputRequirements(own_targets=False))},
            "takes the tokens behind slots",
        ),
    ],
)
def test_rows_that_cannot_be(tmp_path, options, said):
    data = make_data(tmp_path / "data")
    with pytest.raises(ConfigError, match=said):
        loader(data, OBJECTIVES["blocks"], **options)
