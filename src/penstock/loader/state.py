"""What a loader saves: a place in the plan, and what the plan was made from.

A state is a small dict that JSON can hold. It fits any number of ranks that divides the step, and any number of
threads. Numbers by source are packed (zlib, base 85), so that a hundred sources stay under 4 KB.
"""

import base64
import hashlib
import json
import zlib
from typing import Any

import numpy as np

from penstock.errors import StateError
from penstock.loader.plan import Place, Plan
from penstock.loader.steps import StepPlace

FORMAT = 1
_DIGEST_BYTES = 4


def _digest(*parts: Any) -> bytes:
    return hashlib.blake2b(json.dumps(parts, default=repr).encode(), digest_size=_DIGEST_BYTES).digest()


def describe(plan: Plan) -> dict[str, Any]:
    """What the plan was made from: settings by name, and a digest of each source's data and of its settings."""
    digests = b""
    for source, dataset in zip(plan.mixture.sources, plan.datasets, strict=True):
        digests += _digest(dataset.fingerprint)
        digests += _digest(
            source.name, source.share, repr(source.objective), source.max_epochs, list(source.slice), source.shuffle,
            source.too_long,
        )  # fmt: skip
    changes = [(change.step, sorted(change.shares.items())) for change in plan.mixture.changes]
    settings = {
        name: getattr(plan.settings, name)
        for name in ("sequence_length", "rows_per_step", "seed", "packing", "window_rows")
    }
    return {
        **settings,
        "num_sources": len(plan.mixture.sources),
        "share_changes": _digest(changes).hex(),
        "sources": base64.b85encode(digests).decode(),
    }


def save(plan_description: dict[str, Any], after: StepPlace) -> dict[str, Any]:
    """The state at a place between steps."""
    place = after.place
    numbers = np.concatenate([place.cursors.ravel(), place.credits, place.skipped.ravel()])
    # Bytes of equal weight side by side compress: most high bytes are 0.
    packed = zlib.compress(np.ascontiguousarray(numbers.view(np.uint8).reshape(-1, 8).T).tobytes(), 9)
    return {
        "format": FORMAT,
        "step": after.step,
        "row": place.row,
        "window": place.window,
        "rows": after.rows,
        "place": base64.b85encode(packed).decode(),
        "made_from": plan_description,
    }


def load(plan: Plan, state: dict[str, Any]) -> StepPlace:
    """The place that a state was saved at.

    Raises:
        StateError: It is not a state, is of another format, or was made from other data or settings; the message
            names what changed.
    """
    try:
        if state["format"] != FORMAT:
            raise StateError(f"the state has format {state['format']}, this version reads {FORMAT}")
        _refuse_changes(plan, state["made_from"])
        count = len(plan.mixture.sources)
        raw = np.frombuffer(zlib.decompress(base64.b85decode(state["place"])), np.uint8)
        numbers = np.ascontiguousarray(raw.reshape(8, -1).T).view(np.int64).ravel()
        place = Place(
            row=int(state["row"]),
            window=int(state["window"]),
            cursors=numbers[: 2 * count].reshape(count, 2).copy(),
            credits=numbers[2 * count : 3 * count].copy(),
            skipped=numbers[3 * count :].reshape(count, 4).copy(),
        )
        return StepPlace(step=int(state["step"]), place=place, rows=int(state["rows"]))
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"this is not the state of a loader, or it was damaged ({error!r})") from error


def _refuse_changes(plan: Plan, then: dict[str, Any]) -> None:
    if not isinstance(then, dict):
        raise StateError("this is not the state of a loader: it does not say what it was made from")
    now = describe(plan)
    changed = [f"{name} was {then.get(name)!r}, is {now[name]!r}" for name in now if now[name] != then.get(name)]
    changed = [text for text in changed if not text.startswith(("sources was", "share_changes was"))]
    if now["share_changes"] != then.get("share_changes"):
        changed.append("the changes of shares differ")
    if now["num_sources"] == then.get("num_sources") and now["sources"] != then.get("sources"):
        old, new = base64.b85decode(then["sources"]), base64.b85decode(now["sources"])
        for i, source in enumerate(plan.mixture.sources):
            data = slice(2 * i * _DIGEST_BYTES, (2 * i + 1) * _DIGEST_BYTES)
            settings = slice((2 * i + 1) * _DIGEST_BYTES, (2 * i + 2) * _DIGEST_BYTES)
            if old[data] != new[data]:
                changed.append(f"source {i} ({source.name!r}) holds other documents")
            if old[settings] != new[settings]:
                changed.append(
                    f"source {i} ({source.name!r}) has another name, share, objective, slice, order or limit"
                )
    if changed:
        raise StateError(
            f"the state was saved from other data or settings: {'; '.join(changed)}. "
            "Load it into a loader made as it was, or start anew without it"
        )
