"""Fill-in-the-middle at tokens, against a twin that says it in lists; rates, split points and
tokens of families.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makers.tokenizers import tiny_tokenizer
from penstock.core.errors import ConfigError
from penstock.core.randomness import mix_array, philox
from penstock.plan.objectives import Facts, Objective
from penstock.plan.objectives._infill_kernels import measure_infill, write_infill
from penstock.plan.objectives.control_tokens import INFILL_FAMILIES as FAMILIES
from penstock.plan.objectives.infill import Infill

IDS = (1000, 1001, 1002)
PRE, MID, SUF = IDS
KEYS = mix_array(7, np.arange(40_000))


def facts(tokenizer=None, sequence_length=64):
    return Facts(
        where="source 'code'",
        tokenizer=lambda: tokenizer,
        sequence_length=sequence_length,
        longest=50,
    )


def fake_tokenizer(*names, pad_id=None):
    controls = {name: 500 + place for place, name in enumerate(names)}
    return SimpleNamespace(name="tiny", special_tokens=controls, vocab_size=600, pad_id=pad_id)


def slow_infill(objective, tokens, weights, key):
    """(order, tokens, weights) of one document, with lists; weights are all 1 where none are
    given.
    """
    weights = [1.0] * len(tokens) if weights is None else weights
    whether, which, *points = (int(word) for word in philox(0, 3, np.uint64(key)))
    if whether >= round(objective.rate * 2**32):
        return "causal", tokens, weights
    first, second = sorted(point * (len(tokens) + 1) // 2**32 for point in points)
    both = list(zip(tokens, weights, strict=True))
    prefix, middle, suffix = both[:first], both[first:second], both[second:]
    if which < round(objective.spm_rate * 2**32):
        order, sections = "SPM", [(PRE, []), (SUF, suffix), (MID, prefix + middle)]
    else:
        order, sections = "PSM", [(PRE, prefix), (SUF, suffix), (MID, middle)]
    out = []
    for token, section in sections:
        out += [(token, max(weight for _, weight in section or both)), *section]
    if not objective.train_on_context:
        out = [(token, 0.0) for token, _ in out[: len(out) - len(middle)]] + out[
            len(out) - len(middle) :
        ]
    return order, [token for token, _ in out], [weight for _, weight in out]


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_written_as_by_the_slow_twin_and_as_measured(data):
    # Ids of the infilling tokens in the document itself do no harm.
    tokens = data.draw(st.lists(st.sampled_from([*range(10), *IDS]), min_size=1, max_size=30))
    size = len(tokens)
    weights = data.draw(
        st.none() | st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=size, max_size=size)
    )
    key = data.draw(st.integers(0, 2**64 - 1))
    rates = st.sampled_from([0, 0.25, 0.5, 1])
    objective = Infill(
        rate=data.draw(rates),
        spm_rate=data.draw(rates),
        tokens=IDS,
        train_on_context=data.draw(st.booleans()),
    )
    given_weights = None if weights is None else np.array(weights, np.float32)
    written = objective.write(np.array(tokens, np.int32), given_weights, key)
    order, due_tokens, due_weights = slow_infill(objective, tokens, weights, key)
    found_weights = np.ones(len(due_weights)) if written.weights is None else written.weights
    assert (written.tokens.tolist(), found_weights.tolist()) == (due_tokens, due_weights)
    assert (objective.task(size, key), written.prefix) == (order, 0)
    assert objective.measure(np.array([size]), np.array([key], np.uint64)).tolist() == [
        len(due_tokens)
    ]
    assert objective.restore(written.tokens, size, key).tolist() == tokens
    slots, prefix, reads = measure_infill(objective.program(), size, np.uint64(key))
    assert (slots, prefix) == (len(due_tokens), 0)
    if weights is None:
        assert due_weights == [0.0] * reads + [1.0] * (slots - reads)
        none, bare = np.empty(0, np.float32), np.empty(slots, np.int32)
        write_infill(
            objective.program(), np.array(tokens, np.int32), none, np.uint64(key), bare, none
        )
        assert bare.tolist() == due_tokens


def test_weights_of_one_say_what_no_weights_say():
    tokens = np.arange(9, dtype=np.int32)
    for key in KEYS[:200]:
        written = Infill(rate=1, tokens=IDS).write(tokens, np.ones(9, np.float32), int(key))
        assert written.weights.tolist() == [1.0] * 12


def test_the_two_orders_as_they_are_published():
    """PSM, and the SPM of the paper that shares prefix and middle tokens, which StarCoder
    trains.
    """
    tokens = np.arange(100, 106, dtype=np.int32)
    shown = {}
    for key in KEYS[:500]:
        objective = Infill(rate=1, tokens=IDS)
        written = objective.write(tokens, None, int(key)).tokens.tolist()
        points = sorted(int(word) * 7 >> 32 for word in philox(0, 3, key)[2:])
        if points == [2, 4]:
            shown[objective.task(6, int(key))] = written
    assert shown["PSM"] == [PRE, 100, 101, SUF, 104, 105, MID, 102, 103]
    assert shown["SPM"] == [PRE, SUF, 104, 105, MID, 100, 101, 102, 103]


def assert_likely(counts, expected):
    """Chi-square, at most six standard deviations above its mean."""
    freedom = len(counts) - 1
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 6 * (2 * freedom) ** 0.5


def test_rates_and_split_points_are_those_that_are_asked_for():
    objective, length = Infill(rate=0.9, spm_rate=0.3, tokens=IDS), 6
    tokens = np.arange(length, dtype=np.int32)
    pairs, orders = np.zeros((length + 1, length + 1)), {"causal": 0, "PSM": 0, "SPM": 0}
    for key in KEYS:
        order = objective.task(length, int(key))
        orders[order] += 1
        if order == "PSM":
            written = objective.write(tokens, None, int(key)).tokens
            first = int(np.argmax(written == SUF)) - 1
            pairs[first, first + len(written) - 1 - int(np.argmax(written == MID))] += 1
    counts = np.array(list(orders.values()))
    assert_likely(counts, np.array([0.1, 0.63, 0.27]) * len(KEYS))
    # Each of the (length + 1)^2 ordered pairs alike: two different points come twice as often as
    # two equal ones.
    upper = np.triu_indices(length + 1)
    expected = np.where(upper[0] == upper[1], 1, 2) / (length + 1) ** 2 * counts[1]
    assert_likely(pairs[upper], expected)
    assert pairs.sum() == pairs[upper].sum()


def test_every_document_and_none_at_the_ends_of_the_rate():
    lengths = np.full(len(KEYS), 5)
    assert (Infill(rate=1, tokens=IDS).measure(lengths, KEYS) == 8).all()
    assert (Infill(rate=0, tokens=IDS).measure(lengths, KEYS) == 5).all()
    assert (Infill(rate=0).document_limit(64), Infill().document_limit(64)) == (64, 61)
    assert Infill(split="character", room=5).document_limit(64) == 56


def test_lengths_are_known_before_the_tokens_are():
    named = Infill(tokens=("<a>", "<b>", "<c>"))
    assert isinstance(named, Objective)
    lengths = np.full(100, 5)
    assert (
        named.measure(lengths, KEYS[:100]).tolist()
        == Infill(tokens=IDS).measure(lengths, KEYS[:100]).tolist()
    )
    with pytest.raises(ConfigError, match=r"tokens.*known.*resolve\(facts\)"):
        Infill(rate=1).write(np.arange(5, dtype=np.int32), None, 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_known_families_are_found(family):
    prefix, middle, suffix, pad = FAMILIES[family]
    tokenizer = fake_tokenizer("<eos>", pad, suffix, prefix, middle)
    resolved = Infill().resolve(facts(tokenizer))
    assert resolved.tokens == (503, 504, 502)
    assert "splitter" not in repr(resolved)
    assert resolved == eval(repr(resolved))
    # States keep the repr, so the same settings must have the same one.
    assert repr(Infill(rate=np.float64(1), room=np.int64(8))) == repr(Infill(rate=1))


def test_tokens_by_name_and_by_id():
    tokenizer = fake_tokenizer("<a>", "<b>")
    assert Infill(tokens=("<a>", 7, "<b>")).resolve(facts(tokenizer)).tokens == (500, 7, 501)
    ids = Infill(tokens=np.array([5, 6, 7]))
    assert ids.resolve(facts(None)) is ids  # no tokenizer is needed


def test_tokens_that_were_added_to_the_tokenizer(tmp_path):
    from penstock.tokenizers.extension import add_tokens

    own = tiny_tokenizer(tmp_path / "own", ["a b"], 300)
    names = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"]
    more = add_tokens(own, names)
    more.save(tmp_path / "more")
    size = own.vocab_size
    resolved = Infill(tokenizer=str(tmp_path / "more"), split="character").resolve(facts(own))
    assert resolved.tokens == (size, size + 1, size + 2, size + 3)
    # A state holds the repr: a tokenizer that was moved must not keep a run from resuming.
    assert str(tmp_path) not in repr(resolved)
    other = tiny_tokenizer(tmp_path / "other", ["a b", "xyz xyz"], 300)
    with pytest.raises(ConfigError, match=r"more.*extension.*dataset's"):
        Infill(tokenizer=str(tmp_path / "more")).resolve(facts(other))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {},
            (
                r"source 'code': infill: tiny has no tokens .*StarCoder.*; .* add tiny --token "
                r"'<fim_prefix>'"
            ),
        ),
        (
            {"tokens": ("<a>", "<x>", "<b>")},
            (
                "the middle token is '<x>', which is no control entry of tiny; it has <a> <b>; "
                "name another"
            ),
        ),
        (
            {"tokens": ("<a>", 7, "<b>"), "sequence_length": 3},
            "rows of 3 slots leave none for a document and 3",
        ),
        ({"tokens": ("<a>", 600, "<b>")}, "the middle token is 600; tiny has ids below 600"),
        ({"tokens": ("<a>", 500, "<b>")}, "the middle token and the prefix token are both id 500"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_document(changes, message):
    row = changes.pop("sequence_length", 64)
    with pytest.raises(ConfigError, match=message):
        Infill(**changes).resolve(facts(fake_tokenizer("<a>", "<b>"), row))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": 1.5}, "rate must be a share from 0 to 1, got 1.5"),
        ({"spm_rate": float("nan")}, "spm_rate must be a share from 0 to 1, got nan"),
        ({"rate": "half"}, "rate must be a share from 0 to 1, got 'half'"),
        ({"split": "line"}, "split must be token or character, got 'line'"),
        ({"room": -1}, "room must be a number of slots from 0 to 64, got -1"),
        ({"tokens": "<a>"}, "tokens must be prefix, middle, suffix and.*got '<a>'"),
        ({"tokens": (1, 2)}, r"tokens must be prefix, middle, suffix and.*got \(1, 2\)"),
        (
            {"tokens": (1, 2, 2)},
            (
                "the suffix token and the middle token are both id 2; a model could not "
                "distinguish them"
            ),
        ),
        ({"tokens": (1, 2, -3)}, "tokens must be prefix"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        Infill(**changes)
