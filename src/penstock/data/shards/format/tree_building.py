"""Builds a prefix tree from token sequences: what they begin with in common is stored once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from penstock.core.arrays import Array, Float32, Int64
from penstock.core.errors import ConfigError
from penstock.data.shards.format.images import ImageOf
from penstock.data.shards.format.trees import ANSWER, TURN_REWARDS, Tree, answer_numbers
from penstock.media.loading import key_at


class TreeDocument(NamedTuple):
    """A document with its tree, as `build_tree` makes it. T stored tokens."""

    tokens: Annotated[Int64, "tokens"]
    loss_weights: Annotated[Float32, "tokens"]
    """Weight of each token as a target: the sum over the answers that share it."""
    tree: Tree
    columns: dict[str, Array]
    """Name → [T] value of each token."""
    images: tuple[ImageOf, ...] = ()
    """Images of the document, in the order of its stored tokens."""


def build_tree(
    paths: Sequence[object],
    loss_weights: Sequence[Any] | None = None,
    *,
    values: Mapping[str, Sequence[float]] | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
    shared_weights: Literal["sum", "once"] = "sum",
    share: bool = True,
    trained_alike: bool = True,
    images: Sequence[Sequence[ImageOf]] | None = None,
) -> TreeDocument:
    """One document of several token sequences; what they begin with in common is stored once.

    Args:
        paths: Token ids of each path; none is empty.
        loss_weights: Weight of each token of each path as a target; None: 1.
        values: Name → a number for each path, such as `rank`, `label`, `advantage`, `reward`,
            `temperature` or `truncated`; `answer` is the number of the answer that a path belongs
            to, where one answer has several paths.
        columns: Name → a number for each token of each path. Tokens with different numbers are not
            shared.
        shared_weights: The weight of a shared target: the sum over its answers, or (`once`) the
            largest. Of an answer, the largest of its paths.
        share: False: nothing is shared, and each path is a branch of its own. What paths of one
            answer begin with in common is then trained in the first of them alone.
        trained_alike: Answers do not share a target that is trained (its weight is not 0) in one
            but not in the other, as sums over answers need it. False: they may. Paths of one answer
            always may: what one of them trains, the answer does.
        images: Those of each path, in order. Paths share one only with all of its tokens, so a fork
            in or right behind it moves in front of it; None: there are none.

    Returns:
        The document. A path that ends where another goes on has no slot of its own; equal paths
        have the same slots.

    Raises:
        ConfigError: There are no paths, one is empty, the arrays do not fit each other, an image
            leaves its path, or paths of one answer have different rewards.
    """
    sequences = [_ids(number, path) for number, path in enumerate(paths)]
    if not sequences:
        raise ConfigError("a tree needs at least one path")
    count = len(sequences)
    if loss_weights is None:
        weights = [np.ones(len(ids), np.float32) for ids in sequences]
    else:
        weights = _parallel("loss_weights", loss_weights, sequences, np.float32)
    extra = {
        name: _parallel(f"column {name!r}", rows, sequences, None)
        for name, rows in (columns or {}).items()
    }
    names = tuple(values or {})
    table = np.empty((count, len(names)))
    for at, name in enumerate(names):
        if len((values or {})[name]) != count:
            raise ConfigError(
                f"value {name!r}: {len((values or {})[name])} numbers for {count} paths"
            )
        table[:, at] = (values or {})[name]

    documents = np.zeros(count, np.int64)
    answers = answer_numbers(
        table[:, names.index(ANSWER)] if ANSWER in names else None, documents
    ).tolist()
    pictures = [()] * count if images is None else _pictures(images, sequences)
    # Two images may have the same tokens.
    keys = [_keyed(ids, own) for ids, own in zip(sequences, pictures, strict=True)]
    # Paths that end inside another go last, so that they find it.
    shared = np.zeros((count, count), np.int64)
    if share:
        trained = _trained_by_answers(keys, weights, extra, answers)
        for one in range(count):
            for other in range(one):
                alike = [(extra[name][one], extra[name][other]) for name in extra]
                if trained_alike:
                    alike.append((trained[one], trained[other]))
                shared[one, other] = shared[other, one] = _outside(
                    _shared_slots(keys[one], keys[other], alike), pictures[one]
                )
    else:
        weights, extra = _once_in_answers(keys, weights, extra, answers)
    lengths = [len(ids) for ids in sequences]
    inside = [
        any(shared[one, other] == lengths[one] < lengths[other] for other in range(count))
        for one in range(count)
    ]
    grown = _Growth(lengths, shared)
    for one in sorted(range(count), key=lambda one: (inside[one], one)):
        grown.add(one)
    order, branches = grown.depth_first()
    owners = [grown.owner[branch] for branch in order]
    forks = [grown.forks[branch] for branch in order]

    def stored(rows: Sequence[Array]) -> Array:
        return np.concatenate(
            [rows[owner][fork:] for owner, fork in zip(owners, forks, strict=True)]
        )

    number_of = {branch: number for number, branch in enumerate(order)}
    tree = Tree(
        branches=branches,
        paths=np.array([[number_of[grown.ends_in[one]], lengths[one]] for one in range(count)]),
        values=table,
        names=names,
    )
    if fault := tree.answer_fault():
        raise ConfigError(fault)
    tokens = stored(sequences)
    out = np.zeros(len(tokens), np.float32)
    paths_of: dict[int, list[int]] = {}
    for one, answer in enumerate(answers):
        paths_of.setdefault(answer, []).append(one)
    for mine in paths_of.values():
        places, given = _weights_of_answer(tree, weights, mine)
        if shared_weights == "once":
            np.maximum.at(out, places, given)
        else:
            np.add.at(out, places, given)
    kept = [
        replace(one, begin=int(begin) + one.begin - fork, end=int(begin) + one.end - fork)
        for owner, fork, begin in zip(owners, forks, branches[:, 0].tolist(), strict=True)
        for one in pictures[owner]
        if one.begin >= fork
    ]
    return TreeDocument(
        tokens, out, tree, {name: stored(rows) for name, rows in extra.items()}, tuple(kept)
    )


def _weights_of_answer(
    tree: Tree, weights: Sequence[Array], mine: Sequence[int]
) -> tuple[Annotated[Int64, "targets"], Array]:
    """Stored places of an answer's targets, each once, and their weights; of several paths, the
    largest.
    """
    # The weight of token t belongs to the slot before it, so it stands behind that slot, in the
    # same branch.
    places = [tree.slots(one)[:-1] + 1 for one in mine]
    if len(mine) == 1:
        return places[0], weights[mine[0]][1:]
    distinct, which = np.unique(np.concatenate(places), return_inverse=True)
    largest = np.zeros(len(distinct), np.float32)
    np.maximum.at(largest, which.reshape(-1), np.concatenate([weights[one][1:] for one in mine]))
    return distinct, largest


def _trained_by_answers(
    sequences: Sequence[Array],
    weights: Sequence[Array],
    extra: Mapping[str, Sequence[Array]],
    answers: Sequence[int],
) -> list[Array]:
    """bool [tokens] of each path: whether the token is trained in it, or in another path of its
    answer that shares it.

    Of two paths of an answer that share a beginning, these agree in it. So does any third path
    that shares it with one of them, and none shares a target that it does not train.
    """
    found = [row != 0 for row in weights]
    for one, other, stop in _common_targets(sequences, extra, answers):
        trained = (weights[one][1:stop] != 0) | (weights[other][1:stop] != 0)
        found[one][1:stop] |= trained
        found[other][1:stop] |= trained
    return found


def _once_in_answers(
    sequences: Sequence[Array],
    weights: Sequence[Array],
    extra: Mapping[str, Sequence[Array]],
    answers: Sequence[int],
) -> tuple[list[Array], dict[str, list[Array]]]:
    """Weights and columns of paths that are stored apart, where each target of an answer is
    trained, and has a turn's reward, in the first path that has it.
    """
    found = [row.copy() for row in weights]
    columns = {name: list(rows) for name, rows in extra.items()}
    rewards = columns.get(TURN_REWARDS)
    for one, other, stop in _common_targets(sequences, extra, answers):
        found[other][1:stop] = np.maximum(found[other][1:stop], found[one][1:stop])
        found[one][1:stop] = 0
        if rewards is not None:
            rewards[one] = rewards[one].astype(np.float64)
            rewards[one][1:stop] = np.nan
    return found, columns


def _common_targets(
    sequences: Sequence[Array], extra: Mapping[str, Sequence[Array]], answers: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """A path, an earlier one of its answer, and one after the last token that both have as a
    target behind a common beginning.
    """
    for one, answer in enumerate(answers):
        for other in range(one):
            if answers[other] == answer:
                alike = [(extra[name][one], extra[name][other]) for name in extra]
                shared = _shared_slots(sequences[one], sequences[other], alike)
                # The last slot of a path has no target.
                yield one, other, min(shared + 1, len(sequences[one]), len(sequences[other]))


class _Growth:
    """A tree while paths are added: each forks from an earlier one with which it shares most
    slots.
    """

    def __init__(self, lengths: Sequence[int], shared: Annotated[Int64, "paths paths"]) -> None:
        self._lengths, self._shared = lengths, shared
        self.owner: list[int] = []
        """The path that a branch has the tokens of."""
        self.forks: list[int] = []
        self.parents: list[int] = []
        self.ends_in: dict[int, int] = {}
        """Path → the branch in which it ends."""

    def add(self, one: int) -> None:
        """Add a path."""
        near = max(
            self.ends_in, key=lambda other: (int(self._shared[one, other]), -other), default=None
        )
        common = 0 if near is None else int(self._shared[one, near])
        branch = -1
        if near is not None and common:
            # The branch that holds the last shared slot.
            branch = self.ends_in[near]
            while self.forks[branch] >= common:
                branch = self.parents[branch]
        if common == self._lengths[one]:
            self.ends_in[one] = branch
            return
        self.ends_in[one] = len(self.owner)
        self.owner.append(one)
        self.forks.append(common)
        self.parents.append(branch)

    def depth_first(self) -> tuple[list[int], Annotated[Int64, "branches 3"]]:
        """Branches in the order in which they are stored, and what is stored of each."""
        children: dict[int, list[int]] = {}
        for branch, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(branch)
        order: list[int] = []
        stack = sorted(children[-1], reverse=True)
        while stack:
            branch = stack.pop()
            order.append(branch)
            # The deepest fork comes first: what continues a slot must follow it without a gap.
            stack += sorted(children.get(branch, ()), key=lambda one: (self.forks[one], -one))
        number_of = {branch: number for number, branch in enumerate(order)} | {-1: -1}
        sizes = [self._lengths[self.owner[branch]] - self.forks[branch] for branch in order]
        begins = np.cumsum([0, *sizes[:-1]])
        rows = [(self.forks[branch], number_of[self.parents[branch]]) for branch in order]
        return order, np.column_stack([begins, np.array(rows)])


def _shared_slots(one: Array, other: Array, alike: Sequence[tuple[Array, Array]]) -> int:
    """Slots that two paths share; `alike` are arrays of both that must agree, too."""
    most = min(len(one), len(other))
    common = _agree(one, other, most)
    shared = common if common == most else common - 1
    for mine, theirs in alike:
        # Token t is the target of slot t − 1; the first token is none.
        differs = 1 + _agree(mine[1:], theirs[1:], most - 1)
        if differs < most:
            shared = min(shared, differs - 1)
    return max(shared, 0)


def _outside(slots: int, pictures: Sequence[ImageOf]) -> int:
    """A number of slots at the beginning of a path, without those of an image that is cut."""
    return next((one.begin for one in pictures if one.begin < slots < one.end), slots)


def _keyed(ids: Array, pictures: Sequence[ImageOf]) -> Annotated[Int64, "tokens"]:
    """Ids of a path with a number below 0 for tokens of an image."""
    if not pictures:
        return ids
    found = ids.copy()
    for one in pictures:
        found[one.begin : one.end] = key_at(one.digest, one.begin, one.end)
    return found


def _pictures(
    images: Sequence[Sequence[ImageOf]], sequences: Sequence[Array]
) -> list[Sequence[ImageOf]]:
    if len(images) != len(sequences):
        raise ConfigError(f"images: {len(images)} lists for {len(sequences)} paths")
    for number, (own, ids) in enumerate(zip(images, sequences, strict=True)):
        at = 0
        for one in own:
            if not at <= one.begin < one.end <= len(ids):
                raise ConfigError(
                    f"path {number}: an image with tokens {one.begin} to {one.end} of {len(ids)}; "
                    "expected images in order, each inside its path"
                )
            at = one.end
    return list(images)


def _agree(one: Array, other: Array, most: int) -> int:
    """Entries at the beginning that are equal, at most `most`."""
    same = one[:most] == other[:most]
    if one.dtype.kind == "f":
        same |= np.isnan(one[:most]) & np.isnan(other[:most])
    return most if same.all() else int(np.argmin(same))


def _ids(number: int, path: object) -> Annotated[Int64, "tokens"]:
    array = np.asarray(path)
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
        raise ConfigError(f"path {number}: expected a flat list of at least one token id")
    return array.astype(np.int64)


def _parallel(
    what: str, rows: Sequence[Any], sequences: Sequence[Array], dtype: Any
) -> list[Array]:
    if len(rows) != len(sequences):
        raise ConfigError(f"{what}: {len(rows)} lists for {len(sequences)} paths")
    arrays = [np.asarray(row, dtype) for row in rows]
    for number, (row, ids) in enumerate(zip(arrays, sequences, strict=True)):
        if row.shape != ids.shape:
            raise ConfigError(
                f"{what}: {len(row)} numbers for the {len(ids)} tokens of path {number}"
            )
    return arrays
