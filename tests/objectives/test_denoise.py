"""Denoised documents against the slow definition, and put together again."""

import denoise_reference as slow
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Denoise, Infill
from penstock.core.errors import ConfigError
from penstock.plan.objectives import CausalLM, PrefixLM, SpanCorruption, check_objective
from penstock.plan.objectives.denoise_tasks import SCALE, cumulative

SENTINELS = range(1000, 1300)
KEYS = st.integers(0, 2**64 - 1)
PRESETS = {
    "t5": Denoise.t5(sentinels=SENTINELS),
    "ul2": Denoise.ul2(modes={"R": 1, "X": 2, "S": 3}, sentinels=SENTINELS),
    "ul2r": Denoise.ul2r(modes={"R": 1, "X": 2, "S": 3}, sentinels=SENTINELS, final_sentinel=True),
}


@st.composite
def tasks(draw):
    options = {
        "mode": draw(st.sampled_from([None, 7, 8])),
        "weight": draw(st.sampled_from([1, 0.25, "0.1"])),
    }
    kind = draw(st.sampled_from(["spans", "spans", "prefix", "causal"]))
    if kind == "spans":
        rate = draw(st.sampled_from([0.15, 0.5, 0.9, "1/3", 0.01]))
        return SpanCorruption(rate, draw(st.sampled_from([1, 2.5, 3, 64])), **options)
    if kind == "prefix":
        return PrefixLM(
            rate=draw(st.sampled_from([None, 0.25])), sentinel=draw(st.booleans()), **options
        )
    return CausalLM(**options)


@st.composite
def denoisers(draw):
    bidirectional = draw(st.booleans())
    return Denoise(
        draw(st.lists(tasks(), min_size=1, max_size=4)),
        sentinels=SENTINELS,
        final_sentinel=draw(st.booleans()),
        roll=draw(st.booleans()),
        input_end=draw(st.sampled_from([None, 9])),
        bidirectional=bidirectional,
        train_on_inputs=not bidirectional and draw(st.booleans()),
    )


DOCUMENTS = st.integers(1, 400).flatmap(
    lambda size: (
        st.lists(
            st.sampled_from([0, 1, 5, 7, 9, 1000, 1001, 1002, 2**31 - 1]),
            min_size=size,
            max_size=size,
        )
        if size < 40
        else st.integers(0, 2**32).map(
            lambda seed: np.random.default_rng(seed).integers(0, 1300, size).tolist()
        )
    )
)


def as_reference(denoise):
    """The settings as the slow twin wants them."""

    def describe(task):
        kind = {SpanCorruption: "spans", PrefixLM: "prefix", CausalLM: "causal"}[type(task)]
        names = ("mode", "rate", "mean", "sentinel")
        found = {name: getattr(task, name, None) for name in names}
        return {**found, "kind": kind} | {
            n: str(found[n]) for n in ("rate", "mean") if found[n] is not None
        }

    return {
        "tasks": [describe(task) for task in denoise.tasks],
        "cumulative": cumulative(denoise.tasks),
        "roll": denoise.roll,
        "final": denoise.final_sentinel,
        "input_end": denoise.input_end,
        "bidirectional": denoise.bidirectional,
        "inputs_too": denoise.train_on_inputs,
        "sentinels": list(denoise.sentinels),
    }


@settings(deadline=None, max_examples=150)
@given(denoisers(), DOCUMENTS, KEYS, st.sampled_from([None, 0, 1]))
def test_as_the_definition_says(denoise, document, key, seed):
    weights = (
        None if seed is None else np.random.default_rng(seed).choice([0, 0.5, 1, 2], len(document))
    )
    tokens, counts, prefix, bar, spans, number = slow.write(
        as_reference(denoise), document, weights, key
    )
    written = denoise.write(np.array(document, np.int32), weights, key)
    assert written.tokens.tolist() == tokens
    assert written.tokens.dtype == np.int32
    assert written.prefix == prefix
    if weights is None:
        assert ((written.weights > 0) == (np.array(counts) > 0)).all()
        assert set(written.weights.tolist()) <= {0, 1}
    else:
        assert written.weights.tolist() == counts
    assert denoise.measure(np.array([len(document)]), np.array([key], np.uint64)).tolist() == [
        len(tokens)
    ]
    assert denoise.spans(len(document), key) == spans
    assert denoise.task(len(document), key) == denoise.tasks[number].name
    inputs, targets = denoise.encoder_decoder(np.array(document, np.int32), key)
    assert (inputs.tolist(), targets.tolist()) == (tokens[:bar], tokens[bar:])
    slots, sentinels, _ = denoise.worst(len(document))
    assert len(tokens) <= slots <= denoise.worst(len(document) + 1)[0]
    assert (
        len(spans) <= sentinels
        or denoise.tasks[number].name == "causal"
        or not denoise.tasks[number].sentinel
    )


@settings(deadline=None, max_examples=100)
@given(denoisers(), DOCUMENTS, KEYS)
def test_a_document_is_given_back_whatever_ids_it_holds(denoise, document, key):
    document = np.array(document, np.int32)
    written = denoise.write(document, None, key)
    assert np.array_equal(denoise.restore(written.tokens, len(document), key), document)
    inputs, targets = denoise.encoder_decoder(document, key)
    assert np.array_equal(
        denoise.restore(np.concatenate([inputs, targets]), len(document), key), document
    )


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(PRESETS)), DOCUMENTS, KEYS)
def test_sentinels_alone_put_ordinary_documents_together(preset, document, key):
    """As a reader of the format would: each sentinel of the inputs is replaced by what follows it
    in the targets.
    """
    denoise = PRESETS[preset]
    document = [10 + token % 900 for token in document]
    inputs, targets = (
        part.tolist() for part in denoise.encoder_decoder(np.array(document, np.int32), key)
    )
    spans, current = {}, None
    for token in targets:
        if token in SENTINELS:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    if denoise.task(len(document), key) == "S":
        inputs.append(SENTINELS[0])
    found = [word for token in inputs if token > 9 for word in spans.get(token, [token])]
    assert len(document) == 1 or found == document


@pytest.mark.parametrize("preset", PRESETS)
def test_the_contract_of_objectives(preset):
    check_objective(PRESETS[preset], sequence_length=700)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
def test_the_same_whatever_the_dtype(preset, dtype):
    document = np.arange(500)
    due = PRESETS[preset].write(document.astype(np.int32), None, 77)
    assert np.array_equal(
        PRESETS[preset].write(document.astype(dtype), None, np.uint64(77)).tokens, due.tokens
    )


def test_a_document_of_one_token_is_only_read():
    written = PRESETS["ul2"].write(np.array([42], np.int32), None, 3)
    assert written.tokens[1:].tolist() == [42]
    assert written.weights.tolist() == [0, 0]
    assert written.prefix == 2


def test_more_spans_than_sentinels_are_refused():
    denoise = Denoise([SpanCorruption(0.5, 3)], sentinels=range(1000, 1010))
    assert denoise.write(np.arange(57, dtype=np.int32), None, 1).tokens.max() <= 1009
    with pytest.raises(ConfigError, match=r"70.*13.*'spans'.* 10.*max_length=57"):
        denoise.write(np.arange(70, dtype=np.int32), None, 1)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_limit_is_the_longest_that_always_fits(preset):
    denoise = PRESETS[preset]
    for slots in (5, 40, 333, 1024):
        limit = denoise.document_limit(slots)
        assert denoise.worst(limit)[0] <= slots < denoise.worst(limit + 1)[0]
        keys = np.arange(500, dtype=np.uint64)
        assert denoise.measure(np.full(500, limit), keys).max() <= slots


def test_weights_are_whole_numbers_of_two_to_the_32():
    def counts(*weights):
        return np.diff([0, *cumulative([CausalLM(weight=weight) for weight in weights])]).tolist()

    assert counts(0.25, 0.125, 0.125, 0.5) == [2**30, 2**29, 2**29, 2**31]
    assert counts(1, 1, 1) == [SCALE // 3 + 1, SCALE // 3, SCALE // 3]
    assert counts(0.1, 0.2, 0.7) == [429496730, 858993459, 3006477107]
    assert sum(counts(*range(1, 50))) == SCALE


def test_what_does_not_belong_together_is_refused():
    denoise, document = Denoise.t5(sentinels=range(900, 950)), np.arange(20, dtype=np.int32)
    for objective in (denoise, Infill(rate=1, tokens=(910, 911, 912))):
        with pytest.raises(ConfigError, match=r"document.*20.*5.*weights"):
            objective.write(document, np.ones(5, np.float32), 7)
    written = denoise.write(document, None, 7).tokens
    with pytest.raises(ConfigError, match=r"21.*cannot.*written.*20.*takes.*22"):
        denoise.restore(written[:-1], 20, 7)
