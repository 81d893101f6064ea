"""Kinds of the tokens of trajectories: what later paths do with replies of earlier ones, and what
is not claimed.
"""

import numpy as np
import pytest

from makers.trajectories import LOOKS, MORE, SAYS, thinking_tokenizer, thinking_trajectory
from penstock.chat.trajectories.finished import GivenSteps
from penstock.chat.trajectories.kinds import KINDS, StoredPath, kinds_of

END = 9
LETTERS = {"rendered": ".", "sampled": "S", "masked": "m", "repeated": "=", "rewritten": "~"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return thinking_tokenizer(tmp_path_factory.mktemp("kinds") / "tokenizer")


def drawn(paths, ends=(END,), logs=True):
    """Each path as a string, a letter for each token."""
    stored = [
        StoredPath(path.ids, path.weights, path.log_probabilities if logs else None)
        for path in paths
    ]
    found = kinds_of(stored, ends)
    return ["".join(LETTERS[KINDS[kind]] for kind in kinds) for kinds in found.paths], found


def steps(*given):
    """Paths of steps (prompt, ids, weights)."""
    made = GivenSteps()
    for prompt, ids, *weights in given:
        made.add(prompt, ids, [-0.5] * len(ids), *(weights or [[1.0] * len(ids)]))
    return made.paths()


def test_a_trajectory_whose_thoughts_are_dropped(tokenizer):
    trajectory = thinking_trajectory(tokenizer, masked=2)
    ends = set(tokenizer.special_tokens.values())
    (first, second), found = drawn(trajectory.paths(), ends)
    assert set(first) == {".", "S"}
    texts = [
        (copy.reply, copy.same, tokenizer.decode(trajectory.paths()[1].ids[copy.begin : copy.end]))
        for copy in found.copies
    ]
    assert [(reply, same) for reply, same, _ in texts] == [(0, False), (1, True)]
    assert "level Aare" in texts[0][2]
    assert "look" not in texts[0][2]
    assert "It is 42." in texts[1][2]
    assert second.count("~") < len(tokenizer.encode(LOOKS, allow_control=True))
    assert second.count("=") == len(tokenizer.encode(SAYS, allow_control=True))
    assert second.endswith("Smm")
    assert [(one.number, one.path) for one in found.replies] == [(0, 0), (1, 0), (2, 1)]
    assert found.replies[2].end - found.replies[2].begin == len(
        tokenizer.encode(MORE, allow_control=True)
    )


def test_tokens_between_replies_are_rendered_and_masked_ones_have_log_probabilities():
    paths = steps(([1, 2], [3, 4, END], [1, 0, 1]), ([1, 2, 3, 4, END, 5], [6, END]))
    assert drawn(paths)[0] == ["..SmS.SS"]
    # Without log-probabilities, a masked token looks like a rendered one.
    assert drawn(paths, logs=False)[0] == ["..S.S.SS"]


def test_a_rewritten_reply_ends_with_its_control_token():
    paths = steps(([1, 2], [3, 4, 5, END]), ([1, 2, 7, END, 8, 8], [6, END]))
    kinds, found = drawn(paths)
    assert kinds == ["..SSSS", "..~~..SS"]
    assert not found.copies[0].same


def test_a_header_that_goes_with_the_thought():
    # 5 is `<think>` of the prompt; the next prompt has neither it nor the thought.
    paths = steps(([1, 2, 5], [3, 4, END]), ([1, 2, 4, END, 8], [6, END]))
    assert drawn(paths)[0] == ["...SSS", "..~~.SS"]


def test_a_header_that_was_not_there_leaves_the_reply_as_it_was():
    paths = steps(([1, 2], [3, 4, END]), ([1, 2, 5, 5, 3, 4, END, 8], [6, END]))
    assert drawn(paths)[0] == ["..SSS", "....===.SS"]


def test_a_later_path_repeats_what_an_earlier_one_rewrote():
    paths = steps(
        ([1, 2], [3, 4, END]),
        ([1, 2, 7, END, 8], [6, END]),
        ([1, 2, 7, END, 8, 7, END, 8], [4, END]),
    )
    kinds, found = drawn(paths)
    assert kinds[2] == "..~~.~~.SS"
    assert [copy.reply for copy in found.copies if copy.path == 2] == [1]


def test_sub_agents_have_other_text_and_rewrite_nothing():
    agent = [11, 12, 13, 14, END, 15]
    first = [1, 2, END, 5]
    paths = steps((first, [3, 4, END]), (agent, [6, END]), ([*first, 3, 4, END, 8], [7]))
    assert drawn(paths)[0] == ["....SSS.S", "......SS"]
    system = [1, 22, 23, END, 5, 8, END, 5]
    assert drawn(steps((first, [3, 4, END]), (system, [6, END])))[0][1] == "........SS"


def test_answers_sampled_after_one_prompt_rewrite_nothing():
    kinds, found = drawn(steps(([1, 2], [3, 4, END]), ([1, 2], [3, 6, END])))
    assert kinds == ["..SSS", "..SSS"]
    assert not found.copies


def test_another_answer_is_compared_with_its_own_paths_alone():
    one, other = steps(([1, 2], [3, 4, END]), ([1, 2, 7, END, 8], [6, END]))
    stored = [
        StoredPath(path.ids, path.weights, path.log_probabilities, answer)
        for answer, path in enumerate((one, other))
    ]
    found = kinds_of(stored, (END,))
    assert not found.copies
    assert [one.number for one in found.replies] == [0, 0]
    assert np.flatnonzero(found.paths[1]).tolist() == [5, 6]


def test_a_reply_without_an_end_is_marked_up_to_the_next_control_token():
    paths = steps(([1, 2], [3, 4, 5]), ([1, 2, 3, 7, END, 8], [6]))
    assert drawn(paths)[0] == ["..SSS", "..~~~.S"]
