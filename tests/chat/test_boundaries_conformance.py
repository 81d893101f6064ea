"""The conformance table of the reference, row by row: what the scan trains. `·` is a token that is
not trained.
"""

import numpy as np
import pytest

from penstock.chat.masks.boundaries import Boundary
from penstock.chat.masks.scanning import EOS_MODES, scan
from penstock.core.errors import ConfigError

U, A, E = (1, 11, 5), (1, 12, 5), (2,)
USER, ASSISTANT = Boundary("user", U, E), Boundary("assistant", A, E)
BOTH = [USER, ASSISTANT]
PAD, IMAGE = 0, 90
# [/INST] is 4: the end of the user's turn, not included, and the start of the assistant's.
SHARED = [Boundary("user", [3], [4], include_end=False), Boundary("assistant", [4], [99])]


def trained(tokens, boundaries=BOTH, roles=("assistant",), eos="turn", **more):
    """The trained tokens, with · for the others."""
    weights = scan(tokens, boundaries, roles, eos, **more)
    assert weights.dtype == np.float32
    assert weights.shape == np.shape(tokens)
    assert set(weights.tolist()) <= {0.0, 1.0}
    return " ".join(
        str(token) if weight else "·" for token, weight in zip(tokens, weights, strict=True)
    )


CONVERSATION = [*U, 7, *E, *A, 9, *E, 6]


@pytest.mark.parametrize(
    ("eos", "expected"),
    [
        pytest.param("turn", "· · · · · · · · 9 2 ·", id="row 1"),
        pytest.param("none", "· · · · · · · · 9 · ·", id="row 2, none"),
        pytest.param("all", "· · · · 2 · · · 9 2 ·", id="row 2, all"),
    ],
)
def test_rows_1_and_2_only_the_assistant_and_the_ends_that_are_asked_for(eos, expected):
    assert trained(CONVERSATION, eos=eos) == expected


def test_row_3_last():
    assert trained([*A, 8, *E, *A, 9, *E], eos="last") == "· · · 8 · · · · 9 2"


def test_row_4_last_is_the_last_turn_that_closed():
    assert trained([*A, 8, *E, *A, 9], eos="last") == "· · · 8 2 · · · 9"


def test_row_5_a_truncated_turn_runs_to_the_end_of_its_row():
    assert trained([*A, 8, 8]) == "· · · 8 8"


def test_row_6_no_end_was_found_so_none_counts():
    assert trained([*U, 7, 7], eos="all") == "· · · · ·"


def test_row_7_the_longest_start_wins():
    boundaries = [Boundary("user", [1], E), Boundary("assistant", [1, 12], E)]
    assert trained([1, 12, 8, 2, 1, 7, 2], boundaries) == "· · 8 2 · · ·"


def test_row_8_two_roles_with_the_same_start_are_an_error():
    boundaries = [Boundary("user", [1], E), Boundary("assistant", [1], E)]
    with pytest.raises(ConfigError, match=r"'user'.*'assistant'.*\[1\].*make"):
        trained([1, 8, 2], boundaries)


@pytest.mark.parametrize("eos", ["turn", "all"])
def test_row_9_an_end_that_is_not_included_starts_the_next_turn(eos):
    assert trained([3, 7, 4, 8, 99], SHARED, eos=eos) == "· · · 8 99"


def test_row_10_a_start_inside_a_turn_is_content():
    assert trained([3, 7, 4, 4, 8, 99], SHARED) == "· · · 4 8 99"


@pytest.mark.parametrize("eos", EOS_MODES)
def test_row_11_an_end_that_is_not_included_never_counts(eos):
    boundaries = [USER, Boundary("assistant", A, E, include_end=False)]
    assert trained([*A, 9, *E, 6], boundaries, eos=eos) == "· · · 9 · ·"


def test_row_12_start_and_end_the_same():
    assert (
        trained([1, 8, 1, 9, 1], [Boundary("assistant", [1], [1], include_end=False)])
        == "· 8 · 9 ·"
    )


def test_row_13_an_included_start():
    boundaries = [USER, Boundary("assistant", A, E, include_start=True)]
    assert trained(CONVERSATION, boundaries) == "· · · · · 1 12 5 9 2 ·"


def test_row_14_a_part_of_a_marker_is_content():
    assert trained([*A, 8, 1, 8, *E]) == "· · · 8 1 8 2"


def test_row_15_a_turn_closes_at_the_first_end():
    assert trained([*A, 8, *E, 8, *E]) == "· · · 8 2 · ·"


def test_row_16_without_an_end_a_turn_swallows_what_follows():
    assert trained([*A, 8, *U, 7], [USER, Boundary("assistant", A)]) == "· · · 8 1 11 5 7"


def test_row_17_media_and_padding_inside_a_turn():
    row = [*A, 8, IMAGE, 9, *E, PAD, PAD]
    mask = [1] * 7 + [0, 0]
    assert trained(row, masked_ids=[IMAGE], attention_mask=mask) == "· · · 8 · 9 2 · ·"
    assert trained([*A, 8, PAD, 9, *E], masked_ids=[IMAGE, PAD]) == "· · · 8 · 9 2"
    kept = trained(row, masked_ids=[IMAGE], attention_mask=mask, train_on_inputs=True)
    assert kept == "1 12 5 8 · 9 2 · ·"


def test_row_18_padding_alone_nothing_and_shorter_than_a_marker():
    assert trained([PAD] * 4, attention_mask=[0] * 4) == "· · · ·"
    assert trained([]) == ""
    assert trained([1, 12]) == "· ·"
    assert scan(np.zeros((0, 5), np.int64), BOTH).shape == (0, 5)
    assert scan(np.zeros((2, 0), np.int64), BOTH, attention_mask=np.zeros((2, 0))).shape == (2, 0)


def test_row_18_rows_are_independent():
    # The first row's turn stays open; nothing of it reaches the second.
    weights = scan([[*A, 8, 8, 8], [7, 7, *A, 8]], BOTH)
    assert weights.tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1]]


def test_row_19_no_roles_or_no_assistant():
    assert trained(CONVERSATION, roles=[]) == " ".join("·" * len(CONVERSATION))
    assert trained(CONVERSATION, [USER], roles=None) == " ".join("·" * len(CONVERSATION))
    assert trained(CONVERSATION, [], roles=None) == " ".join("·" * len(CONVERSATION))


def test_row_20_what_stands_before_the_first_start_is_masked():
    assert trained([8, 8, *E, *U, 7, *E, *A, 9, *E]) == "· · · · · · · · · · · 9 2"


# What goes beyond the table.


def test_adjacent_turns_and_an_empty_one():
    assert trained([*A, *E, *A, 9, *E]) == "· · · 2 · · · 9 2"


def test_several_ends_the_first_closes_and_the_longest_at_one_place():
    boundaries = [Boundary("assistant", A, [[2], [2, 6], [33]])]
    assert trained([*A, 8, 33, 9], boundaries) == "· · · 8 33 ·"
    assert trained([*A, 8, 2, 6, 9], boundaries) == "· · · 8 2 6 ·"


def test_an_end_that_belongs_to_the_next_turn_is_trained_and_starts_it():
    glm = [
        Boundary("user", [3], until=[4]),
        Boundary("assistant", [4], [[3], [30]], end_starts_next=True),
    ]
    row = [3, 7, 4, 8, 3, 7, 4, 9, 30]
    assert trained(row, glm) == "· · · 8 3 · · 9 30"
    assert trained(row, glm, eos="last") == "· · · 8 · · · 9 30"
    assert trained(row, glm, eos="none") == "· · · 8 · · · 9 ·"
    # Without the flag the user's turn would not be seen, and its text would not end the search for
    # the next start.
    swallowed = [glm[0], Boundary("assistant", [4], [[3], [30]])]
    assert trained(row, swallowed, ("user",)) != trained(row, glm, ("user",))


def test_an_assistant_that_goes_on_without_a_header():
    # 50 opens the outputs of tools, 51 closes them; then the assistant goes on, unless another
    # output follows.
    boundaries = [
        Boundary("user", [3], until=[[4], [50]]),
        Boundary("assistant", [4], [2], until=[[3], [50]]),
        Boundary("tool", [50], [51], include_end=False),
        Boundary("assistant", [51], [2], until=[[3], [4], [50]]),
    ]
    assert trained([3, 7, 4, 8, 2, 50, 70, 51, 9, 2], boundaries) == "· · · 8 2 · · · 9 2"
    assert trained([4, 8, 2, 50, 70, 51, 50, 71, 51, 9, 2], boundaries) == "· 8 2 · · · · · · 9 2"
    assert trained([4, 8, 2, 50, 70, 51, 3, 7, 4, 9, 2], boundaries) == "· 8 2 · · · · · · 9 2"
    assert trained([4, 8, 50, 70, 51, 9, 2], boundaries, eos="all") == "· 8 · · · 9 2"


def test_an_undeclared_end_is_caught_by_until():
    # Reference, section 2: an undeclared end of message lets the assistant run into the tool's
    # turn.
    tool, row = Boundary("tool", [1, 13, 5], E), [*A, 8, 21, 1, 13, 5, 70, *E]
    assert trained(row, [tool, ASSISTANT]) == "· · · 8 21 1 13 5 70 2"
    assert trained(row, [tool, Boundary("assistant", A, [E, [21]])]) == "· · · 8 21 · · · · ·"
    assert (
        trained(row, [tool, Boundary("assistant", A, E, until=[[1, 13, 5]])])
        == "· · · 8 21 · · · · ·"
    )


def test_padding_that_is_the_end_of_text_keeps_its_real_ends():
    pad = E[0]
    right = [*A, 9, *E, pad, pad]
    left = [pad, pad, *A, 9, *E]
    assert trained(right, attention_mask=[1] * 5 + [0, 0]) == "· · · 9 2 · ·"
    assert trained(left, attention_mask=[0, 0] + [1] * 5) == "· · · · · 9 2"
    assert scan([right], BOTH, lengths=[5]).tolist() == [[0, 0, 0, 1, 1, 0, 0]]
    # A turn that was cut off: the padding behind it is no end of it.
    assert trained([*A, 9, 9, pad, pad], attention_mask=[1] * 5 + [0, 0]) == "· · · 9 9 · ·"
    assert trained([*A, 9, 9, pad], [USER, Boundary("assistant", A)], lengths=5) == "· · · 9 9 ·"


def test_padding_in_the_middle_of_a_row():
    assert trained([*A, 9, PAD, 9, *E], attention_mask=[1, 1, 1, 1, 0, 1, 1]) == "· · · 9 · 9 2"


def test_train_on_inputs_needs_no_boundaries():
    assert trained([7, 8, PAD], [], train_on_inputs=True, attention_mask=[1, 1, 0]) == "7 8 ·"
    assert (
        trained([7, 8, PAD], [], train_on_inputs=True, attention_mask=[1, 1, 0], roles=None)
        == "7 8 ·"
    )
