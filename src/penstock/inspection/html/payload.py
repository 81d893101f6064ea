"""The page's data, small: about 2 bytes a token, plus each distinct piece of text once.

Tokens become numbers in a table of the distinct (id, text, control) that occur, the most frequent first, written as
LEB128 in base64. Weights, roles and positions come in long runs and are written as such. 500 conversations of 1,000
tokens take about 1 MB and some 0.5 s.
"""

import base64
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from penstock.inputs import IGNORE
from penstock.inspection.html.figures import histograms_of, shares_of
from penstock.inspection.html.views import PageData, PageDocument
from penstock.inspection.rows import RowDocument, RowView

Key = tuple[int, str, bool]


@final
class Vocabulary:
    """The distinct tokens of a page, numbered as they come, renumbered by frequency at the end."""

    def __init__(self) -> None:
        self.numbers: dict[Key, int] = {}

    def number(self, ids: Sequence[int], texts: Sequence[str], control: Sequence[bool]) -> np.ndarray[Any, Any]:
        """One number a token [n]."""
        numbers = self.numbers
        keys = zip(ids, texts, control, strict=True)
        return np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64, len(ids))

    def write(self, streams: list[np.ndarray[Any, Any]]) -> tuple[dict[str, Any], list[str]]:
        """The table as plain values, and every stream of numbers as text."""
        counts = np.bincount(np.concatenate([*streams, np.empty(0, np.int64)]), minlength=len(self.numbers))
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


def payload(data: PageData) -> dict[str, Any]:
    """Everything the page shows, as values that JSON can hold."""
    vocabulary, streams = Vocabulary(), list[np.ndarray[Any, Any]]()
    role_names = list(dict.fromkeys(name for side in (data, data.other) if side for name in _role_names(side)))
    sides = [[_document(each, role_names, vocabulary, streams) for each in data.documents]]
    if data.other is not None:
        sides.append([_document(each, role_names, vocabulary, streams) for each in data.other.documents])
    rows = [_row(row, data.control_ids, vocabulary, streams) for row in data.rows]
    table, encoded = vocabulary.write(streams)
    for part, tokens in zip([*(each for side in sides for each in side), *rows], encoded, strict=True):
        part["tokens"] = tokens
    histograms = histograms_of(data.documents) if data.histograms is None else data.histograms
    shares = shares_of(data.documents) if data.shares is None else data.shares
    return {
        "title": data.title,
        "roles": role_names,
        "vocabulary": table,
        "sides": [
            {"title": side.label or side.title, "settings": _texts(side.settings), "documents": documents}
            for side, documents in zip((data, data.other), sides, strict=False)
            if side is not None
        ],
        "changed": _changed(data.documents, data.other.documents) if data.other else [],
        "rows": rows,
        "summary": _texts(data.summary),
        "histograms": [
            {"name": name, "edges": [short(e) for e in found.edges], "counts": [int(c) for c in found.counts]}
            for name, found in histograms.items()
        ],
        "shares": [
            {"name": name, "parts": [[part, short(value)] for part, value in parts.items()]}
            for name, parts in shares.items()
        ],
    }


def _document(document: PageDocument, names: list[str], vocabulary: Vocabulary, streams: list[Any]) -> dict[str, Any]:
    count = len(document.ids)
    control = [False] * count if document.is_control is None else np.asarray(document.is_control, bool).tolist()
    streams.append(vocabulary.number(np.asarray(document.ids).tolist(), document.pieces, control))
    roles = np.full(count, -1) if document.roles is None else np.asarray(document.roles)
    # One table of names serves all documents; its last entry stands for −1.
    table = np.array([*(names.index(name) for name in document.role_names), -1], np.int64)
    return {
        "title": document.title,
        "origin": document.origin,
        "length": count,
        "trained": document.trained,
        "weights": runs(document.loss_weights),
        "roles": runs(table[roles], document.turns),
        "notes": [[note[0], readable(note[1])] for note in document.notes],
        "ok": document.ok,
        "checks": list(document.checks),
    }


def _row(row: RowView, control_ids: frozenset[int], vocabulary: Vocabulary, streams: list[Any]) -> dict[str, Any]:
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
        "targets": [_odd_targets(row, ids, distance) for distance in range(1, len(row.targets) + 1)],
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
        **({"tasks": list(row.tasks.items())} if row.tasks else {}),
    }


def _rewritten(document: RowDocument) -> dict[str, Any]:
    """What an objective did to a document; nothing of one that it left as it was."""
    if not (document.task or document.prefix or document.stretches):
        return {}
    return {
        "task": document.task,
        "prefix": document.prefix,
        "stretches": [[each.end - each.begin, each.part, each.role, each.span] for each in document.stretches],
        "restored": [[readable(text), span] for text, span in document.restored],
    }


def _odd_targets(row: RowView, ids: np.ndarray[Any, Any], distance: int) -> list[int]:
    """[slot, target, slot, target, …] where a target is not what the page expects.

    It expects the token `distance` slots on where the weight is not 0, and none elsewhere.
    """
    expected = np.full(row.sequence_length, IGNORE, np.int64)
    expected[: max(0, len(ids) - distance)] = ids[distance:]
    expected[row.loss_weights[distance - 1] == 0] = IGNORE
    targets = np.asarray(row.targets[distance - 1], np.int64)
    odd = np.flatnonzero(targets != expected)
    found: list[int] = np.stack([odd, targets[odd]], axis=1).ravel().tolist()
    return found


def _changed(ours: Sequence[PageDocument], theirs: Sequence[PageDocument]) -> list[int]:
    """For each document how many weights differ; −1 where the tokens themselves do."""
    return [
        int(np.count_nonzero(np.asarray(a.loss_weights) != np.asarray(b.loss_weights)))
        if np.array_equal(a.ids, b.ids)
        else -1
        for a, b in zip(ours, theirs, strict=True)
    ]


def _role_names(side: PageData) -> list[str]:
    return [name for document in side.documents for name in document.role_names]


def _texts(values: Any) -> list[list[str]]:
    return [[str(name), _text(value)] for name, value in values.items()]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        f"{value:,}"
        if isinstance(value, int)
        else ", ".join(map(str, value))
        if isinstance(value, tuple | list)
        else str(value)
    )


def runs(values: Any, parts: Any = None) -> list[float]:
    """[count, value, count, value, …] of values that repeat; a new run also begins where `parts` change."""
    values = np.asarray(values)
    if len(values) == 0:
        return []
    changes = values[1:] != values[:-1]
    if parts is not None:
        changes |= np.asarray(parts)[1:] != np.asarray(parts)[:-1]
    starts = np.flatnonzero(np.concatenate([[True], changes]))
    counts = np.diff(starts, append=len(values))
    return [part for pair in zip(counts.tolist(), map(short, values[starts].tolist()), strict=True) for part in pair]


def short(value: float) -> float:
    """A number with at most six digits, as an integer where it is one."""
    return int(value) if value == int(value) else float(f"{value:.6g}")


def varints(values: np.ndarray[Any, Any]) -> str:
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
        found[starts[mine] + part] = ((values[mine] >> np.uint64(7 * part)) & np.uint64(127)) | more.astype(np.uint64)
    return base64.b64encode(found.tobytes()).decode()


def readable(text: str) -> str:
    r"""`text` with line ends and tabs, and escapes such as `\u202e` for all else that does not print."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
