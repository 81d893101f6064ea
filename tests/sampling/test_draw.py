"""The draw of one source against its definition, whatever the lengths, the policy and the places
where it is cut.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.compiled import address_of
from penstock.core.randomness import mix
from penstock.plan.sampling import Permutation
from penstock.plan.sampling._kernels import ENTRY, NOT_HERE, NOT_REFUSED, SKIPPED, draw
from penstock.plan.sampling.order import SHUFFLE_CODES, shuffle_mode

POLICIES = ("split", "drop", "truncate", "error", "keep_end")
TAKEN = ("split", "drop", "truncate", "keep_end")
"""Those that refuse nothing."""
KEY = 12345
ALL_HERE = np.empty(0, np.uint8)


def slow_draw(lengths, first, size, shuffle, policy, limit, epochs):
    """(position, document, begin, tokens, total, length, (empty, dropped, dropped tokens, truncated
    tokens)) each; then what was skipped at the end.
    """
    skipped, position = [0, 0, 0, 0], 0
    for epoch in range(epochs):
        key = int(mix(np.uint64(KEY), np.uint64(epoch)))
        for image in Permutation(size=size, key=key, shuffle=shuffle).images().tolist():
            document = first + image
            total = lengths[document]
            if total == 0:
                skipped[0] += 1
            elif total > limit and policy == "drop":
                skipped[1] += 1
                skipped[2] += total
            else:
                start = 0
                if total > limit and policy != "split":
                    skipped[3] += total - limit
                    start = total - limit if policy == "keep_end" else 0
                    total = start + limit
                for begin in range(start, total, limit):
                    part = min(limit, total - begin)
                    yield position, document, begin, part, total, part, tuple(skipped)
                    skipped = [0, 0, 0, 0]
            position += 1
    yield tuple(skipped)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=40),
    st.sampled_from(TAKEN),
    st.sampled_from(sorted(SHUFFLE_CODES)),
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(1, 3),
    st.data(),
)
def test_the_draw_equals_its_twin(lengths, policy, shuffle, limit, capacity, epochs, data):
    first = data.draw(st.integers(0, len(lengths) - 1))
    size = data.draw(st.integers(1, len(lengths) - first))
    columns = data.draw(st.sampled_from([1, 2]))
    stored = np.zeros((len(lengths), columns), np.uint32)
    stored[:, 0] = lengths
    *expected, at_end = slow_draw(lengths, first, size, shuffle, policy, limit, epochs)
    found, place, skipped = [], (0, 0), np.zeros((), SKIPPED)
    while True:
        entries = np.zeros(capacity + 1, ENTRY)
        entries["skipped"][0] = skipped
        count, position, begin, refused = draw(
            *place,
            epochs * size,
            size,
            first,
            np.uint64(KEY),
            shuffle_mode(shuffle),
            np.uint64(address_of(stored)),
            np.uint64(stored.strides[0]),
            limit,
            POLICIES.index(policy),
            entries,
            ALL_HERE,
            1,
        )
        assert refused == NOT_REFUSED
        found += entries[:count].tolist()
        place, skipped = (position, begin), entries["skipped"][count].copy()
        if not count:
            break
    assert found == expected
    assert skipped.tolist() == at_end


@settings(deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 20),
    st.sampled_from(["split", "truncate", "keep_end"]),
    st.data(),
)
def test_a_part_that_was_begun_ends_where_it_would_have(total, limit, policy, data):
    """Packing `concat` cuts parts anywhere: what is left of one is the same part, counted no second
    time.
    """
    stored = np.array([[total]], np.uint32)

    def parts(begin):
        entries = np.zeros(70, ENTRY)
        count, *_ = draw(
            0,
            begin,
            1,
            1,
            0,
            np.uint64(KEY),
            shuffle_mode("none"),
            np.uint64(address_of(stored)),
            np.uint64(4),
            limit,
            POLICIES.index(policy),
            entries,
            ALL_HERE,
            1,
        )
        return entries[: count + 1]

    whole = parts(0)
    ends = (whole["begin"] + whole["tokens"])[:-1].tolist()
    for number, (first, end) in enumerate(zip(whole["begin"].tolist(), ends, strict=False)):
        begin = data.draw(st.integers(first, end - 1))
        if begin == 0:
            continue
        rest = parts(begin)
        assert rest["begin"][:-1].tolist() == [begin, *whole["begin"][number + 1 : -1]]
        assert (rest["begin"] + rest["tokens"])[:-1].tolist() == ends[number:]
        assert rest["total"][:-1].tolist() == whole["total"][number:-1].tolist()
        # For `keep_end`, the cut itself is where it begins: no cursor lies there before the
        # document was drawn.
        assert rest["skipped"]["truncated_tokens"].sum() == 0


def test_a_document_that_is_too_long_is_named():
    stored = np.array([[4, 3], [9, 8]], np.uint32)
    entries = np.zeros(8, ENTRY)
    found = draw(
        0,
        0,
        2,
        2,
        0,
        np.uint64(KEY),
        shuffle_mode("none"),
        np.uint64(address_of(stored)),
        np.uint64(8),
        5,
        POLICIES.index("error"),
        entries,
        ALL_HERE,
        1,
    )
    assert found == (1, 1, 0, 1)
    assert entries[0].tolist() == (0, 0, 0, 4, 4, 4, (0, 0, 0, 0))


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=40),
    st.sampled_from(TAKEN),
    st.sampled_from(sorted(SHUFFLE_CODES)),
    st.integers(1, 20),
    st.integers(1, 30),
    st.integers(1, 7),
    st.randoms(use_true_random=False),
)
def test_lengths_that_come_late_change_nothing(
    lengths, policy, shuffle, limit, capacity, width, random
):
    """Whatever order ranges come in, and whichever others come meanwhile; lengths that are not here
    are wrong.
    """
    *expected, at_end = slow_draw(lengths, 0, len(lengths), shuffle, policy, limit, 2)
    stored = np.full((len(lengths), 2), 7, np.uint32)
    here = np.zeros(-(-len(lengths) // width), np.uint8)

    def arrive(number):
        begin, end = number * width, (number + 1) * width
        stored[begin:end, 0] = lengths[begin:end]
        here[number] = 1

    found, place, skipped, stops = [], (0, 0), np.zeros((), SKIPPED), 0
    while True:
        entries = np.zeros(capacity + 1, ENTRY)
        entries["skipped"][0] = skipped
        count = 0
        while True:
            more, position, begin, refused = draw(
                *place,
                2 * len(lengths),
                len(lengths),
                0,
                np.uint64(KEY),
                shuffle_mode(shuffle),
                np.uint64(address_of(stored)),
                np.uint64(stored.strides[0]),
                limit,
                POLICIES.index(policy),
                entries[count:],
                here,
                width,
            )
            count, place = count + more, (position, begin)
            if refused != NOT_HERE:
                break
            stops += 1
            epoch, index = divmod(position, len(lengths))
            key = int(mix(np.uint64(KEY), np.uint64(epoch)))
            arrive(
                int(
                    Permutation(size=len(lengths), key=key, shuffle=shuffle).images(
                        index, index + 1
                    )[0]
                )
                // width
            )
            arrive(random.randrange(len(here)))
        assert refused == NOT_REFUSED
        found += entries[:count].tolist()
        skipped = entries["skipped"][count].copy()
        if not count:
            break
    assert found == expected
    assert skipped.tolist() == at_end
    assert 1 <= stops <= len(here)
