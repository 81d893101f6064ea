"""The plan: every document once an epoch, shares kept, nothing lost, exact states."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from penstock import Mixture, ShareChange, Source
from penstock.core.errors import ConfigError, RecordError
from penstock.core.randomness import key_for, mix
from penstock.plan.loader import Plan, PlanSettings
from penstock.plan.packing import PACKINGS
from penstock.plan.sampling import Permutation, integer_shares
from penstock.plan.sampling.shares import UNIT


class Lengths:
    """A dataset of which only the lengths exist: all that a plan may look at."""

    extras = None

    def __init__(self, lengths, name="lengths"):
        pairs = np.stack([lengths, np.maximum(lengths, 1) - 1], 1).astype(np.uint32)
        self.table = SimpleNamespace(
            num_documents=len(pairs),
            lengths=pairs,
            weight_sums=None,
            has_spans=False,
            check_lengths=lambda documents: None,
        )
        self.fingerprint, self.name = f"{name}{len(pairs)}", name

    def __getitem__(self, index):
        return SimpleNamespace(origin=f"{self.name}.jsonl:{index + 1}")


def lognormal(count, seed=0, largest=100_000):
    lengths = np.exp(np.random.default_rng(seed).normal(4, 1, count))
    return np.clip(lengths, 1, largest).astype(np.int64)


def plan(sources, changes=(), **settings):
    mixture = Mixture(sources, changes)
    return Plan(
        mixture,
        [source.path for source in sources],
        PlanSettings(**{"sequence_length": 256, "rows_per_step": 8, "seed": 5, **settings}),
    )


def pieces_of(the_plan):
    return np.concatenate([window.pieces for window in the_plan.windows()])


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_token_of_every_epoch_once(packing):
    lengths = np.concatenate([lognormal(700), [0, 0]])
    whole = plan([Source(Lengths(lengths), max_epochs=3)], packing=packing, window_rows=32)
    pieces = pieces_of(whole)
    for epoch in range(3):
        mine = pieces[pieces["position"] // len(lengths) == epoch]
        covered = Counter()
        for piece in mine[np.lexsort((mine["begin"], mine["document"]))]:
            assert piece["begin"] == covered[piece["document"]]
            covered[piece["document"]] += piece["tokens"]
        assert [covered[i] for i in range(len(lengths))] == lengths.tolist()
    assert whole.state().skipped.tolist() == [(6, 0, 0, 0)]
    orders = [
        pieces[pieces["position"] // len(lengths) == epoch]["document"][:20].tolist()
        for epoch in range(3)
    ]
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_hold_no_more_than_they_can(packing):
    for window in plan([Source(Lengths(lognormal(2000)), max_epochs=1)], packing=packing).windows():
        used = np.add.reduceat(window.pieces["tokens"], window.row_starts[:-1])
        assert used.min() > 0
        assert used.max() <= 256
        assert window.row_starts[-1] == len(window.pieces)


@pytest.mark.parametrize(
    ("too_long", "skipped"),
    [("drop", (1, 1)), ("truncate", (0, 0)), ("keep_end", (0, 0)), ("split", (0, 0))],
)
def test_too_long_documents_are_counted(too_long, skipped):
    lengths = np.array([10, 700, 256, 3])
    whole = plan([Source(Lengths(lengths), max_epochs=1, too_long=too_long)])
    pieces = pieces_of(whole)
    _, dropped, dropped_tokens, cut = whole.state().skipped[0]
    assert dropped == skipped[0]
    assert dropped_tokens == 700 * skipped[1]
    assert cut == (700 - 256 if too_long in ("truncate", "keep_end") else 0)
    assert pieces["tokens"].sum() + dropped_tokens + cut == lengths.sum()
    if too_long == "split":
        parts = pieces[pieces["document"] == 1]
        assert sorted(parts[["begin", "tokens", "total"]].tolist()) == [
            (0, 256, 700), (256, 256, 700), (512, 188, 700),
        ]  # fmt: skip
    if too_long == "keep_end":
        assert pieces[pieces["document"] == 1][["begin", "tokens", "total"]].tolist() == [
            (444, 256, 700)
        ]


def test_too_long_as_an_error_names_the_origin():
    with pytest.raises(RecordError, match=r"document 1 \(.*:2\).*700.*takes 256"):
        pieces_of(
            plan([Source(Lengths(np.array([10, 700]), "chat"), max_epochs=1, too_long="error")])
        )


def test_a_source_without_a_usable_document_is_refused():
    with pytest.raises(ConfigError, match=r"2.*documents.*empty.*too_long='drop'"):
        plan([Source(Lengths(np.array([700, 900])), too_long="drop")]).next_window()
    with pytest.raises(ConfigError, match="no documents"):
        plan([Source(Lengths(np.array([700])), slice=(0.0, 0.2))])


def slow_stream(sources, shares, seed, slots):
    """(source, document, begin, tokens) in blended order, from the definitions."""
    iterators = []
    for source in sources:
        lengths = source.path.table.lengths[:, 0].astype(int)
        size = len(lengths)

        def documents(source=source, lengths=lengths, size=size):
            key, epoch = key_for(seed, "source", source.name), 0
            while True:
                epoch_key = int(mix(np.uint64(key), np.uint64(epoch)))
                for document in Permutation(size=size, key=epoch_key).images():
                    for begin in range(0, lengths[document], slots):
                        yield int(document), begin, int(min(slots, lengths[document] - begin))
                epoch += 1

        iterators.append(documents())
    heads = [next(iterator) for iterator in iterators]
    units, credits = integer_shares(shares).tolist(), [0] * len(sources)
    while True:
        waits = {
            i: (heads[i][2] * (UNIT - units[i]) - credits[i]) / units[i]
            for i in range(len(heads))
            if credits[i] >= 0
        }
        chosen = min(waits, key=lambda i: (waits[i], i))
        yield (chosen, *heads[chosen])
        for i in range(len(credits)):
            credits[i] += heads[chosen][2] * units[i]
        credits[chosen] -= heads[chosen][2] * UNIT
        heads[chosen] = next(iterators[chosen])


def test_next_fit_plan_equals_its_twin():
    sources = [
        Source(Lengths(lognormal(n, n), str(n)), share, str(n))
        for n, share in ((500, 1.0), (300, 0.2), (40, 0.05))
    ]
    the_plan = plan(sources, packing="next_fit", window_rows=16)
    stream, free = slow_stream(sources, [1.0, 0.2, 0.05], 5, 256), 0
    for _ in range(30):
        window = the_plan.next_window()
        used_rows = []
        for row in range(window.num_rows):
            pieces = window.pieces[window.row_starts[row] : window.row_starts[row + 1]]
            assert pieces[["source", "document", "begin", "tokens"]].tolist() == [
                next(stream) for _ in pieces
            ]
            if used_rows and row < window.num_rows:
                assert pieces["tokens"][0] > free
            free = 256 - pieces["tokens"].sum()
            used_rows.append(free)


@pytest.mark.parametrize("count", [2, 7, 100])
def test_blend_is_exact_at_every_window(count):
    generator = np.random.default_rng(count)
    shares = generator.dirichlet(np.full(count, 0.4)) + 1e-4
    sources = [
        Source(Lengths(lognormal(400, i), str(i)), float(shares[i]), str(i)) for i in range(count)
    ]
    the_plan = plan(sources, window_rows=64)
    taken = np.zeros(count)
    for _ in range(40):
        window = the_plan.next_window()
        taken += np.bincount(window.pieces["source"], window.pieces["tokens"], minlength=count)
        assert np.abs(taken - taken.sum() * shares / shares.sum()).max() <= 256


def test_shares_change_exactly_at_their_step():
    sources = [Source(Lengths(lognormal(3000, i), n), 1.0 - i, n) for i, n in enumerate("ab")]
    changes = [
        ShareChange(step=5, shares={"a": 0.25, "b": 0.75}),
        ShareChange(step=9, shares={"a": 0.0}),
    ]
    the_plan, row = plan(sources, changes, window_rows=24), 0
    tokens = np.zeros((3, 2))
    while row < 8 * 40:
        window = the_plan.next_window()
        for number in range(window.num_rows):
            step = (row + number) // 8
            pieces = window.pieces[window.row_starts[number] : window.row_starts[number + 1]]
            phase = 0 if step < 5 else 1 if step < 9 else 2
            tokens[phase] += np.bincount(pieces["source"], pieces["tokens"], minlength=2)
        row += window.num_rows
    assert tokens[0, 1] == 0
    assert abs(tokens[1, 0] - 0.25 * tokens[1].sum()) <= 512
    assert tokens[2, 0] == 0


def test_finished_sources_leave_the_others_their_proportions():
    sources = [
        Source(Lengths(lognormal(100, 1), "short"), 0.5, max_epochs=1),
        Source(Lengths(lognormal(4000, 2), "b"), 0.3),
        Source(Lengths(lognormal(4000, 3), "c"), 0.2),
    ]
    the_plan = plan(sources)
    pieces = np.concatenate([the_plan.next_window().pieces for _ in range(12)])
    last_short = np.flatnonzero(pieces["source"] == 0).max()
    rest = pieces[last_short + 200 :]
    share = rest["tokens"][rest["source"] == 1].sum() / rest["tokens"].sum()
    assert share == pytest.approx(0.6, abs=0.02)
    assert (pieces["source"] == 0).sum() >= 100


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("limit", [None, 3])
def test_a_place_is_all_that_the_rest_depends_on(packing, limit):
    def build():
        policies = (None, None, "truncate", "keep_end") if packing == "concat" else (
            "drop", "split", "truncate", "keep_end",
        )  # fmt: skip
        sources = [
            Source(
                Lengths(lognormal(90, i), n),
                1.0 + i,
                n,
                max_epochs=4,
                too_long=t,
                max_document_tokens=m,
            )
            for i, (n, t, m) in enumerate(zip("abcd", policies, (None, 40, 60, 30), strict=True))
        ]
        changes = [ShareChange(step=3, shares={"c": 0.1})]
        return plan(sources, changes, packing=packing, window_rows=16, documents_per_row=limit)

    whole, states, windows = build(), [], []
    while True:
        states.append(whole.state())
        if (window := whole.next_window()) is None:
            break
        windows.append(window)
    for i in range(0, len(states), 3):
        resumed = build()
        resumed.restore(states[i])
        for mine, theirs in zip(resumed.windows(), windows[i:], strict=True):
            np.testing.assert_array_equal(mine.pieces, theirs.pieces)
            np.testing.assert_array_equal(mine.row_starts, theirs.row_starts)
        np.testing.assert_array_equal(resumed.state().skipped, whole.state().skipped)


def test_slices_part_a_dataset():
    data = Lengths(lognormal(1000))
    low = pieces_of(plan([Source(data, slice=(0.0, 0.9), max_epochs=1)]))
    high = pieces_of(plan([Source(data, slice=(0.9, 1.0), max_epochs=1)]))
    assert set(low["document"]) == set(range(900))
    assert set(high["document"]) == set(range(900, 1000))


def test_two_billion_documents_and_more_tokens_than_32_bits():
    data = Lengths(np.array([3_000_000_000]))
    data.table.num_documents = 2**31 + 5
    data.table.lengths = np.broadcast_to(data.table.lengths[0], (2**31 + 5, 2))
    assert data.table.lengths.strides[0] == 0
    the_plan = plan([Source(data)], sequence_length=2**31, packing="best_fit", window_rows=8)
    pieces = np.concatenate([the_plan.next_window().pieces for _ in range(4)])
    assert pieces["document"].max() > 2**30
    assert pieces["document"].min() >= 0
    assert pieces["tokens"].sum() > 2**32
    assert sorted(set(pieces["tokens"])) == [3_000_000_000 - 2**31, 2**31]


@pytest.mark.parametrize("empty", [1, 7])
@pytest.mark.parametrize("shuffle", ["full", "none"])
def test_skipped_documents_are_counted_to_the_last(empty, shuffle):
    lengths = np.array([5] * 64 + [0] * empty)
    the_plan = plan(
        [Source(Lengths(lengths), max_epochs=3, shuffle=shuffle)],
        sequence_length=16,
        rows_per_step=2,
    )
    states = [the_plan.state(), *(the_plan.state() for _ in the_plan.windows())]
    assert states[-1].skipped.tolist() == [(3 * empty, 0, 0, 0)]
    for state in states:
        resumed = plan(
            [Source(Lengths(lengths), max_epochs=3, shuffle=shuffle)],
            sequence_length=16,
            rows_per_step=2,
        )
        resumed.restore(state)
        for _ in resumed.windows():
            pass
        np.testing.assert_array_equal(resumed.state().skipped, states[-1].skipped)


def test_a_stream_does_not_end_while_a_share_is_to_come():
    data = Lengths(lognormal(50))
    late = [Source(data, 1.0, "a", max_epochs=1), Source(data, 0.0, "b")]
    the_plan = plan(late, [ShareChange(step=1000, shares={"b": 1.0})])
    with pytest.raises(ConfigError, match=r"source.*finished.*source.*'b'"):
        for _ in the_plan.windows():
            pass
    assert len(pieces_of(plan(late))) > 0
    with pytest.raises(ConfigError, match=r"step.*3.*shares.*sources.*0"):
        Mixture([Source(data, 1.0, "a")], [ShareChange(step=3, shares={"a": 0.0})])
    with pytest.raises(ConfigError, match=r"step.*3.*shares.*negative"):
        Mixture([Source(data, 1.0, "a")], [ShareChange(step=3, shares={"a": -1.0})])
    with pytest.raises(ConfigError, match=r"max_epochs 0.001.*50"):
        plan([Source(data, max_epochs=0.001)])
    with pytest.raises(ConfigError, match="max_epochs must be above 0, got inf"):
        Source(data, max_epochs=float("inf"))


def test_golden_plan():
    """The order is part of the format: a change here breaks every saved run."""
    sources = [
        Source(Lengths(lognormal(50, 1), "a"), 0.7, "a"),
        Source(Lengths(lognormal(50, 2), "b"), 0.3, "b"),
    ]
    window = plan(sources, window_rows=4).next_window()
    fields = window.pieces[["source", "document", "begin", "tokens"]]
    assert [list(piece) for piece in fields[:12].tolist()] == GOLDEN


GOLDEN = [
    [0, 4, 0, 135],
    [0, 41, 0, 27],
    [0, 43, 0, 21],
    [0, 12, 0, 26],
    [0, 26, 0, 45],
    [1, 4, 0, 256],
    [0, 23, 0, 149],
    [0, 11, 0, 94],
    [0, 24, 0, 3],
    [0, 2, 0, 75],
]


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match=r"sequence_length.*least 2, got 1"):
        PlanSettings(sequence_length=1, rows_per_step=1)
    with pytest.raises(ConfigError, match="packing must be one of"):
        PlanSettings(sequence_length=4, rows_per_step=1, packing="tight")
    with pytest.raises(ConfigError, match="two sources are called 'a'"):
        Mixture([Source("x", name="a"), Source("y", name="a")])
    with pytest.raises(ConfigError, match=r"change.*step.*3.*'z'.*sources"):
        Mixture([Source("x", name="a")], [ShareChange(step=3, shares={"z": 1.0})])
    with pytest.raises(ConfigError, match="source 'a': slice must be fractions"):
        Source("a", slice=(0.5, 0.5))
    with pytest.raises(ConfigError, match="source 'a': share must be at least 0"):
        Source("a", share=float("nan"))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.2, 0.8)])
def test_a_split_document_is_charged_for_what_is_taken_of_it(packing, shares):
    """After each window, each source's credit is exactly its share of all tokens, less those that
    it gave.
    """
    kind = {} if packing == "concat" else {"too_long": "split"}
    long, short = Lengths(np.full(40, 5000), "long"), Lengths(np.full(3000, 60), "short")
    sources = [
        Source(one, share, one.name, **kind)
        for one, share in zip((long, short), shares, strict=True)
    ]
    mixed = plan(sources, packing=packing, window_rows=16)
    units, taken = integer_shares(shares), np.zeros(2, np.int64)
    for _ in range(12):
        window = mixed.next_window()
        np.add.at(taken, window.pieces["source"], window.pieces["length"])
        assert mixed.state().credits.tolist() == [
            int(taken.sum()) * int(unit) - int(mine) * UNIT
            for unit, mine in zip(units, taken, strict=True)
        ]
    assert abs(taken - np.array(shares) * taken.sum()).max() <= 256
