"""Cut documents, and parts of them, that have no target are left out: which ones, how they are
counted, and states.
"""

import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from remote_cases import BLOCK, NEED, SETTINGS, pair, patient_store

from contracts import (
    assert_exact_resume,
    assert_no_token_lost,
    assert_other_plans_are_refused,
    assert_ranks_share_steps,
    assert_same_step,
    trained_sum,
)
from makers.datasets import random_documents, tokenizer_info
from makers.objectives import PlainObjective
from penstock import (
    Denoise,
    Infill,
    InputRequirements,
    Loader,
    Mixture,
    Source,
    open_dataset,
    write_dataset,
)
from penstock.core.errors import ConfigError, CorruptionError, StateError
from penstock.plan.inputs import EVERYTHING
from penstock.plan.loader._target_kernels import UNTRAINED
from penstock.plan.objectives import SpanCorruption, Written
from penstock.plan.packing import PACKINGS

SLOTS = 32
CUTTING = ("split", "truncate", "keep_end")


def chats(count=60, seed=0):
    """Documents of a prompt and an answer, some of several turns, some without an answer; with
    their spans.
    """
    generator = np.random.default_rng(seed)
    documents = random_documents(count, 2, 200, seed=seed)
    spans = []
    for number, one in enumerate(documents):
        edges = np.sort(
            generator.choice(len(one) + 1, min(len(one) + 1, 2 * (number % 3 + 1)), replace=False)
        )
        pairs = edges[: len(edges) // 2 * 2].reshape(-1, 2).tolist()
        weights = [(1.0, 0.5, 0.0)[(number + turn) % 3] for turn in range(len(pairs))]
        spans.append(
            [(*pair, weight) for pair, weight in zip(pairs, weights, strict=True)]
            if number % 7
            else []
        )
    spans[3] = None
    return documents, spans


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    documents, spans = chats()
    return write_dataset(tmp_path_factory.mktemp("untrained") / "chats", documents, spans=spans)


def build(source, **options):
    return Loader(
        source,
        **{
            "sequence_length": SLOTS,
            "rows_per_step": 4,
            "seed": 3,
            "window_rows": 16,
            "threads": 0,
            **options,
        },
    )


def plan_of(loader):
    """(document, first token, tokens) of all pieces, by document; what was left out as
    untrained.
    """
    plan = loader.new_plan()
    found = [
        piece
        for window in plan.windows()
        for piece in window.pieces[["document", "begin", "tokens"]].tolist()
    ]
    return sorted(found), plan.state().untrained


def slow_parts(policy, size, limit):
    if size <= limit:
        return [(0, size, size)]
    if policy == "split":
        return [(begin, min(limit, size - begin), size) for begin in range(0, size, limit)]
    begin = size - limit if policy == "keep_end" else 0
    return [(begin, limit, begin + limit)]


def slow_plan(documents, weights, policy, limit, distances, *, rewritten=False):
    """Pieces that stay, and (documents, parts, tokens) that do not, from the weight of each
    token.
    """
    kept, left_out = [], np.zeros(3, int)
    for number, (document, weight) in enumerate(zip(documents, weights, strict=True)):
        mine = []
        parts = slow_parts(policy, len(document), limit)
        for begin, tokens, total in parts:
            if rewritten:
                targets = list(range(begin, begin + tokens))
            else:
                slots = range(begin, begin + tokens)
                targets = [
                    slot + d for slot in slots for d in range(1, distances + 1) if slot + d < total
                ]
            if tokens == len(document) or any(weight[target] for target in targets):
                mine.append((number, begin, tokens))
            else:
                left_out += (0, 1, tokens if policy == "split" else len(document))
        left_out[0] += bool(document.size) and not mine
        kept += mine
    return kept, tuple(left_out.tolist())


def weights_of(documents, spans):
    found = []
    for document, listed in zip(documents, spans, strict=True):
        weight = np.full(len(document), 1.0 if listed is None else 0.0)
        for begin, end, value in listed or ():
            weight[begin:end] = value
        found.append(weight)
    return found


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**20),
    st.sampled_from(CUTTING),
    st.integers(2, 40),
    st.integers(1, 4),
    st.sampled_from(["best_fit", "best_fit_decreasing", "next_fit", "none"]),
)
def test_what_is_left_out_is_what_the_slow_twin_leaves_out(
    tmp_path_factory, seed, policy, limit, distances, packing
):
    documents, spans = chats(12, seed)
    kept, left_out = slow_plan(documents, weights_of(documents, spans), policy, limit, distances)
    dataset = write_dataset(tmp_path_factory.mktemp("u") / "d", documents, spans=spans)
    need = EVERYTHING.merge(InputRequirements(target_distances=distances))
    source = Source(dataset, max_epochs=1, too_long=policy, max_document_tokens=limit)
    loader = build(source, sequence_length=40, packing=packing, requirements=need)
    if not kept:
        with pytest.raises(ConfigError, match=r"nothing.*12.*documents"):
            plan_of(loader)
        return
    found, untrained = plan_of(loader)
    assert found == kept
    assert (left_out if untrained is None else untrained[0].item()) == left_out
    assert_no_token_lost(loader)


@pytest.mark.parametrize("packing", [one for one in PACKINGS if one != "concat"])
@pytest.mark.parametrize("distances", [1, 2, 5])
def test_no_target_is_lost(dataset, packing, distances):
    """All steps together have the targets that they have with every part in its place."""
    need = EVERYTHING.merge(InputRequirements(target_distances=distances))
    sums = []
    for drops in (True, False):
        loader = build(
            Source(dataset, max_epochs=1, drop_untrained=drops),
            packing=packing,
            requirements=need,
            rows_per_step=1,
        )
        steps = list(loader)
        for step in steps:
            for distance in range(1, distances + 1):
                assert step.loss_denominators[distance - 1] == pytest.approx(
                    trained_sum(step, distance)
                )
        sums.append(np.sum([step.loss_denominators for step in steps], axis=0))
        tokens = sum(step.num_tokens for step in steps)
        assert (tokens == dataset.num_tokens) == (not drops)
    np.testing.assert_allclose(sums[0], sums[1], rtol=1e-12)


class Own(PlainObjective):
    """In Python."""

    def write(self, tokens, weights, key):
        return Written(tokens=tokens, weights=weights)


@pytest.mark.parametrize("policy", CUTTING)
@pytest.mark.parametrize(
    "objective",
    [
        Denoise([SpanCorruption(0.3, 2)], sentinels=range(900, 960)),
        Infill(tokens=(970, 971, 972)),
        Own(),
    ],
)
def test_rewritten_documents_have_all_their_weighted_tokens_as_targets(dataset, objective, policy):
    """Targets do not cross from part to part there, and the first token may be one."""
    documents, spans = chats()
    source = Source(dataset, max_epochs=1, too_long=policy, objective=objective, name="d")
    loader = build(source)
    limit = loader.new_plan().limits[0]
    kept, left_out = slow_plan(
        documents, weights_of(documents, spans), policy, limit, 1, rewritten=True
    )
    found, untrained = plan_of(loader)
    assert found == kept
    assert untrained[0].item() == left_out
    assert left_out[0] > 0
    whole = sum(
        step.loss_denominator
        for step in build(Source(dataset, max_epochs=1, name="d", objective=objective))
    )
    every = build(
        Source(dataset, max_epochs=1, name="d", objective=objective, drop_untrained=False)
    )
    assert whole == pytest.approx(sum(step.loss_denominator for step in every))


def test_where_nothing_is_left_out(dataset, tmp_path):
    """Without loss weights, without a document that is cut, with `drop`, `error` and `concat`, and
    if asked for.
    """
    documents, _ = chats()
    plain = write_dataset(tmp_path / "plain", documents)
    short = write_dataset(
        tmp_path / "short", [one[:9] for one in documents], spans=[[]] * 59 + [[(1, 2, 1.0)]]
    )
    for loader in (
        build(Source(plain, max_epochs=1)),
        build(Source(short, max_epochs=1)),
        build(Source(dataset, max_epochs=1, too_long="drop")),
        build(Source(dataset, max_epochs=1), packing="concat"),
        build(Source(dataset, max_epochs=1), packing="concat", max_document_tokens=9),
        build(Source(dataset, max_epochs=1, drop_untrained=False)),
        build(Source(dataset, max_epochs=1), sequence_length=300),
    ):
        list(loader)
        assert loader.untrained == {}
        assert "drop_untrained" not in loader.state_dict()["made_from"]
        assert loader.new_plan().state().untrained is None
    assert build(Source(dataset)).new_plan().state().untrained.dtype is UNTRAINED
    with pytest.raises(ConfigError, match=r"'chats': drop_untrained.*'no'"):
        Source(dataset, drop_untrained="no")


def test_they_are_counted(dataset):
    loader = build(Source(dataset, max_epochs=2))
    assert loader.untrained == {}
    steps = list(loader)
    _, (counts,) = plan_of(build(Source(dataset, max_epochs=2)))
    assert loader.untrained == {"chats": int(counts["parts"])}
    assert f"untrained parts left out: {int(counts['parts']):,} of chats)" in repr(loader)
    loader.load_state_dict(steps[0].resume_state)
    assert loader.untrained.get("chats", 0) <= int(counts["parts"])


# -- promises
# --------------------------------------------------------------------------------------------------


def mixture(dataset, plain):
    sources = [
        Source(dataset, 0.3, policy, max_epochs=2, too_long=policy, max_document_tokens=limit)
        for policy, limit in (("split", None), ("truncate", 20), ("keep_end", None))
    ]
    return Mixture([*sources, Source(plain, 0.2, "plain", max_epochs=2)])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_dataset(
        tmp_path_factory.mktemp("untrained") / "plain", random_documents(50, 0, 100, seed=5)
    )


@pytest.mark.parametrize("packing", [one for one in PACKINGS if one != "concat"])
def test_resume_is_exact_and_ranks_share_steps(dataset, plain, packing):
    def loader(rank=(0, 1)):
        return build(
            mixture(dataset, plain), packing=packing, data_parallel=rank, documents_per_row=3
        )

    steps = assert_exact_resume(loader, 300)
    assert 10 < len(steps) < 300
    assert_ranks_share_steps(loader, [2, 4], 300)
    assert_no_token_lost(loader())


def test_counts_are_those_of_an_uninterrupted_run(dataset, plain):
    """At every window, also where it ends inside a document of which parts are left out."""

    def plan():
        return build(mixture(dataset, plain), window_rows=2).new_plan()

    whole = plan()
    states = [whole.state()]
    while whole.next_window() is not None:
        states.append(whole.state())
    assert len(states) > 50
    for state in states[::3]:
        resumed = plan()
        resumed.restore(state)
        list(resumed.windows())
        for name in ("skipped", "untrained", "cursors", "credits"):
            np.testing.assert_array_equal(getattr(resumed.state(), name), getattr(states[-1], name))


def test_threads_change_nothing(dataset, plain):
    for mine, theirs in zip(
        build(mixture(dataset, plain)),
        build(mixture(dataset, plain), threads=2, prefetch=3),
        strict=True,
    ):
        assert_same_step(mine, theirs)


def test_another_choice_is_refused_and_named(dataset):
    def loader(drops=True, distances=1):
        need = EVERYTHING.merge(InputRequirements(target_distances=distances))
        return build(Source(dataset, drop_untrained=drops), requirements=need)

    assert_other_plans_are_refused(
        loader,
        {
            "kept": ({"drops": False}, "drop_untrained was (True|None), is (True|None)"),
            "distances": ({"distances": 2}, r"source 0 \('chats'\) has another name, .* or limit"),
        },
    )
    loader(drops=False, distances=2).load_state_dict(loader(drops=False).state_dict())


def test_a_state_of_before_says_how_to_go_on(dataset):
    """Earlier versions kept such parts."""
    state = build(Source(dataset, drop_untrained=False)).state_dict()
    with pytest.raises(StateError, match=r"drop_untrained.*without"):
        build(Source(dataset)).load_state_dict(state)


def test_a_damaged_count_is_found(dataset):
    loader = build(Source(dataset))
    state = next(iter(loader)).resume_state
    short = build(Source(dataset, drop_untrained=False)).state_dict()["place"]
    with pytest.raises(StateError, match=r"state.*loader.*damaged"):
        loader.load_state_dict({**state, "place": short})


# -- what cannot be trained, or read
# -----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_epochs", [None, 1, 0.5, 3])
def test_a_source_of_which_nothing_is_left_is_refused(tmp_path, max_epochs):
    dataset = write_dataset(tmp_path / "d", [[7] * 50] * 5000, spans=[[(40, 50, 1.0)]] * 5000)
    loader = build(Source(dataset, too_long="truncate", max_epochs=max_epochs))
    with pytest.raises(ConfigError, match=r"'d'.*nothing.*5000.*documents"):
        next(iter(loader))


def test_a_source_may_end_in_documents_that_are_left_out(tmp_path):
    documents, spans = [[7] * 9, *[[7] * 50] * 9000], [[(3, 9, 1.0)], *[[(40, 50, 1.0)]] * 9000]
    dataset = write_dataset(tmp_path / "d", documents, spans=spans)
    loader = build(Source(dataset, too_long="truncate", max_epochs=1, shuffle="none"))
    (step,) = list(loader)
    assert step.num_tokens == 9
    plan = loader.new_plan()
    list(plan.windows())
    assert plan.state().untrained[0].item() == (9000, 9000, 9000 * 50)
    assert plan.state().skipped[0].item() == (0, 0, 0, 0)
    endless = build(Source(dataset, too_long="truncate", shuffle="none"), rows_per_step=1)
    assert [step.num_tokens for step in islice(endless, 3)] == [27, 27, 27]


def test_a_whole_epoch_is_counted_from_the_begin_of_a_document(tmp_path):
    """The trained tokens are further from both ends than is planned at once."""
    spans = [[(20_000, 20_200, 1.0)], []]
    dataset = write_dataset(tmp_path / "d", [[7] * 40_000, []], spans=spans)
    loader = build(Source(dataset, max_epochs=2, too_long="split"), max_document_tokens=4)
    assert sum(int((row.targets[0] != -100).sum()) for step in loader for row in step) == 2 * 200


def test_damaged_loss_weights_are_named(tmp_path):
    documents, spans = chats()
    write_dataset(tmp_path / "d", documents, spans=spans)
    (shard,) = (tmp_path / "d").glob("*.arrow")
    content = bytearray(shard.read_bytes())
    begins = np.array([begin for listed in spans for begin, _, _ in listed or ()], "<u4").tobytes()
    place = content.index(begins)
    content[place + len(begins) // 2 // 4 * 4] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CorruptionError, match=r"'d' .*document \d+: its loss weights"):
        list(build(Source(open_dataset(tmp_path / "d"), max_epochs=1)))


# -- stores
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", CUTTING)
@pytest.mark.parametrize("threads", [0, 2])
def test_steps_are_those_of_a_local_copy(tmp_path_factory, tmp_path, monkeypatch, policy, threads):
    """The plan reads spans of cut documents, which come from the store first."""
    root = tmp_path_factory.mktemp("store")
    documents = random_documents(2000, 5, 700, seed=2)
    spans = [[(len(one) * 3 // 4, len(one), 1.0)] for one in documents]
    info = {"tokenizer": tokenizer_info(), "documents_per_shard": 700}
    write_dataset(root / "bucket" / "chats", documents, spans=spans, **info)
    with patient_store(root, tmp_path, monkeypatch) as store:
        local, remote = pair(store, "chats", max_epochs=1, too_long=policy, **BLOCK)
        here, there = (
            Loader(one, threads=threads, requirements=NEED, **SETTINGS) for one in (local, remote)
        )
        for mine, theirs in zip(here, there, strict=True):
            assert_same_step(mine, theirs)
        assert here.untrained == there.untrained
        assert ("chats" in here.untrained) == (policy != "keep_end")
        there.load_state_dict(json.loads(json.dumps(here.state_dict())))
