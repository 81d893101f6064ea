"""Prefix trees: built from paths, stored, read back, and refused where they are none."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makers.trees import check_tree, random_paths
from penstock.core.errors import ConfigError, CorruptionError
from penstock.data.shards.format.tree_building import build_tree
from penstock.data.shards.format.trees import Tree, pairs_of


@settings(deadline=None, max_examples=300)
@given(seed=st.integers(0, 2**32), share=st.booleans(), alike=st.booleans())
def test_a_tree_holds_its_paths(seed, share, alike):
    generator = random.Random(seed)
    paths = random_paths(generator)
    weights = [[float(generator.randint(0, 1)) for _ in path] for path in paths]
    built = build_tree(paths, weights, share=share, trained_alike=alike)
    check_tree(built, paths, weights, alike=alike)
    again = Tree.of_words(built.tree.words(), (), len(built.tokens))
    assert again.branches.tolist() == built.tree.branches.tolist()
    assert again.paths.tolist() == built.tree.paths.tolist()


def test_the_example_of_the_module():
    built = build_tree([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]])
    assert built.tokens.tolist() == [1, 2, 3, 4, 5, 3, 6, 7]
    assert built.tree.branches.tolist() == [[0, 0, -1], [5, 2, 0]]
    # The token at the fork is the target of both paths; the first token of the branch is none.
    assert built.loss_weights.tolist() == [0, 2, 2, 1, 1, 0, 1, 1]


@pytest.mark.parametrize(
    ("paths", "tokens", "branches"),
    [
        # Nothing but the first token is common: it moves into both, which become roots.
        ([[1, 2, 3], [1, 4, 5]], [1, 2, 3, 1, 4, 5], [[0, 0, -1], [3, 0, -1]]),
        ([[1], [2]], [1, 2], [[0, 0, -1], [1, 0, -1]]),
        # A path that ends inside another has no slot of its own, whatever the order.
        ([[1, 2], [1, 2, 3]], [1, 2, 3], [[0, 0, -1]]),
        ([[1, 2, 3], [1, 2, 3]], [1, 2, 3], [[0, 0, -1]]),
        # The inner node is only the token that moved.
        (
            [[1, 2, 3, 5], [1, 2, 3, 6], [1, 2, 4]],
            [1, 2, 3, 5, 3, 6, 2, 4],
            [[0, 0, -1], [4, 2, 0], [6, 1, 0]],
        ),
    ],
)
def test_corner_cases(paths, tokens, branches):
    built = build_tree(paths)
    assert built.tokens.tolist() == tokens
    assert built.tree.branches.tolist() == branches
    check_tree(built, paths, [[1.0] * len(path) for path in paths], alike=True)


def test_weights_add_up_or_count_once():
    paths, weights = [[1, 2, 3, 4], [1, 2, 3, 5]], [[0, 1, 0.5, 1], [0, 0.25, 0.5, 1]]
    assert build_tree(paths, weights).loss_weights.tolist() == [0, 1.25, 1, 1, 0, 1]
    assert build_tree(paths, weights, shared_weights="once").loss_weights.tolist() == [
        0,
        1,
        0.5,
        1,
        0,
        1,
    ]


def test_a_target_trained_in_one_path_only_is_not_shared():
    paths, weights = [[1, 2, 3, 4], [1, 2, 3, 4, 5]], [[0, 1, 1, 1], [0, 1, 0, 1, 1]]
    apart = build_tree(paths, weights)
    assert apart.tree.forked
    assert apart.tree.branches.tolist() == [[0, 0, -1], [4, 1, 0]]
    check_tree(apart, paths, weights, alike=True)
    assert not build_tree(paths, weights, trained_alike=False).tree.forked


def test_tokens_of_different_numbers_are_not_shared():
    paths = [[1, 2, 3, 4], [1, 2, 3, 5]]
    same = build_tree(paths, columns={"old": [[0, 1.0, 2.0, 3.0], [0, 1.0, 2.0, 9.0]]})
    assert len(same.tokens) == 6
    other = build_tree(paths, columns={"old": [[0, 1.0, 2.0, 3.0], [0, 1.0, 2.5, 9.0]]})
    assert len(other.tokens) == 7
    for number, column in enumerate([[0, 1.0, 2.0, 3.0], [0, 1.0, 2.5, 9.0]]):
        assert other.columns["old"][other.tree.slots(number)].tolist() == column


def test_values_pairs_and_examples():
    built = build_tree(
        [[1, 2], [1, 3], [1, 4], [1, 5]],
        values={"rank": [0, 1, 1, float("nan")], "label": [1, 0, -1, float("nan")]},
    )
    assert built.tree.pairs().tolist() == [[0, 1], [0, 2]]
    assert (built.tree.num_pairs, built.tree.num_examples, built.tree.num_roots) == (2, 2, 4)
    assert pairs_of(np.array([2.0, 1.0, 0.0])).tolist() == [[1, 0], [2, 0], [2, 1]]


@pytest.mark.parametrize(
    ("branches", "paths", "reason"),
    [
        ([[1, 0, -1]], [[0, 5]], "begins at its document's first token"),
        ([[0, 1, -1]], [[0, 5]], "no parent"),
        ([[0, 0, -1], [0, 1, 0]], [[0, 5], [1, 6]], "no token"),
        ([[0, 0, -1], [3, 4, 0]], [[0, 3], [1, 6]], "not depth first"),
        ([[0, 0, -1], [3, 1, 1]], [[0, 3], [1, 3]], "not depth first"),
        ([[0, 0, -1]], [[1, 5]], "ends in branch 1"),
        ([[0, 0, -1]], [[0, 6]], "path 0 of 6 tokens"),
        ([[0, 0, -1]], [[0, 4]], "no path goes to the end"),
        # A sibling with a deeper fork must come first.
        ([[0, 0, -1], [3, 1, 0], [4, 2, 0]], [[0, 3], [1, 2], [2, 3]], "not depth first"),
    ],
)
def test_what_is_no_tree_is_refused(branches, paths, reason):
    tree = Tree(
        branches=np.array(branches), paths=np.array(paths), values=np.empty((len(paths), 0))
    )
    with pytest.raises(ConfigError, match=reason):
        tree.check(5)


def test_a_changed_word_is_found():
    tree = build_tree([[1, 2, 3], [1, 2, 4]], values={"rank": [0, 1]}).tree
    words = tree.words()
    for place in range(len(words)):
        changed = words.copy()
        changed[place] ^= 1
        with pytest.raises(CorruptionError, match="its tree"):
            Tree.of_words(changed, ("rank",), 5)
    with pytest.raises(CorruptionError, match="its tree"):
        Tree.of_words(words, ("rank", "more"), 5)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"paths": []}, "at least one path"),
        ({"paths": [[1], []]}, "path 1"),
        ({"paths": [[1, 2]], "loss_weights": [[1]]}, "1 numbers for the 2 tokens of path 0"),
        ({"paths": [[1, 2]], "values": {"rank": [0, 1]}}, "2 numbers for 1 paths"),
        ({"paths": [[1, 2]], "columns": {"x": []}}, "0 lists for 1 paths"),
    ],
)
def test_bad_paths_are_refused(arguments, reason):
    with pytest.raises(ConfigError, match=reason):
        build_tree(**arguments)
