"""Promises that hold for anything that iterates, packs or plans; each test of a room calls them on
what it builds.
"""

import json
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import numpy as np
import pytest

from penstock import Loader, ModelInput
from penstock.core.errors import StateError
from penstock.media.rows import RowMedia
from penstock.plan.loader import Step

ARRAYS = (
    "tokens",
    "targets",
    "loss_weights",
    "positions",
    "document_ids",
    "cu_seqlens",
    "source_ids",
)


def assert_same_row(left: ModelInput, right: ModelInput) -> None:
    for name in ARRAYS:
        mine, theirs = getattr(left, name), getattr(right, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            np.testing.assert_array_equal(mine, theirs, err_msg=name)
    assert (left.num_tokens, left.max_seqlen) == (right.num_tokens, right.max_seqlen)
    assert (left.media is None) == (right.media is None)
    if left.media is not None and right.media is not None:
        assert_same_media(left.media, right.media)


def assert_same_media(left: RowMedia, right: RowMedia) -> None:
    for name in ("begins", "ends", "slots", "documents", "patches", "positions"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
    assert left.digests == right.digests
    assert left.arrays.keys() == right.arrays.keys()
    for name, array in left.arrays.items():
        np.testing.assert_array_equal(array, right.arrays[name], err_msg=name)


def assert_same_step(left: Step, right: Step) -> None:
    assert left.index == right.index
    assert left.loss_denominators == right.loss_denominators
    assert left.num_tokens == right.num_tokens
    assert left.resume_state == right.resume_state
    assert len(left) == len(right)
    for mine, theirs in zip(left, right, strict=True):
        assert_same_row(mine, theirs)


def assert_exact_resume(build: Callable[[], Loader], num_steps: int) -> list[Step]:
    """Restore after every step, through JSON, and compare the whole tail; returns the uninterrupted
    steps.
    """
    whole = list(islice(build(), num_steps))
    states = [build().state_dict()] + [json.loads(json.dumps(step.resume_state)) for step in whole]
    for done, state in enumerate(states):
        resumed = build()
        resumed.load_state_dict(state)
        tail = list(islice(resumed, num_steps - done))
        assert len(tail) == len(whole) - done
        for mine, theirs in zip(tail, whole[done:], strict=True):
            assert_same_step(mine, theirs)
    return whole


def assert_ranks_share_steps(
    build: Callable[[tuple[int, int]], Loader], sizes: Iterable[int], num_steps: int
) -> None:
    """The rows of all ranks, in order, are those of one rank, whatever their number."""
    whole = list(islice(build((0, 1)), num_steps))
    for size in sizes:
        ranks = [list(islice(build((rank, size)), num_steps)) for rank in range(size)]
        for step, parts in zip(whole, zip(*ranks, strict=True), strict=True):
            rows = [row for part in parts for row in part]
            assert len({len(part) for part in parts}) == 1
            for mine, theirs in zip(rows, step, strict=False):
                assert_same_row(mine, theirs)
            assert all(row.num_tokens == 0 for row in rows[len(step) :])
            for part in parts:
                assert part.loss_denominators == step.loss_denominators
                assert part.resume_state == step.resume_state


def assert_no_token_lost(loader: Loader) -> None:
    """Tokens in rows, and those that the last state counts as left out, are all tokens of all
    epochs of each source.
    """
    plan = loader.new_plan()
    placed = np.zeros(len(plan.datasets), np.int64)
    for window in plan.windows():
        np.add.at(placed, window.pieces["source"], window.pieces["tokens"])
    end = plan.state()
    left_out = end.skipped["dropped_tokens"] + end.skipped["truncated_tokens"]
    if end.untrained is not None:
        left_out = left_out + end.untrained["tokens"]
    for number, (source, dataset) in enumerate(
        zip(loader.mixture.sources, loader.datasets, strict=True)
    ):
        assert source.max_epochs is not None
        assert placed[number] + left_out[number] == source.max_epochs * source.count_tokens(
            dataset
        ), source.name


def assert_other_plans_are_refused(
    build: Callable[..., Loader], changes: dict[str, tuple[dict[str, Any], str]]
) -> None:
    """A state fits its own loader; with each change it is refused, both ways, and the message says
    what changed.

    Args:
        build: Makes a loader, given what is changed.
        changes: What is changed.
    """
    saved = {
        name: build(**change).state_dict()
        for name, (change, _) in {**changes, "": ({}, "")}.items()
    }
    for name, (change, message) in changes.items():
        build(**change).load_state_dict(json.loads(json.dumps(saved[name])))
        for loader, state in ((build(), saved[name]), (build(**change), saved[""])):
            with pytest.raises(StateError, match=message):
                loader.load_state_dict(state)
    build().load_state_dict(saved[""])


def trained_sum(step: Step, distance: int = 1) -> float:
    """What the loss denominator must be, counted in the rows themselves."""
    total = 0.0
    for row in step:
        targets, weights = row.targets[distance - 1], row.loss_weights
        assert weights is not None
        assert np.array_equal(targets == -100, weights[distance - 1] == 0)
        total += float(weights[distance - 1].astype(np.float64).sum())
    return total


def tokens_of(steps: Iterable[Any]) -> int:
    return sum(row.num_tokens for step in steps for row in step)
