"""Where the sources of a plan stand after a step, as a place to go on from
(`penstock.plan.loader.places`).
"""

import base64
from typing import Any

import numpy as np

from penstock.core.arrays import Records
from penstock.core.formats import PLACE
from penstock.core.json_values import JsonObject
from penstock.plan.loader.extras import too_long_of
from penstock.plan.loader.packed_numbers import pack
from penstock.plan.loader.places import Seen, order_text
from penstock.plan.loader.plan import Plan
from penstock.plan.loader.step_planner import StepPlan


def place_after(plan: Plan, step: StepPlan) -> JsonObject:
    """Where all sources stand after a step, as a dict that JSON can hold; a few kilobytes for most
    windows.
    """
    window, cut = step.window, int(step.window.row_starts[step.after.rows_used])
    trained, left = window.pieces[:cut], window.pieces[cut:]
    sources = {}
    for number, (source, dataset) in enumerate(
        zip(plan.mixture.sources, plan.datasets, strict=True)
    ):
        mine = [pieces[pieces["source"] == number] for pieces in (trained, left)]
        epoch, drawn, seen = _after(plan, number, mine[0], mine[1], window.cursors[number])
        sources[source.name] = {
            "fingerprint": dataset.fingerprint,
            "documents": dataset.table.num_documents,
            "first": source.documents_in_use(dataset.table.num_documents)[0],
            "order": order_text(source),
            "epoch": epoch,
            "drawn": [list(pair) for pair in drawn],
            "seen": [len(seen), base64.b85encode(pack(seen)).decode() if len(seen) else ""],
        }
    return {
        **PLACE.fields(),
        "step": step.after.step,
        "seed": plan.settings.seed,
        "sources": sources,
    }


def _after(
    plan: Plan, number: int, trained: Records, left: Records, cursor: Any
) -> tuple[int, list[tuple[int, int]], Seen]:
    """Epoch, drawn and seen of a source, from its pieces in a window, and where it stands at the
    window's end.
    """
    size, begin = int(plan.sizes[number]), plan.begins[number]
    if len(left):
        next_one = left[np.lexsort((left["begin"], left["position"]))[0]]
        position, token = int(next_one["position"]), int(next_one["begin"])
    else:
        position, token = int(cursor["position"]), int(cursor["begin"])
    epoch = max((position - 1) // size, begin.epoch)
    later = trained[trained["position"] >= position]
    seen = [
        np.column_stack(
            [
                later["position"] // size,
                later["document"],
                later["begin"],
                later["begin"] + later["tokens"],
            ]
        ),
        begin.seen[begin.seen[:, 0] >= epoch],
    ]
    if token:
        document = plan.document(number, position)
        dataset = plan.datasets[number]
        skipped = 0
        if too_long_of(plan.mixture.sources[number], dataset) == "keep_end":
            skipped = max(0, int(dataset.table.lengths[document, 0]) - plan.limits[number])
        seen.append(np.array([[position // size, document, skipped, token]]))
    earlier = begin.earlier if epoch == begin.epoch else ()
    return epoch, [*earlier, (size, position - epoch * size)], np.concatenate(seen).astype(np.int64)


def what_becomes(plan: Plan) -> list[str]:
    """What becomes of each source where a plan begins at a place, a sentence each."""
    place = plan.start.place
    if place is None:
        return []
    found = []
    sizes, places = plan.sizes.tolist(), place["sources"]
    for source, size, begin in zip(plan.mixture.sources, sizes, plan.begins, strict=True):
        name = f"source {source.name!r}"
        if source.name not in places:
            found.append(f"{name} is new: begins at its beginning")
        elif begin.grown:
            found.append(
                f"{name} has grown by {size - begin.grown:,} documents to {size:,}: they come "
                f"in epoch {begin.epoch}, with those of it that were not seen"
            )
        else:
            at = begin.position - begin.epoch * size
            found.append(
                f"{name} goes on after {at:,} of {size:,} documents of epoch {begin.epoch}"
            )
    names = {source.name for source in plan.mixture.sources}
    return found + [f"source {name!r} is no longer there" for name in places if name not in names]
