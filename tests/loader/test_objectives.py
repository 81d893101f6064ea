"""Objectives in a mixture: the compiled fill does what each objective's own `write` does, and all
contracts hold.
"""

from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from contracts import assert_exact_resume, assert_ranks_share_steps, trained_sum
from makers.datasets import tokenizer_info
from penstock.core.errors import ConfigError

VOCAB = 1000
SENTINELS = tuple(range(700, 900))
MODES = {"R": 901, "X": 902, "S": 903}
BOS, EOS = 1, 2
INFILL = ps.Infill(rate=0.7, tokens=(910, 911, 912))
EVERYTHING = ps.InputRequirements(
    target_distances=3,
    loss_weights=True,
    positions=True,
    document_ids=True,
    cu_seqlens=True,
    prefix=True,
)


def denoise(**options):
    return ps.Denoise.ul2r(modes=MODES, sentinels=SENTINELS, **options)


def make_data(folder, *, count=200, longest=150, framed=True, weighted=False, seed=0):
    numbers = np.random.default_rng(seed)
    documents = []
    for length in numbers.integers(1, longest, count):
        words = numbers.integers(3, 65536 if seed % 2 else 700, length).tolist()
        documents.append([BOS, *words, EOS] if framed else words)
    spans = None
    if weighted:
        spans = [
            None if i % 3 == 0 else [(len(d) // 3, len(d) // 3 + 1 + len(d) // 2, 0.5)]
            for i, d in enumerate(documents)
        ]
        spans = [
            None if s is None else [(b, min(e, len(d)), w) for b, e, w in s]
            for s, d in zip(spans, documents, strict=True)
        ]
    info = tokenizer_info(vocab_size=65536 if seed % 2 else VOCAB, bos_id=BOS, eos_id=EOS)
    return ps.write_dataset(folder, documents, tokenizer=info, spans=spans)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("objectives") / "data")


def make(sources, **options):
    options = {
        "sequence_length": 128,
        "rows_per_step": 6,
        "seed": 3,
        "threads": 0,
        "requirements": EVERYTHING,
        **options,
    }
    return ps.Loader(ps.Mixture(sources), **options)


def mixture(data, objective=None, **options):
    chosen = denoise() if objective is None else objective
    sources = [
        ps.Source(data, name="plain", share=2, max_epochs=2),
        ps.Source(data, name="denoised", objective=chosen, max_epochs=2),
        ps.Source(data, name="infilled", objective=INFILL, max_epochs=2),
    ]
    return make(sources, **options)


def assert_like_twin(loader, steps):
    """Every piece of every row is what `Rewriting.write`, plain Python, makes of it."""
    kinds = set()
    for _ in range(steps):
        plan = loader._planner.next()
        if plan is None:
            break
        step = loader._filling.step(plan)
        for d in range(len(step.loss_denominators)):
            assert trained_sum(step, d + 1) == pytest.approx(step.loss_denominators[d])
        for row, begin, end in zip(step, plan.row_starts[:-1], plan.row_starts[1:], strict=True):
            place = 0
            for number, piece in enumerate(plan.pieces[begin:end]):
                rewriting = loader._plan.rewritings[piece["source"]]
                written, count = rewriting.write(piece), int(piece["length"])
                here = slice(place, place + count)
                assert np.array_equal(row.tokens[here], written.tokens)
                assert row.prefix_lengths[number] == written.prefix
                assert np.array_equal(row.prefix[here], np.arange(count) < written.prefix)
                if not rewriting.is_causal:
                    for d in range(row.targets.shape[0]):
                        weights = np.zeros(count, np.float32)
                        weights[: max(count - d - 1, 0)] = written.weights[d + 1 :]
                        due = np.where(
                            weights != 0,
                            np.concatenate([written.tokens[d + 1 :], [0] * (d + 1)])[:count],
                            -100,
                        )
                        assert np.array_equal(row.loss_weights[d, here], weights)
                        assert np.array_equal(row.targets[d, here], due)
                kinds.add(rewriting.task(piece))
                place += count
            assert not row.prefix[place:].any()
            assert place == row.num_tokens
    return kinds


def test_rows_are_what_python_writes(data):
    kinds = assert_like_twin(mixture(data), 40)
    assert {"R", "X", "S", "PSM", "SPM", "causal", ""} <= kinds


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 99),
    framed=st.booleans(),
    weighted=st.booleans(),
    final=st.booleans(),
    roll=st.booleans(),
    packing=st.sampled_from(["best_fit", "best_fit_decreasing", "next_fit", "none"]),
    too_long=st.sampled_from(["split", "drop", "truncate", "keep_end"]),
)
def test_rows_are_what_python_writes_for_any_data(
    tmp_path_factory, seed, framed, weighted, final, roll, packing, too_long
):
    folder = tmp_path_factory.mktemp("any") / "data"
    data = make_data(folder, count=60, longest=300, framed=framed, weighted=weighted, seed=seed)
    objective = denoise(final_sentinel=final, roll=roll, input_end=904)
    sources = [
        ps.Source(data, name=name, objective=chosen, max_epochs=2, too_long=too_long)
        for name, chosen in [("plain", ps.Causal()), ("denoised", objective), ("infilled", INFILL)]
    ]
    assert_like_twin(make(sources, packing=packing), 12)


def test_bos_and_eos_stay_at_the_ends_and_out_of_the_noise(data):
    loader = make([ps.Source(data, objective=denoise(), max_epochs=1)])
    seen = 0
    for step in loader:
        for row in step:
            for begin, end in zip(row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True):
                document = row.tokens[begin:end]
                if begin < row.num_tokens and BOS in document:
                    assert document[0] == BOS
                    assert document[1] in MODES.values()
                    seen += 1
                # A part of a split document may be its EOS alone.
                if begin < row.num_tokens and EOS in document[1:]:
                    assert document[-1] == EOS
                    assert row.targets[0, end - 2] == EOS
    assert seen == len(data)


def test_every_word_of_an_epoch_is_in_some_row(data):
    for objective in (denoise(), INFILL):
        loader = make([ps.Source(data, objective=objective, max_epochs=1)])
        found = np.concatenate([row.tokens[: row.num_tokens] for step in loader for row in step])
        due = np.concatenate([data[i].tokens for i in range(len(data))])
        assert np.array_equal(np.sort(found[found < 700]), np.sort(due))


def test_resume_and_ranks(data):
    assert_exact_resume(lambda: mixture(data), 8)
    assert_ranks_share_steps(lambda rank: mixture(data, data_parallel=rank), (2, 3), 6)
    for threaded, plain in zip(mixture(data, threads=2), mixture(data), strict=True):
        for mine, theirs in zip(threaded, plain, strict=True):
            assert np.array_equal(mine.tokens, theirs.tokens)
            assert np.array_equal(mine.targets, theirs.targets)


def test_a_document_is_denoised_alike_wherever_it_is_packed_and_otherwise_each_epoch(data):
    def documents(**options):
        found = {}
        loader = make([ps.Source(data, objective=denoise(), max_epochs=2)], **options)
        while (plan := loader._planner.next()) is not None:
            step = loader._filling.step(plan)
            for row, begin, end in zip(
                step, plan.row_starts[:-1], plan.row_starts[1:], strict=False
            ):
                ends = np.cumsum(plan.pieces["length"][begin:end])
                for piece, stop in zip(plan.pieces[begin:end], ends, strict=True):
                    position, first = int(piece["position"]), int(piece["begin"])
                    found[position, first, int(piece["tokens"])] = row.tokens[
                        stop - piece["length"] : stop
                    ].tolist()
        return found

    mine = documents()
    assert mine == documents(packing="best_fit_decreasing", rows_per_step=2)
    assert mine != documents(seed=4)
    assert len(mine) >= 2 * len(data)


def test_blends_are_exact_in_slots(data):
    loader = make(
        [
            ps.Source(data, name="plain", share=1),
            ps.Source(data, name="d", share=3, objective=denoise()),
        ]
    )
    slots = np.zeros(2, np.int64)
    for step in islice(loader, 60):
        for row in step:
            np.add.at(slots, row.source_ids, np.diff(row.cu_seqlens)[: row.num_documents])
    assert abs(slots[1] / slots.sum() - 0.75) < 0.01


def test_objectives_follow_a_curriculum_by_changes_of_shares(data):
    sources = [
        ps.Source(data, name="causal", share=1),
        ps.Source(data, name="denoised", share=0, objective=denoise()),
    ]
    changes = [
        ps.ShareChange(step=3, shares={"causal": 1, "denoised": 1}),
        ps.ShareChange(step=6, shares={"causal": 0}),
    ]
    loader = ps.Loader(
        ps.Mixture(sources, changes),
        sequence_length=128,
        rows_per_step=6,
        threads=0,
        requirements=EVERYTHING,
    )
    seen = [{int(i) for row in step for i in row.source_ids} for step in islice(loader, 9)]
    assert seen == [{0}] * 3 + [{0, 1}] * 3 + [{1}] * 3


def test_prefixes_are_refused_where_nobody_honours_them(data):
    plain = ps.InputRequirements(asked_by="layer 3", loss_weights=True)
    with pytest.raises(ConfigError, match=r"'denoised'.*'denoise'.*prefixes.*layer 3"):
        mixture(data, requirements=plain)
    with pytest.raises(ConfigError, match="layer 3 cannot honour them"):
        mixture(data, requirements=ps.InputRequirements(asked_by="layer 3", prefix=False))
    with pytest.raises(ConfigError, match=r'attention="row".*would join'):
        mixture(data, attention="row")
    row = next(iter(mixture(data, denoise(bidirectional=False), requirements=plain)))[0]
    assert row.prefix is None
    assert row.prefix_lengths is None


def test_concat_is_refused(data):
    with pytest.raises(ConfigError, match="'concat' cuts documents"):
        mixture(data, packing="concat")


def test_too_few_sentinels_are_refused_before_the_first_row(data):
    few = ps.Denoise.ul2r(modes=MODES, sentinels=SENTINELS[:5])
    with pytest.raises(ConfigError, match=r"source 'denoised'.*X.*5.*max_length"):
        mixture(data, few)


def test_documents_of_one_token_and_rows_too_short(tmp_path):
    single = ps.write_dataset(tmp_path / "d", [[5]] * 30 + [[6] * 40], vocab_size=VOCAB)
    loader = make([ps.Source(single, objective=denoise(), max_epochs=1)])
    rows = [row for step in loader for row in step]
    assert sum(row.num_documents for row in rows) == 31
    assert not any((row.targets == 5).any() for row in rows)
    with pytest.raises(ConfigError, match=r"infill: rows of 3 slots leave none"):
        make([ps.Source(single, objective=INFILL)], sequence_length=3)


def test_explain_says_where_slots_come_from_and_what_was_done(data):
    loader = mixture(data)
    step = next(iter(loader))
    tasks = set()
    for number, row in enumerate(step):
        pieces = loader.explain(0, number)
        borders = [piece.begin for piece in pieces]
        assert borders == row.cu_seqlens[: len(pieces)].tolist()
        assert sum(piece.num_tokens for piece in pieces) == row.num_tokens
        tasks |= {piece.task for piece in pieces if piece.source == "denoised"}
        assert {piece.task for piece in pieces if piece.source == "plain"} <= {""}
    assert tasks <= {"R", "X", "S"}
    assert tasks


@dataclass(frozen=True)
class Miscounting:
    """Measures one slot more than its compiled program writes."""

    inner: Any
    name: str = "miscounting"

    def resolve(self, facts):
        return replace(self, inner=self.inner.resolve(facts))

    def document_limit(self, sequence_length):
        return self.inner.document_limit(sequence_length - 1)

    def measure(self, lengths, keys):
        return self.inner.measure(lengths, keys) + 1

    def write(self, tokens, weights, key):
        return self.inner.write(tokens, weights, key)

    def program(self):
        return self.inner.program()


def test_a_wrong_measure_is_a_bug_of_the_objective(data):
    loader = make([ps.Source(data, name="web", objective=Miscounting(INFILL))])
    with pytest.raises(ConfigError, match=r"'web'.*'miscounting'"):
        next(iter(loader))
