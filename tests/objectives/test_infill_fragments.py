"""Infilling of repositories: fragments between separators, starts that are left alone, longest
middles.
"""

import collections
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from contracts import assert_exact_resume, assert_ranks_share_steps
from makers.datasets import tokenizer_info
from makers.tokenizers import tiny_tokenizer
from penstock.core.errors import ConfigError
from penstock.core.randomness import mix_array, philox
from penstock.plan.objectives import Facts, check_objective
from penstock.plan.objectives.infill import Infill

PRE, MID, SUF, PAD, SEP, HEAD = IDS = (1000, 1001, 1002, 1003, 50, 51)
KEYS = mix_array(11, np.arange(20_000))


def infill(**changes):
    return Infill(**({"tokens": (PRE, MID, SUF, PAD), "separator": SEP} | changes))


def words_of(key, block):
    return [int(word) for word in philox(np.uint64(block), np.uint64(3), np.uint64(key))]


def slow_cut(objective, units, key, block, rate):
    """(order, first, second) by the words of a block, in plain Python."""
    whether, which, one, two = words_of(key, block)
    if whether >= round(rate * 2**32):
        return None
    order = "SPM" if which < round(objective.spm_rate * 2**32) else "PSM"
    if objective.max_middle is not None:
        size = one * (min(objective.max_middle, units) + 1) >> 32
        first = two * (units - size + 1) >> 32
        return order, first, first + size
    return (order, *sorted(word * (units + 1) >> 32 for word in (one, two)))


def slow_infilled(objective, fragment, cut):
    order, first, second = cut
    prefix, middle, suffix = fragment[:first], fragment[first:second], fragment[second:]
    opened = [(PRE, prefix), (SUF, suffix), (MID, middle)]
    if order == "SPM":
        opened = [(PRE, []), (SUF, suffix), (MID, prefix + middle)]
    out = []
    for token, section in opened:
        out += [(token, max(weight for _, weight in section or fragment)), *section]
    if not objective.train_on_context:
        context = len(out) - len(middle)
        out = [(token, 0.0) for token, _ in out[:context]] + out[context:]
    return out


def slow_fragments(objective, tokens, weights, key):
    """[(token, weight)] of a document, padding included, with lists."""
    both = list(zip(tokens, weights, strict=True))
    if words_of(key, 0)[0] >= round(objective.rate * 2**32):
        return both
    fragments = [[]]
    for pair in both:
        if pair[0] == objective.separator:
            fragments.append(pair)
            fragments.append([])
        else:
            fragments[-1].append(pair)
    files, separators = fragments[::2], fragments[1::2]
    rate = objective.rate if objective.fragment_rate is None else objective.fragment_rate
    most = 1 if objective.separator is None else 1 + len(tokens) // objective.fragment_tokens
    cuts = {}
    for number, fragment in enumerate(files):
        if not fragment or fragment[0][0] == objective.ignore_prefix:
            continue
        alone = len(files) == 1
        block = 0 if alone else number + 1
        cut = slow_cut(objective, len(fragment), key, block, objective.rate if alone else rate)
        if cut is not None:
            cuts[number] = (words_of(key, block)[0], number, cut)
    chosen = {number: cut for _, number, cut in sorted(cuts.values())[:most]}
    out = []
    for number, fragment in enumerate(files):
        cut = chosen.get(number)
        out += fragment if cut is None else slow_infilled(objective, fragment, cut)
        out += separators[number : number + 1]
    return out + [(PAD, 0.0)] * (len(tokens) + 3 * most - len(out))


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_written_as_by_the_slow_twin_and_as_measured(data):
    tokens = data.draw(
        st.lists(st.sampled_from([*range(8), SEP, SEP, HEAD, PRE]), min_size=1, max_size=40)
    )
    size = len(tokens)
    weights = data.draw(
        st.none() | st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=size, max_size=size)
    )
    rates = st.sampled_from([0.25, 0.7, 1])
    separator = data.draw(st.sampled_from([SEP, None]))
    objective = infill(
        rate=data.draw(rates),
        spm_rate=data.draw(st.sampled_from([0, 0.5, 1])),
        separator=separator,
        fragment_rate=None if separator is None else data.draw(st.none() | rates),
        fragment_tokens=data.draw(st.sampled_from([1, 3, 10, 256])),
        ignore_prefix=HEAD if separator is None else data.draw(st.sampled_from([None, HEAD])),
        max_middle=data.draw(st.sampled_from([None, 1, 2, 100])),
        train_on_context=data.draw(st.booleans()),
    )
    key = data.draw(st.integers(0, 2**64 - 1))
    given_weights = None if weights is None else np.array(weights, np.float32)
    given_tokens = np.array(tokens, np.int32)
    written = objective.write(given_tokens, given_weights, key)
    due = slow_fragments(objective, tokens, weights or [1.0] * size, key)
    found = np.ones(len(due)) if written.weights is None else written.weights
    assert list(zip(written.tokens.tolist(), found.tolist(), strict=True)) == due
    assert objective.measure(np.array([size]), np.array([key], np.uint64)).tolist() == [len(due)]
    assert given_tokens.tolist() == tokens
    filling = [token == PAD for token, _ in due]
    assert written.padding == sum(filling)
    assert all(filling[len(filling) - written.padding :])
    assert objective.program() is None
    if PRE not in tokens:
        assert objective.restore(written.tokens, size, key).tolist() == tokens


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rate": 1, "fragment_rate": 1, "fragment_tokens": 16},
        {"separator": None, "ignore_prefix": HEAD},
        {"separator": None, "max_middle": 5},
        {"fragment_tokens": 1, "train_on_context": False},
    ],
)
def test_the_contract_of_objectives(changes):
    objective = infill(**changes)
    check_objective(objective)
    for length in (20, 63, 512, 4096):
        limit = objective.document_limit(length)
        key = KEYS[:500]
        assert objective.measure(np.full(500, limit), key).max() <= length
        assert objective.measure(np.full(500, limit + 1), key).max() > length


def assert_likely(counts, expected):
    """Chi-square, at most six standard deviations above its mean."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    freedom = len(counts) - 1
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 6 * (2 * freedom) ** 0.5


def test_fragments_are_drawn_as_often_as_fast_llm_draws_them():
    """A document with `rate`; of such a document each fragment with `fragment_rate`, in one of the
    two orders by itself, but for those with the start that is left alone.
    """
    tokens = np.array([1, 2, 3, SEP, HEAD, 4, SEP, 5, 6, 7, 8, SEP, 9], np.int32)
    objective = infill(
        rate=0.6, fragment_rate=0.3, spm_rate=0.2, ignore_prefix=HEAD, fragment_tokens=4
    )
    numbers, orders, infilled = collections.Counter(), collections.Counter(), 0
    for key in KEYS:
        if objective.task(len(tokens), int(key)) == "causal":
            continue
        infilled += 1
        written = objective.write(tokens, None, int(key))
        found = objective.fragments(written.tokens[: len(written.tokens) - written.padding], key)
        assert [fragment.order for fragment in found][1] == 0
        numbers[sum(fragment.order != 0 for fragment in found)] += 1
        orders.update(fragment.order for number, fragment in enumerate(found) if number != 1)
    assert_likely([infilled, len(KEYS) - infilled], np.array([0.6, 0.4]) * len(KEYS))
    shares = np.array([0.7**3, 3 * 0.3 * 0.7**2, 3 * 0.3**2 * 0.7, 0.3**3])
    assert_likely([numbers[drawn] for drawn in range(4)], shares * infilled)
    assert_likely([orders[one] for one in (0, 1, 2)], np.array([0.7, 0.24, 0.06]) * 3 * infilled)


def test_of_too_many_fragments_each_is_as_likely_as_the_others():
    tokens = np.array([1, SEP, 2, SEP, 3, SEP, 4, SEP, 5], np.int32)
    objective = infill(rate=1, fragment_rate=0.9, fragment_tokens=9)  # slots for two of five
    counts = np.zeros(5)
    for key in KEYS[:6000]:
        written = objective.write(tokens, None, int(key))
        found = objective.fragments(written.tokens[: len(written.tokens) - written.padding], key)
        chosen = [fragment.order != 0 for fragment in found]
        assert sum(chosen) <= 2
        counts += chosen
    # P(at least two of five are drawn) is 0.99954, and P(one) 0.00045.
    assert_likely(counts, np.full(5, counts.sum() / 5))
    assert counts.sum() == pytest.approx(2 * 6000, rel=1e-3)


def test_middles_are_no_longer_than_asked_for_and_lie_anywhere():
    """As in Fast-LLM: the length uniform from 0 to the longest, then the place."""
    objective = Infill(rate=1, spm_rate=0, tokens=(PRE, MID, SUF), max_middle=3)
    assert objective.program() is not None
    tokens = np.arange(6, dtype=np.int32)
    cuts = collections.Counter()
    for key in KEYS:
        written = objective.write(tokens, None, int(key)).tokens.tolist()
        assert len(written) == 9
        cuts[written.index(SUF) - 1, 8 - written.index(MID)] += 1
    pairs = [(first, size) for size in range(4) for first in range(6 - size + 1)]
    assert_likely([cuts[pair] for pair in pairs], [20_000 / 4 / (7 - size) for _, size in pairs])
    assert set(cuts) == set(pairs)
    whole = Infill(rate=1, tokens=(PRE, MID, SUF), max_middle=10**6)
    assert whole.write(tokens, None, 5).tokens.shape == (9,)


TEXT = "the pump flows into the turbine. def gate(x): return x  # Zürich 水 "
NAMES = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<file_sep>", "<issue>"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tiny"), [TEXT] * 20, 400, NAMES)


def resolved(tokenizer, **changes):
    facts = Facts(
        where="source 'code'", tokenizer=lambda: tokenizer, sequence_length=4096, longest=4000
    )
    return Infill(**({"rate": 1, "separator": "<file_sep>"} | changes)).resolve(facts)


def test_names_and_texts_are_looked_up(tiny):
    known = tiny.special_tokens
    one = resolved(tiny, ignore_prefix="<issue>")
    assert (one.separator, one.ignore_prefix) == (known["<file_sep>"], known["<issue>"])
    assert one.tokens == tuple(known[name] for name in NAMES[:4])
    assert one == eval(repr(one))
    text = resolved(tiny, ignore_prefix="the pu", fragment_rate=1, fragment_tokens=8)
    tokens = tiny.encode(
        "the pump flows<file_sep>the turbine<file_sep>the pu<file_sep>the p", allow_control=True
    )
    ignored = collections.Counter()
    for key in KEYS[:50]:
        written = text.write(tokens.astype(np.int32), None, int(key))
        kept = written.tokens[: len(written.tokens) - written.padding]
        orders = [fragment.order for fragment in text.fragments(kept, int(key))]
        ignored.update(place for place, order in enumerate(orders) if not order)
    assert (ignored[0], ignored[2]) == (50, 50)
    assert len(ignored) < 4 or ignored[1] < 50
    # All ids given: no tokenizer is needed.
    assert (
        infill().resolve(Facts(where="a", tokenizer=None, sequence_length=64, longest=9))
        == infill()
    )


def test_settings_that_a_state_of_the_first_release_did_not_have_are_not_in_its_text():
    assert repr(Infill(rate=0.5)) == (
        "Infill(rate=0.5, spm_rate=0.5, split='token', tokens=None, train_on_context=True, room=8)"
    )
    assert repr(infill(max_middle=3)).endswith("room=8, max_middle=3, separator=50)")


words = st.sampled_from([*TEXT.split(), " ", "\n", "αβ", "<file_sep>", "<file_sep>", "<issue>"])


@settings(deadline=None, max_examples=100)
@given(
    st.lists(words, min_size=1, max_size=40),
    st.integers(0, 2**64 - 1),
    st.booleans(),
    st.sampled_from([1, 5, 256]),
    st.sampled_from([None, 4]),
)
def test_characters_of_fragments_are_restored_and_the_measure_kept(
    tiny, parts, key, spm, each, longest
):
    tokens = tiny.encode(" ".join(parts), allow_control=True).astype(np.int32)
    objective = resolved(
        tiny, split="character", spm_rate=int(spm), room=2, fragment_tokens=each,
        max_middle=longest, ignore_prefix="<issue>", fragment_rate=0.8,
    )  # fmt: skip
    written = objective.write(tokens, None, key)
    measured = objective.measure(np.array([len(tokens)]), np.array([key], np.uint64))
    assert measured.tolist() == [len(written.tokens)] == [len(written.weights)]
    assert len(written.tokens) == len(tokens) + 5 * (1 + len(tokens) // each)
    table = tiny.byte_table
    spelled = [
        b"".join(table[token] or b"\xff%d\xff" % token for token in ids.tolist())
        for ids in (tokens, objective.restore(written.tokens, len(tokens), key))
    ]
    assert spelled[0] == spelled[1]
    pad = tiny.special_tokens["<fim_pad>"]
    assert written.weights.tolist() == [float(token != pad) for token in written.tokens]
    if longest is not None:
        kept = written.tokens[: len(written.tokens) - written.padding]
        for fragment in objective.fragments(kept, key):
            if fragment.order == 1:
                middle = kept[fragment.sections[1]]
                assert len(table.spell(middle).tobytes().decode(errors="replace")) <= longest + 6


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    """Documents of several files, each with EOS."""
    numbers = np.random.default_rng(3)
    documents = []
    for _ in range(40):
        files = [
            numbers.integers(60, 900, numbers.integers(1, 30))
            for _ in range(numbers.integers(1, 9))
        ]
        joined = np.concatenate([np.append(file, SEP) for file in files])[:-1]
        documents.append([*joined.tolist(), 2])
    folder = tmp_path_factory.mktemp("repositories") / "data"
    info = tokenizer_info(vocab_size=1100, bos_id=None, eos_id=2)
    return ps.write_dataset(folder, documents, tokenizer=info)


def make(data, **settings):
    objective = infill(rate=0.8, fragment_rate=0.7, fragment_tokens=16, max_middle=9)
    source = ps.Source(data.path, name="code", objective=objective, max_epochs=2)
    return ps.Loader(
        ps.Mixture([source]), **({"sequence_length": 128, "rows_per_step": 2, "seed": 5} | settings)
    )


def test_the_end_of_a_document_comes_before_its_padding(repositories):
    padded = ended = 0
    for step in make(repositories):
        for row in step:
            for begin, end in pairwise(row.cu_seqlens.tolist()):
                tokens, targets = row.tokens[begin:end], row.targets[0][begin:end]
                filling = int((tokens == PAD).sum())
                if end > row.num_tokens or not filling:
                    continue
                padded += filling
                assert (tokens[len(tokens) - filling :] == PAD).all()
                assert (targets[len(tokens) - filling - 1 :] == -100).all()
                last = tokens[len(tokens) - filling - 1]
                ended += last == 2
                if last == 2:
                    assert targets[len(tokens) - filling - 2] == 2
    assert padded > 100
    assert ended > 10


def test_no_token_is_lost(repositories):
    found = np.concatenate(
        [row.tokens[: row.num_tokens] for step in make(repositories) for row in step]
    )
    due = np.concatenate([repositories[i].tokens for i in range(len(repositories))] * 2)
    assert np.array_equal(np.sort(found[found < PRE]), np.sort(due))


def test_it_resumes_exactly_and_ranks_share_its_steps(repositories):
    assert_exact_resume(lambda: make(repositories), 6)
    assert_ranks_share_steps(
        lambda rank: make(repositories, rows_per_step=6, data_parallel=rank), (2, 3), 3
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_middle": 0}, "max_middle must be a number of tokens from 1 to .*got 0"),
        ({"max_middle": 2.5}, "max_middle must be a number of tokens from 1 .*got 2.5"),
        ({"separator": ""}, "separator must be an id or a name, got ''"),
        ({"separator": -1}, "separator must be an id or a name, got -1"),
        ({"separator": True}, "separator must be an id or a name, got True"),
        ({"ignore_prefix": 1.0}, "ignore_prefix must be an id, a name or a text, got 1.0"),
        ({"fragment_tokens": 0}, "fragment_tokens must be a number of tokens from 1 .*got 0"),
        ({"fragment_rate": 2}, "fragment_rate must be a share from 0 to 1, got 2"),
        ({"separator": None, "fragment_rate": 0.5}, "without a separator a document is one; give"),
        ({"separator": MID}, r"separator 1001 is one of the infilling tokens \(1000, 1001"),
        ({"ignore_prefix": SEP}, "ignore_prefix is the separator, 50, and no fragment begins with"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        infill(**changes)


def test_what_cannot_work_is_refused_before_the_first_document(tiny, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"source 'code': infill: the separator is '<sep>', which is no control.*<file_sep>",
    ):
        resolved(tiny, separator="<sep>")
    with pytest.raises(ConfigError, match=r"separator is 100000; .* has ids below"):
        resolved(tiny, separator=100_000)
    with pytest.raises(ConfigError, match=r"ignore_prefix is 100000; .* has ids below"):
        resolved(tiny, ignore_prefix=100_000)
    with pytest.raises(ConfigError, match=r"separator .* is one of the infilling tokens"):
        resolved(tiny, separator="<fim_pad>")
    bare = tiny_tokenizer(tmp_path, ["a b"], 300, [*NAMES[:3], "<file_sep>"])
    if bare.pad_id is None:
        with pytest.raises(
            ConfigError, match=r"slots that a document does not need hold a padding"
        ):
            resolved(bare)
    tokens = np.arange(5, dtype=np.int32)
    for unresolved in (
        Infill(rate=1, tokens=(PRE, MID, SUF), separator=SEP),
        infill(rate=1, separator="<file_sep>"),
        infill(rate=1, ignore_prefix="def"),
    ):
        with pytest.raises(ConfigError, match=r"not known yet; call resolve\(facts\)"):
            unresolved.write(tokens, None, 3)
