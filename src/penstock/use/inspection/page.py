"""Self-contained HTML page: no network, no fonts, no scripts other than its own.

Its data takes about 2 bytes per token, plus each distinct piece of text once. Tokens become numbers
in a table of the distinct (id, text, control), the most frequent first, written as LEB128 in
base64. Weights, roles and positions are written as runs. 500 conversations of 1,000 tokens take
about 1 MB and 0.5 s.

Security: all text from data goes through JSON into an inert element, and from there only into text
nodes. The page's content security policy allows only the script with the hash that it names, and no
fetches.
"""

import base64
import html
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from penstock.core.arrays import Array
from penstock.core.errors import OutputError
from penstock.core.json_values import JsonObject
from penstock.core.page_assets import asset, inline_hash
from penstock.core.system import writing_cure
from penstock.plan.inputs import IGNORE
from penstock.use.inspection.images import MOST_PICTURES, ShownImage
from penstock.use.inspection.page_model import (
    PageData,
    PageDocument,
    first_words,
    histograms_of,
    shares_of,
)
from penstock.use.inspection.rows import RowDocument, RowView
from penstock.use.inspection.trajectories import NAMES, TrajectoryTree

Key = tuple[int, str, bool]
NATS = 1e-4
"""Log-probabilities of a page are multiples of it."""

SCRIPTS = (
    "data",
    "elements",
    "tokens",
    "trajectories",
    "difference",
    "documents",
    "rewritten",
    "rows",
    "figures",
    "main",
)
"""Parts of the page's script; each needs only those before it."""


@final
class Vocabulary:
    """The distinct tokens of a page, numbered in order of appearance and renumbered by frequency at
    the end.
    """

    def __init__(self) -> None:
        self.numbers: dict[Key, int] = {}

    def number(self, ids: Sequence[int], texts: Sequence[str], control: Sequence[bool]) -> Array:
        """The number of each token [n]."""
        numbers = self.numbers
        keys = zip(ids, texts, control, strict=True)
        return np.fromiter(
            (numbers.setdefault(key, len(numbers)) for key in keys), np.int64, len(ids)
        )

    def write(self, streams: list[Array]) -> tuple[JsonObject, list[str]]:
        """The table as plain values, and each stream of numbers as text."""
        counts = np.bincount(
            np.concatenate([*streams, np.empty(0, np.int64)]), minlength=len(self.numbers)
        )
        order = np.argsort(-counts, kind="stable")
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        keys = list(self.numbers)
        table = [keys[place] for place in order.tolist()]
        found = {
            "ids": [key[0] for key in table],
            "texts": [readable(key[1]) for key in table],
            "control": [place for place, key in enumerate(table) if key[2]],
        }
        return found, [varints(ranks[stream]) for stream in streams]


@final
class Pictures:
    """The distinct small pictures of a page, as data URLs."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    @property
    def texts(self) -> list[str]:
        """All pictures."""
        return list(self._numbers)

    def write(self, images: Sequence[ShownImage]) -> JsonObject:
        """Images as [begin, end, number of the picture], −1: none is shown."""
        found = []
        for image in images:
            number = self._numbers.get(image.picture, -1)
            if number < 0 and image.picture and len(self._numbers) < MOST_PICTURES:
                number = self._numbers[image.picture] = len(self._numbers)
            found.append([image.begin, image.end, number])
        return {"images": found} if found else {}


def write_html(path: str | os.PathLike[str], data: PageData) -> None:
    """Write the page.

    Args:
        path: The file; replaced if it exists.
        data: What to show.

    Raises:
        OutputError: The file cannot be written.
    """
    text = page_html(data)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"{path}: the page cannot be written ({error.strerror}); "
            f"{writing_cure(error, otherwise='name a file in a folder that exists')}"
        ) from error


def page_html(data: PageData) -> str:
    """The page as text."""
    script = '"use strict";\n' + "\n".join(asset(__package__, f"{name}.js") for name in SCRIPTS)
    style = asset(__package__, "style.css")
    content = {
        "policy": (
            f"default-src 'none'; style-src '{inline_hash(style)}'; "
            f"script-src '{inline_hash(script)}'; "
            "img-src data:; base-uri 'none'"
        ),
        "title": html.escape(data.title),
        "style": style,
        "script": script,
        # In a script element, only "<" can end or open anything.
        "data": json.dumps(payload(data), ensure_ascii=False, separators=(",", ":")).replace(
            "<", "\\u003c"
        ),
    }
    # One pass, so that a placeholder inside the data stays unchanged.
    page = re.sub(
        r"\{\{(\w+)\}\}", lambda found: content[found[1]], asset(__package__, "page.html")
    )
    return page.encode("utf-8", "backslashreplace").decode()


def payload(data: PageData) -> JsonObject:
    """Everything that the page shows, as JSON values."""
    vocabulary, streams, pictures = Vocabulary(), list[Array](), Pictures()
    documents = [document for side in (data, data.other) if side for document in side.documents]
    role_names = list(dict.fromkeys(name for document in documents for name in document.role_names))
    # Of all documents, each once; a trained token has none.
    reasons = list(
        dict.fromkeys(
            ["", *(why for document in documents for why in dict.fromkeys(document.reasons or ()))]
        )
    )
    sides = [
        [
            _document(each, role_names, reasons, vocabulary, streams, pictures)
            for each in data.documents
        ]
    ]
    if data.other is not None:
        sides.append(
            [
                _document(each, role_names, reasons, vocabulary, streams, pictures)
                for each in data.other.documents
            ]
        )
    rows = [_row(row, data.control_ids, vocabulary, streams, pictures) for row in data.rows]
    table, encoded = vocabulary.write(streams)
    for part, tokens in zip(
        [*(each for side in sides for each in side), *rows], encoded, strict=True
    ):
        part["tokens"] = tokens
    histograms = histograms_of(data.documents) if data.histograms is None else data.histograms
    shares = shares_of(data.documents) if data.shares is None else data.shares
    return {
        "title": data.title,
        "roles": role_names,
        **({"reasons": reasons} if len(reasons) > 1 else {}),
        "vocabulary": table,
        **({"pictures": pictures.texts} if pictures.texts else {}),
        "sides": [
            {
                "title": side.label or side.title,
                "settings": _texts(side.settings),
                "documents": documents,
            }
            for side, documents in zip((data, data.other), sides, strict=False)
            if side is not None
        ],
        "changed": _changed(data.documents, data.other.documents) if data.other else [],
        "rows": rows,
        "summary": _texts(data.summary),
        "histograms": [
            {
                "name": name,
                "edges": [short(e) for e in found.edges],
                "counts": [int(c) for c in found.counts],
            }
            for name, found in histograms.items()
        ],
        "shares": [
            {"name": name, "parts": [[part, short(value)] for part, value in parts.items()]}
            for name, parts in shares.items()
        ],
    }


def _document(
    document: PageDocument,
    names: list[str],
    reasons: list[str],
    vocabulary: Vocabulary,
    streams: list[Array],
    pictures: Pictures,
) -> JsonObject:
    count = len(document.ids)
    control = (
        [False] * count
        if document.is_control is None
        else np.asarray(document.is_control, bool).tolist()
    )
    streams.append(vocabulary.number(np.asarray(document.ids).tolist(), document.pieces, control))
    roles = np.full(count, -1) if document.roles is None else np.asarray(document.roles)
    # One table of names serves all documents; index −1 takes its last entry.
    table = np.array([*(names.index(name) for name in document.role_names), -1], np.int64)
    return {
        "title": document.title,
        "words": readable(first_words(document)),
        "origin": document.origin,
        "length": count,
        "trained": document.trained,
        "weights": runs(document.loss_weights),
        "roles": runs(table[roles], document.turns),
        **(
            {"reasons": runs([reasons.index(why) for why in document.reasons])}
            if document.reasons
            else {}
        ),
        "notes": [[note[0], readable(note[1])] for note in document.notes],
        "ok": document.ok,
        "checks": list(document.checks),
        **(
            {"branches": [list(branch) for branch in document.branches]}
            if document.branches
            else {}
        ),
        **pictures.write(document.images),
        **({"trajectory": _trajectory(document.trajectory)} if document.trajectory else {}),
    }


def _trajectory(tree: TrajectoryTree) -> JsonObject:
    """A tree of trajectories; of log-probabilities whole units of `NATS`, 0: none."""
    kinds = [name for name in NAMES if name in tree.kinds]
    logs = [0 if log is None else 1 + round(-log / NATS) for log in tree.log_probabilities]
    numbers = {"advantages": tree.advantages, "rewards": tree.turn_rewards}
    return {
        "about": str(tree),
        "kinds": kinds,
        "of_tokens": runs([kinds.index(kind) for kind in tree.kinds]),
        **({"logs": varints(np.array(logs, np.int64))} if logs else {}),
        **{name: _some(values) for name, values in numbers.items() if values},
        **({"versions": runs(tree.versions)} if tree.versions else {}),
        "branches": [
            {
                "depth": branch.depth,
                "label": branch.label,
                "why": [readable(why) for why in branch.why],
                "forks": [list(fork) for fork in branch.forks],
                "segments": [
                    [part.begin, part.end, readable(part.title), readable(part.about)]
                    for part in branch.segments
                ],
            }
            for branch in tree.branches
        ],
    }


def _some(values: Sequence[float | None]) -> JsonObject:
    """Numbers of which some are missing: the distinct ones, and runs of places in them; −1: no."""
    found = list(dict.fromkeys(value for value in values if value is not None))
    places = {value: place for place, value in enumerate(found)}
    return {
        "values": [short(value) for value in found],
        "of_tokens": runs([-1 if value is None else places[value] for value in values]),
    }


def _row(
    row: RowView,
    control_ids: frozenset[int],
    vocabulary: Vocabulary,
    streams: list[Array],
    pictures: Pictures,
) -> JsonObject:
    ids = np.asarray(row.tokens[: row.num_tokens], np.int64)
    control = np.isin(ids, list(control_ids))
    for added in (each for part in row.documents for each in part.stretches if each.is_added):
        control[added.begin : added.end] = True
    streams.append(vocabulary.number(ids.tolist(), row.texts[: len(ids)], control.tolist()))
    known = set(ids.tolist())
    for target in sorted(set(np.unique(row.targets).tolist()) - known - {IGNORE}):
        vocabulary.number([target], [row.spell(target)], [target in control_ids])
    steps = np.asarray(row.positions[: len(ids)], np.int64) - np.arange(len(ids))
    return {
        "title": f"step {row.step} · row {row.row}",
        "slots": row.sequence_length,
        "length": len(ids),
        # A position minus its slot is constant within a document.
        "positions": runs(steps),
        "weights": [runs(weights) for weights in row.loss_weights],
        "targets": [
            _odd_targets(row, ids, distance) for distance in range(1, len(row.targets) + 1)
        ],
        "learned": runs(row.learned_weights[: len(ids)]),
        "documents": [
            {
                "begin": part.begin,
                "end": part.end,
                "source": part.source,
                "origin": part.origin,
                "document": part.document,
                "first": part.first_token,
                "epoch": part.epoch,
                **_rewritten(part),
            }
            for part in row.documents
        ],
        **(
            {"nodes": [[n.begin, n.end, n.prefix, n.reach] for n in row.nodes]} if row.nodes else {}
        ),
        **({"tasks": list(row.tasks.items())} if row.tasks else {}),
        **pictures.write([image for part in row.documents for image in part.images]),
    }


def _rewritten(document: RowDocument) -> JsonObject:
    """What an objective did to a document; empty for an unchanged one."""
    if not (document.task or document.prefix or document.stretches):
        return {}
    return {
        "task": document.task,
        "prefix": document.prefix,
        "stretches": [
            [each.end - each.begin, each.part, each.role, each.span]
            + ([] if each.level is None else [short(each.level)])
            for each in document.stretches
        ],
        **({"own": True} if document.own_targets else {}),
        "restored": [[readable(text), span] for text, span in document.restored],
    }


def _odd_targets(row: RowView, ids: Array, distance: int) -> list[int]:
    """[slot, target, slot, target, …] of all targets that the page does not expect.

    It expects the token `distance` slots later where the weight is not 0, and no target elsewhere.
    """
    expected = np.full(row.sequence_length, IGNORE, np.int64)
    expected[: max(0, len(ids) - distance)] = ids[distance:]
    expected[row.loss_weights[distance - 1] == 0] = IGNORE
    targets = np.asarray(row.targets[distance - 1], np.int64)
    odd = np.flatnonzero(targets != expected)
    found: list[int] = np.stack([odd, targets[odd]], axis=1).ravel().tolist()
    return found


def _changed(ours: Sequence[PageDocument], theirs: Sequence[PageDocument]) -> list[int]:
    """Number of different weights in each document; −1: its tokens differ."""
    return [
        int(np.count_nonzero(np.asarray(a.loss_weights) != np.asarray(b.loss_weights)))
        if np.array_equal(a.ids, b.ids)
        else -1
        for a, b in zip(ours, theirs, strict=True)
    ]


def _texts(values: Any) -> list[list[str]]:
    return [[str(name), _text(value)] for name, value in values.items()]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        f"{value:,}"
        if isinstance(value, int)
        else ", ".join(map(str, value))
        if isinstance(value, tuple | list)
        else str(value)
    )


def runs(values: object, parts: object = None) -> list[float]:
    """Run-length encoding [count, value, count, value, …]; a change in `parts` also begins a new
    run.
    """
    values = np.asarray(values)
    if len(values) == 0:
        return []
    changes = values[1:] != values[:-1]
    if parts is not None:
        changes |= np.asarray(parts)[1:] != np.asarray(parts)[:-1]
    starts = np.flatnonzero(np.concatenate([[True], changes]))
    counts = np.diff(starts, append=len(values))
    return [
        part
        for pair in zip(counts.tolist(), map(short, values[starts].tolist()), strict=True)
        for part in pair
    ]


def short(value: float) -> float:
    """A number with at most six digits, as an integer if it is one."""
    return int(value) if value == int(value) else float(f"{value:.6g}")


def varints(values: Array) -> str:
    """Numbers from 0 to 2³⁵ − 1 as LEB128, 7 bits a byte and the lowest first, in base64."""
    values = values.astype(np.uint64)
    sizes = np.ones(len(values), np.int64)
    for part in range(1, 5):
        sizes += values >= 1 << 7 * part
    starts = np.cumsum(sizes) - sizes
    found = np.zeros(int(sizes.sum()), np.uint8)
    for part in range(5):
        mine = sizes > part
        more = np.where(sizes[mine] > part + 1, 128, 0)
        found[starts[mine] + part] = (
            (values[mine] >> np.uint64(7 * part)) & np.uint64(127)
        ) | more.astype(np.uint64)
    return base64.b64encode(found.tobytes()).decode()


def readable(text: str) -> str:
    r"""`text` with escapes such as `\u202e` for all characters that do not print, except line ends
    and tabs.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
