"""A trajectory in a notebook: its paths as a tree, tokens by kind, log-probabilities as a shade."""

import codecs
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Protocol

import numpy as np

from penstock.chat.trajectories.kinds import (
    KINDS,
    MASKED,
    REPEATED,
    REWRITTEN,
    SAMPLED,
    StoredPath,
    TokenKinds,
    common_ids,
    kinds_of,
)
from penstock.chat.trajectories.paths import TokenPath
from penstock.chat.trajectories.proof import TrajectoryCertificate
from penstock.chat.trajectories.replies import TokenTexts
from penstock.core.arrays import Array
from penstock.core.json_values import JsonObject
from penstock.core.notebook import card
from penstock.tokenizers import Tokenizer

_MOST = 3000
"""Tokens that are shown."""
_FAINTEST, _STRONGEST, _NATS = 0.12, 0.7, 3.0
"""Opacity of a log-probability of 0, and of one of −3 nats and less."""
_LOOKS: Mapping[int, str] = {
    MASKED: "text-decoration:underline dotted #e08a2c 2px",
    REPEATED: "text-decoration:underline dashed #3b7dd8 1px",
    REWRITTEN: "text-decoration:underline wavy #c0407a 1px",
}
_BLOCK = "margin:4px 0 4px {indent}px;padding-left:8px;border-left:2px solid #8888"
_TEXT = '<pre style="white-space:pre-wrap;margin:2px 0">{}</pre>'


class Shown(Protocol):
    """What is shown of a `Trajectory`."""

    tokenizer: Tokenizer
    messages: list[JsonObject]
    steps: list[Any]

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens of the current path."""

    @property
    def has_log_probabilities(self) -> bool:
        """Whether all replies came with log-probabilities."""

    @property
    def certificate(self) -> TrajectoryCertificate:
        """What was proven."""

    def paths(self) -> tuple[TokenPath, ...]:
        """The token sequences so far."""


def tree_html(trajectory: Shown) -> str:
    """A card: figures, a legend, and each path behind the place where it forks."""
    texts = TokenTexts(trajectory.tokenizer)
    paths = _paths(trajectory)
    found = kinds_of(paths, texts.names)
    sampled = int(sum((path.weights > 0).sum() for path in paths))
    facts = [
        ("messages", f"{len(trajectory.messages):,}"),
        ("paths", f"{len(paths):,}"),
        ("sampled and trained", f"{sampled:,} tokens"),
        ("certificate", str(trajectory.certificate)),
    ]
    left = _MOST
    blocks = []
    for number, (path, (begin, depth)) in enumerate(zip(paths, _forks(paths), strict=True)):
        if left <= 0:
            blocks.append(f"<div>…{len(paths) - number:,} more paths</div>")
            break
        end = min(len(path.ids), begin + left)
        left -= end - begin
        inner = _path(trajectory, number, path, found, begin, end, texts)
        blocks.append(f'<div style="{_BLOCK.format(indent=16 * min(depth, 6))}">{inner}</div>')
    return card("Trajectory", facts, _legend(), *blocks)


def _paths(trajectory: Shown) -> list[StoredPath]:
    """All paths, with the prompt that waits for a reply."""
    paths = [path for path in trajectory.paths() if len(path.ids)]
    sent = np.array(trajectory.ids, np.int64)
    stored = [StoredPath(path.ids, path.weights, path.log_probabilities) for path in paths]
    if len(sent) and not any(np.array_equal(path.ids, sent) for path in paths):
        weights, logs = np.zeros((2, len(sent)), np.float32)
        if paths and np.array_equal(paths[-1].ids, sent[: len(paths[-1].ids)]):
            stored.pop()
            weights[: len(paths[-1].ids)] = paths[-1].weights
            logs[: len(paths[-1].ids)] = paths[-1].log_probabilities
        stored.append(StoredPath(sent, weights, logs))
    return stored


def _forks(paths: Sequence[StoredPath]) -> list[tuple[int, int]]:
    """Of each path the first token that no earlier one has in common, and the forks before it."""
    found: list[tuple[int, int]] = []
    for place, path in enumerate(paths):
        shared = [(common_ids(other.ids, path.ids), at) for at, other in enumerate(paths[:place])]
        begin, near = max(shared, default=(0, -1))
        found.append((begin, found[near][1] + 1 if begin else 0))
    return found


def _path(
    trajectory: Shown,
    number: int,
    path: StoredPath,
    found: TokenKinds,
    begin: int,
    end: int,
    texts: TokenTexts,
) -> str:
    """A heading and the tokens of a path from its fork on."""
    where = f", from its token {begin} on" if begin else ""
    branches = [step for step in trajectory.steps if step.kind == "branch"]
    why = branches[number - 1].why if 0 < number <= len(branches) else ""
    does = [
        f"{'repeats' if copy.same else 'rewrites'} reply {found.replies[copy.reply].number}"
        for copy in found.copies
        if copy.path == number
    ]
    logs = path.logs if trajectory.has_log_probabilities else None
    replies = [
        f"reply {one.number}: {one.end - one.begin} tokens{_figures(logs, one.begin, one.end)}"
        for one in found.replies
        if one.path == number
    ]
    lines = [*([f"why: {why}"] if why else []), *does, *replies]
    notes = "".join(f"<div>{escape(one)}</div>" for one in lines)
    spans = "".join(_spans(path, logs, found.paths[number], begin, end, texts))
    more = f" …{len(path.ids) - end:,} more tokens" if end < len(path.ids) else ""
    small = f'<div style="font-size:90%;opacity:.8">{notes}</div>'
    return f"<b>path {number}</b>{where}{small}{_TEXT.format(spans + more)}"


def _figures(logs: Array | None, begin: int, end: int) -> str:
    if logs is None:
        return ""
    mine = logs[begin:end].astype(np.float64)
    return f", log-probability {mine.mean():.2f} on average, smallest {mine.min():.2f}"


def _spans(
    path: StoredPath, logs: Array | None, kinds: Array, begin: int, end: int, texts: TokenTexts
) -> Iterator[str]:
    """An element for each token; its title has its id, kind, weight and log-probability."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for place in range(begin, end):
        token, kind = int(path.ids[place]), int(kinds[place])
        about = f"id {token}, {KINDS[kind]}, weight {path.weights[place]:g}"
        look = _LOOKS.get(kind, "opacity:.65")
        if logs is not None and kind in (SAMPLED, MASKED):
            about += f", log-probability {logs[place]:.3f} ({math.exp(float(logs[place])):.1%})"
        if kind == SAMPLED:
            look = _shade(0.0 if logs is None else float(logs[place]))
        text = escape(decoder.decode(texts.data([token])))
        yield f'<span style="{look}" title="{about}">{text}</span>'


def _shade(log: float) -> str:
    share = min(-log / _NATS, 1.0)
    opacity = _FAINTEST + (_STRONGEST - _FAINTEST) * share
    return f"background:rgba(63,163,77,{opacity:.2f})"


def _legend() -> str:
    looks = [
        ("opacity:.65", "rendered, only read"),
        (_shade(0.0), "sampled and trained"),
        (_shade(-_NATS), "the same, improbable"),
        (_LOOKS[MASKED], "sampled, masked"),
        (_LOOKS[REPEATED], "a reply, again"),
        (_LOOKS[REWRITTEN], "a reply, rewritten"),
    ]
    shown = (f'<span style="{look}">{escape(about)}</span>' for look, about in looks)
    return f'<div style="font-size:90%">{" &nbsp; ".join(shown)}</div>'
