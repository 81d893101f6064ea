"""Documents that are prefix trees: token sequences (paths) whose common beginnings are stored, and
trained on, once.

    paths 1 2 3 4 5 and 1 2 3 6 7   →   tokens 1 2 3 4 5 | 3 6 7,   branches (begin 0, fork 0), (begin 5, fork 2)

A slot is a token with its target, and two paths share a slot if they agree in all slots up to it;
the end of a path agrees with any target. So the parent ends one token before the fork, and each
branch begins with that token, which is moved and not copied: next to the original, a copy would be
seen twice. Depth first, a tree is a list of branches, each with consecutive slots: the target of
slot i is token i + 1 of the same branch, and positions go up by 1 in a branch. The loss weight of
token i + 1 is that of slot i; the first token of a branch is nobody's target there.

A query at slot q sees a key at slot k if k ≤ q < reach[k]: the end of the subtree of k's node.

Stored is one list of 32-bit words for each document: counts (`UNITS`); the branches; the paths; the
values of paths, two words each; a checksum. An ordinary document without values of its own has no
words.
"""  # noqa: E501

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Self, final

import numpy as np

from penstock.core.arrays import Array, Float64, Int64, UInt32
from penstock.core.errors import ConfigError, CorruptionError
from penstock.core.properties import cached_property
from penstock.core.ragged import Ragged
from penstock.data.stores.files import checksum

RANK, LABEL = "rank", "label"
"""Values of a path that count: `rank`, 0 the best, makes pairs of a better and a worse path;
`label`, 1 or 0, says whether an answer is good (KTO); below 0 it is a mismatched answer, which is
not trained.
"""
REWARD, ADVANTAGE = "reward", "advantage"
"""Values of a sampled answer; a policy learns from one of them."""
TEMPERATURE, TRUNCATED = "temperature", "truncated"
"""More values of a sampled answer: the temperature of the sampler, and 1 where `max_tokens` or the
context cut it.
"""
ANSWER = "answer"
"""Number of the answer that a path belongs to, within its document; one of several paths is a
trajectory whose history was rewritten. Without it, each path is an answer.
"""
LOG_PROBABILITIES, TOKEN_ADVANTAGES = "log_probabilities", "advantages"
"""Columns of sampled answers: of each sampled token what the sampler gave it, in nats; and its own
advantage.
"""
UNITS = ("branches", "paths", "pairs", "examples", "path_tokens")
"""What the first words of a stored tree count."""
TURN_REWARDS, POLICY_VERSION = "turn_rewards", "policy_version"
"""More columns of sampled answers: the reward of a turn, at its last sampled token, and NaN at all
others; and the number of the version of the policy that sampled a token.
"""
OF_ANSWERS = (RANK, LABEL, REWARD, ADVANTAGE)
"""Values that an answer has once: its paths have the same, or none (NaN)."""
_HEAD, _TAIL = 5, 2
_BRANCH, _PATH = 3, 2
MAX_PATHS = 2**16
"""Of a document."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Tree:
    """The branches and paths of one document. B branches, P paths, K values of a path."""

    branches: Annotated[Int64, "branches 3"]
    """[B, 3] first slot; position of that slot in its paths (0: a root); the branch that it forks
    from, −1: none.
    """
    paths: Annotated[Int64, "paths 2"]
    """[P, 2] the branch in which a path ends, and its tokens."""
    values: Annotated[Float64, "paths values"]
    """[P, K] values of each path; NaN: not given."""
    names: tuple[str, ...] = ()
    """[K] names of the values."""

    def check(self, num_tokens: int) -> None:
        """Check that this is a tree over a document of `num_tokens` tokens.

        Raises:
            ConfigError: It is not; says what is wrong.
        """
        if fault := self._fault(num_tokens):
            raise ConfigError(fault)

    def _fault(self, num_tokens: int) -> str | None:
        begins, forks, parents = self.branches.T.tolist()
        if not begins or begins[0] != 0 or len(self.paths) > MAX_PATHS:
            return f"a tree begins at its document's first token and has 1 to {MAX_PATHS:,} paths"
        ends = [*begins[1:], num_tokens]
        chain: dict[int, int] = {}
        for number, (begin, fork, parent) in enumerate(zip(begins, forks, parents, strict=True)):
            if not begin < ends[number]:
                return f"branch {number} has no token"
            if parent < 0:
                if parent != -1 or fork != 0:
                    return f"branch {number} has no parent, but forks at position {fork}"
                chain = {}
            else:
                # Slots of the parent up to the fork, and the token that was moved.
                last = forks[parent] + ends[parent] - begins[parent] - 1 if parent < number else -1
                if parent not in chain or not forks[parent] < fork <= min(chain[parent], last):
                    return (
                        f"branch {number} forks from branch {parent} at position {fork}, which is "
                        "not depth first"
                    )
                chain = {one: limit for one, limit in chain.items() if one <= parent}
                chain[parent] = fork
            chain[number] = 2**62
        covered = [0] * len(begins)
        for number, (branch, length) in enumerate(self.paths.tolist()):
            if not 0 <= branch < len(begins):
                return f"path {number} ends in branch {branch}, but there are {len(begins)}"
            most = forks[branch] + ends[branch] - begins[branch]
            if not forks[branch] < length <= most:
                return (
                    f"path {number} of {length} tokens does not end in its branch, which has "
                    f"{forks[branch]} to {most}"
                )
            covered[branch] = max(covered[branch], length)
        for branch, length in enumerate(covered):
            if length != forks[branch] + ends[branch] - begins[branch]:
                return f"no path goes to the end of branch {branch}"
        if self.values.shape != (len(self.paths), len(self.names)):
            return (
                f"values are {list(self.values.shape)}, expected "
                f"{[len(self.paths), len(self.names)]}"
            )
        return self.answer_fault()

    def answer_fault(self) -> str | None:
        """What is wrong with the value `answer`, or with those that an answer has once; None:
        nothing.
        """
        if ANSWER not in self.names:
            return None
        given = self.value(ANSWER)
        known = given[~np.isnan(given)]
        if (wrong := known[(known < 0) | (known != np.floor(known)) | np.isinf(known)]).size:
            return f"a path has answer {wrong[0]:g}; expected a whole number, from 0, or NaN"
        answers = self.answers
        for name in OF_ANSWERS:
            if name not in self.names:
                continue
            try:
                value_of_answers(name, self.value(name), answers)
            except ConfigError as error:
                return str(error)
        return None

    @property
    def forked(self) -> bool:
        """Whether any slot is shared by two branches."""
        return bool((self.branches[:, 2] >= 0).any())

    @property
    def num_roots(self) -> int:
        """Branches that share nothing with those before them."""
        return int(np.count_nonzero(self.branches[:, 2] < 0))

    @property
    def path_tokens(self) -> int:
        """Tokens of all paths, each counted by itself."""
        return int(self.paths[:, 1].sum())

    @cached_property
    def num_pairs(self) -> int:
        """Pairs of a better and a worse answer, by `rank`."""
        return len(self.pairs())

    @property
    def num_examples(self) -> int:
        """Answers with a label of 0 or 1."""
        if LABEL not in self.names:
            return 0
        labels = value_of_answers(LABEL, self.value(LABEL), self.answers)
        return int(np.count_nonzero(labels >= 0))

    @cached_property
    def answers(self) -> Annotated[Int64, "paths"]:
        """[P] number of the answer that each path belongs to, counted from 0 in the order of their
        first paths.
        """
        given = self.value(ANSWER) if ANSWER in self.names else None
        return answer_numbers(given, np.zeros(len(self.paths), np.int64))

    def value(self, name: str) -> Annotated[Float64, "paths"]:
        """A value of each path."""
        found: Float64 = self.values[:, self.names.index(name)]
        return found

    def pairs(self) -> Annotated[Int64, "pairs 2"]:
        """[pairs, 2] (better, worse) path, of each answer its first; none if paths have no rank, or
        one is NaN.
        """
        if RANK not in self.names:
            return np.empty((0, 2), np.int64)
        first: Int64 = np.unique(self.answers, return_index=True)[1]
        return first[pairs_of(value_of_answers(RANK, self.value(RANK), self.answers))]

    def nodes(self, num_tokens: int) -> tuple[list[int], list[int], Annotated[Int64, "tokens"]]:
        """Nodes of the tree: stretches of slots that the same paths share.

        Returns:
            First slot of each node; the end of each node's subtree; and the position of every slot
            in its paths.
        """
        begins, forks, parents = self.branches.T.tolist()
        ends = [*begins[1:], num_tokens]
        whole = list(ends)
        children: list[list[tuple[int, int]]] = [[] for _ in begins]
        for branch in range(len(begins) - 1, -1, -1):
            if (parent := parents[branch]) >= 0:
                whole[parent] = max(whole[parent], whole[branch])
                # Reversed: the fork nearest to the root comes first.
                children[parent].append((forks[branch] - forks[parent], whole[branch]))
        starts: list[int] = []
        reach: list[int] = []
        positions = np.arange(num_tokens)
        for branch, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            if begin or forks[branch]:
                positions[begin:end] += forks[branch] - begin
            at = 0
            for offset, last in children[branch]:
                if offset > at:
                    starts.append(begin + at)
                    reach.append(last)
                    at = offset
            starts.append(begin + at)
            reach.append(end)
        return starts, reach, positions

    def slots(self, path: int) -> Annotated[Int64, "tokens"]:
        """The slots of one path, from its root to its end."""
        branch, limit = self.paths[path].tolist()
        parts = []
        while branch >= 0:
            begin, fork, parent = self.branches[branch].tolist()
            parts.append(np.arange(begin, begin + limit - fork))
            branch, limit = parent, fork
        return np.concatenate(parts[::-1])

    def describe(self, num_tokens: int) -> "list[BranchView]":
        """The branches in their order, each with the paths that end in it."""
        begins, forks, parents = self.branches.T.tolist()
        ends = [*begins[1:], num_tokens]
        found = []
        for branch, (begin, end, fork, parent) in enumerate(
            zip(begins, ends, forks, parents, strict=True)
        ):
            paths = np.flatnonzero(self.paths[:, 0] == branch).tolist()
            labels = [", ".join([f"path {path}", *self._values_of(path)]) for path in paths]
            found.append(BranchView(begin, end, fork, parent, "; ".join(labels)))
        return found

    def _values_of(self, path: int) -> list[str]:
        pairs = zip(self.names, self.values[path].tolist(), strict=True)
        return [f"{name} {value:g}" for name, value in pairs if not np.isnan(value)]

    def words(self) -> Annotated[UInt32, "words"]:
        """What is stored; see above."""
        counts = [
            len(self.branches),
            len(self.paths),
            self.num_pairs,
            self.num_examples,
            self.path_tokens,
        ]
        branches = self.branches.copy()
        branches[:, 2] += 1
        numbers = np.concatenate([counts, branches.ravel(), self.paths.ravel()]).astype(np.uint32)
        content = np.concatenate(
            [numbers, np.ascontiguousarray(self.values, "<f8").reshape(-1).view(np.uint32)]
        )
        return np.concatenate([content, np.array([checksum(content)], "<u8").view(np.uint32)])

    @classmethod
    def of_words(
        cls, words: Annotated[UInt32, "words"], names: tuple[str, ...], num_tokens: int
    ) -> Self:
        """The tree of a document of `num_tokens` tokens, from what is stored.

        Raises:
            CorruptionError: It is not what was written.
        """
        content = np.ascontiguousarray(words[:-_TAIL])
        if len(words) < _HEAD + _TAIL or checksum(content) != int(
            np.ascontiguousarray(words[-_TAIL:]).view("<u8")[0]
        ):
            raise CorruptionError("its tree differs from its checksum")
        num_branches, num_paths = content[:2].tolist()
        at = _HEAD + _BRANCH * num_branches
        end = at + _PATH * num_paths
        if len(content) != end + 2 * num_paths * len(names):
            raise CorruptionError(f"its tree has {len(content)} words, which is not what it says")
        branches = content[_HEAD:at].astype(np.int64).reshape(-1, _BRANCH)
        branches[:, 2] -= 1
        tree = cls(
            branches=branches,
            paths=content[at:end].astype(np.int64).reshape(-1, _PATH),
            values=content[end:].view("<f8").reshape(num_paths, len(names)).astype(np.float64),
            names=names,
        )
        if fault := tree._fault(num_tokens):
            raise CorruptionError(f"its tree is none: {fault}")
        return tree

    def __repr__(self) -> str:
        values = f", values {', '.join(self.names)}" if self.names else ""
        return f"Tree({len(self.branches)} branches, {len(self.paths)} paths{values})"


class BranchView(NamedTuple):
    """One branch, for people."""

    begin: int
    """Its first slot in the document."""
    end: int
    """One after its last slot."""
    position: int
    """Position of its first slot in its paths; 0: a root."""
    parent: int
    """The branch that it forks from; −1: none."""
    label: str
    """The paths that end in it, with their values."""

    def __str__(self) -> str:
        where = (
            f"from position {self.position} of branch {self.parent}"
            if self.parent >= 0
            else "from the beginning"
        )
        return f"slots {self.begin}–{self.end - 1} {where}: {self.label or 'no path ends here'}"


def answer_numbers(
    given: Annotated[Float64, "paths"] | None, documents: Annotated[Int64, "paths"]
) -> Annotated[Int64, "paths"]:
    """[P] number of each path's answer, counted from 0 in the order of their first paths.

    Args:
        given: [P] the value `answer`: paths of a document with the same are one answer; NaN: an
            answer by itself. None: each path is one.
        documents: [P] the document of each path.
    """
    first = np.arange(len(documents))
    known = np.empty(0, np.int64) if given is None else np.flatnonzero(~np.isnan(given))
    if given is None or not len(known):
        return first
    keys = np.column_stack([documents[known].astype(np.float64), given[known]])
    _, places, same = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    first[known] = known[places[same.reshape(-1)]]
    numbers: Int64 = np.unique(first, return_inverse=True)[1].reshape(-1)
    return numbers


def value_of_answers(
    name: str, values: Annotated[Float64, "paths"], answers: Annotated[Int64, "paths"]
) -> Annotated[Float64, "answers"]:
    """[A] a value of each answer: that of its paths; NaN: none of them has one. An answer is cut
    (`truncated`) if any of its paths is.

    Args:
        name: Of the value.
        values: [P] of each path.
        answers: [P] number of each path's answer, from 0.

    Raises:
        ConfigError: Paths of one answer have different numbers.
    """
    found = np.full(int(answers.max(initial=-1)) + 1, np.nan)
    if name == TRUNCATED:
        np.fmax.at(found, answers, values)
        return found
    known = ~np.isnan(values)
    found[answers[known]] = values[known]
    if (odd := np.flatnonzero(known & (found[answers] != values))).size:
        path = int(odd[0])
        raise ConfigError(
            f"path {path} has {name} {values[path]:g}, but another path of its answer "
            f"{found[answers[path]]:g}; an answer has one {name}: give it to each of its paths, or "
            "numbers of tokens as a column"
        )
    return found


def pairs_of(ranks: Annotated[Float64, "paths"]) -> Annotated[Int64, "pairs 2"]:
    """[pairs, 2] (better, worse): every two paths of different rank; equal and missing ranks (NaN)
    make none.
    """
    better, worse = np.nonzero(ranks[:, None] < ranks[None, :])
    return np.stack([better, worse], axis=1)


def odd_weight(weights: Array, times: Array) -> float | None:
    """A loss weight of a token that is neither 0 nor 1, which losses of whole answers cannot read;
    None: there is none.

    Args:
        weights: [n] stored weights of tokens.
        times: [n] answers that share each token: its weight may be the sum over them.
    """
    wrong = (weights != 0) & (weights != 1) & (weights != times)
    return float(weights[wrong][0] / times[wrong][0]) if wrong.any() else None


def tree_words(trees: Sequence[Tree | None], lengths: Sequence[int]) -> Ragged:
    """What is stored for documents of these lengths; None is an ordinary document.

    Raises:
        ConfigError: A tree does not fit its document; names it.
    """
    rows = []
    for number, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
        if tree is not None and (fault := tree._fault(length)):
            raise ConfigError(f"document {number}: {fault}")
        rows.append(np.empty(0, np.uint32) if tree is None else tree.words())
    return Ragged.from_rows(rows, np.uint32)
