"""Trees of trajectories for people: what kind each token is, replies with their figures, and what a
later path does with the replies of an earlier one.

From what a dataset stores; `penstock.chat.trajectories.kinds` says how kinds are found.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, NamedTuple, final

import numpy as np

from penstock.chat.trajectories.kinds import KINDS, Copy, StoredPath, TokenKinds, kinds_of
from penstock.core.arrays import Array, Float32, Int64
from penstock.data.shards.format.trees import (
    ADVANTAGE,
    ANSWER,
    LOG_PROBABILITIES,
    POLICY_VERSION,
    REWARD,
    TOKEN_ADVANTAGES,
    TRUNCATED,
    TURN_REWARDS,
    Tree,
)

MOVED = "moved"
"""Kind of the first token of a branch: the token at the fork, which is stored behind it again."""
NAMES = (*KINDS, MOVED)
"""Names of the kinds, by number."""
OF_SAMPLES = (ANSWER, REWARD, ADVANTAGE)
"""Values of paths that only sampled answers have."""


class Segment(NamedTuple):
    """A stretch of a branch: a reply, a stretch that stands for one, or what lies between."""

    begin: int
    """Its tokens in the document, [begin, end)."""
    end: int
    reply: int = -1
    """Place of the reply that it ends, in `replies`; −1: none."""
    title: str = ""
    """"reply 0", or what it does with one."""
    about: str = ""
    """Figures of the reply."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShownReply:
    """A reply with its figures."""

    number: int
    """In its trajectory, from 0."""
    path: int
    answer: int
    places: tuple[int, ...]
    """Its tokens in the document."""
    masked: int
    """Tokens that are not trained."""
    mean: float | None = None
    """Mean log-probability, in nats; None: not stored."""
    smallest: float | None = None
    smallest_at: int = -1
    """Place of the token with the smallest."""
    advantage: float | None = None
    turn_reward: float | None = None
    version: int | None = None
    """Of the policy."""

    def about(self, texts: Sequence[str] = ()) -> str:
        """Its figures in a line; `texts` [n]: of each token."""
        parts = [plural(len(self.places), "token")]
        if self.masked:
            parts.append("masked" if self.masked == len(self.places) else f"{self.masked} masked")
        if self.mean is not None and self.smallest is not None:
            where = f" at ‘{in_a_line(texts[self.smallest_at])}’" if texts else ""
            parts.append(f"log-probability {nats(self.mean)} on average")
            parts.append(f"smallest {nats(self.smallest)}{where}")
        figures = {name: getattr(self, name) for name in ("advantage", "turn_reward", "version")}
        parts += [
            f"{name.replace('_', ' ')} {value:g}".replace("-", "−")
            for name, value in figures.items()
            if value is not None
        ]
        return ", ".join(parts)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShownBranch:
    """A branch of the tree."""

    begin: int
    """Its tokens in the document, [begin, end)."""
    end: int
    position: int
    """Of its first token in its paths."""
    parent: int
    """The branch that it forks from; −1: none."""
    depth: int
    """Number of branches between it and its root."""
    label: str
    """The paths that end in it, with their values."""
    why: tuple[str, ...]
    """Why its paths began, where that is known."""
    segments: tuple[Segment, ...]
    forks: tuple[tuple[int, int], ...]
    """(place, branch) of each branch that leaves it, in front of the token at that place."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryTree:
    """Trajectories of one document of n tokens."""

    branches: tuple[ShownBranch, ...]
    replies: tuple[ShownReply, ...]
    answers: int
    paths: int
    kinds: tuple[str, ...]
    """[n] kind of each token."""
    log_probabilities: tuple[float | None, ...] = ()
    """[n] nats; None: the token was not sampled. Empty: not stored."""
    advantages: tuple[float | None, ...] = ()
    """[n] of tokens or of their answer; None: has none. Empty: not stored."""
    turn_rewards: tuple[float | None, ...] = ()
    """[n] at the last token of a turn. Empty: not stored."""
    versions: tuple[int, ...] = ()
    """[n] version of the policy. Empty: not stored."""

    def counts(self) -> dict[str, int]:
        """Tokens of each kind that there is, in the order of `NAMES`."""
        found = Counter(self.kinds)
        return {name: found[name] for name in NAMES if found[name]}

    def __str__(self) -> str:
        """Counts, in a line."""
        counted = (f"{count:,} {name}" for name, count in self.counts().items() if name != MOVED)
        return (
            f"{plural(self.answers, 'trajectory', 'trajectories')}, {plural(self.paths, 'path')}, "
            f"{plural(len(self.replies), 'reply', 'replies')}; tokens: {', '.join(counted)}"
        )


def is_sampled(tree: Tree | None, columns: Collection[str]) -> bool:
    """Whether a document holds sampled answers."""
    names = () if tree is None else (*tree.names, *columns)
    return any(name in names for name in (*OF_SAMPLES, LOG_PROBABILITIES))


def trajectories_of(
    tokens: Array,
    weights: Annotated[Float32, "tokens"],
    columns: Mapping[str, Array],
    tree: Tree,
    *,
    texts: Sequence[str] = (),
    control_ids: Collection[int] = (),
    why: Mapping[int, str] = MappingProxyType({}),
) -> TrajectoryTree:
    """What is shown of a document of sampled answers.

    Args:
        tokens: [n] its stored ids.
        weights: [n] its stored loss weights.
        columns: Name → [n] numbers of its tokens.
        tree: Its branches and paths.
        texts: [n] text of each token; empty: unknown.
        control_ids: Ids that may end a reply; empty: unknown.
        why: Path → why it began, where that is known.
    """
    made = _Made(tokens, weights, columns, tree, texts, why)
    return made.shown(kinds_of(made.stored, control_ids))


@final
@dataclass(slots=True)
class _Made:
    """A tree while it is made."""

    tokens: Array
    weights: Array
    columns: Mapping[str, Array]
    tree: Tree
    texts: Sequence[str]
    why: Mapping[int, str]
    places: list[Int64] = field(init=False)
    """Of each path: where each of its tokens is shown, next to what it follows."""
    stored: list[StoredPath] = field(init=False)

    def __post_init__(self) -> None:
        answers, logs = self.tree.answers.tolist(), self.columns.get(LOG_PROBABILITIES)
        self.places, self.stored = [], []
        for path, answer in enumerate(answers):
            slots = self.tree.slots(path)
            # A token stands behind the slot whose target it is; the first of a branch is moved.
            places = np.concatenate([slots[:1], slots[:-1] + 1])
            weights = np.array(self.weights[places], np.float32)
            weights[:1] = 0
            mine = None if logs is None else np.asarray(logs[slots], np.float32)
            ids = np.asarray(self.tokens[slots], np.int64)
            self.places.append(places)
            self.stored.append(StoredPath(ids, weights, mine, answer))

    def shown(self, found: TokenKinds) -> TrajectoryTree:
        kinds = np.full(len(self.tokens), -1)
        for places, of_path in zip(self.places, found.paths, strict=True):
            new = kinds[places] < 0
            kinds[places[new]] = of_path[new]
        kinds[kinds < 0] = NAMES.index(MOVED)
        names = [NAMES[kind] for kind in kinds.tolist()]
        replies = [self._reply(found, place) for place in range(len(found.replies))]
        return TrajectoryTree(
            branches=tuple(self._branches(found, replies)),
            replies=tuple(replies),
            answers=len(set(self.tree.answers.tolist())),
            paths=len(self.stored),
            kinds=tuple(names),
            log_probabilities=self._logs(names),
            advantages=self._advantages(names),
            turn_rewards=_numbers(self.columns.get(TURN_REWARDS)),
            versions=tuple(map(int, self.columns.get(POLICY_VERSION, ()))),
        )

    def _logs(self, kinds: Sequence[str]) -> tuple[float | None, ...]:
        logs = self.columns.get(LOG_PROBABILITIES)
        if logs is None:
            return ()
        return tuple(
            value if value or kind == "sampled" else None
            for value, kind in zip(logs.tolist(), kinds, strict=True)
        )

    def _advantages(self, kinds: Sequence[str]) -> tuple[float | None, ...]:
        """Of tokens, or of the answers that train them."""
        if TOKEN_ADVANTAGES in self.columns:
            return _numbers(self.columns[TOKEN_ADVANTAGES])
        if ADVANTAGE not in self.tree.names:
            return ()
        # What several answers share has one only if theirs are the same.
        low, high = np.full((2, len(self.tokens)), np.nan)
        for places, value in zip(self.places, self.tree.value(ADVANTAGE).tolist(), strict=True):
            low[places] = np.fmin(low[places], value)
            high[places] = np.fmax(high[places], value)
        trained = np.array([kind == "sampled" for kind in kinds])
        return _numbers(np.where(trained & (low == high), low, np.nan))

    def _reply(self, found: TokenKinds, number: int) -> ShownReply:
        reply = found.replies[number]
        inside = slice(reply.begin, reply.end)
        path, places = self.stored[reply.path], self.places[reply.path][inside]
        logs = None if path.logs is None else path.logs[inside]
        version = self.columns.get(POLICY_VERSION)
        advantage = self._mean(TOKEN_ADVANTAGES, places)
        if advantage is None and ADVANTAGE in self.tree.names:
            advantage = _known(self.tree.value(ADVANTAGE)[reply.path])
        return ShownReply(
            number=reply.number,
            path=reply.path,
            answer=path.answer,
            places=tuple(places.tolist()),
            masked=int(np.count_nonzero(path.weights[inside] == 0)),
            mean=None if logs is None else float(logs.mean(dtype=np.float64)),
            smallest=None if logs is None else float(logs.min()),
            smallest_at=-1 if logs is None else int(places[int(np.argmin(logs))]),
            advantage=advantage,
            turn_reward=self._mean(TURN_REWARDS, places),
            version=None if version is None else int(version[places[0]]),
        )

    def _mean(self, column: str, places: Int64) -> float | None:
        """Of what a column has at some places; None: nothing."""
        found = self.columns.get(column, np.full(len(self.tokens), np.nan))[places]
        known = found[~np.isnan(found)]
        return float(known.mean(dtype=np.float64)) if len(known) else None

    def _branches(self, found: TokenKinds, replies: Sequence[ShownReply]) -> Iterator[ShownBranch]:
        described = self.tree.describe(len(self.tokens))
        depths: list[int] = []
        owners = self._owners(found)
        children: dict[int, list[tuple[int, int]]] = {}
        for child, (_, _, position, parent, _) in enumerate(described):
            children.setdefault(parent, []).append((position, child))
        for number, (begin, end, position, parent, _) in enumerate(described):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            forks = [
                (min(begin + at - position + 1, end - 1), child)
                for at, child in children.get(number, ())
            ]
            paths = np.flatnonzero(self.tree.paths[:, 0] == number).tolist()
            yield ShownBranch(
                begin=begin,
                end=end,
                position=position,
                parent=parent,
                depth=depths[-1],
                label="; ".join(map(self._label, paths)),
                why=tuple(self.why[path] for path in paths if path in self.why),
                segments=tuple(self._segments(found, replies, owners[begin:end], begin)),
                forks=tuple(sorted(forks)),
            )

    def _label(self, path: int) -> str:
        """A path with its values."""
        values = zip(self.tree.names, self.tree.values[path].tolist(), strict=True)
        shown = [
            name if name == TRUNCATED else f"{name} {value:g}".replace("-", "−")
            for name, value in values
            if not np.isnan(value) and (value or name != TRUNCATED)
        ]
        return ", ".join([f"path {path}", *shown])

    def _does(self, found: TokenKinds, copy: Copy) -> str:
        """What a copy does with its reply."""
        number, path, begin, end = found.replies[copy.reply]
        trained = (self.stored[path].weights[begin:end] != 0).any()
        where = f"reply {number}, {'trained' if trained else 'masked'} in path {path}"
        if copy.same:
            return f"repeats {where}"
        if self.texts:
            pairs = ((path, begin, end), (copy.path, copy.begin, copy.end))
            said, written = (
                "".join(self.texts[place] for place in self.places[of][first:last])
                for of, first, last in pairs
            )
            if said == written:
                return f"rewrites {where}: the same text in other tokens"
        return f"rewrites {where}"

    def _owners(self, found: TokenKinds) -> Int64:
        """[n] the reply or copy that each token belongs to, replies first; −1: none."""
        owners = np.full(len(self.tokens), -1)
        stretches = [
            *((reply.path, reply.begin, reply.end) for reply in found.replies),
            *((copy.path, copy.begin, copy.end) for copy in (*found.copies, *found.shared)),
        ]
        for number, (path, first, last) in enumerate(stretches):
            places = self.places[path][first:last]
            # Where it goes on in another branch, also the token at the fork, stored there again.
            moved = places[1:][np.diff(places) != 1] - 1
            mine = np.concatenate([places, moved])
            owners[mine[owners[mine] < 0]] = number
        return owners

    def _segments(
        self, found: TokenKinds, replies: Sequence[ShownReply], owners: Int64, begin: int
    ) -> Iterator[Segment]:
        """The stretches of a branch that begins at `begin` and has the tokens of `owners`."""
        count = len(replies)
        edges = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
        for first, last in pairwise(edges):
            owner = int(owners[first])
            if owner < 0:
                yield Segment(begin + first, begin + last)
            elif owner < count:
                yield self._of_reply(replies, owner, begin + first, begin + last)
            else:
                copy = (*found.copies, *found.shared)[owner - count]
                yield Segment(begin + first, begin + last, -1, self._does(found, copy))

    def _of_reply(self, replies: Sequence[ShownReply], place: int, begin: int, end: int) -> Segment:
        reply = replies[place]
        title = f"reply {reply.number}"
        if len({one.answer for one in replies}) > 1:
            alike = [one.answer for one in replies if one.places == reply.places]
            names = " and ".join(map(str, alike))
            title += f" of answer{'s' if len(alike) > 1 else ''} {names}"
        if reply.places[-1] != end - 1:
            return Segment(begin, end, -1, f"{title}, its beginning")
        return Segment(begin, end, place, title, reply.about(self.texts))


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _numbers(values: Array | None) -> tuple[float | None, ...]:
    """Numbers as plain values, None for NaN."""
    return () if values is None else tuple(map(_known, values.tolist()))


def in_a_line(text: str) -> str:
    """A token's text without its spaces, with marks for line ends and tabs."""
    return text.replace("⏎\n", "⏎").replace("\n", "⏎").replace("\t", "→").strip(" ") or "␣"


def nats(value: float, digits: int = 2) -> str:
    """ "−0.31"; what is rounded to 0 has no sign."""
    return f"{round(value, digits) or 0.0:.{digits}f}".replace("-", "−")


def plural(count: int, one: str, many: str = "") -> str:
    """ "1 reply", "2,000 replies"."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
