"""What a loader saves: the state after a step, and what the plan was made from, in few bytes.

A state is a small dict that JSON can hold. It fits any number of ranks that divides the step, and
any number of threads. What the model is given of a row (arrays, dtypes, who attends to whom) is no
part of it: it changes no plan.

Numbers by source are packed by column: a number takes the bits of the difference between the
largest and the smallest of its column, and a zero takes one. These counters differ by source and
grow during a run, so their bytes alone would compress badly; packed, a hundred sources stay under 4
KB for as long as a run may last.
"""

import base64
import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import numpy as np

from penstock.core.arrays import Int64, Records
from penstock.core.errors import StateError
from penstock.core.formats import LOADER_STATE
from penstock.core.json_values import JsonObject
from penstock.data.shards.dataset import Dataset
from penstock.plan.loader._plan_kernels import CURSOR
from penstock.plan.loader._target_kernels import UNTRAINED
from penstock.plan.loader.extras import too_long_of
from penstock.plan.loader.mixture import Source
from penstock.plan.loader.packed_numbers import pack, unpack
from penstock.plan.loader.places import order_text
from penstock.plan.loader.plan import Plan, PlanState
from penstock.plan.loader.raised_epochs import moved
from penstock.plan.loader.step_planner import StepState
from penstock.plan.loader.targets import UntrainedParts
from penstock.plan.sampling._kernels import SKIPPED

_DIGEST_BYTES = 8
_MOST = 2**61
"""Of documents, rows and windows: far more, and sums with them would not fit 64 bits."""
_KEYS = ("format", "step", "row", "window", "rows", "place", "made_from")
"""`row`, `window` and `place` (cursors, credits and skips of all sources) are the `PlanState`."""
_NAMED = "named"
"""Of up to `_FEW` sources, which keeps states small: their names, and a byte for each of
`_SETTINGS`, to tell what has changed; nothing depends on them.
"""
_FEW = 32
_MOST_NAMES = 1 << 20
_SETTINGS = ("share", "objective", "slice", "order", "limit")
_LIMITS = ("patches_per_row", "documents_per_row")
"""Settings that a state names only where they are not None."""
_DROPS = "drop_untrained"
"""Says that some source leaves out parts without a target, of which a state then has the counts."""
_EPOCHS = "max_epochs"
"""Those of all sources, which may be raised; of a state only where some source has one."""
_START = ("first_step", "continues")
"""Where the plan begins, if not at the beginning of its data."""
_KNOWN_FROM = "known_from"
"""As in `StepState`; of a state only where it is not 0."""
CURE = (
    "Load it into a loader made as it was; to go on with other data or settings, begin a new "
    "run with continue_from=RUN (--continue-from), or a loader with continue_from=PLACE (what "
    "step.place gave)"
)


def _digest(*parts: object) -> bytes:
    return hashlib.blake2b(
        json.dumps(parts, default=repr).encode(), digest_size=_DIGEST_BYTES
    ).digest()


def _cuts(
    plan: Plan, source: Source, untrained: UntrainedParts | None
) -> Iterator[tuple[str, int]]:
    """How the documents of a source are cut, where that is not by rows alone: nothing in the states
    of most runs.
    """
    if (most := plan.settings.document_tokens(source)) is not None:
        yield "max_document_tokens", most
    if untrained is not None:
        yield _DROPS, untrained.depends_on


def describe(plan: Plan) -> JsonObject:
    """What the plan was made from: settings by name, and digests of the sources.

    One digest of 8 bytes is of all sources together and finds every change; after it come two bytes
    a source, of its data and of its settings, which only show what has changed.
    """
    whole, hints, more = [], b"", b""
    names = [source.name for source in plan.mixture.sources]
    few = len(names) <= _FEW
    sources = zip(
        plan.mixture.sources, plan.datasets, plan.rewritings, plan.untrained_parts, strict=True
    )
    for source, dataset, rewriting, untrained in sources:
        how = (
            source.name,
            source.share,
            repr(rewriting.objective),
            source.max_epochs,
            list(source.slice),
            order_text(source),
            too_long_of(source, dataset),
            *(Dataset.open(side).fingerprint for side in source.sides),
            *_cuts(plan, source, untrained),
        )
        whole.append((dataset.fingerprint, how))
        hints += _digest(dataset.fingerprint)[:1] + _digest(how)[:1]
        if few:
            more += b"".join(
                _digest(one)[:1] for one in (how[1], how[2], how[4], how[5], (how[3], how[6:]))
            )
    changes = [(change.step, sorted(change.shares.items())) for change in plan.mixture.changes]
    settings: JsonObject = {
        name: getattr(plan.settings, name)
        for name in ("sequence_length", "rows_per_step", "seed", "packing", "window_rows")
    }
    if not isinstance(settings["rows_per_step"], int):
        # As it comes back from JSON.
        settings["rows_per_step"] = [list(phase) for phase in plan.settings.ramp.phases]
    settings |= {
        name: limit for name in _LIMITS if (limit := getattr(plan.settings, name)) is not None
    }
    if any(plan.untrained_parts):
        settings[_DROPS] = True
    return {
        **settings,
        "num_sources": len(plan.mixture.sources),
        "share_changes": _digest(changes).hex(),
        "sources": base64.b85encode(_digest(whole) + hints).decode(),
        **(
            {_NAMED: base64.b85encode(zlib.compress(more + json.dumps(names).encode(), 9)).decode()}
            if few
            else {}
        ),
        **plan.start.described,
    }


def _epochs_text(limits: list[float | None]) -> dict[str, str]:
    """`max_epochs` of all sources, in few bytes; nothing where no source has one."""
    if not any(limits):
        return {}
    numbers = np.array([limit or 0.0 for limit in limits], "<f8")
    return {_EPOCHS: base64.b85encode(zlib.compress(numbers.tobytes(), 9)).decode()}


def _epochs_of(text: str | None, sources: int) -> list[float | None]:
    """What `_epochs_text` was given.

    Raises:
        ValueError, zlib.error: It is not from `_epochs_text`, or of another number of sources.
    """
    if text is None:
        return [None] * sources
    numbers = np.frombuffer(
        zlib.decompressobj().decompress(base64.b85decode(text), 8 * sources + 1), "<f8"
    )
    if len(numbers) != sources or not (np.isfinite(numbers) & (numbers >= 0)).all():
        raise ValueError("max_epochs of other sources")
    return [float(limit) or None for limit in numbers]


def epochs_of(plan: Plan) -> dict[str, str]:
    """What states say of `max_epochs`, besides the digest of the sources; nothing where no source
    has one.
    """
    return _epochs_text([source.max_epochs for source in plan.mixture.sources])


def save(plan_description: JsonObject, epochs: dict[str, str], after: StepState) -> JsonObject:
    """The dict of a state between two steps; from `describe`, `epochs_of` and the state."""
    start = after.window_start
    counts = [start.skipped] if start.untrained is None else [start.skipped, start.untrained]
    packed = pack(np.column_stack([_columns(start.cursors), start.credits, *map(_columns, counts)]))
    return {
        **LOADER_STATE.fields(),
        "step": after.step,
        "row": start.row,
        "window": start.window,
        "rows": after.rows_used,
        "place": base64.b85encode(packed).decode(),
        "made_from": plan_description,
        **epochs,
        **({_KNOWN_FROM: after.known_from} if after.known_from else {}),
    }


def _columns(records: Annotated[Records, "sources"]) -> Annotated[Int64, "sources fields"]:
    """Records of int64 as a column for each field."""
    return np.ascontiguousarray(records).view(np.int64).reshape(len(records), -1)


def load(plan: Plan, state: JsonObject, say: Callable[[str], None]) -> StepState:
    """The state that `save` was given.

    Only `max_epochs` of sources may have changed since, where that changes no row before it; `say`
    is called.

    Raises:
        StateError: It is not a state, is of another format, or was made from other data or
            settings; the message names what changed.
    """
    try:
        LOADER_STATE.check(
            {"format": state["format"]}, "the state", cure="begin the run again", error=StateError
        )
        _refuse_unknown(state, (*_KEYS, _EPOCHS, _KNOWN_FROM), "")
        old = _refuse_changes(plan, state["made_from"], state.get(_EPOCHS))
        found = _read(plan, state)
    except (
        LookupError,
        AttributeError,
        TypeError,
        ValueError,
        OverflowError,
        zlib.error,
        struct.error,
    ) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(
            f"this is not the state of a loader, or it was damaged ({error!r})"
        ) from error
    return found if old is None else moved(old, plan, found, say)


def _read(plan: Plan, state: JsonObject) -> StepState:
    leaves_out = any(plan.untrained_parts)
    columns = 7 + (len(UNTRAINED.names or ()) if leaves_out else 0)
    numbers = unpack(base64.b85decode(state["place"]), len(plan.mixture.sources), columns)
    start = PlanState(
        row=int(state["row"]),
        window=int(state["window"]),
        cursors=numbers[:, :2].copy().view(CURSOR)[:, 0],
        credits=numbers[:, 2].copy(),
        skipped=numbers[:, 3:7].copy().view(SKIPPED)[:, 0],
        untrained=numbers[:, 7:].copy().view(UNTRAINED)[:, 0] if leaves_out else None,
    )
    known_from = state.get(_KNOWN_FROM, 0)
    counts = [known_from, *(state[name] for name in ("step", "row", "window", "rows"))]
    if min(counts) < 0 or np.delete(numbers, 2, axis=1).min() < 0:
        raise ValueError("a count below 0")
    if max(counts) >= _MOST or np.abs(numbers[:, :2]).max() >= _MOST:
        raise ValueError("a count that no run reaches")
    return StepState(
        step=int(state["step"]),
        window_start=start,
        rows_used=int(state["rows"]),
        known_from=int(known_from),
    )


def _refuse_unknown(found: JsonObject, known: Any, inside: str) -> None:
    """Whatever a state says must be understood: a key that is not may be another version's, or
    another's state.
    """
    unknown = sorted(str(key) for key in set(found) - set(known))
    if unknown:
        raise StateError(
            "the state has keys that this version does not know: "
            f"{', '.join(inside + key for key in unknown)}; load what `state_dict()` or "
            "`step.resume_state` gave, unchanged, with the penstock that saved it"
        )


def _refuse_changes(plan: Plan, then: JsonObject, epochs: str | None) -> Plan | None:
    """The plan as it was, if only `max_epochs` changed; None: nothing did."""
    if not isinstance(then, dict):
        raise StateError("this is not the state of a loader: it does not say what it was made from")
    now = describe(plan)
    _refuse_unknown(then, dict.fromkeys((*now, *_LIMITS, _DROPS, _NAMED, *_START)), "made_from.")
    sources = len(plan.mixture.sources)
    old = None
    if then.get("num_sources") == sources and then != now:
        # Where it stands decides whether the old limits may become the new ones. Earlier versions
        # did not store them.
        limits = _epochs_of(epochs, sources)
        if limits != [source.max_epochs for source in plan.mixture.sources]:
            old = plan.with_max_epochs(limits)
            before = describe(old)
            # Earlier versions did not store names either.
            if epochs is not None or {**before, _NAMED: None} == {**then, _NAMED: None}:
                now = before
    changed = differences(
        plan, now, then, lambda name, now, then: f"{name} was {then!r}, is {now!r}"
    )
    if changed:
        raise StateError(
            f"the state was saved from other data or settings: {'; '.join(changed)}. {CURE}"
        )
    return old


def differences(
    plan: Plan, now: JsonObject, then: JsonObject, tell: Callable[[str, Any, Any], str]
) -> list[str]:
    """In what two descriptions of plans differ, in words.

    Args:
        plan: A plan with the sources of either; names them.
        now, then: What `describe` gives.
        tell: A setting and its two values as words.
    """
    told_below = ("sources", "share_changes", "continues", _NAMED)
    names = [name for name in dict.fromkeys((*now, *then)) if name not in told_below]
    changed = [
        tell(name, now.get(name), then.get(name))
        for name in names
        if now.get(name) != then.get(name)
    ]
    if now.get(_DROPS) and not then.get(_DROPS):
        changed.append(
            "parts without a target were kept, as sources with drop_untrained: false keep them"
        )
    if now["share_changes"] != then.get("share_changes"):
        changed.append("the changes of shares differ")
    if now.get("continues") != then.get("continues"):
        changed.append("the places at which the sources begin (continue_from) differ")
    if now["num_sources"] == then.get("num_sources") and now["sources"] != then.get("sources"):
        changed += _changed_sources(plan, then, now)
    return changed


def _changed_sources(plan: Plan, then: JsonObject, now: JsonObject) -> list[str]:
    """Which sources differ, and in what, as far as a byte for each can show."""
    before, after = (base64.b85decode(one["sources"]) for one in (then, now))
    (names, hints), (_, own_hints) = (
        _details(one, len(plan.mixture.sources)) for one in (then, now)
    )
    changed, width = [], len(_SETTINGS)
    for i, source in enumerate(plan.mixture.sources):
        data, hint = _DIGEST_BYTES + 2 * i, width * i
        if before[data] != after[data]:
            changed.append(f"source {i} ({source.name!r}) holds other documents")
        found = [
            name
            for at, name in enumerate(_SETTINGS)
            if hints and hints[hint + at] != own_hints[hint + at]
        ]
        if names and names[i] != source.name:
            found.insert(0, f'the name, which was {names[i]!r}: name="{names[i]}" gives it back')
        if before[data + 1] == after[data + 1] and not found:
            continue
        what = f" ({' and '.join(found)})" if found else ""
        changed.append(
            f"source {i} ({source.name!r}) has another name, share, objective, slice, order "
            f"or limit{what}"
        )
    return changed or ["one of the sources holds other documents or has other settings"]


def _details(description: JsonObject, sources: int) -> tuple[list[str], bytes]:
    """The names of the sources, and a byte for each of their settings; nothing, where an older
    state has none.
    """
    try:
        packed = base64.b85decode(description[_NAMED])
        stream, most = zlib.decompressobj(), _MOST_NAMES + len(_SETTINGS) * sources
        data = stream.decompress(packed, most)
        hints, names = (
            data[: len(_SETTINGS) * sources],
            json.loads(data[len(_SETTINGS) * sources :]),
        )
        if (
            not isinstance(names, list)
            or len(names) != sources
            or not all(isinstance(one, str) for one in names)
        ):
            raise ValueError("not names")
    except (KeyError, ValueError, TypeError, RecursionError, zlib.error):
        return [], b""
    return names, hints
